"""The byte-for-byte way between one client and one engine. Never parses an answer, alters a body, or lets a client name an upstream."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial
from hmac import compare_digest
from time import perf_counter
from typing import Any, Protocol

import aiohttp

from sparkd.errors import BodyTooLarge, Draining, SparkdError, Unavailable, UnknownResponse, UnsupportedMediaType
from sparkd.gateway.answers import Receive, Scope, Send, error_event
from sparkd.gateway.body import model_of_form, model_of_json
from sparkd.gateway.engine import ask, request_headers, response_headers, translated
from sparkd.gateway.exchange import ClientGone, Exchange, in_flight
from sparkd.gateway.limits import Limits
from sparkd.gateway.listing import find_model
from sparkd.gateway.protocol import CONNECTION, BoundedProtocol
from sparkd.gateway.routes import Kind, Route
from sparkd.snapshot import Snapshot
from sparkd.state import ModelState
from sparkd.upstream import Upstream

PROBE_HEADER = b"x-sparkd-probe"

_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,123})"')
_PEEKED_BYTES = 4096
_REMEMBERED_RESPONSES = 10_000
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")


class Lease(Protocol):
    """The right to one engine, for one request."""

    @property
    def model(self) -> str: ...
    @property
    def upstream(self) -> Upstream: ...


class Leases(Protocol):
    """What the gateway knows of the supervisor."""

    def lease(self, name: str, *, wait_s: float | None = None, probe: bool = False) -> AbstractAsyncContextManager[Lease]: ...
    def snapshot(self) -> Snapshot: ...


class Proxy:
    """Forwards requests for as long as the daemon lives. `limits` may be replaced while it runs."""

    def __init__(self, supervisor: Leases, limits: Limits, probe_token: str | None) -> None:
        self.limits = limits
        self._supervisor = supervisor
        self._probe_token = probe_token.encode() if probe_token else None
        self._responses: OrderedDict[str, str] = OrderedDict()
        self._buffered_bytes = 0

    async def forward(
        self, scope: Scope, receive: Receive, send: Send, route: Route, name: str, headers: dict[bytes, bytes], exchange: Exchange
    ) -> None:
        """One exchange, from the body's first byte to the answer's last. Raises SparkdError only while no answer was begun."""
        content_type = headers.get(b"content-type", b"")
        _check_content(route.kind, content_type, headers.get(b"content-encoding"))
        body = exchange.body = await self.read_body(receive, exchange, self.limits.body_bytes)
        if route.kind is Kind.JSON:
            model = model_of_json(body)
        elif route.kind is Kind.FORM:
            model = model_of_form(body, content_type.decode("latin-1"))
        else:
            model = self._model_of_response(name)
        del body
        await self._lease(model, scope, send, route, headers, exchange)

    async def read_body(self, receive: Receive, exchange: Exchange, limit: int) -> bytes | bytearray:
        """The whole body. Raises BodyTooLarge beyond `limit` bytes, and Unavailable where all bodies together take too much."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body: bytes | bytearray = message["body"]
        if message["more_body"]:
            body = bytearray(body)
            self._reserve(len(body), exchange)
            while message["more_body"] and len(body) <= limit:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                self._reserve(len(message["body"]), exchange)
                body += message["body"]
        exchange.whole = not message["more_body"]
        if len(body) > limit:
            raise BodyTooLarge(f"The body is larger than {limit} bytes.")
        return body

    def release(self, exchange: Exchange) -> None:
        """Lets the body go, and its share of the bound on all bodies."""
        self._buffered_bytes -= exchange.reserved
        exchange.reserved = 0
        exchange.body = b""

    async def _lease(self, model: str, scope: Scope, send: Send, route: Route, headers: dict[bytes, bytes], exchange: Exchange) -> None:
        """Waits for the engine and passes the request on, for as long as the client is there."""
        connection: BoundedProtocol = scope["extensions"][CONNECTION]
        connection.call_when_gone(partial(_leave, exchange, asyncio.current_task()))
        exchange.model = "unknown"
        asked_s = perf_counter()
        try:
            async with self._supervisor.lease(model, probe=self._is_probe(headers)) as lease:
                exchange.model = lease.model
                exchange.queued_s = perf_counter() - asked_s
                gauge = in_flight(lease.model)
                gauge.inc()
                try:
                    await self._relay(lease, scope, send, route, headers, exchange)
                finally:
                    gauge.dec()
        except asyncio.CancelledError:
            if exchange.gone:
                raise ClientGone from None
            raise
        except SparkdError:
            if exchange.model == "unknown":
                view = find_model(self._supervisor.snapshot().models, model)
                exchange.model = view.name if view else "unknown"
            raise
        finally:
            connection.call_when_gone(None)

    async def _relay(self, lease: Lease, scope: Scope, send: Send, route: Route, headers: dict[bytes, bytes], exchange: Exchange) -> None:
        query = scope["query_string"].decode("latin-1") if route.kind is Kind.RESPONSE else ""
        told = request_headers(headers, exchange.request_id)
        response = await ask(lease.upstream, scope["method"], scope["path"], query, told, exchange.body or None)
        self.release(exchange)
        chunk = b""
        streams = False
        try:
            answer, streams = response_headers(response, exchange.request_id)
            exchange.status = response.status
            await send({"type": "http.response.start", "status": response.status, "headers": answer})
            content = response.content
            read: Callable[[], Awaitable[bytes]] = content.readany
            if route.label == "/v1/responses":
                read = self._peeking(read, lease.model)
            more = True
            while more:
                chunk = await read()
                if streams and exchange.first_s is None:
                    exchange.first_s = perf_counter()
                exchange.bytes_out += len(chunk)
                # A broken answer also comes to an end; its exception is raised by the next read.
                more = not content.at_eof() or content.exception() is not None
                await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except (aiohttp.ClientError, OSError) as error:
            await _break_off(translated(error), scope, send, route, exchange, streams and response.content_length is None, chunk)
        except asyncio.CancelledError:
            if not exchange.gone:
                going = Draining("sparkd is going down; ask again soon.")
                await _break_off(going, scope, send, route, exchange, streams and response.content_length is None, chunk)
            raise
        finally:
            response.close()

    def _is_probe(self, headers: dict[bytes, bytes]) -> bool:
        token = headers.get(PROBE_HEADER)
        return token is not None and self._probe_token is not None and compare_digest(token, self._probe_token)

    def _reserve(self, size: int, exchange: Exchange) -> None:
        self._buffered_bytes += size
        exchange.reserved += size
        if self._buffered_bytes > self.limits.buffered_bytes:
            raise Unavailable("Too many large requests are coming in at once; try again soon.", retry_after_s=1)

    # --- /v1/responses/{id} -----------------------------------------------------------------------------------------------

    def _peeking(self, read: Callable[[], Awaitable[bytes]], model: str) -> Callable[[], Awaitable[bytes]]:
        """`read`, looking in the first bytes for the id by which the answer will be asked for again."""
        seen: bytearray | None = bytearray()

        async def peek() -> bytes:
            nonlocal seen
            chunk = await read()
            if seen is not None:
                seen += chunk[:_PEEKED_BYTES]
                match = _RESPONSE_ID.search(seen)
                if match is not None:
                    self._responses[match[1].decode()] = model
                    if len(self._responses) > _REMEMBERED_RESPONSES:
                        self._responses.popitem(last=False)
                if match is not None or len(seen) >= _PEEKED_BYTES:
                    seen = None
            return chunk

        return peek

    def _model_of_response(self, response_id: str) -> str:
        known = self._responses.get(response_id)
        if known is not None:
            self._responses.move_to_end(response_id)
            return known
        ready = [view.name for view in self._supervisor.snapshot().models.values() if view.state is ModelState.READY]
        if len(ready) == 1:
            return ready[0]
        raise UnknownResponse(response_id)


def _leave(exchange: Exchange, task: asyncio.Task[Any] | None) -> None:
    """The client has gone: ends the exchange where it stands, waiting for a load, for the engine, or within a stream."""
    exchange.gone = True
    if task is not None:
        task.cancel()


async def _break_off(error: SparkdError, scope: Scope, send: Send, route: Route, exchange: Exchange, events: bool, last: bytes) -> None:
    """Ends a begun answer so that nobody takes it for complete.

    An event stream gets an error event and no `[DONE]`, if it stands between two events; a half event cannot be mended, and what
    is no event stream has no place for words: there the connection is cut.
    """
    exchange.code = error.code
    if events and (not last or last.endswith(_EVENT_ENDS)):
        event = error_event(error, exchange.request_id, anthropic=route.anthropic)
        await send({"type": "http.response.body", "body": event, "more_body": False})
        return
    connection: BoundedProtocol = scope["extensions"][CONNECTION]
    connection.cut()


@lru_cache(maxsize=128)
def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _check_content(kind: Kind, content_type: bytes, encoding: bytes | None) -> None:
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        raise UnsupportedMediaType("A body with a content-encoding is not taken; send it plain.")
    media = _media_type(content_type)
    if kind is Kind.JSON and media not in (b"", b"application/json"):
        raise UnsupportedMediaType("This path takes content-type application/json.")
    if kind is Kind.FORM and media != b"multipart/form-data":
        raise UnsupportedMediaType("This path takes content-type multipart/form-data.")
