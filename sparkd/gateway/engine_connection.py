"""One HTTP/1.1 connection to an engine.

sparkd has its own client because it spends its time passing bytes through. With aiohttp a chunk took 80 to 95 µs of CPU and a short answer
300 µs, where copying the bytes between two sockets (uvloop, without HTTP) took 41 and 31 µs. No task and no queue stands between the
engine's socket and the client's: the callback that reads bytes also passes them on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import httptools

from sparkd.errors import EngineError, EngineGone
from sparkd.gateway.headers import RawHeaders

if TYPE_CHECKING:
    from sparkd.gateway.upstream import Upstream

_SLICE_BYTES = 64 * 1024
# An engine says at the end of its answer how many tokens it took: in one of the last three events of a stream, behind all else in JSON.
_TAIL_BYTES = 8 * 1024
_CRLF = b"\r\n"

_BROKEN_OFF = "The engine ended its answer early. Its log may say why."

# _CHUNKS[n] has what a chunk of n bytes, framing included, begins with, and its size without. The lookup takes half the time of parsing.
# Some n are impossible, such as 21; their entry is longer than any read that is compared with it.
_MAX_PASSED_BYTES = 2048
_CHUNKS = [(b"\n" * (_MAX_PASSED_BYTES + 1), 0)] * (_MAX_PASSED_BYTES + 1)
for _head, _size in [(b"%x\r\n" % size, size) for size in range(1, _MAX_PASSED_BYTES)]:
    if len(_head) + _size + 2 <= _MAX_PASSED_BYTES:
        _CHUNKS[len(_head) + _size + 2] = _head, _size


class ResponseSink(Protocol):
    """The receiver of an answer: one `head`, then `body` until `ended`, or `broken` at any point as the last call.

    The connection's callbacks call these methods, which must not raise. `broken` may follow `head` at once, so a sink sends nothing of an
    answer before the first `body`.
    """

    def head(self, status: int, headers: RawHeaders) -> None: ...
    def body(self, data: bytes, ended: bool) -> None:
        """The bytes of the body in one read, without their framing; b"" if it had none."""

    def broken(self, error: EngineError) -> None: ...


class EngineConnection(asyncio.Protocol):
    """One connection; one exchange at a time. Made by an Upstream, which keeps it for the next."""

    transport: asyncio.Transport

    def __init__(self, upstream: Upstream) -> None:
        self.idle_since_s = 0.0
        self._upstream = upstream
        self._sink: ResponseSink | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: RawHeaders = []
        self._bodies: list[bytes] = []
        self._answering = False  # whether the sink has the head
        self._complete = True
        self._request_written = True
        self._keep_alive = False
        self._connected = False
        self._between_chunks = False
        self._pass: Callable[[bytes], None] | None = None
        self._passing: Callable[[bytes], None] | None = None  # _pass, while the parser stands between two chunks
        self.passed = self._second_last = self._third_last = b""
        self.passed_bytes = self.passed_pieces = 0
        self._writable: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    # --- the exchange ---------------------------------------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes | bytearray, sink: ResponseSink) -> None:
        """Write a request whose answer goes to `sink`. Return once it is written, or once the answer is over before that."""
        self._sink = sink
        self._headers = []
        self._answering = self._complete = self._between_chunks = False
        self._pass = None
        self.passed, self._second_last, self._third_last, self.passed_bytes, self.passed_pieces = b"", b"", b"", 0, 0
        if len(body) <= _SLICE_BYTES:
            self.transport.write(head + body)
            return
        self._request_written = False
        self.transport.write(head)
        # In slices, because the transport copies what the socket does not take at once.
        with memoryview(body) as view:
            for at in range(0, len(view), _SLICE_BYTES):
                if self._writable is not None:
                    await self._writable
                if self._sink is not sink:
                    return
                self.transport.write(bytes(view[at : at + _SLICE_BYTES]))
        self._request_written = True

    def abort(self, sink: ResponseSink) -> None:
        """Hang up unless the exchange of `sink` is over. Nothing more reaches it, and vLLM aborts the request."""
        if self._sink is sink:
            self._sink = self._passing = None
            self.transport.abort()

    def discard(self) -> None:
        """Close a connection that was never lent. If the task that opens it is cancelled, uvloop does not call connection_lost."""
        self._upstream.closed(self)
        self._parser = None
        if self._connected:
            self.transport.abort()

    def pass_chunks(self, write: Callable[[bytes], None]) -> None:
        """For the rest of this answer, call `write` instead of `ResponseSink.body` with every read that is exactly one chunk.

        `passed` is the last such read, framing included; `passed_bytes` is the size of all without their framing, and
        `passed_pieces` their number.
        """
        self._pass = write

    def remember(self, data: bytes) -> None:
        """Take a piece that the sink passed on itself for the last one that was passed on."""
        self._third_last, self._second_last, self.passed = self._second_last, self.passed, data[-_TAIL_BYTES:]

    @property
    def tail(self) -> bytes:
        """The last three pieces that were passed on, of each its last bytes."""
        return b"".join((self._third_last, self._second_last, self.passed))

    def pause(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # --- asyncio --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connected = True
        self._upstream.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._passing is not None:
            # The common case of a stream: one read is one whole chunk. The parser is between two chunks before and after it, so it need not
            # see the bytes, and they are passed on as they came.
            length = len(data)
            if length <= _MAX_PASSED_BYTES:
                head, size = _CHUNKS[length]
                if data.startswith(head) and data.endswith(_CRLF):
                    self.passed_bytes += size
                    self.passed_pieces += 1
                    self._third_last, self._second_last, self.passed = self._second_last, self.passed, data
                    self._passing(data)
                    return
        if self._sink is None:  # no request is open
            self.transport.abort()
            return
        self._parse(data, self._sink)

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._upstream.closed(self)
        self._passing = None
        self._parser = None  # it holds this object's methods
        sink, self._sink = self._sink, None
        self._wake_writer()
        if sink is None:
            return
        if self._answering:
            sink.broken(EngineError(_BROKEN_OFF))
        else:
            sink.broken(EngineGone("The engine closed the connection before its answer was complete; it may have died. Try again soon."))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._wake_writer()

    # --- httptools ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            # A hostile client may have hidden a second request in its own: no other client may get that one's answer.
            raise ValueError("bytes behind the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        headers, self._headers = self._headers, []  # what follows are trailers, which are dropped
        status = self._parser.get_status_code()
        if status < 200:
            return
        self._answering = True
        self._keep_alive = self._parser.should_keep_alive()
        if self._sink is not None:
            self._sink.head(status, headers)

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._complete = self._answering  # else it was an interim answer

    # --- own ------------------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes, sink: ResponseSink) -> None:
        sound = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            sound = False
        self._passing = None
        bodies = self._bodies
        body = b""
        if bodies:
            body = bodies[0] if len(bodies) == 1 else b"".join(bodies)
            bodies.clear()
        if self._complete:
            self._sink = None
            sink.body(body, True)
            self._done(sound)
        elif not sound:
            self._sink = None
            self.transport.abort()
            sink.broken(EngineError(_BROKEN_OFF if self._answering else "The engine's answer is not valid HTTP. Its log may say why."))
        elif self._answering:
            sink.body(body, False)
            # After a whole chunk the parser may have begun on the next one's size, for which it calls nothing before the line's end.
            if self._between_chunks and self._sink is sink and data.endswith(_CRLF):
                self._passing = self._pass

    def _done(self, sound: bool) -> None:
        if sound and self._keep_alive and self._request_written:
            self._upstream.keep(self)
            return
        self._wake_writer()
        self.transport.abort()

    def _wake_writer(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)
