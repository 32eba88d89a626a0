"""Counts the requests of one model: those that its engine works on, those that wait, and since when the model is requested."""

from __future__ import annotations

import asyncio

# Seconds within which a client that was asked to retry must be back: twice the longest Retry-After.
PROMISE_S = 120.0


class RequestQueue:
    """Times are monotonic seconds.

    questions: the daemon's own test requests that the engine works on. They do not count as a use of the model.
    waiters: in order of arrival.
    promised_at_s: when a client waited too long and was asked to retry by a 503.
    requested_since_s: since when the model is requested while it is not READY.
    abandoned_at_s: when a client that waited for that load last left.
    unanswered: whether every recent client gave up, or its connection broke, before the engine answered.
    """

    def __init__(self, now_s: float) -> None:
        self.in_flight = 0
        self.questions = 0
        self.waiters: dict[asyncio.Future[None], None] = {}
        self.promised_at_s: float | None = None
        self.requested_since_s: float | None = None
        self.abandoned_at_s: float | None = None
        self.unanswered = False
        self.last_used_s = now_s

    @property
    def waiting(self) -> int:
        return len(self.waiters)

    @property
    def in_use(self) -> bool:
        """Whether a client's request is worked on or waits."""
        return self.in_flight > 0 or bool(self.waiters)

    def begin(self, *, probe: bool) -> None:
        """Count a request in. probe: one of our own."""
        if probe:
            self.questions += 1
        else:
            self.in_flight += 1
            self.promised_at_s = None

    def end(self, now_s: float, *, probe: bool) -> None:
        """Count a request out."""
        if probe:
            self.questions -= 1
        else:
            self.in_flight -= 1
            self.last_used_s = now_s

    def request(self, now_s: float) -> None:
        """The model is requested. An earlier request keeps its position."""
        if self.requested_since_s is None:
            self.requested_since_s = now_s

    def withdraw(self) -> None:
        """The model is no longer requested."""
        self.requested_since_s = self.abandoned_at_s = None

    def wait(self, waiter: asyncio.Future[None], now_s: float) -> None:
        self.waiters[waiter] = None
        self.request(now_s)

    def leave(self, waiter: asyncio.Future[None]) -> None:
        self.waiters.pop(waiter, None)

    def open(self, now_s: float) -> None:
        """The model is READY: admit all waiters. It stays for clients that were asked to retry, until they are back or too late."""
        self.requested_since_s = self.abandoned_at_s = None
        self.unanswered = False
        self.last_used_s = now_s
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def turn_away(self, error: Exception) -> None:
        """Refuse all waiters with this error."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_exception(error)
