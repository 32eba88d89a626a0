"""Measures the passing memory of real batches, and reports where it exceeds the learned peak. Never lowers the peak: small batches prove
nothing about the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# An excess over the plan that every margin covers.
ERROR_BYTES = 64 << 20
# A measurement costs 0.1 ms (torch's memory statistics; /proc/self/status): too much for every step that only decodes.
LOOKS, EVERY = 64, 1024
# The growth over the last report that is worth a new one.
GROWTH = 1.1


class Batches(Protocol):
    """The platform's measurement of batches."""

    def mark(self) -> None:
        """Called before a batch."""

    def taken_by_batch(self) -> int:
        """Called after a batch: the peak of its passing memory in bytes, or of all batches since the first mark."""


class UnderLoad:
    """planned: bytes that a batch may take. report: called with the largest measurement so far. beyond: called where it exceeds the
    plan."""

    def __init__(self, batches: Batches, planned: int, report: Callable[[int], None], beyond: Callable[[int], None]) -> None:
        self._batches = batches
        self._planned = planned
        self._report = report
        self._beyond = beyond
        self._most_tokens = 0
        self._looks = 0
        self._steps = 0
        self._seen = 0
        batches.mark()

    def looks_at(self, tokens: int) -> bool:
        """Whether to measure a batch of so many tokens: the largest batches so far, LOOKS times each, and every EVERY-th step."""
        self._steps += 1
        if tokens > self._most_tokens:
            self._most_tokens, self._looks = tokens, 0
        elif (tokens < self._most_tokens or self._looks >= LOOKS) and self._steps % EVERY:
            return False
        self._looks += 1
        self._batches.mark()
        return True

    def look(self) -> None:
        taken = self._batches.taken_by_batch()
        if taken > GROWTH * self._seen:
            self._seen = taken
            self._report(taken)
        if taken > self._planned + ERROR_BYTES:
            self._planned = taken
            self._beyond(taken)
