"""Passes one answer from an engine's connection to a client's, without a task in between."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from time import perf_counter

from sparkd.errors import EngineError, SparkdError
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.exchange import Exchange, Tokens
from sparkd.gateway.failures import error_event, failure_event, is_cut
from sparkd.gateway.headers import RawHeaders, response_headers

# The ends of an event, and of a chunk that ends with an event.
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_CHUNK_ENDS = tuple(end + b"\r\n" for end in _EVENT_ENDS)
# The last events of OpenAI's and Anthropic's streams. A text within an event holds no line of its own.
_LAST_EVENT = re.compile(rb"^(?:data: \[DONE\]|event: (?:message_stop|response\.(?:completed|incomplete|failed)))\r?$", re.MULTILINE)
# With the names of its parts, an object `usage` of vLLM has some 300 bytes.
_USAGE_BYTES = 1024
_COUNT = re.compile(rb'"(prompt|input|completion|output|cached|cache_read_input)_tokens"\s*:\s*(\d{1,12})')


class Relay:
    """The sink of one exchange.

    The head leaves together with the first bytes of the body, in one write. If the exchange's heartbeat has begun the client's answer, the
    engine's continues it: a stream as it comes, anything else, such as an error, as one event that tells the failure.

    over: None when the answer is complete, or the error if the engine broke it off.
    """

    def __init__(self, connection: EngineConnection, exchange: Exchange) -> None:
        client = exchange.client
        self.over: asyncio.Future[EngineError | None] = client.loop.create_future()
        self._client = client
        self._connection: EngineConnection | None = connection
        self._exchange = exchange
        self._write: Callable[[bytes], None] = client.transport.write
        self._status = 0
        self._headers: RawHeaders = []
        self.begun = False
        self.ended = False
        self._streams = False
        self._chunked = False  # False for an answer of known length, and for HTTP/1.0, where one of unknown length ends with the connection
        self._first = self._tail = b""
        self._pieces = 0
        self._foreign: bytearray | None = None

    @property
    def passed_bytes(self) -> int:
        """Bytes of the answer that went past `body`, and are not counted in the exchange yet."""
        return 0 if self._connection is None else self._connection.passed_bytes

    @property
    def pieces(self) -> int:
        """The pieces of the answer so far, as the engine sent them."""
        return self._pieces + (0 if self._connection is None else self._connection.passed_pieces)

    @property
    def between_events(self) -> bool:
        """Whether the client may get an event of sparkd's own: the engine is silent yet, or its stream stands between two events."""
        return self._connection is not None and (not self._status or self._stands_between_events(self._connection.tail))

    def finish_early(self) -> bool:
        """Take an answer for complete whose last event was written, because its client leaves before the body's end. False: it was not."""
        if self._connection is None or not self._streams or not _LAST_EVENT.search(self._connection.passed):
            return False
        self.stop()
        self._end()
        return True

    def stop(self) -> None:
        """Hang up on an engine whose answer is not complete. Nothing more of it reaches the client."""
        connection = self._connection
        if connection is not None:
            self._release_connection()
            connection.abort(self)

    def break_off(self, error: SparkdError) -> None:
        """End an answer that has begun so that no client takes it for complete.

        An event stream that stands between two events gets an error event; any other answer is cut.
        """
        if not self.ended and self._stands_between_events(self._tail):
            self._client.fail(error_event(error, self._exchange, self._first, self._tail), cut=is_cut(self._exchange))
        else:
            self._client.cut()

    # --- sparkd.gateway.engine_connection.ResponseSink -----------------------------------------------------------------------------------

    def head(self, status: int, headers: RawHeaders) -> None:
        self._status = status
        takes_chunks = self._client.takes_chunks
        self._headers, self._streams, self._chunked = response_headers(headers, self._exchange.request_id, takes_chunks=takes_chunks)
        if self._follows():
            if status != 200 or not self._streams:
                self._foreign = bytearray()
                self._exchange.code = f"status_{status}"
            self._streams, self._chunked = True, takes_chunks
        self._exchange.streamed = self._streams

    def body(self, data: bytes, ended: bool) -> None:
        connection = self._connection
        if connection is None:
            return
        if self._foreign is not None:
            self._foreign += data
            if ended:
                self._fail(bytes(self._foreign))
            return
        pieces: list[bytes] = []
        if not self.begun:
            self.begun = True
            if not self._follows():
                self._exchange.status = self._status
                pieces.append(self._client.begin_answer(self._status, self._headers))
            if not ended:
                self._client.set_source(connection)
        if data:
            self._count(data)
            if self._chunked:
                connection.pass_chunks(self._write)
                data = b"%x\r\n%b\r\n" % (len(data), data)
            connection.remember(data)
            pieces.append(data)
        if ended and self._chunked:
            pieces.append(b"0\r\n\r\n")
        if pieces:
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if ended:
            self._release_connection()
            self._client.end_answer()
            self._end()

    def broken(self, error: EngineError) -> None:
        self._release_connection()
        if not self.over.done():
            self.over.set_result(error)

    # --- own ------------------------------------------------------------------------------------------------------------

    def _fail(self, body: bytes) -> None:
        """The engine's refusal, to a client that was told of a stream."""
        self.begun = True
        event = failure_event(body, self._exchange, lasts=self._status < 500)
        self._count(event)
        self._release_connection()
        self._client.fail(event, cut=is_cut(self._exchange))
        self._end()

    def _end(self) -> None:
        self.ended = True
        if not self.over.done():
            self.over.set_result(None)

    def _follows(self) -> bool:
        heartbeat = self._exchange.heartbeat
        return heartbeat is not None and heartbeat.begun

    def _stands_between_events(self, tail: bytes) -> bool:
        return self._streams and (not tail or tail.endswith(_CHUNK_ENDS if self._chunked else _EVENT_ENDS))

    def _release_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._client.set_source(None)
            self._exchange.bytes_out += connection.passed_bytes
            self._pieces += connection.passed_pieces
            self._tail = connection.tail
            self._exchange.tokens = tokens_of(self._tail) or (None if self._streams else tokens_of(self._first))

    def _count(self, data: bytes) -> None:
        if self._streams and self._exchange.first_s is None:
            self._exchange.first_s = perf_counter()
        if not self._pieces:
            self._first = data[:_USAGE_BYTES]
        self._exchange.bytes_out += len(data)
        self._pieces += 1


def tokens_of(tail: bytes) -> Tokens | None:
    """The tokens in the last `usage` of an answer's last or first bytes (vLLM's answer of /rerank has it before the results).

    Quotes in a text are escaped in JSON, so a text never holds what is searched for.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    counts: dict[bytes, int] = {}
    for match in _COUNT.finditer(tail, at, at + _USAGE_BYTES):
        counts.setdefault(match[1], int(match[2]))
    if not counts:
        return None
    return Tokens(
        counts.get(b"prompt", counts.get(b"input")),
        counts.get(b"cached", counts.get(b"cache_read_input")),
        counts.get(b"completion", counts.get(b"output")),
    )
