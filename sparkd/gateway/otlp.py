"""A request's spans as OpenTelemetry has them, over OTLP/HTTP. Imported only where `traces.endpoint` is set; needs the extra `traces`."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from sparkd import __version__
from sparkd.gateway.exchange import CLIENT_GONE
from sparkd.gateway.trace_context import Parent
from sparkd.gateway.traces import Finished

# https://opentelemetry.io/docs/specs/semconv/registry/attributes/gen-ai/#gen-ai-operation-name
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class OtlpExporter:
    """OpenTelemetry's spans of a request, over OTLP/HTTP. Headers, certificates and time-outs are those of OpenTelemetry's own variables
    (OTEL_EXPORTER_OTLP_HEADERS ...) in the daemon's environment.

    The request is a SERVER span with two children: `queue`, in which lies `load`, and `engine`, the parent of the engine's own spans.
    """

    def __init__(self, url: str) -> None:
        """url: where spans are posted."""
        # It logs each batch that fails, and each try.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._ids = _GivenIds()
        self._spans = _Ended()
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "sparkd", "service.version": __version__}
        provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(named), id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._spans)
        self._tracer = provider.get_tracer("sparkd.gateway", __version__)
        self._otlp = OTLPSpanExporter(endpoint=url)

    def send(self, batch: Sequence[Finished]) -> bool:
        for finished in batch:
            self._request(finished)
            time.sleep(0)  # streams go on between two requests: this thread gives up Python's lock
        return self._otlp.export(self._spans.taken()) is SpanExportResult.SUCCESS

    def stop(self) -> None:
        self._otlp.shutdown()

    def _request(self, finished: Finished) -> None:
        ended_ns = finished.ended_ns
        root = self._start(
            f"{finished.method} {finished.route}",
            None if finished.parent is None else self._remote(finished.parent),
            api.SpanKind.SERVER,
            finished.begun_ns,
            (finished.trace_id, finished.span_id),
        )
        root.set_attributes(_attributes(finished))
        if finished.status >= 500 or (finished.code is not None and finished.status < 400):
            root.set_status(api.Status(api.StatusCode.ERROR))
        asked_ns, admitted_ns = finished.asked_ns, finished.admitted_ns
        if asked_ns is not None:
            queue_ends_ns = ended_ns if admitted_ns is None else admitted_ns
            queue = self._start("queue", root, api.SpanKind.INTERNAL, asked_ns)
            if finished.load_s is not None:
                load = self._start("load", queue, api.SpanKind.INTERNAL, max(asked_ns, queue_ends_ns - int(finished.load_s * 1e9)))
                load.set_attribute("sparkd.load.duration", finished.load_s)
                load.end(queue_ends_ns)
            queue.end(queue_ends_ns)
        if admitted_ns is not None:
            engine = self._start("engine", root, api.SpanKind.CLIENT, admitted_ns, (finished.trace_id, finished.engine_span_id))
            if finished.first_ns is not None:
                engine.add_event("first byte", timestamp=finished.first_ns)
            engine.end(ended_ns)
        root.end(ended_ns)

    def _start(self, name: str, parent: api.Span | None, kind: api.SpanKind, begun_ns: int, ids: tuple[int, int] | None = None) -> api.Span:
        """parent: a span, or None. ids: of trace and span; None draws them."""
        self._ids.next = ids
        context = api.set_span_in_context(parent if parent is not None else api.INVALID_SPAN, Context())
        return self._tracer.start_span(name, context, kind, start_time=begun_ns)

    @staticmethod
    def _remote(parent: Parent) -> api.Span:
        state = api.TraceState.from_header([parent.state])
        context = api.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=api.TraceFlags(1), trace_state=state)
        return api.NonRecordingSpan(context)


class _GivenIds(IdGenerator):
    """For spans whose ids an engine knows already."""

    next: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        return self.next[0] if self.next is not None else secrets.randbits(128) or 1

    def generate_span_id(self) -> int:
        return self.next[1] if self.next is not None else secrets.randbits(64) or 1

    def is_trace_id_random(self) -> bool:
        return True


class _Ended(SpanProcessor):
    """Keeps the spans that ended until they are taken."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def taken(self) -> list[ReadableSpan]:
        spans, self._spans = self._spans, []
        return spans


def _attributes(finished: Finished) -> dict[str, Any]:
    """Names of OpenTelemetry's semantic conventions where they have one."""
    found: dict[str, Any] = {
        "http.request.method": finished.method,
        "http.route": finished.route,
        "http.response.status_code": finished.status,
        "http.response.body.size": finished.bytes_out,
        "gen_ai.operation.name": _OPERATIONS.get(finished.route),
        "gen_ai.request.model": finished.model or None,
        "gen_ai.usage.input_tokens": finished.tokens[0],
        "gen_ai.usage.output_tokens": finished.tokens[1],
        "error.type": finished.code or ("client_gone" if finished.status == CLIENT_GONE else None),
        "sparkd.request_id": finished.request_id,
    }
    return {name: value for name, value in found.items() if value is not None}
