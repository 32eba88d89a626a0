"""The record of one request, its metrics and its log line. Neither holds a body, a query string or a key."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkd import metrics
from sparkd.gateway.body import Members
from sparkd.gateway.headers import RawHeaders
from sparkd.gateway.routes import EXACT, RouteKind

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from sparkd.gateway.client_connection import ClientConnection
    from sparkd.gateway.heartbeat import Heartbeat
    from sparkd.gateway.relay import Relay

_log = logging.getLogger("sparkd.access")

# Monitoring polls these every few seconds, and a browser fetches the page's files by the dozen, so only failures are logged. A change
# through the admin API is also an event.
_PROBES = (path for path, route in EXACT.items() if route.kind in (RouteKind.LIVE, RouteKind.READY))
_POLLED = frozenset((*_PROBES, "/metrics", "/admin/v1", "/ui/{file}"))

_REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_NO_MEMBERS = Members()
# Where the scope's extensions have the client's connection, a ClientConnection.
CONNECTION = "sparkd.connection"
# Ids need to be unlike each other, not secret: one random part per process is enough.
_ids = count(1)
_process = secrets.token_hex(6)
CLIENT_GONE = 499  # nginx's code for a client that closed before the answer; never sent, only counted


class ClientGone(Exception):
    """The client closed its connection, so no response can be sent."""


class Tokens(NamedTuple):
    """Token counts of one request, as its engine reported them; None for a count that the response lacks."""

    prompt: int | None
    cached: int | None
    completion: int | None


@dataclass(slots=True, eq=False)
class Exchange:
    """One request, and what became of it. Times are in seconds of `perf_counter`, None until they happen.

    scope, receive, send: ASGI's.
    headers: the client's; of a repeated one the last.
    route: the label of its route.
    model: a configured name, "" or "unknown", so that the series stay bounded.
    body: held until an engine has it.
    members: what sparkd reads in the body.
    reserved: the body's share in bytes of the limit on all bodies.
    whole: whether the body was read to its end.
    relay: set once an engine works on the request.
    heartbeat: set for a stream, once its request waits for a model or an engine has it.
    key: the name of the client's key.
    tokens: what the engine counted.
    task: serves the request.
    cancelled: whether an operator ended it.
    """

    scope: Scope
    receive: Receive
    send: Send
    headers: dict[bytes, bytes] = field(init=False)
    request_id: str = field(init=False)
    route: str = "none"
    model: str = ""
    status: int = 0
    code: str | None = None
    started_s: float = field(default_factory=perf_counter)
    first_s: float | None = None
    queued_s: float | None = None
    bytes_out: int = 0
    body: bytes | bytearray = b""
    members: Members = _NO_MEMBERS
    reserved: int = 0
    whole: bool = False
    gone: bool = False
    cancelled: bool = False
    streamed: bool = False
    key: str | None = None
    tokens: Tokens | None = None
    relay: Relay | None = None
    heartbeat: Heartbeat | None = None
    task: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        self.headers = dict(self.scope["headers"])
        named = self.headers.get(b"x-request-id")
        self.request_id = named.decode() if named is not None and _REQUEST_ID.fullmatch(named) else new_request_id()

    @property
    def client(self) -> ClientConnection:
        """The client's connection."""
        return self.scope["extensions"][CONNECTION]

    @property
    def id_header(self) -> tuple[bytes, bytes]:
        """The header that every answer has."""
        return b"x-request-id", self.request_id.encode()

    @property
    def anthropic(self) -> bool:
        """Whether the client speaks Anthropic's API, which its path says, also where nothing is there."""
        return self.scope["path"].startswith("/v1/messages")

    @property
    def speaks_responses(self) -> bool:
        """Whether the client speaks OpenAI's API of /v1/responses."""
        return self.scope["path"].startswith("/v1/responses")

    async def answer(self, status: int, headers: RawHeaders, body: bytes = b"") -> None:
        """Send a whole answer of sparkd's own, with the request's id."""
        self.status, self.bytes_out = status, len(body)
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, self.id_header]})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    def cancel(self) -> None:
        """End the request for an operator. Its client gets RequestCancelled."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """Count and log the request, once, at its end."""
        self.task = self.relay = self.heartbeat = None  # each would leave a cycle to the garbage collector
        seconds = perf_counter() - self.started_s
        if self.gone:
            self.status = CLIENT_GONE
        series(metrics.REQUESTS, self.model, self.route, str(self.status)).inc()
        if self.model:
            series(metrics.REQUEST_SECONDS, self.model, self.route).observe(seconds)
            if self.first_s is not None:
                series(metrics.TIME_TO_FIRST_TOKEN_SECONDS, self.model).observe(self.first_s - self.started_s)
            if self.queued_s is not None:
                series(metrics.QUEUE_SECONDS, self.model).observe(self.queued_s)
        level = logging.DEBUG if self.route in _POLLED and self.status < 400 else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(
                level,
                "request_id=%s model=%s route=%s status=%d seconds=%.4f queued=%s ttft=%s bytes_out=%d gone=%d code=%s",
                self.request_id,
                self.model or "-",
                self.route,
                self.status,
                seconds,
                "-" if self.queued_s is None else f"{self.queued_s:.4f}",
                "-" if self.first_s is None else f"{self.first_s - self.started_s:.4f}",
                self.bytes_out,
                self.gone,
                self.code or "-",
            )


def new_request_id() -> str:
    return f"req-{_process}-{next(_ids):x}"


# prometheus_client looks a child up under a lock and builds a tuple of strings each time. There are few, and every request needs some.
@lru_cache(maxsize=4096)
def series(metric: Any, *labels: str) -> Any:
    """The series of a metric with these values of its labels."""
    return metric.labels(*labels)
