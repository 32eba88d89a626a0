"""The headers of W3C Trace Context: reads a client's, writes an engine's. Draws no sample and keeps no span.

https://www.w3.org/TR/trace-context/, sections 3.2 (traceparent), 3.3 (tracestate) and 4.3 (what to do with a malformed one).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparkd.gateway.responses import RawHeaders

# As much as every party must keep (W3C Trace Context, 3.3.1.5); longer ones are dropped, because queued requests hold them.
MOST_STATE_BYTES = 512
_TRACEPARENT, _TRACESTATE = b"traceparent", b"tracestate"
# A later version may have more behind the flags; version ff is none.
_SHAPE = re.compile(rb"(?!ff)(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?")
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16


@dataclass(frozen=True, slots=True)
class Parent:
    """The client's span. state: its `tracestate`, as it came."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str


def parent_of(headers: RawHeaders) -> Parent | None:
    """None without a traceparent, and with a malformed one or two: then a new trace begins."""
    sent = [value for name, value in headers if name == _TRACEPARENT]
    match = _SHAPE.fullmatch(sent[0].strip()) if len(sent) == 1 else None
    if match is None or (match["version"] == b"00" and match["more"]) or match["trace"] == _NO_TRACE or match["span"] == _NO_SPAN:
        return None
    state = b",".join(value for name, value in headers if name == _TRACESTATE)
    if len(state) > MOST_STATE_BYTES:
        state = b""
    return Parent(int(match["trace"], 16), int(match["span"], 16), bool(int(match["flags"], 16) & 1), state.decode("latin-1"))


def forwarded(headers: RawHeaders, trace_id: int, span_id: int, sampled: bool, *, continued: bool) -> RawHeaders:
    """The client's headers with this span in the place of the client's. continued: the trace is the client's, and so is its tracestate."""
    kept = [pair for pair in headers if pair[0] != _TRACEPARENT and (continued or pair[0] != _TRACESTATE)]
    return [*kept, (_TRACEPARENT, b"00-%032x-%016x-%02x" % (trace_id, span_id, sampled))]
