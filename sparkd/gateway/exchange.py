"""The record of one request, and what is told about it when it is over: metrics and one log line. Never tells a body, a query or a key."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter
from typing import Any, Protocol

from sparkd import metrics
from sparkd.errors import SparkdError
from sparkd.gateway.routes import EXACT, RouteKind

_log = logging.getLogger("sparkd.access")

# Asked every few seconds by whoever watches; only their failures are news. A change through the admin API is an event besides.
_POLLED = frozenset((*(path for path, route in EXACT.items() if route.kind in (RouteKind.LIVE, RouteKind.READY)), "/metrics", "/admin/v1"))

CLIENT_GONE = 499  # nginx's code for a client that closed before the answer; never sent, only counted


class ClientGone(Exception):
    """The client closed its connection: nobody is left to answer."""


class EarlyAnswer(Protocol):
    """The part of sparkd.gateway.heartbeat.Heartbeat that the rest of a request needs. begun: the client has its head already.
    anthropic: the client expects Anthropic's events."""

    begun: bool
    anthropic: bool

    def stop(self) -> None: ...
    def refuse(self, error: SparkdError) -> None: ...


class Exchange:
    """One request. Times are seconds of `perf_counter`; None where it has not happened.

    `body` is held until an engine has it, `outline` is what sparkd reads of it, `reserved` is how much of it counts towards the bound on
    all bodies, `whole` says that it was read to its end, `hang_up` takes an engine's work away from it, `heartbeat` is there once it had
    to wait for a model.
    """

    __slots__ = (
        "body",
        "bytes_out",
        "code",
        "first_s",
        "gone",
        "hang_up",
        "heartbeat",
        "model",
        "outline",
        "queued_s",
        "request_id",
        "reserved",
        "route",
        "started_s",
        "status",
        "whole",
    )

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.route = "none"
        self.model = ""
        self.status = 0
        self.code: str | None = None
        self.started_s = perf_counter()
        self.first_s: float | None = None
        self.queued_s: float | None = None
        self.bytes_out = 0
        self.body: bytes | bytearray = b""
        self.outline: bytes | bytearray = b""
        self.reserved = 0
        self.whole = False
        self.gone = False
        self.hang_up: Callable[[], None] | None = None
        self.heartbeat: EarlyAnswer | None = None

    def close(self) -> None:
        """Called once, at the end. `model` is a configured name or one of "" and "unknown", so that the series stay bounded."""
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
    """A request that was refused before it had a route: malformed, too slow, too large in its headers."""
    _requests("", "none", status).inc()


# prometheus_client looks a child up under a lock and builds a tuple of strings each time; there are few and they are asked for on
# every request.
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
