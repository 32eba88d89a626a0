"""The spans of a real daemon with the stub engine: what arrives at a collector, that none of a prompt does, and that one may be away."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.otlp_receiver import Receiver, Span, receiver, tree_of
from tests.support.stage import USER, Stage
from tests.support.waiting import HUNG_S, until

CANARY = "canary-51c9e2"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = "POST /v1/chat/completions"


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def _models(stage: Stage, collector: Receiver) -> Iterator[None]:
    with stage.serving({"m": stage.entry()}, traces={"endpoint": collector.url}):
        yield


def ask(stage: Stage, **fields: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": CANARY}], "user": CANARY} | fields
    headers = USER | {f"x-{CANARY}": CANARY}
    sent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"} if fields.get("stream") else {}
    return httpx.post(f"{stage.url}/v1/chat/completions?{CANARY}=1", json=body, headers=headers | sent, timeout=HUNG_S, trust_env=False)


def trace_of(collector: Receiver, answer: httpx.Response) -> dict[str, Span]:
    """The spans of an answered request by name."""

    def root() -> Span | None:
        return next((span for span in collector.spans if span.attributes.get("sparkd.request_id") == answer.headers["x-request-id"]), None)

    trace = until(root, "its spans").trace
    return {span.name: span for span in collector.spans if span.trace == trace}


def traced(stage: Stage, outcome: str) -> float:
    """How many requests were; 0 where the metric is not there yet."""
    count = stage.metric("sparkd_traced_requests_total", f'outcome="{outcome}"')
    return 0.0 if math.isnan(count) else count


def warnings(stage: Stage) -> int:
    return stage.output.read_text().count("WARNING sparkd.traces")


def test_the_first_request_shows_the_load_that_it_waited_for(stage: Stage, collector: Receiver) -> None:
    stage.stopped("m")
    answer = ask(stage)
    assert answer.status_code == 200, answer.text
    spans = trace_of(collector, answer)

    assert tree_of([*spans.values()]) == {CHAT: "", "queue": CHAT, "load": "queue", "engine": CHAT}
    root, queue, load, engine = (spans[name] for name in (CHAT, "queue", "load", "engine"))
    assert root.parent == ""
    assert root.begun_ns <= queue.begun_ns <= load.begun_ns < load.ended_ns == queue.ended_ns == engine.begun_ns < engine.ended_ns
    assert (root.attributes["gen_ai.request.model"], root.attributes["http.response.status_code"]) == ("m", 200)


def test_a_stream_below_a_span_of_the_client(stage: Stage, collector: Receiver) -> None:
    stage.ready("m")
    spans = trace_of(collector, ask(stage, stream=True))

    assert tree_of([*spans.values()]) == {CHAT: "", "queue": CHAT, "engine": CHAT}
    assert (spans[CHAT].trace, spans[CHAT].parent, spans[CHAT].state) == (TRACE, PARENT, "vendor=1")
    assert spans["engine"].begun_ns < spans["engine"].events["first byte"] <= spans["engine"].ended_ns


@pytest.mark.rest
def test_a_refusal(stage: Stage, collector: Receiver) -> None:
    refused = trace_of(collector, ask(stage, model=CANARY))[CHAT]

    assert (refused.attributes["http.response.status_code"], refused.attributes["gen_ai.request.model"]) == (404, "unknown")
    assert not refused.failed


def test_nothing_of_a_request_is_in_its_spans(stage: Stage, collector: Receiver) -> None:
    stage.ready("m")
    before = traced(stage, "sent")
    trace_of(collector, ask(stage))

    assert collector.raw and not any(CANARY.encode() in body for body in collector.raw)
    until(lambda: traced(stage, "sent") > before, "it is counted")


@pytest.mark.rest
def test_a_collector_that_is_away_costs_a_count_until_it_is_back(stage: Stage, collector: Receiver) -> None:
    stage.ready("m")
    dropped, warned = traced(stage, "dropped"), warnings(stage)
    collector.status = 400
    try:
        assert ask(stage).status_code == 200
        until(lambda: traced(stage, "dropped") > dropped, "a drop")
    finally:
        collector.status = 200
    trace_of(collector, ask(stage))

    assert warnings(stage) == warned + 1


@pytest.mark.rest
def test_a_reload_turns_them_off_and_on_and_leaves_the_engine(stage: Stage, collector: Receiver) -> None:
    stage.ready("m")
    pid, untraced, given = stage.pid_of("m"), set[object](), stage.given
    for traces in ({}, {"endpoint": collector.url, "ratio": 0}):
        assert stage.reload(given | {"traces": traces})["later"] == []
        untraced.add(ask(stage).headers["x-request-id"])
    assert stage.reload(given)["later"] == []
    trace_of(collector, ask(stage))

    assert len(untraced) == 2 and untraced.isdisjoint(span.attributes.get("sparkd.request_id") for span in collector.spans)
    assert stage.pid_of("m") == pid
