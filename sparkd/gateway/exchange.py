"""The record of one request, its metrics and its log line. Neither holds a body, a query string or a key."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

from sparkd import metrics
from sparkd.gateway.body import Members
from sparkd.gateway.routes import EXACT, RouteKind
from sparkd.gateway.usage import Tokens

if TYPE_CHECKING:
    from sparkd.gateway.heartbeat import Heartbeat
    from sparkd.gateway.relay import Relay

_log = logging.getLogger("sparkd.access")

# Monitoring polls these every few seconds, and a browser fetches the page's files by the dozen, so only failures are logged. A change
# through the admin API is also an event.
_PROBES = (path for path, route in EXACT.items() if route.kind in (RouteKind.LIVE, RouteKind.READY))
_POLLED = frozenset((*_PROBES, "/metrics", "/admin/v1", "/ui/{file}"))

_NO_MEMBERS = Members()
CLIENT_GONE = 499  # nginx's code for a client that closed before the answer; never sent, only counted


class ClientGone(Exception):
    """The client closed its connection, so no response can be sent."""


class Exchange:
    """One request. Times are in seconds of `perf_counter`, None until they happen.

    body: held until an engine has it.
    members: what sparkd reads in the body.
    reserved: the body's share in bytes of the limit on all bodies.
    whole: whether the body was read to its end.
    relay: there while an engine works on the request; its `stop` aborts that work.
    heartbeat: set for a stream, once its request waits for a model or an engine has it.
    key: the name of the client's key.
    tokens: what the engine counted.
    task: serves the request.
    cancelled: whether an operator ended it.
    anthropic, speaks_responses: whether the client speaks Anthropic's API, or OpenAI's of /v1/responses.
    """

    __slots__ = (
        "anthropic",
        "body",
        "bytes_out",
        "cancelled",
        "code",
        "first_s",
        "gone",
        "heartbeat",
        "key",
        "members",
        "model",
        "queued_s",
        "relay",
        "request_id",
        "reserved",
        "route",
        "speaks_responses",
        "started_s",
        "status",
        "streamed",
        "task",
        "tokens",
        "whole",
    )

    def __init__(self, request_id: str, path: str) -> None:
        self.request_id = request_id
        self.route = "none"
        # By its path the client says whose API it speaks, also where nothing is there.
        self.anthropic = path.startswith("/v1/messages")
        self.speaks_responses = path.startswith("/v1/responses")
        self.model = ""
        self.status = 0
        self.code: str | None = None
        self.started_s = perf_counter()
        self.first_s: float | None = None
        self.queued_s: float | None = None
        self.bytes_out = 0
        self.body: bytes | bytearray = b""
        self.members = _NO_MEMBERS
        self.reserved = 0
        self.whole = False
        self.gone = False
        self.cancelled = False
        self.streamed = False
        self.key: str | None = None
        self.tokens: Tokens | None = None
        self.relay: Relay | None = None
        self.task: asyncio.Task[Any] | None = None
        self.heartbeat: Heartbeat | None = None

    def cancel(self) -> None:
        """End the request for an operator. Its client gets RequestCancelled."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def close(self) -> None:
        """Count and log the request, once, at its end. `model` is a configured name, "" or "unknown", so that the series stay bounded."""
        seconds = perf_counter() - self.started_s
        if self.gone:
            self.status = CLIENT_GONE
        _requests(self.model, self.route, self.status).inc()
        if self.model:
            _seconds(self.model, self.route).observe(seconds)
            if self.first_s is not None:
                _first(self.model).observe(self.first_s - self.started_s)
            if self.queued_s is not None:
                _queue(self.model).observe(self.queued_s)
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


def count_refused(status: int) -> None:
    """Count a request that was refused before it had a route: malformed, too slow, or with headers too large."""
    _requests("", "none", status).inc()


# prometheus_client looks a child up under a lock and builds a tuple of strings each time. There are few, and every request needs some.
@lru_cache(maxsize=4096)
def _requests(model: str, route: str, code: int) -> Any:
    return metrics.REQUESTS.labels(model, route, str(code))


@lru_cache(maxsize=1024)
def _seconds(model: str, route: str) -> Any:
    return metrics.REQUEST_SECONDS.labels(model, route)


@lru_cache(maxsize=256)
def _first(model: str) -> Any:
    return metrics.TIME_TO_FIRST_TOKEN_SECONDS.labels(model)


@lru_cache(maxsize=256)
def _queue(model: str) -> Any:
    return metrics.QUEUE_SECONDS.labels(model)


@lru_cache(maxsize=256)
def in_flight(model: str) -> Any:
    """The gauge of requests that an engine is working on."""
    return metrics.IN_FLIGHT.labels(model)
