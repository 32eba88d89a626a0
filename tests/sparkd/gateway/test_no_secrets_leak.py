"""S9 and S10: nothing a client says gets into a log, a metric or an error; and no client makes a new time series."""

from __future__ import annotations

import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sparkd import metrics
from sparkd.gateway.keys import KeyDigests
from tests.sparkd.gateway.fakes import DONE, EVENT, STREAM_HEAD, RawEngine, Running, chunked, post, serving, soon, until_gone

CHAT = "/v1/chat/completions"
BODY = b'{"model":"tiny"}'
CANARY = "canary-7f3a"


def samples(name: str, **labels: str) -> float:
    """The sum of all samples of `name` whose labels include these."""
    families = text_string_to_metric_families(metrics.text().decode())
    return sum(
        sample.value for family in families for sample in family.samples if sample.name == name and labels.items() <= sample.labels.items()
    )


def series() -> int:
    return sum(len(family.samples) for family in text_string_to_metric_families(metrics.text().decode()))


async def test_the_canary_is_nowhere(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "sparkd")
    caplog.set_level(logging.DEBUG, "uvicorn")
    answers = []
    async with serving(engine, keys=KeyDigests.of(inference=[CANARY + "-key"])) as gateway:
        key = f"X-Api-Key: {CANARY}-key"
        prompt = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": CANARY}]}).encode()
        assert (await gateway.post(CHAT, prompt, key)).status == 200
        answers.append(await gateway.post(CHAT, prompt, f"Authorization: Bearer {CANARY}"))
        answers.append(await gateway.post(CHAT, prompt[:-1], key))
        answers.append(await gateway.post(CHAT, prompt.replace(b"tiny", b"\xff"), key))
        answers.append(await gateway.post(CHAT, prompt, key, f"Content-Type: {CANARY}/x"))
        answers.append(await gateway.post(CHAT, prompt, key, f"Content-Encoding: {CANARY}"))
        answers.append(await gateway.get(f"/v1/models?key={CANARY}"))
        answers.append(await gateway.get(f"/{CANARY}?key={CANARY}", key))
        answers.append(await gateway.get("/livez", f"Host: {CANARY}/x"))
        answers.append(await gateway.ask(f"{CANARY}\r\n\r\n".encode()))
        engine.replies(f"HTTP/1.1 200 OK\r\n{CANARY}\r\n\r\n".encode(), then_close=True)
        answers.append(await gateway.post(CHAT, prompt, key))
        engine.replies(STREAM_HEAD, chunked(EVENT, end=False) + CANARY.encode(), then_close=True)
        answers.append(await gateway.post(CHAT, prompt, key))
        metric_text = (await gateway.get("/metrics")).body.decode()
    assert all(answer.status >= 400 or answer.body.startswith(EVENT) for answer in answers)
    assert CANARY not in "".join(answer.body.decode() + str(answer.headers) for answer in answers)
    assert CANARY not in metric_text
    assert CANARY not in caplog.text
    assert not any(CANARY in str(vars(record)) for record in caplog.records)


async def test_one_line_for_each_request(gateway: Running, caplog: pytest.LogCaptureFixture) -> None:
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, DONE))
    await gateway.post(CHAT + "?a=b", b'{"model":"small"}', "X-Request-Id: one")
    await gateway.post(CHAT, b'{"model":"nobody"}', "X-Request-Id: two")
    gateway.engine.script = until_gone
    client = await gateway.open()
    client.send(post(CHAT, BODY, "X-Request-Id: three"))
    await soon(lambda: gateway.supervisor.held)
    await client.close()
    await soon(lambda: not gateway.supervisor.held)
    lines = [
        dict(part.split("=", 1) for part in record.getMessage().split(" ")) for record in caplog.records if record.name == "sparkd.access"
    ]
    one, two, three = lines
    assert (one["request_id"], one["model"], one["route"], one["status"], one["gone"]) == ("one", "tiny", CHAT, "200", "0")
    assert float(one["ttft"]) <= float(one["seconds"])
    assert one["bytes_out"] == str(len(EVENT + DONE))
    assert (two["model"], two["status"], two["code"], two["ttft"]) == ("unknown", "404", "model_not_found", "-")
    assert (three["status"], three["gone"]) == ("499", "1")


async def test_polled_paths_are_told_only_when_they_fail(engine: RawEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(engine, ready=lambda: (False, {})) as gateway:
        for path in ("/livez", "/metrics", "/health", "/readyz"):
            await gateway.get(path)
    lines = [record.getMessage() for record in caplog.records if record.name == "sparkd.access"]
    assert len(lines) == 1
    assert "route=/readyz status=503" in lines[0]


async def test_malformed_requests_are_counted(gateway: Running) -> None:
    before = samples("sparkd_requests_total", route="none", code="400")
    await gateway.ask(b"hello\r\n\r\n")
    assert samples("sparkd_requests_total", route="none", code="400") == before + 1


async def test_what_is_counted(gateway: Running) -> None:
    before = {
        code: samples("sparkd_requests_total", model=model, route=CHAT, code=code)
        for model, code in (("tiny", "200"), ("unknown", "404"), ("tiny", "499"))
    }
    first, queued = (samples(f"sparkd_{name}_seconds_count", model="tiny") for name in ("time_to_first_token", "queue"))
    gateway.engine.replies(STREAM_HEAD, chunked(EVENT, DONE))
    await gateway.post(CHAT, BODY)
    await gateway.post(CHAT, b'{"model":"nobody"}')
    gateway.engine.script = until_gone
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.supervisor.held)
    assert samples("sparkd_in_flight", model="tiny") == 1
    await client.close()
    await soon(lambda: not gateway.supervisor.held)
    await soon(lambda: gateway.edge._open_requests == 0)
    assert samples("sparkd_in_flight", model="tiny") == 0
    assert samples("sparkd_requests_total", model="tiny", route=CHAT, code="200") == before["200"] + 1
    assert samples("sparkd_requests_total", model="unknown", route=CHAT, code="404") == before["404"] + 1
    assert samples("sparkd_requests_total", model="tiny", route=CHAT, code="499") == before["499"] + 1
    assert samples("sparkd_time_to_first_token_seconds_count", model="tiny") == first + 1
    assert samples("sparkd_queue_seconds_count", model="tiny") == queued + 2


async def test_clients_make_no_series(gateway: Running) -> None:
    client = await gateway.open()

    async def strange(number: int) -> None:
        client.send(post(CHAT, b'{"model":"random-%d"}' % number))
        await client.answer()
        client.send(post(f"/random/{number}", BODY))
        await client.answer()
        client.send(post(f"/v1/responses/resp_{number}/cancel", b""))
        await client.answer()

    await strange(0)
    before = series()
    for number in range(1, 50):
        await strange(number)
    await client.close()
    assert series() == before
