"""The record of requests behind the real gateway: in flight, finished, cancelled, and what never gets into it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from sparkd.errors import ModelFailed, NotFound, StateError
from sparkd.gateway import request_log
from sparkd.gateway.keys import KeyDigests, digest
from sparkd.gateway.limits import ClientLimits
from sparkd.gateway.request_log import RequestLog
from sparkd.state.model_state import ModelState
from sparkd.state.request_store import ROWS_AT_ONCE, RequestRow, RequestStore
from tests.sparkd.gateway.fakes import (
    DONE,
    EVENT,
    STREAM_HEAD,
    RawEngine,
    Running,
    chunked,
    post,
    request,
    serving,
    soon,
    until_gone,
    view,
)
from tests.sparkd.state.test_request_store import ROW

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY, STREAM = b'{"model":"small","messages":[]}', b'{"model":"tiny","stream":true,"messages":[]}'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
ID = "X-Request-Id: one"


@pytest.fixture
def log(tmp_path: Path) -> RequestLog:
    return RequestLog(RequestStore(tmp_path / "state.db"))


@pytest.fixture
async def gateway(engine: RawEngine, log: RequestLog) -> AsyncIterator[Running]:
    async with serving(engine, requests=log) as running:
        yield running
    await log.close()


async def ended(log: RequestLog, count: int = 1) -> list[RequestRow]:
    """The finished requests, once there are so many."""
    await soon(lambda: not log.in_flight() and log._number >= count)
    return await log.finished()


def pieces(*pieces: bytes) -> object:
    """A script that writes each piece as a chunk of its own, and then the end."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            writer.write(chunked(piece, end=False))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    return script


async def test_a_stream_with_usage(gateway: Running, log: RequestLog) -> None:
    gateway.engine.script = pieces(*[EVENT] * 5, USAGE, b"event: message_stop\n\n", DONE)  # type: ignore[assignment]
    answer = await gateway.post(CHAT, STREAM, ID)
    (row,) = await ended(log)
    assert (row.number, row.request_id, row.model, row.route, row.status, row.code) == (1, "one", "tiny", CHAT, 200, None)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (7, 4, 5)
    assert (row.bytes_out, row.streamed, row.phase, row.key) == (len(answer.body), True, "done", None)
    assert 0 <= (row.queued_s or 0) <= (row.ttft_s or 0) < row.seconds
    assert row.tokens_per_s is not None and row.tokens_per_s > 0


async def test_answers_without_usage_and_of_unknown_models(gateway: Running, log: RequestLog) -> None:
    gateway.engine.script = pieces(EVENT, DONE)  # type: ignore[assignment]
    await gateway.post(CHAT, STREAM)
    await gateway.post(CHAT, b'{"model":"a prompt"}')
    await gateway.post(CHAT, b'{"model":')
    await gateway.get("/v1/models")
    await gateway.get("/nothing")
    gateway.supervisor.refusal = ModelFailed("It failed.")
    await gateway.post(CHAT, BODY)
    four, three, two, one = await ended(log, 4)
    assert (four.model, four.status, four.code) == ("tiny", 503, "model_failed")
    assert (one.status, one.prompt_tokens, one.completion_tokens, one.tokens_per_s) == (200, None, None, None)
    assert (two.model, two.status, two.code) == ("unknown", 404, "model_not_found")
    assert (three.model, three.status, three.code) == ("", 400, "bad_request")
    assert [row.number for row in await log.finished(before=3, limit=1)] == [2]
    assert [row.number for row in await log.finished(failed=True)] == [4, 3, 2]
    assert [row.number for row in await log.finished(model="tiny")] == [4, 1]


LONG = b'["' + b"x" * 600_000 + b'"]'
COUNTED = b'"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0}'


@pytest.mark.parametrize(
    "body",
    [b'{"data":' + LONG + b"," + COUNTED + b"}", b'{"id":"score-1","model":"tiny",' + COUNTED + b',"results":' + LONG + b"}"],
    ids=["behind it", "before it, as /rerank has it"],
)
async def test_usage_of_a_long_answer(gateway: Running, log: RequestLog, body: bytes) -> None:
    gateway.engine.replies(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body), body)
    await gateway.post("/v1/embeddings", BODY)
    (row,) = await ended(log)
    assert (row.prompt_tokens, row.completion_tokens, row.bytes_out, row.streamed) == (3, 0, len(body), False)


async def test_the_phases_of_a_request_in_flight(gateway: Running, log: RequestLog) -> None:
    going, more = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await going.wait()
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await more.wait()
        writer.write(chunked(EVENT, end=False))
        await reader.read(1)

    gateway.engine.script = script
    gateway.supervisor.gate.clear()
    client = await gateway.open()
    client.send(post(CHAT, BODY, ID))
    await soon(lambda: gateway.supervisor.waiting)
    (row,) = log.in_flight()
    assert (row.number, row.model, row.phase, row.status, row.queued_s) == (None, "tiny", "queued", None, None)
    assert log.in_flight("other") == []
    gateway.supervisor.gate.set()
    await soon(lambda: gateway.supervisor.held)
    (row,) = log.in_flight("tiny")
    assert (row.phase, row.ttft_s, row.bytes_out, row.pieces) == ("forwarded", None, 0, None)
    going.set()
    await soon(lambda: log.in_flight()[0].bytes_out)
    (row,) = log.in_flight()
    assert (row.phase, row.status, row.streamed, row.bytes_out, row.pieces) == ("streaming", 200, True, len(EVENT), 1)
    more.set()
    await soon(lambda: log.in_flight()[0].pieces == 2)
    await client.close()
    (row,) = await ended(log)
    assert (row.status, row.code, row.failed, row.bytes_out, row.phase, row.pieces) == (499, None, True, 2 * len(EVENT), "done", None)


async def test_a_client_that_leaves_the_queue(gateway: Running, log: RequestLog) -> None:
    gateway.supervisor.gate.clear()
    client = await gateway.open()
    client.send(post(CHAT, BODY))
    await soon(lambda: gateway.supervisor.waiting)
    await client.close()
    (row,) = await ended(log)
    assert (row.model, row.status, row.queued_s) == ("tiny", 499, None)


async def test_a_cancel_in_the_queue(gateway: Running, log: RequestLog) -> None:
    gateway.supervisor.gate.clear()
    client = await gateway.open()
    client.send(post(CHAT, BODY, ID))
    await soon(lambda: gateway.supervisor.waiting)
    assert log.cancel("one").phase == "queued"
    answer = await client.answer()
    assert (answer.status, answer.error["code"], answer.error["src"]) == (410, "request_cancelled", "sparkd")
    assert gateway.supervisor.withdrawn == 1
    (row,) = await ended(log)
    assert (row.status, row.code) == (410, "request_cancelled")


async def test_a_cancel_behind_a_heartbeat(gateway: Running, log: RequestLog) -> None:
    gateway.supervisor.models = {"tiny": view("tiny", state=ModelState.LOADING)}
    gateway.supervisor.gate.clear()
    client = await gateway.open()
    client.send(post(CHAT, STREAM, ID))
    await soon(lambda: gateway.supervisor.waiting)
    gateway.turn(ClientLimits().heartbeat_s)
    assert (await client.answer(head_only=True)).status == 200
    log.cancel("one")
    assert b'"code": "request_cancelled"' in await client.ended()
    (row,) = await ended(log)
    assert (row.status, row.code, row.streamed) == (200, "request_cancelled", True)


@pytest.mark.parametrize(("path", "name"), [(CHAT, b"data: {"), (MESSAGES, b"event: error\ndata: {")])
async def test_a_cancel_in_a_stream(gateway: Running, log: RequestLog, path: str, name: bytes) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + chunked(EVENT, end=False))
        await reader.read(1)
        writer.close()

    gateway.engine.script = script
    client = await gateway.open()
    client.send(post(path, STREAM, ID))
    await soon(lambda: log.in_flight() and log.in_flight()[0].phase == "streaming")
    log.cancel("one")
    rest = await client.ended()
    assert name in rest.partition(EVENT)[2]
    assert b'"code": "request_cancelled"' in rest and rest.endswith(b"\n\n\r\n") and DONE not in rest
    await soon(lambda: gateway.engine.lost == 1)
    await client.close()
    assert gateway.supervisor.answered == [True], "a cancel is no sign that the engine hangs"
    (row,) = await ended(log)
    assert (row.status, row.code) == (200, "request_cancelled")


async def test_a_cancel_before_the_engine_has_answered(gateway: Running, log: RequestLog) -> None:
    gateway.engine.script = until_gone
    one, two, other = [await gateway.open() for _ in range(3)]
    for client, name in ((one, ID), (two, ID), (other, "X-Request-Id: other")):
        client.send(post(CHAT, BODY, name))
    await soon(lambda: gateway.supervisor.held == 3 and len(gateway.engine.heard) == 3)
    log.cancel("one")
    for client in (one, two):
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (410, "request_cancelled")
    await soon(lambda: gateway.engine.lost == 2)
    assert [row.request_id for row in log.in_flight()] == ["other"]
    with pytest.raises(NotFound):
        log.cancel("one")
    await other.close()
    await ended(log, 3)
    for client in (one, two):  # the connection goes on
        client.send(request("GET", "/v1/models"))
        assert (await client.answer()).status == 200


async def test_a_cancel_while_the_body_arrives(gateway: Running, log: RequestLog) -> None:
    client = await gateway.open()
    client.send(post(CHAT, BODY, ID)[:-4])
    await soon(log.in_flight)
    assert log.cancel("one").model == ""
    assert (await client.answer()).error["code"] == "request_cancelled"


async def test_whose_key_it_was(engine: RawEngine, log: RequestLog) -> None:
    laptop, boss = digest("laptop-key"), digest("boss-key")
    async with serving(engine, requests=log, keys=KeyDigests((laptop,), (boss,), {laptop: "laptop", boss: "boss"})) as gateway:
        for header in ("X-Api-Key: laptop-key", "Authorization: Bearer boss-key", "X-Api-Key: stranger"):
            await gateway.post(CHAT, BODY, header)
        assert [(row.key, row.status) for row in await ended(log, 2)] == [("boss", 200), ("laptop", 200)]
    await log.close()


async def test_a_record_that_is_turned_off(gateway: Running, log: RequestLog) -> None:
    await gateway.post(CHAT, BODY)
    await ended(log)
    log.keeps = False
    await gateway.post(CHAT, BODY)
    await soon(lambda: not log.in_flight())
    assert [row.number for row in await log.finished()] == [1]


async def test_without_a_store_only_those_in_flight_are_known(engine: RawEngine) -> None:
    log = RequestLog()
    async with serving(engine, requests=log) as gateway:
        await gateway.post(CHAT, BODY)
        assert (log.in_flight(), await log.finished()) == ([], [])
    await log.close()


async def test_the_next_daemon_counts_on(gateway: Running, log: RequestLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "WRITE_EVERY_S", 0.0)
    writing = asyncio.create_task(log.run())
    await gateway.post(CHAT, BODY)
    other = RequestStore(tmp_path / "state.db")
    await soon(lambda: other.last_number() == 1)
    await gateway.post(CHAT, BODY)
    writing.cancel()
    await soon(lambda: not log.in_flight())
    await log._write()
    assert RequestLog(other)._number == 2
    assert [row.number for row in await log.finished()] == [2, 1]
    other.close()


async def test_a_disk_that_is_full_for_a_while(gateway: Running, log: RequestLog, caplog: pytest.LogCaptureFixture) -> None:
    assert log._store is not None
    write, full = log._store.write, True

    def writes(rows: list[RequestRow]) -> None:
        if full:
            raise StateError("The disk is full.")
        write(rows)

    log._store.write = writes  # type: ignore[method-assign, assignment]
    for count in (1, 2):
        await gateway.post(CHAT, BODY)
        await ended(log, count)
        await log._write()
    assert len([record for record in caplog.records if record.name == "sparkd.requests"]) == 1
    full = False
    await log._write()
    assert ([row.number for row in log._store.read()], len(log._finished)) == ([2, 1], 0)


async def test_many_finished_requests_leave_the_supervisor_its_turn(tmp_path: Path) -> None:
    """The supervisor writes to the same file: no write of the record holds it up for longer than a few rows take."""

    class Counted(RequestStore):
        def write(self, rows: Sequence[RequestRow]) -> None:
            sizes.append(len(rows))
            super().write(rows)

    sizes: list[int] = []
    log = RequestLog(Counted(tmp_path / "state.db"))
    log._finished.extend(ROW._replace(number=number) for number in range(1, 2 * ROWS_AT_ONCE + 2))
    rows = await log.finished()
    assert (sizes, len(rows)) == ([ROWS_AT_ONCE, ROWS_AT_ONCE, 1], 2 * ROWS_AT_ONCE + 1)
    await log.close()
