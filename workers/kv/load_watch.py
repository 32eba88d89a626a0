"""Looks at what real batches take for a moment, and says where it is more than was learned of the largest. Never makes it less: that a load
was small is no proof that none is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

# As much more than planned is within every margin.
ERROR_BYTES = 64 << 20
# A look costs a tenth of a millisecond (torch's memory statistics; /proc/self/status): not in every step that only decodes.
LOOKS, EVERY = 64, 1024
# A report is worth writing for so much more than was reported before.
GROWTH = 1.1


class Batches(Protocol):
    """The platform's part."""

    def mark(self) -> None:
        """Before a batch."""

    def taken_by_batch(self) -> int:
        """After it: bytes that it took for a moment, or any since the first mark."""


class UnderLoad:
    """planned: bytes that a batch may take. report: called with what the largest took so far. beyond: more than was planned."""

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
        """At the largest batches so far, some of each size, and now and then at any."""
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
