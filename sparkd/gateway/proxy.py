"""Forwards a request to an engine and its answer to the client, byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from hmac import compare_digest
from time import perf_counter
from typing import Any, Protocol
from urllib.parse import parse_qs

from sparkd import metrics
from sparkd.errors import (
    BadRequest,
    BodyTooLarge,
    NotFound,
    SparkdError,
    Unavailable,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from sparkd.gateway.body import ENCODINGS, LARGE_BYTES, Members, members_of_json, model_of_form, refuse_many_members, unpacked
from sparkd.gateway.exchange import ClientGone, Exchange, series
from sparkd.gateway.headers import media_type, request_head
from sparkd.gateway.heartbeat import Heartbeat
from sparkd.gateway.limits import too_large
from sparkd.gateway.models_list import find_model, model_meant
from sparkd.gateway.relay import Relay
from sparkd.gateway.routes import Route, RouteKind
from sparkd.gateway.upstream import Upstream
from sparkd.state.abilities import RequestNeeds
from sparkd.state.model_state import ModelState
from sparkd.state.snapshot import Snapshot

_RESPONSES = "/v1/responses"
PROBE_HEADER = b"x-sparkd-probe"

_WITH_TOOLS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
_ENCODINGS = (b"", b"identity", *ENCODINGS)
# An engine finds a stored response in its memory: one that takes longer is frozen.
_FIND_RESPONSE_S = 5.0


# Called when a request starts to wait, with a function that returns ModelView.loading, and whether chats get progress text. It raises the
# refusal of a request that no model is to be loaded for.
OnWait = Callable[[Callable[[], Mapping[str, Any]], bool], None]


class EngineLease(Protocol):
    """The right to use one engine for one request. answered: see sparkd.control.lease.Lease."""

    answered: bool | None

    @property
    def model(self) -> str: ...
    @property
    def upstream(self) -> Upstream: ...


class Leases(Protocol):
    """The part of the supervisor that the gateway uses."""

    def lease(
        self, name: str, *, probe: bool = False, on_wait: OnWait | None = None, need: RequestNeeds | None = None
    ) -> AbstractAsyncContextManager[EngineLease]: ...
    def snapshot(self) -> Snapshot: ...


class Proxy:
    """Forwards the requests of all clients."""

    def __init__(self, supervisor: Leases, probe_token: str | None) -> None:
        self._supervisor = supervisor
        self._probe_token = probe_token.encode() if probe_token else None
        self._buffered_bytes = 0
        self._large_bodies, self._unpacking = asyncio.Lock(), asyncio.Lock()

    async def forward(self, exchange: Exchange, route: Route, name: str) -> None:
        """Read the body, wait for an engine and pass its answer on. name: the variable part of the path."""
        headers = exchange.headers
        encoding = headers.get(b"content-encoding", b"").strip().lower()
        _check_content(route.kind, media_type(headers), encoding)
        body = exchange.body = await self.read_body(exchange, exchange.client.limits.body_bytes)
        if encoding in ENCODINGS:
            body = exchange.body = await self._unpack(body, encoding, exchange)
        model: str | None
        if route.kind is RouteKind.JSON:
            exchange.members = await self._members(body)
            model = exchange.members.model
        elif route.kind is RouteKind.FORM:
            model = model_of_form(body, headers[b"content-type"].decode("latin-1"))
        elif route.kind is RouteKind.ENGINE:
            model = self._ready_model(exchange.scope["query_string"])
        else:
            model = await self._model_of_response(name)
        if model is None:
            model = model_meant(self._supervisor.snapshot().models)
        if route.label == _RESPONSES and exchange.members.store:
            self._check_store(model)
        del body
        await self._lease(model, route, exchange)

    async def read_body(self, exchange: Exchange, limit: int) -> bytes | bytearray:
        """The whole body. Raises BodyTooLarge above `limit` bytes, and Unavailable if all bodies together take too much memory."""
        message = await exchange.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body: bytes | bytearray = message["body"]
        if message["more_body"]:
            body = bytearray(body)
            self._reserve(len(body), exchange)
            while message["more_body"] and len(body) <= limit:
                message = await exchange.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                self._reserve(len(message["body"]), exchange)
                body += message["body"]
        exchange.whole = not message["more_body"]
        if len(body) > limit:
            raise BodyTooLarge(too_large(limit))
        return body

    async def _unpack(self, body: bytes | bytearray, encoding: bytes, exchange: Exchange) -> bytes:
        """The body without its encoding. One at a time, because its size is known only afterwards: a kilobyte may stand for gigabytes."""
        async with self._unpacking:
            plain = await asyncio.to_thread(unpacked, bytes(body), encoding, exchange.client.limits.body_bytes)
            self._reserve(len(plain) - len(body), exchange)
        return plain

    async def _members(self, body: bytes | bytearray) -> Members:
        """The members of a JSON body. One large body is read per turn of the loop, so that others go on in between."""
        if len(body) <= LARGE_BYTES:
            return members_of_json(body)
        async with self._large_bodies:
            refuse_many_members(body)
            await asyncio.sleep(0)
            return members_of_json(body)

    def release(self, exchange: Exchange) -> None:
        """Drop the body and its share of the limit on all bodies."""
        self._buffered_bytes -= exchange.reserved
        exchange.reserved = 0
        exchange.body = b""

    def break_off(self, exchange: Exchange, error: SparkdError) -> None:
        """End an answer that has begun so that no client takes it for complete."""
        if exchange.relay is not None and exchange.relay.begun:
            exchange.relay.break_off(error)
        elif exchange.heartbeat is not None and exchange.heartbeat.begun:
            exchange.heartbeat.refuse(error)
        else:
            exchange.client.cut()

    async def _lease(self, model: str, route: Route, exchange: Exchange) -> None:
        """Wait for the engine and relay the request, until the client leaves."""
        exchange.client.call_on_disconnect(partial(client_left, exchange))
        exchange.model = "unknown"
        begun_s = perf_counter()
        try:
            on_wait = partial(self._on_wait, exchange, route)
            need = _need(route, exchange)
            async with self._supervisor.lease(model, probe=self._is_probe(exchange.headers), on_wait=on_wait, need=need) as lease:
                exchange.model = lease.model
                exchange.queued_s = perf_counter() - begun_s
                if exchange.heartbeat is not None:
                    exchange.heartbeat.loaded()
                elif exchange.members.stream:
                    exchange.heartbeat = Heartbeat(exchange)
                gauge = series(metrics.IN_FLIGHT, lease.model)
                gauge.inc()
                try:
                    await self._relay(lease, route, exchange)
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
            exchange.client.call_on_disconnect(None)
            if exchange.heartbeat is not None:
                exchange.heartbeat.stop()

    def _on_wait(self, exchange: Exchange, route: Route, loading: Callable[[], Mapping[str, Any]], in_words: bool) -> None:
        """Raises BadRequest for a body that no engine can answer: none is loaded for it. An engine that runs says so in its own words."""
        exchange.model = loading()["model"]
        if route.asks and not any(b'"%b"' % member.encode() in exchange.body for member in route.asks):
            members = " or ".join(f"`{member}`" for member in route.asks)
            raise BadRequest(f"The body has no {members}, so {exchange.model} is not loaded for it: add it.", param=route.asks[0])
        if exchange.members.stream:
            exchange.heartbeat = Heartbeat(exchange, loading, in_words)

    async def _relay(self, lease: EngineLease, route: Route, exchange: Exchange) -> None:
        """Relay the engine's answer. EngineConnection's callbacks move the bytes from socket to socket; this task only waits."""
        upstream, scope = lease.upstream, exchange.scope
        target = scope["raw_path"]
        if route.kind is RouteKind.RESPONSE and scope["query_string"]:
            target += b"?" + scope["query_string"]
        connection = await upstream.connection()
        relay = exchange.relay = Relay(connection, exchange)
        try:
            head = request_head(scope["method"], target, upstream.preamble, scope["headers"], exchange.request_id, len(exchange.body))
            await connection.ask(head, exchange.body, relay)
            self.release(exchange)
            error = await relay.over
            if error is not None:
                exchange.code = error.code
                raise error
        finally:
            if relay.pieces:
                # A refusal does not prove that the engine works: vLLM's API server sends it even while the engine hangs.
                well = exchange.status < 500 and (exchange.code is None or exchange.cancelled)
                lease.answered = (True if exchange.status == 200 else None) if well else False
            relay.stop()

    def _is_probe(self, headers: dict[bytes, bytes]) -> bool:
        token = headers.get(PROBE_HEADER)
        return token is not None and self._probe_token is not None and compare_digest(token, self._probe_token)

    def _reserve(self, size: int, exchange: Exchange) -> None:
        self._buffered_bytes += size
        exchange.reserved += size
        if self._buffered_bytes > exchange.client.limits.buffered_bytes:
            raise Unavailable("Too many large requests are arriving at once; try again soon.", retry_after_s=1)

    # --- /v1/responses/{id} -----------------------------------------------------------------------------------------------

    def _check_store(self, model: str) -> None:
        """Raise BadRequest if the engine keeps no responses: vLLM ignores `store: true`, and the id would lead nowhere."""
        view = find_model(self._supervisor.snapshot().models, model)
        if view is not None and not view.stores_responses:
            raise BadRequest(
                f"The model {view.name} keeps no responses, so this one could not be found by its id. Leave `store` out or send false, "
                "or set `env: {VLLM_ENABLE_RESPONSES_API_STORE: 1}` on the model; vLLM then keeps every response until it ends.",
                param="store",
            )

    def _ready_model(self, query: bytes) -> str:
        """The READY model that `?model=` names. A question about an engine must not load a model."""
        models = self._supervisor.snapshot().models
        names = parse_qs(query.decode("latin-1")).get("model")
        ready = [view.name for view in models.values() if view.state is ModelState.READY and not view.unlisted]
        if names is None and len(ready) == 1:
            return ready[0]
        name = names[-1] if names else model_meant(models)
        view = find_model(models, name)
        if view is not None and view.state is not ModelState.READY:
            raise Unavailable(f"The model {view.name} is {view.state.value}, and this path needs a running engine. Load the model first.")
        return name

    async def _model_of_response(self, response_id: str) -> str:
        """The READY model whose engine has the response. The engines are asked each time: they outlive the daemon, and so does what they
        keep."""
        ready = [view.name for view in self._supervisor.snapshot().models.values() if view.state is ModelState.READY]
        if len(ready) == 1:
            return ready[0]
        keepers = await asyncio.gather(*(self._has_response(name, response_id) for name in ready))
        if True not in keepers:
            kept = "an engine keeps its responses until it ends"
            raise NotFound(f"No running engine has the response {response_id[:128]!r}: {kept}. Create it again.")
        return ready[keepers.index(True)]

    async def _has_response(self, model: str, response_id: str) -> bool:
        try:
            # A probe is no use of the model, and starts none.
            async with self._supervisor.lease(model, probe=True) as lease:
                await lease.upstream.get(f"{_RESPONSES}/{response_id}", _FIND_RESPONSE_S)
        except SparkdError:
            return False
        return True


def client_left(exchange: Exchange) -> None:
    """End the exchange of a client that left, whether it waits for a load, for the engine, or is in a stream.

    SDKs close at the last event, before the body ends: such a stream is complete.
    """
    if exchange.relay is not None and exchange.relay.finish_early():
        return
    exchange.gone = True
    if exchange.relay is not None:
        exchange.relay.stop()
    if exchange.task is not None:
        exchange.task.cancel()


def _need(route: Route, exchange: Exchange) -> RequestNeeds | None:
    """The abilities that the route and the body require. A model without them is refused before it is loaded."""
    if route.need is None or route.label not in _WITH_TOOLS or not exchange.members.functions:
        return route.need
    return replace(route.need, tools=True)


def _check_content(kind: RouteKind, media: bytes, encoding: bytes) -> None:
    if encoding not in _ENCODINGS:
        raise UnsupportedEncoding("This content-encoding is not accepted; send the body with gzip, with zstd or as it is.")
    if kind is RouteKind.JSON and media not in (b"", b"application/json"):
        raise UnsupportedMediaType("This path takes content-type application/json.")
    if kind is RouteKind.FORM and media != b"multipart/form-data":
        raise UnsupportedMediaType("This path takes content-type multipart/form-data.")
