"""Ends ranks: stops each, releases its memory, and tries again later what would not end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkd.control.means import Means
from sparkd.control.plan import Backoff
from sparkd.errors import ClusterError
from sparkd.state.nouns import RankFact, RankHandle

# Between two tries to end what would not end.
ENDING = Backoff(initial_s=1.0, max_s=60.0)
# Its clients were sent away, and it would not answer them: it gets no time to end.
HANGS = frozenset({"EngineFrozen", "RankHangs"})


class Endings:
    """left: hears what a rank that was ended has left behind on its node."""

    def __init__(self, means: Means, left: Callable[[RankHandle, Sequence[Mapping[str, Any]]], None]) -> None:
        self._registry = means.registry
        self._journal = means.journal
        self._cluster = means.cluster
        self._boundary = means.boundary
        self._clock = means.clock
        self._rng = means.rng
        self._left = left
        # By what was to end: how often in a row it did not.
        self._unended: dict[str, int] = {}
        self._retry_at_s: dict[str, float] = {}

    async def end(self, kind: str, key: str, model: str, ranks: Sequence[RankFact], say: Callable[[str], None]) -> bool:
        """End the ranks and release their memory. If that fails, say so.

        Each next try waits longer: a process that hangs in a driver still hangs a second later.
        """
        record = self._registry.records.get(model)
        with self._boundary.around(kind, model, lambda error: say(error.message)):
            try:
                await self._end_all(ranks, hangs=record is not None and record.attempt.reason in HANGS)
                if kind == "stop" or record is None or record.attempt.rank_id in (None, key):
                    # Else the node of these ranks was lost and is back, and the reservation is a newer start's.
                    self._cluster.reservations.release(model)
            except ClusterError as error:
                say(error.message)
            else:
                self._unended.pop(key, None)
                self._retry_at_s.pop(key, None)
                return True
        self._unended[key] = self._unended.get(key, 0) + 1
        self._retry_at_s[key] = self._clock() + ENDING.delay_s(self._unended[key], self._rng)
        return False

    def rests(self, key: str) -> bool:
        """Whether the next try to end it is later. key: the model's name for a stop, the start for a destroy."""
        return self._clock() < self._retry_at_s.get(key, float("-inf"))

    def try_again(self) -> None:
        """A node can be seen again: whatever would not end is tried at once, and waits anew from the shortest pause."""
        self._unended.clear()
        self._retry_at_s.clear()

    async def _end_all(self, ranks: Sequence[RankFact], *, hangs: bool) -> None:
        """Each is stopped whatever becomes of the others. Raises the first ClusterError once all were tried."""
        results = await asyncio.gather(*(self._cluster.launcher.destroy(fact, hangs=hangs) for fact in ranks), return_exceptions=True)
        for fact, left in zip(ranks, results, strict=True):
            if not isinstance(left, BaseException):
                self._journal.forget_handle(fact.handle.rank_id)
                self._left(fact.handle, left)
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            raise error
