"""The trace of a request: the sample, the headers that an engine gets, the queue that never grows, and a collector that is away."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from sparkd import metrics
from sparkd.gateway import traces
from sparkd.gateway.exchange import Exchange
from sparkd.gateway.trace_context import parent_of
from sparkd.gateway.traces import BATCH_REQUESTS, QUEUE_REQUESTS, Finished, RequestTrace, Tracer
from tests.sparkd.gateway.fakes import ANSWER, DONE, EVENT, STREAM_HEAD, Running, chunked
from tests.support.waiting import HUNG_S, until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, LEFT_OUT = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
CHAT, BODY = "/v1/chat/completions", b'{"model":"tiny","messages":[]}'


class FakeExporter:
    def __init__(self) -> None:
        self.batches: list[list[Finished]] = []
        self.takes = True
        self.fault: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.stopped = False

    def send(self, batch: Sequence[Finished]) -> bool:
        self.goes_on.wait(HUNG_S)
        if self.fault is not None:
            raise self.fault
        self.batches.append([*batch])
        return self.takes

    def stop(self) -> None:
        self.stopped = True
        self.goes_on.set()

    @property
    def sent(self) -> list[Finished]:
        return [finished for batch in self.batches for finished in batch]


Make = Callable[..., tuple[Tracer, FakeExporter]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(traces, "FLUSH_S", HUNG_S)
    made: list[Tracer] = []

    def make(ratio: float = 1.0) -> tuple[Tracer, FakeExporter]:
        exporter = FakeExporter()
        tracer = Tracer(lambda: exporter, ratio, "http://collector")
        made.append(tracer)
        return tracer, exporter

    yield make
    for tracer in made:
        tracer.close()


def headers(*traceparent: str) -> list[tuple[bytes, bytes]]:
    return [(b"traceparent", text.encode()) for text in traceparent]


def begun(tracer: Tracer, *traceparent: str) -> RequestTrace:
    trace = tracer.begin("POST", headers(*traceparent))
    assert trace is not None
    return trace


def counted(outcome: str) -> float:
    return metrics.TRACED_REQUESTS.labels(outcome)._value.get()


def end(trace: RequestTrace) -> None:
    trace.end(Exchange("id", "/v1/chat/completions"))


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
def test_the_sample_of_what_begins_here(make: Make, ratio: float, least: int, most: int) -> None:
    tracer, exporter = make(ratio)
    flags = []
    for _ in range(200):
        trace = begun(tracer)
        parent = parent_of(trace.headers([]))
        assert parent is not None
        flags.append(parent.sampled)
        end(trace)
    tracer.close()

    assert least <= sum(flags) <= most
    assert len(exporter.sent) == sum(flags)
    assert begun(tracer, SAMPLED)


def test_times_are_of_the_wall_and_in_order(make: Make) -> None:
    tracer, exporter = make()
    trace, exchange = begun(tracer), Exchange("id", "/v1/chat/completions")
    trace.asked_s, exchange.queued_s, exchange.first_s = exchange.started_s + 1, 2.0, exchange.started_s + 4
    trace.end(exchange)
    tracer.close()

    (finished,) = exporter.sent
    assert finished.asked_ns is not None
    assert finished.admitted_ns is not None
    assert finished.first_ns is not None
    gaps = [finished.asked_ns - finished.begun_ns, finished.admitted_ns - finished.asked_ns, finished.first_ns - finished.admitted_ns]
    assert [round(gap / 1e9, 3) for gap in gaps] == [1, 2, 1]


def test_more_than_the_queue_holds_is_dropped_and_counted(make: Make) -> None:
    tracer, exporter = make()
    exporter.goes_on.clear()
    before = counted("dropped"), counted("sent")
    for _ in range(QUEUE_REQUESTS + 3 * BATCH_REQUESTS):
        end(begun(tracer))
    dropped = counted("dropped") - before[0]
    exporter.goes_on.set()
    tracer.close()

    assert 2 * BATCH_REQUESTS <= dropped <= 3 * BATCH_REQUESTS
    assert counted("sent") - before[1] == len(exporter.sent) == QUEUE_REQUESTS + 3 * BATCH_REQUESTS - dropped
    assert max(map(len, exporter.batches)) == BATCH_REQUESTS


@pytest.mark.parametrize(("delay_s", "ended"), [(HUNG_S, BATCH_REQUESTS), (0.01, 1)], ids=["a full batch", "its time"])
def test_what_has_ended_is_sent_before_the_close(make: Make, monkeypatch: pytest.MonkeyPatch, delay_s: float, ended: int) -> None:
    monkeypatch.setattr(traces, "DELAY_S", delay_s)
    tracer, exporter = make()
    for _ in range(ended):
        end(begun(tracer))
    until(lambda: len(exporter.sent) == ended, "all are sent")
    tracer.close()


@pytest.mark.parametrize("fault", [None, ValueError("no")])
def test_a_collector_that_takes_nothing_costs_spans_and_nothing_else(
    make: Make, fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    tracer, exporter = make()
    exporter.takes, exporter.fault = False, fault
    before, ended = counted("dropped"), 2 * BATCH_REQUESTS
    with caplog.at_level(logging.WARNING, "sparkd.traces"):
        for _ in range(ended):
            end(begun(tracer))
        tracer.close()
    end(begun(tracer))

    assert counted("dropped") - before == ended + 1
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    caplog.clear()


def test_an_end_does_not_wait_for_a_collector_that_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "FLUSH_S", 0.0)
    tracer, exporter = make()
    exporter.goes_on.clear()
    until(lambda: tracer._exporter, "the thread has its exporter")
    end(begun(tracer))
    tracer.close()

    assert exporter.stopped


async def ended_of(gateway: Running, make: Make, *asked: str, **options: Any) -> tuple[dict[str, str], list[Finished]]:
    """The headers that the engine got, and what was traced, of one chat with these headers."""
    gateway.edge.tracer, exporter = make(**options)
    answer = await gateway.post(f"{CHAT}?secret=1", BODY, *asked)
    assert answer.status == 200
    await asyncio.to_thread(gateway.edge.tracer.close)
    return gateway.engine.heard[-1].headers, exporter.sent


async def test_the_engines_span_hangs_below_the_gateways(gateway: Running, make: Make) -> None:
    got, (finished,) = await ended_of(gateway, make, f"traceparent: {SAMPLED}", "tracestate: a=1", "tracestate: b=2")

    assert got["traceparent"] == f"00-{TRACE}-{finished.engine_span_id:016x}-01"
    assert finished.parent == parent_of([(b"traceparent", SAMPLED.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")])
    assert (finished.trace_id, len({finished.span_id, finished.engine_span_id, int(SPAN, 16)})) == (int(TRACE, 16), 3)
    assert got["tracestate"] == "b=2"  # of several headers with one name this shows the last
    assert gateway.engine.heard[-1].head.count(b"tracestate:") == 2
    assert (finished.method, finished.route, finished.model, finished.status, finished.code) == ("POST", CHAT, "tiny", 200, None)
    assert finished.bytes_out == len(ANSWER)
    assert "secret" not in repr(finished)


@pytest.mark.parametrize("sent", [[], ["traceparent: 00-1-2-01", "tracestate: a=1"]])
async def test_a_trace_begins_where_the_client_sent_none(gateway: Running, make: Make, sent: list[str]) -> None:
    got, (finished,) = await ended_of(gateway, make, *sent)

    assert got["traceparent"] == f"00-{finished.trace_id:032x}-{finished.engine_span_id:016x}-01"
    assert gateway.engine.heard[-1].head.count(b"traceparent:") == 1
    assert "tracestate" not in got
    assert finished.parent is None


async def test_the_clients_no_reaches_the_engine(gateway: Running, make: Make) -> None:
    got, traced = await ended_of(gateway, make, f"traceparent: {LEFT_OUT}", "tracestate: a=1")

    assert (got["traceparent"], got["tracestate"], traced) == (LEFT_OUT, "a=1", [])


async def test_nothing_is_added_without_a_collector(gateway: Running) -> None:
    await gateway.post(CHAT, BODY, "traceparent: 00-1-2-01")
    assert gateway.engine.heard[-1].headers["traceparent"] == "00-1-2-01"
    await gateway.post(CHAT, BODY)
    assert "traceparent" not in gateway.engine.heard[-1].headers


async def test_a_stream_that_breaks_off(gateway: Running, make: Make) -> None:
    gateway.edge.tracer, exporter = make()
    gateway.engine.replies(STREAM_HEAD + chunked(EVENT, end=False), then_close=True)
    await gateway.post(CHAT, BODY)
    gateway.engine.replies(STREAM_HEAD + chunked(EVENT, DONE))
    await gateway.post(CHAT, BODY)
    await gateway.post(CHAT, b'{"model":"other"}')
    await gateway.get("/v1/models")
    await asyncio.to_thread(gateway.edge.tracer.close)

    broken, well, refused = exporter.sent
    assert (broken.status, broken.code is None, broken.first_ns is None) == (200, False, False)
    assert (well.status, well.code, well.first_ns is None) == (200, None, False)
    assert (refused.status, refused.model, refused.admitted_ns, refused.asked_ns is None) == (404, "unknown", None, False)
