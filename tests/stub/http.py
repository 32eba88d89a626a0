"""One connection of a stub engine: parses with httptools, paces the answer, counts aborts. Never decides what to answer.

Hand-written on asyncio.Protocol because the stub is the upstream of the gateway's benchmark: per chunk it must cost several times
less than the proxy that is measured with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from http import HTTPStatus

import httptools

from tests.stub.engine import Answer, Behaviour, Request, StubEngine, route

_SSE = b"content-type: text/event-stream; charset=utf-8\r\n"
_PLAIN = Behaviour()
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
# Unpaced chunks per turn of the loop: enough to amortise the turn, few enough that other connections keep their pace.
_BURST = 32
_STALLED_AGAIN_S = 0.05


class StubProtocol(asyncio.Protocol):
    """Serves one request at a time; pipelined ones wait their turn."""

    def __init__(self, engine: StubEngine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._request: Request | None = None
        self._answer = Answer()
        self._timer: asyncio.Handle | None = None
        self._paused = False
        self._seq = 0
        self._due_s = 0.0

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._engine.connections.add(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return
        except httptools.HttpParserError:
            self._transport.write(_head(400, False, b"content-length: 0\r\n"))
            self._transport.close()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._request is not None and self._seq and self._timer is None:
            self._due_s = self._loop.time()
            self._continue()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.connections.discard(self._transport)
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._request is None:
            return
        self._engine.aborts += 1
        self._leave()

    # --- httptools ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers: list[tuple[str, str]] = []
        self._body: list[bytes] = []

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        if any(name.lower() == "expect" for name, _ in self._headers) and self._request is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        request = Request(
            method=self._parser.get_method().decode(),
            target=self._target.decode("latin-1"),
            headers=tuple(self._headers),
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
            chunked_reply=self._parser.get_http_version() == "1.1",
        )
        self._waiting.append(request)
        if self._request is None:
            self._next()

    # --- one exchange ------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._request is not None or not self._waiting:
            return
        request = self._request = self._waiting.popleft()
        self._seq = 0
        self._answer = answer = route(self._engine, request)
        if answer.behaviour is not None:
            self._engine.running += 1
        if not answer.hang:
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        request, answer = self._request, self._answer
        if request is None:
            return
        behaviour = answer.behaviour
        if behaviour is not None and self._waits(behaviour, 0 if answer.stream else answer.tokens - 1):
            self._timer = self._loop.call_later(_STALLED_AGAIN_S, self._begin)
            return
        if answer.stream is not None:
            framing = b"transfer-encoding: chunked\r\n" if request.chunked_reply else b""
            self._transport.write(_head(200, request.keep_alive, _SSE + framing))
            self._due_s = self._loop.time()
            self._continue()
            return
        fields = b"content-type: %s\r\ncontent-length: %d\r\n" % (answer.content_type.encode(), len(answer.body))
        body = b"" if request.method == "HEAD" else answer.body
        self._transport.write(_head(answer.status, request.keep_alive, fields) + body)
        self._engine.generation_tokens += answer.tokens
        self._end(close=not request.keep_alive)

    def _continue(self) -> None:
        """Writes what is due now and arranges for the rest, unless the client reads too slowly."""
        self._timer = None
        request, answer, stream = self._request, self._answer, self._answer.stream
        if request is None or stream is None or self._paused:
            return
        behaviour = answer.behaviour or _PLAIN
        start = self._seq
        if self._waits(behaviour, start):
            self._timer = self._loop.call_later(_STALLED_AGAIN_S, self._continue)
            return
        interval_s = behaviour.chunk_interval_s
        stop = min(answer.tokens, start + (1 if interval_s else _BURST))
        if behaviour.held(stop):
            stop = behaviour.gate_after
        events = [stream.chunk(seq, time.monotonic_ns()) for seq in range(start, stop)]
        if start == 0 and stream.head:
            events.insert(0, stream.head)
        if stop == answer.tokens:
            events.append(stream.tail)
        if request.chunked_reply:
            events = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
            if stop == answer.tokens:
                events.append(b"0\r\n\r\n")
        self._seq = stop
        self._engine.generation_tokens += stop - start
        self._transport.write(b"".join(events))
        if stop == answer.tokens:
            self._end(close=not (request.keep_alive and request.chunked_reply))
            return
        if interval_s:
            self._due_s += interval_s
            self._timer = self._loop.call_at(self._due_s, self._continue)
        elif not self._paused:
            self._timer = self._loop.call_soon(self._continue)

    def _waits(self, behaviour: Behaviour, pieces: int) -> bool:
        """Whether nothing goes out now. Behind its gate the engine counts on: it computes for long, and does not hang."""
        if self._engine.stalled():
            return True
        if behaviour.held(pieces):
            self._engine.generation_tokens += 1
            return True
        return False

    def _end(self, *, close: bool) -> None:
        self._leave()
        if close:
            self._transport.close()
        elif self._waiting:
            self._loop.call_soon(self._next)

    def _leave(self) -> None:
        self._request = None
        if self._answer.behaviour is not None:
            self._engine.running -= 1


def _head(status: int, keep_alive: bool, fields: bytes) -> bytes:
    connection = b"" if keep_alive else b"connection: close\r\n"
    return b"HTTP/1.1 %d %s\r\nserver: uvicorn\r\n%s%s\r\n" % (status, _PHRASES[status], connection, fields)
