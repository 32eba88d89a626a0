"""A collector of the tests' own: takes OTLP over HTTP on a free port and gives the spans as plain values."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from tests.support.waiting import until


@dataclass(frozen=True)
class Span:
    """Ids are hex digits, parent "" for none; times are nanoseconds since 1970."""

    service: str
    name: str
    kind: int
    trace: str
    span: str
    parent: str
    state: str
    begun_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: dict[str, int]


@dataclass
class Receiver:
    """status: how it answers. raw: every body that came."""

    url: str = ""
    status: int = 200
    spans: list[Span] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    def wait_for(self, number: int, **wanted: Any) -> list[Span]:
        """At least so many spans whose fields have these values."""

        def found() -> list[Span]:
            return [span for span in self.spans if all(getattr(span, name) == value for name, value in wanted.items())]

        until(lambda: len(found()) >= number, f"{number} spans {wanted}")
        return found()


@contextlib.contextmanager
def receiver() -> Iterator[Receiver]:
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            if made.status == 200:
                made.raw.append(body)
                made.spans += _spans(body)
            self.send_response(made.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tree_of(spans: list[Span]) -> dict[str, str]:
    """The name of each span's parent; "" where the parent is not among them."""
    names = {span.span: span.name for span in spans}
    return {span.name: names.get(span.parent, "") for span in spans}


def _spans(body: bytes) -> Iterator[Span]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = {pair.key: _value(pair.value) for pair in resource.resource.attributes}["service.name"]
        for scope in resource.scope_spans:
            yield from (_span(service, span) for span in scope.spans)


def _span(service: str, span: WireSpan) -> Span:
    return Span(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.trace_state,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        {pair.key: _value(pair.value) for pair in span.attributes},
        {event.name: event.time_unix_nano for event in span.events},
    )


def _value(value: AnyValue) -> Any:
    return getattr(value, value.WhichOneof("value"))
