"""HTTP/1.1 to one engine as the data plane speaks it: connections, the idle ones, the bounds of an answer. Never reads what a body says.

Own, because the pass-through is what sparkd does all day: with aiohttp in this place a chunk cost 80 to 95 µs of CPU and a short
answer 300 µs on a machine where the bare copying of bytes between the two sockets (uvloop, no HTTP at all) cost 41 and 31 µs.
There is no task and no queue between the engine's socket and the client's: what was read is handed on within the same callback.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from sparkd.errors import EngineError, EngineGone

CONNECT_TIMEOUT_S = 2.0
# vLLM's server closes a connection that was idle for 5 s, unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE says more (workers.rank.command does); a
# request that is written at that moment is lost and may not be sent again. So the gateway is the first to close.
IDLE_S = 4.0
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128

_CONNECT_AGAIN_S = 0.05
_SLICE_BYTES = 64 * 1024
# The bytes that a read may hold behind a head that is just within the bound; asyncio reads 256 KiB at most.
_ONE_READ_BYTES = 256 * 1024
_CRLF = b"\r\n"

_GONE = "The engine does not take connections; it may be restarting. Try again soon."
_BROKEN_OFF = "The engine broke its answer off. Its log may say why."

# A chunk of n bytes, framing included, begins with _CHUNK_HEADS[n]: to look it up takes half the time of parsing it. No chunk has
# exactly 21 bytes, for instance; what stands there is longer than any read that is compared with it.
_MAX_PASSED_BYTES = 2048
_CHUNK_HEADS = [b"\n" * (_MAX_PASSED_BYTES + 1)] * (_MAX_PASSED_BYTES + 1)
for _head, _size in [(b"%x\r\n" % size, size) for size in range(1, _MAX_PASSED_BYTES)]:
    if len(_head) + _size + 2 <= _MAX_PASSED_BYTES:
        _CHUNK_HEADS[len(_head) + _size + 2] = _head

RawHeaders = list[tuple[bytes, bytes]]  # names in lower case


class ResponseSink(Protocol):
    """The receiver of an answer: one `head`, then `body` until `ended`, or `broken` at any point and nothing after it.

    All are called from within the connection's own callbacks and must not raise. `head` may be followed by `broken` at once:
    nothing of an answer should leave before the first `body`.
    """

    def head(self, status: int, headers: RawHeaders) -> None: ...
    def body(self, data: bytes, ended: bool) -> None:
        """The bytes of the body that one read brought, without their framing; b"" where it brought none."""

    def broken(self, error: EngineError) -> None: ...


class Connection(asyncio.Protocol):
    """One connection; one exchange at a time. Made by a ConnectionPool."""

    # More attributes than CPython shares the keys of (30): without slots each connection would have a hash table of its own.
    __slots__ = (
        "_answering",
        "_between_chunks",
        "_bodies",
        "_complete",
        "_headers",
        "_in_head",
        "_keep",
        "_made",
        "_parser",
        "_pass",
        "_passing",
        "_pool",
        "_sink",
        "_unparsed_bytes",
        "_until_close",
        "_whole_request",
        "_writable",
        "idle_since_s",
        "passed",
        "passed_bytes",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: ConnectionPool) -> None:
        self.idle_since_s = 0.0
        self._pool = pool
        self._sink: ResponseSink | None = None
        self._parser: Any = httptools.HttpResponseParser(self)
        self._headers: RawHeaders = []
        self._bodies: list[bytes] = []
        self._unparsed_bytes = 0
        self._in_head = True
        self._answering = False  # the head has been handed on
        self._complete = True
        self._whole_request = True
        self._until_close = False
        self._keep = False
        self._made = False
        self._between_chunks = False
        self._pass: Callable[[bytes], None] | None = None
        self._passing: Callable[[bytes], None] | None = None  # _pass, while the parser stands between two chunks
        self.passed = b""
        self.passed_bytes = 0
        self._writable: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self.transport.is_closing()

    # --- the exchange ---------------------------------------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes | bytearray, sink: ResponseSink) -> None:
        """Writes a request whose answer goes to `sink`. Returns when it is written, or when it no longer has to be."""
        self._sink = sink
        self._headers = []
        self._unparsed_bytes = 0
        self._in_head, self._answering, self._complete, self._until_close, self._between_chunks = True, False, False, False, False
        self._pass = None
        self.passed, self.passed_bytes = b"", 0
        if len(body) <= _SLICE_BYTES:
            self.transport.write(head + body)
            return
        self._whole_request = False
        self.transport.write(head)
        # In slices: given whole, the transport would copy what the socket does not take at once.
        with memoryview(body) as view:
            for at in range(0, len(view), _SLICE_BYTES):
                if self._writable is not None:
                    await self._writable
                if self._sink is not sink:
                    return
                self.transport.write(bytes(view[at : at + _SLICE_BYTES]))
        self._whole_request = True

    def abort(self) -> None:
        """Hangs up if the exchange is not over; nothing more reaches the sink. An engine takes this for the client's leaving."""
        if self._sink is not None:
            self._sink = self._passing = None
            self.transport.abort()

    def discard(self) -> None:
        """For a connection that was never handed out. uvloop closes it without connection_lost where its maker is cancelled."""
        self._pool.closed(self)
        self._parser = None
        if self._made:
            self.transport.abort()

    def pass_chunks(self, write: Callable[[bytes], None]) -> None:
        """For the rest of this answer, has `write` called with every read that is exactly one chunk, framing included, in place of
        `ResponseSink.body`. `passed` is the last of them, `passed_bytes` the size of all without their framing.
        """
        self._pass = write

    def pause(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    # --- asyncio --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._made = True
        self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._passing is not None:
            # The common case of a stream: one read is one whole chunk. The parser stands between two chunks and still does after it,
            # so it need not see it; the bytes go on as they came.
            length = len(data)
            if length <= _MAX_PASSED_BYTES:
                head = _CHUNK_HEADS[length]
                if data.startswith(head) and data.endswith(_CRLF):
                    self.passed_bytes += length - len(head) - 2
                    self.passed = data
                    self._passing(data)
                    return
        if self._sink is None:  # nobody asked
            self.transport.abort()
            return
        self._parse(data, self._sink)

    def eof_received(self) -> None:
        return None  # the transport closes itself

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.closed(self)
        self._passing = None
        self._parser = None  # it holds this object's methods
        sink, self._sink = self._sink, None
        self._let_writer_go()
        if sink is None:
            return
        if self._until_close and exc is None:
            sink.body(b"", True)
        elif self._answering:
            sink.broken(EngineError(_BROKEN_OFF))
        else:
            sink.broken(EngineGone("The engine closed the connection before its answer was complete; it may have died. Try again soon."))

    def pause_writing(self) -> None:
        self._writable = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        self._let_writer_go()

    # --- httptools ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("bytes behind the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))  # else a trailer, which nobody reads

    def on_headers_complete(self) -> None:
        headers, self._headers = self._headers, []
        status = self._parser.get_status_code()
        large = self._unparsed_bytes > MAX_HEAD_BYTES and sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES
        if large or len(headers) > MAX_HEADERS or status == 101 or status > 599:
            raise ValueError("no head that could be passed on")
        if status < 200:
            return
        self._in_head = False
        self._keep = self._parser.should_keep_alive()
        framed = status in (204, 304)
        for name, value in headers:
            if name == b"content-length":
                framed = True
            elif name == b"transfer-encoding":
                if value.strip().lower() != b"chunked":
                    raise ValueError("an encoding that cannot be passed on")
                framed = True
        self._until_close = not framed
        if self._sink is not None:
            self._sink.head(status, headers)

    def on_body(self, body: bytes) -> None:
        self._bodies.append(body)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        self._complete = not self._in_head  # else it was an interim answer

    # --- own ------------------------------------------------------------------------------------------------------------

    def _parse(self, data: bytes, sink: ResponseSink) -> None:
        sound = True
        self._unparsed_bytes += len(data)
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
            self._unparsed_bytes = 0
        if self._complete:
            self._sink = None
            sink.body(body, True)
            self._done(sound)
        elif not sound or self._unparsed_bytes > MAX_HEAD_BYTES + (0 if self._in_head else _ONE_READ_BYTES):
            self._sink = None
            self.transport.abort()
            if self._answering:
                sink.body(body, False)
                sink.broken(EngineError(_BROKEN_OFF))
            else:
                sink.broken(EngineError("The engine's answer is not valid HTTP. Its log may say why."))
        elif not self._in_head:
            self._answering = True
            sink.body(body, False)
            # Behind a whole chunk the parser may have begun on the next one's size, of which there is no event before its line's end.
            if self._between_chunks and self._sink is sink and data.endswith(_CRLF):
                self._passing = self._pass

    def _done(self, sound: bool) -> None:
        if sound and self._keep and self._whole_request:
            self._pool.keep(self)
            return
        self._let_writer_go()
        self.transport.abort()

    def _let_writer_go(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)


class ConnectionPool:
    """The connections to one engine: as many as there are exchanges, the idle ones kept for IDLE_S.

    `preamble` is what every request's head begins with behind its target.
    """

    def __init__(self, socket_path: str | None, base_url: str, api_key: str | None) -> None:
        where = urlsplit(base_url)
        self._path = socket_path
        self._host, self._port = where.hostname or "", where.port or 80
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self.preamble = f" HTTP/1.1\r\nhost: {where.netloc}\r\n{key}".encode()
        self._open: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # the longest idle one first; may hold some that closed meanwhile
        self._sweeper: asyncio.TimerHandle | None = None
        self._shut = False

    async def connection(self) -> Connection:
        """An idle connection that is open, else a new one. Raises EngineGone where none can be made, after a second try."""
        if self._shut:
            raise EngineGone(_GONE)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        try:
            return await self._connect()
        except (OSError, TimeoutError):
            await asyncio.sleep(_CONNECT_AGAIN_S)
        try:
            return await self._connect()
        except (OSError, TimeoutError):
            raise EngineGone(_GONE) from None

    def keep(self, connection: Connection) -> None:
        """Takes back a connection whose exchange is over."""
        if self._shut or not connection.usable:
            connection.transport.abort()
            return
        connection.resume()
        connection.idle_since_s = monotonic()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        """Hangs up everywhere. Exchanges that are under way are told that the engine is gone."""
        self._shut = True
        self._idle.clear()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in self._open:
            connection.transport.abort()

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def closed(self, connection: Connection) -> None:
        self._open.discard(connection)

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        connection = Connection(self)
        opening: Coroutine[Any, Any, tuple[Any, Connection]]
        if self._path is not None:
            opening = loop.create_unix_connection(lambda: connection, self._path)
        else:
            opening = loop.create_connection(lambda: connection, self._host, self._port)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await opening
            if self._shut:
                raise ConnectionError("closed meanwhile")
        except BaseException:  # a client that leaves at this moment cancels the request
            connection.discard()
            raise
        return connection

    def _sweep(self) -> None:
        self._sweeper = None
        stale_s = monotonic() - IDLE_S
        while self._idle and (self._idle[0].idle_since_s <= stale_s or not self._idle[0].usable):
            self._idle.popleft().transport.abort()
        if self._idle:
            self._sweeper = asyncio.get_running_loop().call_later(max(0.01, self._idle[0].idle_since_s - stale_s), self._sweep)
