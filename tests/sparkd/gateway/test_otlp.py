"""The spans of a request as a collector gets them over OTLP/HTTP."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sparkd.gateway.otlp import OtlpExporter
from sparkd.gateway.trace_context import Parent
from sparkd.gateway.traces import Finished
from tests.support.observability import ROOT
from tests.support.otlp_receiver import Receiver, Span, receiver, tree_of

S = 1_000_000_000
SERVER, CLIENT, INTERNAL = 2, 3, 1
PLAIN = Finished(
    trace_id=0xA1,
    span_id=0xB1,
    engine_span_id=0xC1,
    parent=None,
    method="POST",
    route="/v1/chat/completions",
    model="tiny",
    status=200,
    code=None,
    request_id="req-1",
    bytes_out=77,
    begun_ns=100 * S,
    asked_ns=101 * S,
    admitted_ns=110 * S,
    first_ns=111 * S,
    ended_ns=120 * S,
    load_s=None,
    tokens=(5, 7),
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def spans_of(collector: Receiver, finished: Finished) -> dict[str, Span]:
    collector.spans.clear()
    exporter = OtlpExporter(f"{collector.url}/v1/traces")
    assert exporter.send([finished])
    exporter.stop()
    return {span.name: span for span in collector.spans}


def test_a_streamed_answer(collector: Receiver) -> None:
    spans = spans_of(collector, PLAIN)

    assert tree_of(collector.spans) == {
        "POST /v1/chat/completions": "",
        "queue": "POST /v1/chat/completions",
        "engine": "POST /v1/chat/completions",
    }
    root, queue, engine = spans["POST /v1/chat/completions"], spans["queue"], spans["engine"]
    assert {span.trace for span in collector.spans} == {f"{0xA1:032x}"}
    assert (root.span, root.parent, engine.span) == (f"{0xB1:016x}", "", f"{0xC1:016x}")
    assert (root.kind, queue.kind, engine.kind) == (SERVER, INTERNAL, CLIENT)
    assert [(span.begun_ns // S, span.ended_ns // S) for span in (root, queue, engine)] == [(100, 120), (101, 110), (110, 120)]
    assert engine.events == {"first byte": 111 * S}
    assert {span.service for span in collector.spans} == {"sparkd"}
    assert not any(span.failed for span in collector.spans)
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.body.size": 77,
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 7,
        "sparkd.request_id": "req-1",
    }


def test_the_clients_span_is_above_it(collector: Receiver) -> None:
    spans = spans_of(collector, replace(PLAIN, parent=Parent(0xA1, 0xD1, True, "a=1,b=2")))

    assert spans["POST /v1/chat/completions"].parent == f"{0xD1:016x}"
    assert {span.state for span in collector.spans} == {"a=1,b=2"}


@pytest.mark.parametrize(("load_s", "begins_s"), [(4.0, 106), (60.0, 101)])
def test_the_load_that_it_waited_for(collector: Receiver, load_s: float, begins_s: int) -> None:
    load = spans_of(collector, replace(PLAIN, load_s=load_s))["load"]

    assert tree_of(collector.spans)["load"] == "queue"
    assert (load.begun_ns // S, load.ended_ns // S, load.attributes) == (begins_s, 110, {"sparkd.load.duration": load_s})


@pytest.mark.parametrize(
    ("status", "code", "failed", "kind"),
    [
        (200, "engine_error", True, "engine_error"),
        (503, "model_loading", True, "model_loading"),
        (400, "bad_request", False, "bad_request"),
        (499, None, False, "client_gone"),
        (200, None, False, None),
    ],
)
def test_an_error(collector: Receiver, status: int, code: str | None, failed: bool, kind: str | None) -> None:
    root = spans_of(collector, replace(PLAIN, status=status, code=code))["POST /v1/chat/completions"]

    assert (root.failed, root.attributes.get("error.type")) == (failed, kind)


def test_a_request_that_never_had_an_engine(collector: Receiver) -> None:
    spans_of(collector, replace(PLAIN, asked_ns=None, admitted_ns=None, first_ns=None, model="", tokens=(None, None)))
    assert tree_of(collector.spans) == {"POST /v1/chat/completions": ""}
    queued = spans_of(collector, replace(PLAIN, admitted_ns=None, first_ns=None))
    assert (sorted(queued), queued["queue"].ended_ns) == (["POST /v1/chat/completions", "queue"], 120 * S)


def test_a_collector_that_refuses(collector: Receiver) -> None:
    exporter = OtlpExporter(f"{collector.url}/elsewhere")
    assert not exporter.send([PLAIN])
    exporter.stop()


@pytest.mark.rest
def test_the_daemon_does_not_import_it() -> None:
    code = "import sys, sparkd.daemon.daemon; print(sum(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "0"
