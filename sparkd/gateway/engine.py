"""What an engine is told of a client's request, and a client of an engine's answer: which headers go and come back. Never sees a body."""

from __future__ import annotations

import re

from sparkd.gateway.answers import RawHeaders

_FORWARDED = (
    b"content-type",
    b"accept",
    b"user-agent",
    b"traceparent",
    b"tracestate",
    b"anthropic-version",
    b"anthropic-beta",
    b"openai-beta",
)
# RFC 9110 7.6.1, and what the gateway says itself.
_DROPPED = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"server",
        b"date",
        b"x-request-id",
    )
)
_PRINTABLE = re.compile(rb"[\t\x20-\x7e]*")


def request_head(method: str, target: bytes, preamble: bytes, headers: dict[bytes, bytes], request_id: str, body_bytes: int) -> bytes:
    """The head of the engine's request: an allow-list of the client's headers, less what `Connection` names, in printable ASCII.

    Not the client's key. No encoding is accepted, because bytes are passed on as they come. `preamble` is sparkd.wire.Pool's.
    """
    hidden: list[bytes] | tuple[()] = ()
    connection = headers.get(b"connection")
    if connection is not None:
        hidden = _tokens(connection)
    lines = [b"%b %b%bx-request-id: %b\r\naccept-encoding: identity\r\n" % (method.encode(), target, preamble, request_id.encode())]
    for name in _FORWARDED:
        value = headers.get(name)
        if value is not None and name not in hidden and _PRINTABLE.fullmatch(value):
            lines.append(b"%b: %b\r\n" % (name, value))
    if body_bytes or method == "POST":
        lines.append(b"content-length: %d\r\n" % body_bytes)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_headers(status: int, headers: RawHeaders, request_id: str) -> tuple[RawHeaders, bool, bool]:
    """The client's headers for an engine's answer, whether it is an event stream, and whether it goes out in chunks."""
    kept: RawHeaders = [(b"x-request-id", request_id.encode())]
    streams, chunked = False, status not in (204, 304)
    hidden: list[bytes] = []
    for name, value in headers:
        if name in _DROPPED or name.startswith(b"access-control-"):
            if name == b"connection":
                hidden += _tokens(value)
            continue
        if name == b"content-length":
            if status in (204, 304):
                continue
            chunked = False
        elif name == b"content-type" and value[:17].lower() == b"text/event-stream":
            streams = True
        kept.append((name, value))
    if hidden:
        kept = [pair for pair in kept if pair[0] not in hidden]
    if streams:
        # nginx and its like would hold a stream back; browsers and caches would keep it.
        kept = [pair for pair in kept if pair[0] != b"cache-control"]
        kept += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    if chunked:
        kept.append((b"transfer-encoding", b"chunked"))
    return kept, streams, chunked


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
