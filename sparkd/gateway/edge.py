"""The ASGI application: gives each request its id and route, checks its key and its size, and answers every error.

The route depends on `scope["path"]` alone. Servers that built a URL from the Host header let strangers in (CVE-2026-48710, CVE-2026-49468).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparkd import __version__, metrics
from sparkd.errors import (
    LATER,
    REQUEST_ID,
    BadRequest,
    BodyTooLarge,
    Draining,
    Forbidden,
    MethodNotAllowed,
    RequestCancelled,
    SparkdError,
    Unauthorized,
    Unavailable,
    UnknownRoute,
)
from sparkd.gateway.exchange import ClientGone, Exchange
from sparkd.gateway.failures import error_bytes, json_headers, status_of
from sparkd.gateway.headers import RawHeaders
from sparkd.gateway.keys import KeyDigests, Role
from sparkd.gateway.limits import ClientLimits, too_large
from sparkd.gateway.models_list import model_entry, models_list
from sparkd.gateway.pages import PREFLIGHT, check_local, page_headers, preflight_headers
from sparkd.gateway.proxy import Leases, Proxy, client_left
from sparkd.gateway.request_log import RequestLog
from sparkd.gateway.routes import EXACT, Route, RouteKind, find, nearest
from sparkd.unexpected import place_of, unexpected
from sparkd.web import files as web_files

_log = logging.getLogger("sparkd.gateway")

_ONCE = (b"authorization", b"x-api-key", b"content-type", b"content-encoding", b"x-sparkd-probe")
_PROBES = (RouteKind.LIVE, RouteKind.READY)
_FORWARDED = (RouteKind.JSON, RouteKind.FORM, RouteKind.RESPONSE, RouteKind.ENGINE)

Probe = Callable[[], tuple[bool, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """The settings that `sparkd reload` may change.

    page_origins: in lower case; b"*" allows every page.
    web: whether sparkd's own page is served.
    """

    keys: KeyDigests = field(default_factory=KeyDigests)
    metrics_need_key: bool = False
    include_aliases_in_list: bool = False
    page_origins: frozenset[bytes] = frozenset()
    web: bool = True


class Edge:
    """The ASGI application of the daemon.

    settings: may be replaced at any time; applies to requests that arrive afterwards.
    admin: gets the requests under /admin/v1, after their key and the size of their body were checked.
    requests: records the requests for models.
    """

    def __init__(
        self,
        supervisor: Leases,
        *,
        admin: ASGIApp,
        live: Probe,
        ready: Probe,
        settings: EdgeSettings | None = None,
        metrics_text: Callable[[], bytes] = metrics.text,
        probe_token: str | None = None,
        requests: RequestLog | None = None,
    ) -> None:
        self.settings = settings or EdgeSettings()
        self._supervisor = supervisor
        self._admin = admin
        self._live = live
        self._ready = ready
        self._metrics_text = metrics_text
        self._proxy = Proxy(supervisor, probe_token)
        self._requests = requests or RequestLog()
        self._open_requests = 0
        self._admin_turns = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, task=asyncio.current_task())
        self._open_requests += 1
        try:
            await self._serve(exchange)
        except ClientGone:
            exchange.gone = True
        except SparkdError as error:
            await self._refuse(error, exchange)
        except asyncio.CancelledError:
            # A shutdown or an operator cancels a request. If this were raised again, uvicorn would answer with its own error in plain text.
            await self._refuse(RequestCancelled() if exchange.cancelled else Draining("sparkd is shutting down; try again soon."), exchange)
        except Exception as error:  # noqa: BLE001 - uvicorn would answer with its own error and log a traceback
            _log.error("request_id=%s internal error: %s at %s", exchange.request_id, type(error).__name__, place_of(error))
            await self._refuse(unexpected(error), exchange)
        finally:
            self._open_requests -= 1
            self._proxy.release(exchange)
            exchange.close()
            self._requests.end(exchange)

    async def _serve(self, exchange: Exchange) -> None:
        """Find the route, check the request and hand it on. Raises the error that the client gets."""
        page = self._allowed_origin(exchange)
        if page is not None:
            exchange.client.add_default_headers(page_headers(page))
        if exchange.anthropic:
            # As Anthropic's API calls it, whose SDK reads it.
            exchange.client.add_default_headers([(b"request-id", exchange.request_id.encode())])
        route, name = self._find(exchange)
        exchange.route = route.label
        if page is not None and exchange.scope["method"] == "OPTIONS" and PREFLIGHT in exchange.headers:
            await exchange.answer(204, preflight_headers(route.methods, exchange.headers))
            return
        self._check(exchange, route, allowed_page=page is not None)
        if route.kind in _FORWARDED:
            await self._proxy.forward(exchange, route, name)
        elif route.kind is RouteKind.ADMIN:
            await self._delegate(exchange)
        elif route.kind is RouteKind.PAGE or (route.kind is RouteKind.ROOT and self.settings.web and _wants_page(exchange)):
            await _answer_page(exchange)
        else:
            await self._answer(exchange, route, name)

    def _find(self, exchange: Exchange) -> tuple[Route, str]:
        """The route and its variable part. Raises UnknownRoute."""
        path = exchange.scope["path"]
        match = find(path, exchange.scope["raw_path"])
        if match is None or (match[0].kind is RouteKind.PAGE and not self.settings.web):
            raise UnknownRoute(f"There is nothing at this path{self._suggestion(path, exchange.headers)}. docs/api.md lists the routes.")
        return match

    def _check(self, exchange: Exchange, route: Route, *, allowed_page: bool) -> None:
        """Refuse a wrong method, a caller without the route's key, a request too many, repeated headers and a body that is too large.

        A request for a model is on record from its key on, so that what refuses it later is there to be read.
        """
        method, headers = exchange.scope["method"], exchange.headers
        if method not in route.methods:
            raise MethodNotAllowed(method, list(route.methods))
        exchange.key = self._check_caller(route, method, headers, allowed_page=allowed_page)
        if route.kind in _FORWARDED:
            self._requests.begin(exchange)
        limits = exchange.client.limits
        if self._open_requests > _most_requests(route.kind, limits):
            raise Unavailable("Too many requests are open; try again soon.", retry_after_s=1)
        if len(headers) != len(exchange.scope["headers"]):
            _check_repeated(exchange.scope["headers"])
        limit = limits.admin_body_bytes if route.kind is RouteKind.ADMIN else limits.body_bytes
        if int(headers.get(b"content-length", b"0")) > limit:
            raise BodyTooLarge(too_large(limit))

    async def _answer(self, exchange: Exchange, route: Route, name: str) -> None:
        """Answer a route that needs neither an engine nor the admin API: probes, /metrics, the models, and / for programs."""
        content_type, status = b"application/json", 200
        if route.kind is RouteKind.METRICS:
            content_type, body = metrics.CONTENT_TYPE.encode(), self._metrics_text()
        elif route.kind in _PROBES:
            well, facts = (self._live if route.kind is RouteKind.LIVE else self._ready)()
            status = 200 if well else 503
            body = json.dumps({"status": "ok" if well else "unavailable", **facts}).encode()
        elif route.kind is RouteKind.MODELS:
            models = self._supervisor.snapshot().models
            with_aliases = self.settings.include_aliases_in_list
            body = json.dumps(models_list(models, with_aliases=with_aliases, paths=self._is_admin(exchange.headers))).encode()
        elif route.kind is RouteKind.MODEL:
            body = json.dumps(model_entry(self._supervisor.snapshot().models, name, paths=self._is_admin(exchange.headers))).encode()
        else:
            body = json.dumps({"name": "sparkd", "version": __version__, "api": "/v1", "admin": "/admin/v1", "ready": "/readyz"}).encode()
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-cache")]
        await exchange.answer(status, headers, body)

    async def _delegate(self, exchange: Exchange) -> None:
        """Pass a request and its whole body, which is small, to the admin API, and put the request id on the answer.

        The app sends the head of an endless answer (sparkd.admin.streams.Endless) and returns; the edge then sends the texts behind it.
        """
        scope = exchange.scope
        body = await self._proxy.read_body(exchange, exchange.client.limits.admin_body_bytes)
        replay: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        send, broken = exchange.send, False

        async def receive_again() -> Message:
            return replay.pop() if replay else await exchange.receive()

        async def send_named(message: Message) -> None:
            nonlocal broken, send
            if message["type"] == "http.response.start":
                headers: RawHeaders = message["headers"]
                broken = message["status"] == 500 and (b"content-type", b"text/plain; charset=utf-8") in headers
                if not broken:
                    exchange.status = message["status"]
                    sized = scope["method"] == "HEAD" or any(name == b"content-length" for name, _ in headers)
                    if not sized and scope["http_version"] != "1.1":
                        send = exchange.client.send_unframed
                    named = [pair for pair in headers if pair[0] != b"x-request-id"]
                    message = {**message, "headers": [*named, exchange.id_header]}
            if not broken:  # else Starlette answers in plain text before it raises the app's exception; __call__ answers that one instead
                await send(message)

        later: list[AsyncGenerator[str, None]] = []
        # uvicorn keeps its own copy of the scope, and by that it leaves the body out of an answer to HEAD.
        inner = {**scope, REQUEST_ID: exchange.request_id, LATER: later} | ({"method": "GET"} if scope["method"] == "HEAD" else {})
        # An admin request holds the loop for half a millisecond or more before it first waits. One starts per turn of the loop.
        await self._admin_turn()
        await self._admin(inner, receive_again, send_named)
        del inner  # what the app put there, three stacks among it, is not for the life of a stream
        for texts in later:
            try:
                await _send_rest(texts, send_named, exchange)
            except ClientGone:
                # When a network fails, all its clients leave at once.
                await self._admin_turn()
                raise

    async def _admin_turn(self) -> None:
        """Let one admin request continue per turn of the loop."""
        async with self._admin_turns:
            await asyncio.sleep(0)

    def _allowed_origin(self, exchange: Exchange) -> bytes | None:
        """The origin of the web page that sent the request, if `cors` allows it on this path."""
        origin, allowed = exchange.headers.get(b"origin"), self.settings.page_origins
        if origin is None or not exchange.scope["path"].startswith("/v1/") or not (origin.lower() in allowed or b"*" in allowed):
            return None
        return origin

    def _is_admin(self, headers: dict[bytes, bytes]) -> bool:
        return self.settings.keys.open or self.settings.keys.role(headers) is Role.ADMIN

    def _suggestion(self, path: str, headers: dict[bytes, bytes]) -> str:
        """The nearest path, for a client with a key: looking for it costs more than refusing."""
        has_key = self.settings.keys.open or self.settings.keys.role(headers) is not Role.NOBODY
        suggested = nearest(path) if has_key else None
        if suggested is None or (EXACT[suggested].kind is RouteKind.PAGE and not self.settings.web):
            return ""
        return f"; the nearest is {suggested}"

    def _check_caller(self, route: Route, method: str, headers: dict[bytes, bytes], *, allowed_page: bool) -> str | None:
        """Return the name of the key. Raise unless the request has the route's key.

        Without configured keys, raise if a web page that is not allowed sent it.
        """
        if self.settings.keys.open:
            if route.kind not in _PROBES:
                reads_only = route.kind in (RouteKind.ROOT, RouteKind.METRICS, RouteKind.PAGE)
                check_local(headers, method, reads_only=reads_only, allowed_page=allowed_page)
            return None
        needed = route.role
        if route.kind is RouteKind.METRICS and self.settings.metrics_need_key:
            needed = Role.INFERENCE
        if needed is Role.NOBODY:
            return None
        role, name = self.settings.keys.caller(headers)
        if role is Role.NOBODY:
            raise Unauthorized
        if role < needed:
            raise Forbidden("This key is for inference; the admin API needs an admin key.")
        return name

    async def _refuse(self, error: SparkdError, exchange: Exchange) -> None:
        """Send the error, or break off the answer that has begun.

        Read and drop the rest of the body for a while: a client that is still sending would not see the answer.
        """
        exchange.code = error.code
        if exchange.gone:
            return
        if exchange.status:
            self._proxy.break_off(exchange, error)
            return
        status, headers = status_of(error, exchange), exchange.headers
        body = error_bytes(error, exchange.request_id, anthropic=exchange.anthropic)
        answer = json_headers(len(body), error.headers())
        bodiless = b"content-length" not in headers and b"transfer-encoding" not in headers
        try:
            if exchange.whole or bodiless or exchange.scope["method"] == "HEAD":
                await exchange.answer(status, answer, body)
                return
            waits = b"expect" in headers  # this client sends its body only after a 100
            if waits or int(headers.get(b"content-length", b"0")) > exchange.client.limits.admin_body_bytes:
                answer.append((b"connection", b"close"))
            exchange.status, exchange.bytes_out = status, len(body)
            await exchange.send({"type": "http.response.start", "status": status, "headers": [*answer, exchange.id_header]})
            await exchange.send({"type": "http.response.body", "body": body, "more_body": True})
            if not waits:
                await _drop_body(exchange)
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            return  # the client left, or the server is shutting down; see __call__


def _most_requests(kind: RouteKind, limits: ClientLimits) -> float:
    if kind in _FORWARDED:
        return limits.requests
    return limits.any_requests if kind is RouteKind.ADMIN else math.inf


def _wants_page(exchange: Exchange) -> bool:
    """A browser that a person sent here; programs ask for JSON or for anything."""
    return b"text/html" in exchange.headers.get(b"accept", b"")


async def _answer_page(exchange: Exchange) -> None:
    """Answer with a file of sparkd's own page, or send a browser to the page."""
    path = exchange.scope["path"]
    if path == "/":
        await exchange.answer(303, [(b"location", web_files.ROOT.encode()), (b"content-length", b"0"), (b"vary", b"accept")])
        return
    file = web_files.page_files().answer(path, exchange.headers)
    if file is None:
        raise UnknownRoute("This page has no such file, or an earlier release had it. Load /ui/ again.")
    await exchange.answer(file.status, file.headers, file.body)


async def _drop_body(exchange: Exchange) -> None:
    try:
        async with asyncio.timeout(exchange.client.limits.linger_s):
            while (await exchange.receive()).get("more_body", False):
                pass
    except TimeoutError:
        return


def _check_repeated(headers: list[tuple[bytes, bytes]]) -> None:
    seen: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _ONCE and seen.setdefault(name, value) != value:
            raise BadRequest(f"The header {name.decode()} comes more than once, with different values: send it once.")


async def _send_rest(texts: AsyncGenerator[str, None], send: Send, exchange: Exchange) -> None:
    """Send the rest of an answer whose head was sent, until its client leaves."""
    client = exchange.client
    client.call_on_disconnect(partial(client_left, exchange))
    try:
        async for text in texts:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except asyncio.CancelledError:
        if exchange.gone:
            raise ClientGone from None
        raise
    finally:
        client.call_on_disconnect(None)
        await texts.aclose()
