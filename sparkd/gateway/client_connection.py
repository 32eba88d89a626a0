"""One client connection: uvicorn's HTTP protocol with limits on bytes and time, and with sparkd's own errors.

uvicorn with httptools has no limit on headers and no deadline for headers or bodies. It accepts a missing and a second Host, loses the
disconnect of a request behind which another was pipelined, and writes its errors in plain text. This subclass relies on internals of
uvicorn 0.54 (uvicorn/protocols/http/httptools_impl.py), which tests/sparkd/gateway/test_protocol.py checks.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import struct
from collections.abc import Callable
from enum import Enum
from time import monotonic
from typing import Any, ClassVar

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sparkd import metrics
from sparkd.condition import Condition
from sparkd.errors import BadRequest, HeadersTooLarge, RequestTimeout, SparkdError, Unavailable, UpgradeNotServed
from sparkd.gateway.engine_connection import EngineConnection
from sparkd.gateway.exchange import CONNECTION, new_request_id, series
from sparkd.gateway.failures import error_bytes, json_headers
from sparkd.gateway.headers import RawHeaders
from sparkd.gateway.limits import ClientLimits, descriptor_limit

_log = logging.getLogger("sparkd.gateway")

_NO_WEBSOCKET = "sparkd serves no WebSocket, so no /v1/realtime; send an HTTP request, such as POST /v1/chat/completions with stream: true."
# RFC 9112 3.2: uri-host [":" port], with the scope of a link-local address (RFC 6874), which some clients send along. It excludes the bytes
# that some servers take for a path (CVE-2026-48710).
_HOST = re.compile(rb"(?:[A-Za-z0-9._~%-]+|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._~-]+)?\])(?::[0-9]{0,5})?")
# asyncio reads at most 256 KiB at once. A read may hold the end of the headers and that much of the body.
_ONE_READ_BYTES = 256 * 1024
_IGNORED_BYTES = 1024 * 1024
# struct linger of socket(7), on, 0 s: closing sends a reset.
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
# How long a connection without a request stays open after shutdown has begun.
_SHUTDOWN_GRACE_S = 0.25
# How long the condition stays after the last connection beyond the limit.
FULL_S = 15.0


class _Stage(Enum):
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class _Refused(ValueError):
    """Raised to leave httptools' callbacks; the error for the client is in `_refusal`."""


class ClientConnection(HttpToolsProtocol):
    """uvicorn's httptools protocol with `limits`. `client_connection` makes a subclass for each server.

    idle: the server's connections without a request, the longest idle one first.
    full_at_s: when a client last connected beyond the limit, monotonic.
    """

    limits: ClassVar[ClientLimits] = ClientLimits()
    idle: ClassVar[dict[Any, None]] = {}
    full_at_s: ClassVar[float] = float("-inf")
    parser: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.access_log = False  # the edge writes one line per request, without the query string
        self._stage = _Stage.HEAD
        self._deadline_stage: _Stage | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._body_begun_s = 0.0
        self._unparsed_bytes = 0
        self._body_bytes = 0
        self._ignores_input = self._shutting_down = False
        self._refusal: SparkdError | None = None
        self._disconnect_callback: Callable[[], object] | None = None
        self._source: EngineConnection | None = None
        self.headers: list[tuple[bytes, bytes]] = []

    # --- for the app, by scope["extensions"][CONNECTION] ------------------------------------------------------------------

    def call_on_disconnect(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` once if the client leaves, or has left, before its answer is complete. None withdraws it.

        ASGI's way, a second task that awaits `receive()`, takes a tenth of a short request's time.
        """
        self._disconnect_callback = callback
        if callback is not None and self.cycle is not None and self.cycle.disconnected:
            self._disconnect_callback = None
            callback()

    def add_default_headers(self, headers: RawHeaders) -> None:
        """Add `headers` to the present answer, whether the app or `begin_answer` writes it."""
        self.cycle.default_headers = [*self.cycle.default_headers, *headers]

    def cut(self) -> None:
        """Close without completing the answer, so that the client sees that it is incomplete.

        The close comes after what was written: a browser that gets both in one read drops the last event. A response that ends with the
        connection, of HTTP/1.0, is shown to be incomplete by a reset only.
        """
        self._disconnect_callback = None
        self._ignores_input = self.cycle.disconnected = True
        if not self.takes_chunks:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.loop.call_later(self.limits.cut_s, self._close)

    def write_event(self, event: bytes) -> None:
        """Send a server-sent event as a piece of an answer of unknown length."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(event), event) if self.takes_chunks else event)

    def fail(self, event: bytes, *, cut: bool) -> None:
        """End a stream with `event`, which tells its failure; in order, or so that a reader that overlooks it meets the cut."""
        self.write_event(event)
        if cut:
            self.cut()
            return
        if self.takes_chunks:
            self.transport.write(b"0\r\n\r\n")
        self.end_answer()

    def begin_answer(self, status: int, headers: RawHeaders) -> bytes:
        """The head of the present answer, for a caller that writes to `transport` directly and then calls `end_answer`.

        It replaces ASGI's `send`, which costs a message, a task and a second write per chunk. Both methods update uvicorn's own state.
        """
        cycle = self.cycle
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        lines = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        return b"".join(lines)

    @property
    def takes_chunks(self) -> bool:
        """False for HTTP/1.0, where a body of unknown length ends with the connection (RFC 9112 6.1, 6.3)."""
        return bool(self.scope["http_version"] == "1.1")

    async def send_unframed(self, message: Message) -> None:
        """ASGI's `send` for a body of unknown length to a client of HTTP/1.0, to which uvicorn would send chunks."""
        if self.flow.write_paused:
            await self.flow.drain()
        if self.cycle.disconnected:
            return
        if message["type"] == "http.response.start":
            self.transport.write(self.begin_answer(message["status"], message["headers"]))
            return
        self.transport.write(message.get("body", b""))
        if not message.get("more_body", False):
            self.end_answer()

    def set_source(self, source: EngineConnection | None) -> None:
        """Pause `source` while the client's buffer is full. None withdraws it."""
        self._source = source
        if source is not None and self.flow.write_paused:
            source.pause()

    def end_answer(self) -> None:
        """Record that the present answer was written completely."""
        cycle = self.cycle
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    # --- asyncio --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio sets it only for a listener with an explicit protocol number. Without it every answer waits for an ACK.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        metrics.CONNECTIONS.inc()
        if len(self.connections) > self.limits.connections and not self._displace_idle():
            self._refuse(Unavailable("Too many connections are open; try again soon.", retry_after_s=1))
            del self.idle[self]  # it would make room for none
            self._close()
            return
        self.idle[self] = None
        self._set_deadline(_Stage.HEAD, self.limits.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        metrics.CONNECTIONS.dec()
        self.idle.pop(self, None)
        self._clear_deadline()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        self._unset_keepalive_if_required()
        super().connection_lost(exc)
        callback, self._disconnect_callback = self._disconnect_callback, None
        if callback is not None:
            callback()

    def data_received(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        if self._ignores_input:
            if self._unparsed_bytes > _IGNORED_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                self._ignore_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            if not self._ignores_input:
                self._refuse(self._refusal or BadRequest("The request is not valid HTTP/1.1."))
            return
        if self._stage is _Stage.ANSWER:
            if self._deadline is not None:
                self._clear_deadline()
        elif self._stage is _Stage.HEAD:
            if self._unparsed_bytes > self.limits.header_bytes:
                self._refuse(self._too_large())
            elif self._deadline_stage is not _Stage.HEAD:
                self._set_deadline(_Stage.HEAD, self.limits.header_s)
        elif self._unparsed_bytes > self.limits.header_bytes + _ONE_READ_BYTES:
            self._refuse(BadRequest("The request's chunk extensions or trailers are too large."))
        elif self._deadline_stage is not _Stage.BODY:
            self._body_begun_s = self.loop.time()
            self._set_deadline(_Stage.BODY, self.limits.body_grace_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._source is not None:
            self._source.pause()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(self.limits.client_write_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()
        if self._source is not None:
            self._source.resume()

    # --- httptools ------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._stage is not _Stage.HEAD:
            # A client pipelined a request behind an unfinished one. uvicorn would queue it without limit and lose track of the disconnect.
            # RFC 9112 9.3.2 lets a server close after any answer: sparkd answers the first request and reads no further.
            self._ignores_input = True
            self.cycle.keep_alive = False
            raise _Refused
        super().on_message_begin()
        self.scope["extensions"] = {CONNECTION: self}

    def on_headers_complete(self) -> None:
        hosts, host = 0, b""
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
                host = value
        # The bytes read so far may hold body too, so the headers are added up only above the limit.
        large = self._unparsed_bytes > self.limits.header_bytes and self._head_bytes() > self.limits.header_bytes
        if large or len(self.headers) > self.limits.header_count:
            self._refusal = self._too_large()
            raise _Refused
        hostless = hosts == 0 and self.parser.get_http_version() == "1.0"  # RFC 9112 3.2: HTTP/1.1 needs one
        if not hostless and (hosts != 1 or _HOST.fullmatch(host) is None):
            self._refusal = BadRequest("The request must have exactly one valid Host header.")
            raise _Refused
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._refusal = BadRequest("sparkd is no proxy; send the request without CONNECT.")
                raise _Refused
            if any(name == b"upgrade" and b"websocket" in value.lower() for name, value in self.headers):
                self._refusal = UpgradeNotServed(_NO_WEBSOCKET)
                raise _Refused
            return  # data_received gets HttpParserUpgrade, and ignores the offer
        self.idle.pop(self, None)
        super().on_headers_complete()
        if not self.url.startswith(b"/") or b"#" in self.url:  # absolute form, asterisk form or a fragment: it matches no route
            self.scope["path"] = self.url.decode("latin-1")
            self.scope["raw_path"] = self.url
        if self._shutting_down:
            self.cycle.keep_alive = False
        self.headers = []  # trailers land in this unread list instead of among the request's headers
        self._stage = _Stage.BODY
        self._unparsed_bytes = self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._stage = _Stage.ANSWER
        super().on_message_complete()

    # --- uvicorn --------------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self._disconnect_callback = None
        super().on_response_complete()
        if self.transport.is_closing() or self._stage is not _Stage.ANSWER or self._ignores_input:
            self._close()
            return
        self._stage = _Stage.HEAD
        self._unparsed_bytes = 0
        self.idle[self] = None

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def shutdown(self) -> None:
        """Answer the request in progress, and one that arrives within _SHUTDOWN_GRACE_S: its client cannot know of the shutdown yet."""
        self._shutting_down = True
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
        else:
            self.loop.call_later(_SHUTDOWN_GRACE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._stage is _Stage.HEAD and self._unparsed_bytes == 0 and not self.transport.is_closing():
            self._close()

    # --- own ------------------------------------------------------------------------------------------------------------

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request anew without its Upgrade header, for instance an offer of h2c, which a server may ignore (RFC 9110 7.8).

        httptools takes `rest`, which is the body, for bytes of the other protocol.
        """
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self.parser.feed_data(b"\r\n".join([*lines, b"", rest]))

    @classmethod
    def condition(cls) -> Condition | None:
        """Why clients cannot connect. It stands until FULL_S after the last time."""
        if monotonic() - cls.full_at_s > FULL_S:
            return None
        return Condition(
            "ConnectionsFull",
            f"{cls.limits.connections} clients are connected, the most allowed: idle connections are closed for new ones. "
            f"Raise limits.max_connections, and this process's limit of {descriptor_limit()} open files (LimitNOFILE=, ulimit -n).",
        )

    def _displace_idle(self) -> bool:
        """Keep hostile clients from taking all descriptors: close the connection that was idle longest. False if none is idle."""
        if monotonic() - self.full_at_s > FULL_S:
            _log.warning("%d clients are connected, the most allowed: idle connections are closed for new ones", self.limits.connections)
        type(self).full_at_s = monotonic()
        oldest = next(iter(self.idle), None)
        metrics.CONNECTIONS_TURNED_AWAY.labels("refused" if oldest is None else "displaced").inc()
        if oldest is None:
            return False
        del self.idle[oldest]
        oldest.transport.abort()
        return True

    def _refuse(self, error: SparkdError) -> None:
        """Send the error of the parser or of a deadline, and close. If an answer has begun, only close."""
        self._ignores_input = True
        self._unparsed_bytes = 0
        self._clear_deadline()
        self._unset_keepalive_if_required()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False  # uvicorn would write the 100 behind this answer
            cycle.message_event.set()
            callback, self._disconnect_callback = self._disconnect_callback, None
            if callback is not None:
                callback()
            if cycle.response_started:
                self._close()
                return
        series(metrics.REQUESTS, "", "none", str(error.status)).inc()
        self.idle[self] = None
        request_id = new_request_id()
        body = error_bytes(error, request_id)
        headers = json_headers(len(body), {"x-request-id": request_id, "connection": "close", **error.headers()})
        head = [STATUS_LINE[error.status], *(b"%b: %b\r\n" % pair for pair in (*self.server_state.default_headers, *headers))]
        self.transport.write(b"".join([*head, b"\r\n", body]))
        # Closing at once would reset the connection of a client that is still sending, and it would lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._write_deadline = self._write_deadline or self.loop.call_later(self.limits.linger_s, self.transport.abort)

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _too_large(self) -> SparkdError:
        return HeadersTooLarge(
            f"The request's headers are larger than {self.limits.header_bytes} bytes or more than {self.limits.header_count}."
        )

    def _set_deadline(self, stage: _Stage, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline_stage = stage
        self._deadline = self.loop.call_later(seconds, self._deadline_passed)

    def _clear_deadline(self) -> None:
        self._deadline_stage = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self._stage is _Stage.HEAD:
            if self._unparsed_bytes == 0:
                self._close()
                return
            self._refuse(RequestTimeout(f"The request's headers did not arrive within {self.limits.header_s:g} s."))
            return
        left_s = self._body_begun_s + self.limits.body_grace_s + self._body_bytes / self.limits.body_rate - self.loop.time()
        if left_s > 0:
            self._set_deadline(_Stage.BODY, left_s)
            return
        self._refuse(RequestTimeout("The request's body arrived too slowly."))

    def _close(self) -> None:
        """Flush and close. A client that does not read the rest within client_write_s is cut off."""
        self.transport.close()
        if self._write_deadline is None and self.transport.get_write_buffer_size() > 0:
            self._write_deadline = self.loop.call_later(self.limits.client_write_s, self.transport.abort)


def client_connection(limits: ClientLimits) -> type[ClientConnection]:
    """The class that uvicorn instantiates for each connection of one server."""
    return type("ClientConnection", (ClientConnection,), {"limits": limits, "idle": {}})
