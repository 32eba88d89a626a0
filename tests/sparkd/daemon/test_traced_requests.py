"""The spans of a real daemon with the stub engine: what arrives at a collector, that none of a prompt does, and that one may be away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.daemon_process import DaemonProcess
from tests.support.otlp_receiver import Receiver, Span, receiver, tree_of
from tests.support.waiting import until

CANARY = "canary-51c9e2"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "POST /v1/chat/completions"


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def settings(folder: Path, **traces: Any) -> dict[str, Any]:
    (folder / "model").mkdir(exist_ok=True)
    return {
        "engine": {"entrypoint": "workers.stub", "stop_timeout_s": 2},
        "traces": traces,
        "models": {"m": {"model": str(folder / "model"), "memory_gib": 1, "env": {"SPARKD_STUB_START_DELAY_S": "2"}}},
    }


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, collector: Receiver) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("traced")
    made = DaemonProcess(folder, settings(folder, endpoint=collector.url))
    made.start()
    try:
        made.settled()
        yield made
    finally:
        made.gone()


def ask(daemon: DaemonProcess, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": CANARY}], "user": CANARY} | fields
    headers = {"authorization": f"Bearer {CANARY}", f"x-{CANARY}": CANARY}
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"} if fields.get("stream") else {}
    return httpx.post(f"{daemon.url}/v1/chat/completions?{CANARY}=1", json=body, headers=headers | sent, timeout=90, trust_env=False)


def trace_of(collector: Receiver, answer: httpx.Response) -> dict[str, Span]:
    """The spans of an answered request by name."""

    def root() -> Span | None:
        return next((span for span in collector.spans if span.attributes.get("sparkd.request_id") == answer.headers["x-request-id"]), None)

    trace = until(root, "its spans").trace
    return {span.name: span for span in collector.spans if span.trace == trace}


def reload(daemon: DaemonProcess, **traces: Any) -> None:
    daemon.configure(settings(daemon.config.parent, **traces))
    assert daemon.client.post("/admin/v1/reload").json()["later"] == []


def test_the_first_request_shows_the_load_that_it_waited_for(daemon: DaemonProcess, collector: Receiver) -> None:
    answer = ask(daemon)
    assert answer.status_code == 200, answer.text
    spans = trace_of(collector, answer)

    assert tree_of([*spans.values()]) == {CHAT: "", "queue": CHAT, "load": "queue", "engine": CHAT}
    root, queue, load, engine = (spans[name] for name in (CHAT, "queue", "load", "engine"))
    assert root.parent == ""
    assert (load.ended_ns - load.begun_ns) / 1e9 > 1
    assert root.begun_ns <= queue.begun_ns <= load.begun_ns < load.ended_ns == queue.ended_ns == engine.begun_ns < engine.ended_ns
    assert (root.attributes["gen_ai.request.model"], root.attributes["http.response.status_code"]) == ("m", 200)


def test_a_stream_below_a_span_of_the_client(daemon: DaemonProcess, collector: Receiver) -> None:
    spans = trace_of(collector, ask(daemon, stream=True, stub={"tokens": 20, "chunk_interval_s": 0.01}))

    assert tree_of([*spans.values()]) == {CHAT: "", "queue": CHAT, "engine": CHAT}
    assert (spans[CHAT].trace, spans[CHAT].parent, spans[CHAT].state) == (TRACE, PARENT, "vendor=1")
    assert spans["engine"].begun_ns < spans["engine"].events["first byte"] < spans["engine"].ended_ns


def test_a_refusal(daemon: DaemonProcess, collector: Receiver) -> None:
    refused = trace_of(collector, ask(daemon, model=CANARY))[CHAT]

    assert (refused.attributes["http.response.status_code"], refused.attributes["gen_ai.request.model"]) == (404, "unknown")
    assert not refused.failed


def test_nothing_of_a_request_is_in_its_spans(daemon: DaemonProcess, collector: Receiver) -> None:
    trace_of(collector, ask(daemon))

    assert not any(CANARY.encode() in body for body in collector.raw)
    assert daemon.metric("sparkd_traced_requests_total", 'outcome="sent"') >= 4


def test_a_collector_that_is_away_costs_a_count_until_it_is_back(daemon: DaemonProcess, collector: Receiver) -> None:
    collector.status = 400
    assert ask(daemon).status_code == 200
    until(lambda: daemon.metric("sparkd_traced_requests_total", 'outcome="dropped"') == 1, "a drop")
    collector.status = 200
    trace_of(collector, ask(daemon))

    warned = [line for line in daemon.output.read_text().splitlines() if "WARNING sparkd.traces" in line]
    assert len(warned) == 1, warned


def test_a_reload_turns_them_off_and_on_and_leaves_the_engine(daemon: DaemonProcess, collector: Receiver) -> None:
    pid, before = daemon.pid_of("m"), len(collector.spans)
    reload(daemon)
    assert ask(daemon).status_code == 200
    reload(daemon, endpoint=collector.url, ratio=0)
    assert ask(daemon).status_code == 200
    reload(daemon, endpoint=collector.url)
    trace_of(collector, ask(daemon))

    assert len({span.trace for span in collector.spans[before:]}) == 1
    assert daemon.pid_of("m") == pid
