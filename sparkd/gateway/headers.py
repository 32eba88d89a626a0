"""Selects the headers of a client's request that go to the engine, and those of the engine's answer that go back."""

from __future__ import annotations

import re
from collections.abc import Mapping

RawHeaders = list[tuple[bytes, bytes]]  # names in lower case

# RFC 9110 7.6.1: they apply to one connection.
_HOP_BY_HOP = frozenset(
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
    )
)
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"cookie"))
# Headers that the gateway writes or answers itself: framing, accepted encodings, the origin of a page. vLLM would take the model from
# _MODEL (/invocations).
_MODEL = b"x-amzn-sagemaker-adapter-identifier"
_OWN = frozenset((b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect", b"x-request-id", b"origin", _MODEL))
_KEPT_FROM_ENGINE = _HOP_BY_HOP | _CREDENTIALS | _OWN
_KEPT_FROM_CLIENT = _HOP_BY_HOP | {b"server", b"date", b"x-request-id", b"set-cookie"}
_OWN_PREFIXES = (b"proxy-", b"x-sparkd-", b"access-control-")
_PRINTABLE = re.compile(rb"[\t\x20-\x7e]*")


def request_head(method: str, target: bytes, preamble: bytes, headers: RawHeaders, request_id: str, body_bytes: int) -> bytes:
    """The head of the request to the engine: the client's headers, in printable ASCII.

    Left out are the client's credentials, headers of its connection (and those that `Connection` names), and the headers that sparkd
    writes. sparkd asks for no encoding, because it passes bytes on as they come. `preamble` is Upstream's.
    """
    hidden: list[bytes] = []
    lines = [b"%b %b%bx-request-id: %b\r\naccept-encoding: identity\r\n" % (method.encode(), target, preamble, request_id.encode())]
    for name, value in headers:
        if name == b"connection":
            hidden += (token.strip().lower() for token in value.split(b","))
    for name, value in headers:
        if name in _KEPT_FROM_ENGINE or name in hidden or name.startswith(_OWN_PREFIXES) or not _PRINTABLE.fullmatch(value):
            continue
        lines.append(b"%b: %b\r\n" % (name, value))
    if body_bytes or method == "POST":
        lines.append(b"content-length: %d\r\n" % body_bytes)
    lines.append(b"\r\n")
    return b"".join(lines)


def response_headers(headers: RawHeaders, request_id: str, *, takes_chunks: bool) -> tuple[RawHeaders, bool, bool]:
    """The client's headers for an engine's answer, whether it is an event stream, and whether it goes to the client in chunks.

    takes_chunks: whether the client accepts chunked encoding.
    """
    passed: RawHeaders = [(b"x-request-id", request_id.encode())]
    streams, chunked = False, takes_chunks
    for name, value in headers:
        if name in _KEPT_FROM_CLIENT or name.startswith(_OWN_PREFIXES):
            continue
        if name == b"content-length":
            chunked = False
        elif name == b"content-type" and value[:17].lower() == b"text/event-stream":
            streams = True
        passed.append((name, value))
    if streams:
        # Without these, nginx would buffer a stream, and browsers and caches would store it.
        passed = [pair for pair in passed if pair[0] != b"cache-control"]
        passed += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
    if chunked:
        passed.append((b"transfer-encoding", b"chunked"))
    return passed, streams, chunked


def media_type(headers: Mapping[bytes, bytes]) -> bytes:
    """The type in Content-Type without its parameters, b"" if there is none."""
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
