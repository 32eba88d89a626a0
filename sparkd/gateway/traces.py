"""Owns the traces of forwarded requests: ids and times on the loop, sent on a thread of its own. Knows no library of traces.

Nothing here holds a prompt, an answer, a query string or a key. Without `traces.endpoint` there is no Tracer.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from sparkd import metrics
from sparkd.gateway.exchange import Exchange
from sparkd.gateway.responses import RawHeaders
from sparkd.gateway.trace_context import Parent, forwarded, parent_of

_log = logging.getLogger("sparkd.traces")

# OTEL_BSP_MAX_QUEUE_SIZE is 2048 spans, of which a request has up to four. A batch is small: while it is encoded, in some milliseconds, the
# loop gets Python's lock at its switch interval only (5 ms).
QUEUE_REQUESTS = 2048
BATCH_REQUESTS = 32
DELAY_S = 2.0
# The daemon's end waits so long for what is queued.
FLUSH_S = 2.0
_TRACE_BITS = 64


@dataclass(frozen=True, slots=True)
class Finished:
    """One request at its end. Times are nanoseconds since 1970; asked: of an engine, None where the request was refused before.

    load_s: how long the load took that it waited for. tokens: in and out, None where they are not known.
    """

    trace_id: int
    span_id: int
    engine_span_id: int
    parent: Parent | None
    method: str
    route: str
    model: str
    status: int
    code: str | None
    request_id: str
    bytes_out: int
    begun_ns: int
    asked_ns: int | None
    admitted_ns: int | None
    first_ns: int | None
    ended_ns: int
    load_s: float | None
    tokens: tuple[int | None, int | None]


class Exporter(Protocol):
    """Sends what `Finished` says to a collector; blocks, and is called on the thread alone."""

    def send(self, batch: Sequence[Finished]) -> bool:
        """Whether the collector took it."""
        ...

    def stop(self) -> None:
        """End a `send` that is under way; called on another thread."""
        ...


class RequestTrace:
    """One request's place in its trace. asked_s: when it asked for an engine, `perf_counter`; load_s: see Finished."""

    __slots__ = ("_engine_span_id", "_method", "_parent", "_span_id", "_trace_id", "_tracer", "asked_s", "load_s")

    def __init__(self, tracer: Tracer | None, method: str, parent: Parent | None, trace_id: int) -> None:
        """tracer: None where the sample leaves this request out."""
        self._tracer = tracer
        self._method = method
        self._parent = parent
        self._trace_id = trace_id
        self._span_id = secrets.randbits(64) or 1
        self._engine_span_id = secrets.randbits(64) or 1
        self.asked_s: float | None = None
        self.load_s: float | None = None

    def headers(self, headers: RawHeaders) -> RawHeaders:
        """The client's headers, as the engine gets them."""
        sampled = self._tracer is not None
        return forwarded(headers, self._trace_id, self._engine_span_id, sampled, continued=self._parent is not None)

    def end(self, exchange: Exchange) -> None:
        if self._tracer is None:
            return
        now_s, now_ns = perf_counter(), time.time_ns()

        def wall(at_s: float) -> int:
            return now_ns - int((now_s - at_s) * 1e9)

        asked_s, queued_s = self.asked_s, exchange.queued_s
        self._tracer.put(
            Finished(
                trace_id=self._trace_id,
                span_id=self._span_id,
                engine_span_id=self._engine_span_id,
                parent=self._parent,
                method=self._method,
                route=exchange.route,
                model=exchange.model,
                status=exchange.status,
                code=exchange.code,
                request_id=exchange.request_id,
                bytes_out=exchange.bytes_out,
                begun_ns=wall(exchange.started_s),
                asked_ns=None if asked_s is None else wall(asked_s),
                admitted_ns=None if asked_s is None or queued_s is None else wall(asked_s + queued_s),
                first_ns=None if exchange.first_s is None else wall(exchange.first_s),
                ended_ns=now_ns,
                load_s=self.load_s,
                tokens=(exchange.tokens.prompt, exchange.tokens.completion) if exchange.tokens else (None, None),
            )
        )


class Tracer:
    """Draws the sample, queues what has ended, and sends it. `close` it.

    ratio: the share of the traces begun here that is sampled; a client's own traces follow the client's flag.
    """

    def __init__(self, make: Callable[[], Exporter], ratio: float, place: str) -> None:
        """make: called on the thread, because it imports OpenTelemetry. place: of the collector, for the log."""
        self._make = make
        self._sampled_below = int(ratio * (1 << _TRACE_BITS))
        self._place = place
        self._queue: deque[Finished] = deque()
        self._wake = threading.Event()
        self._closed = False
        self._exporter: Exporter | None = None
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def begin(self, method: str, headers: RawHeaders) -> RequestTrace | None:
        """None where the request goes to the engine with the client's headers as they are: the client takes no sample of it."""
        parent = parent_of(headers)
        if parent is not None:
            return RequestTrace(self, method, parent, parent.trace_id) if parent.sampled else None
        trace_id = secrets.randbits(128) or 1
        # As OpenTelemetry's TraceIdRatioBased: the low 64 bits of a trace id are random.
        sampled = trace_id & ((1 << _TRACE_BITS) - 1) < self._sampled_below
        return RequestTrace(self if sampled else None, method, None, trace_id)

    def put(self, finished: Finished) -> None:
        """Queue a finished request without blocking the loop. A request that finds the queue full is dropped and counted."""
        if self._closed or len(self._queue) >= QUEUE_REQUESTS:
            metrics.TRACED_REQUESTS.labels("dropped").inc()
            return
        self._queue.append(finished)
        if len(self._queue) >= BATCH_REQUESTS:
            self._wake.set()

    def close(self) -> None:
        """Send what is queued, for at most FLUSH_S; blocks."""
        self._closed = True
        self._wake.set()
        self._thread.join(FLUSH_S)
        if self._thread.is_alive() and self._exporter is not None:
            self._exporter.stop()
        metrics.TRACED_REQUESTS.labels("dropped").inc(len(self._queue))

    def _run(self) -> None:
        self._send(())
        well = True
        while not self._closed or self._queue:
            if not self._closed:
                self._wake.wait(DELAY_S)
                self._wake.clear()
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(BATCH_REQUESTS, len(self._queue)))]
                sent = self._send(batch)
                metrics.TRACED_REQUESTS.labels("sent" if sent else "dropped").inc(len(batch))
                if sent is not well:
                    well = sent
                    if sent:
                        _log.info("the collector at %s takes spans again", self._place)
                    else:
                        _log.warning("the collector at %s takes no spans; they are dropped until it does", self._place)
                if not sent and self._closed:
                    return

    def _send(self, batch: Sequence[Finished]) -> bool:
        try:
            if self._exporter is None:
                self._exporter = self._make()
            return not batch or self._exporter.send(batch)
        except Exception:  # noqa: BLE001 - a fault in a library of traces costs spans and nothing else
            _log.exception("spans could not be sent")
            metrics.INTERNAL_ERRORS.labels("traces").inc()
            return False
