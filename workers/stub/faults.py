"""The named ways in which a stub engine breaks HTTP or its event stream. Never answers correctly."""

from __future__ import annotations

from collections.abc import Callable

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
_CHUNKED = _HEAD + b"transfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" Paris"}}]}\n\n'
_DONE = b"data: [DONE]\n\n"
_END = b"0\r\n\r\n"
_HUGE_BYTES = 10_000_000
_FLOOD_HEADERS = 20_000


def broken_answer(name: str) -> tuple[bytes, bool]:
    """The raw bytes of the fault, and whether the connection closes behind them. KeyError for a name that is not in FAULTS."""
    return FAULTS[name]()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _half_event() -> tuple[bytes, bool]:
    return _CHUNKED + _chunk(_EVENT) + _chunk(_EVENT[:40]) + _END, False


def _no_blank_line() -> tuple[bytes, bool]:
    return _CHUNKED + _chunk(_EVENT[:-1]) * 3 + _chunk(_DONE[:-1]) + _END, False


def _huge_line() -> tuple[bytes, bool]:
    line = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * _HUGE_BYTES + b'"}}]}\n\n'
    return _CHUNKED + _chunk(line) + _chunk(_DONE) + _END, False


def _mixed_newlines() -> tuple[bytes, bool]:
    event = _EVENT[:-2]
    return _CHUNKED + _chunk(event + b"\r\n\r\n" + event + b"\r\r" + event + b"\n\r\n" + _DONE) + _END, False


def _after_done() -> tuple[bytes, bool]:
    return _CHUNKED + _chunk(_EVENT) + _chunk(_DONE) + _chunk(_EVENT + b"\x00not an event") + _END, False


def _early_close() -> tuple[bytes, bool]:
    return _CHUNKED + _chunk(_EVENT) * 2, True


def _bad_chunk() -> tuple[bytes, bool]:
    return _CHUNKED + _chunk(_EVENT) + b"zz\r\n" + _EVENT + b"\r\n", True


def _length_long() -> tuple[bytes, bool]:
    return _HEAD + b"content-length: %d\r\n\r\n" % (len(_EVENT) * 10) + _EVENT, True


def _length_short() -> tuple[bytes, bool]:
    return _HEAD + b"content-length: %d\r\n\r\n" % (len(_EVENT) // 2) + _EVENT, True


def _informational() -> tuple[bytes, bool]:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n"
    return early + _CHUNKED + _chunk(_EVENT) + _chunk(_DONE) + _END, False


def _header_flood() -> tuple[bytes, bool]:
    flood = b"".join(b"x-flood-%d: %s\r\n" % (number, b"y" * 40) for number in range(_FLOOD_HEADERS))
    return _HEAD + flood + b"transfer-encoding: chunked\r\n\r\n" + _chunk(_EVENT) + _chunk(_DONE) + _END, False


def _not_http() -> tuple[bytes, bool]:
    return b"\x16\x03\x01 this is not HTTP\r\n\r\n", True


def _no_answer() -> tuple[bytes, bool]:
    return b"", True


FAULTS: dict[str, Callable[[], tuple[bytes, bool]]] = {
    "half_event": _half_event,
    "no_blank_line": _no_blank_line,
    "huge_line": _huge_line,
    "mixed_newlines": _mixed_newlines,
    "after_done": _after_done,
    "early_close": _early_close,
    "bad_chunk": _bad_chunk,
    "length_long": _length_long,
    "length_short": _length_short,
    "informational": _informational,
    "header_flood": _header_flood,
    "not_http": _not_http,
    "no_answer": _no_answer,
}
