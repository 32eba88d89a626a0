"""Ends ranks: stops each, releases its memory, and tries again later what would not end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkd.config.config import BackoffSettings
from sparkd.control.context import Context
from sparkd.errors import ClusterError
from sparkd.state.nouns import RankFact, RankHandle
from sparkd.units import GIB

# Between two tries to end what would not end.
ENDING = BackoffSettings(initial_s=1.0, max_s=60.0)
# Its clients were sent away, and it would not answer them: it gets no time to end.
HANGS = frozenset({"EngineFrozen", "RankHangs"})
# Files that one sentence names.
NAMED = 3


class RankStopper:
    """Stops ranks on their nodes."""

    def __init__(self, context: Context) -> None:
        self._registry = context.registry
        self._journal = context.journal
        self._cluster = context.cluster
        self._boundary = context.boundary
        self._clock = context.clock
        self._rng = context.rng
        # By what was to end: how often in a row it did not, and when it is tried again, infinity while it is being ended.
        self._unended: dict[str, int] = {}
        self._retry_at_s: dict[str, float] = {}

    async def stop(self, kind: str, key: str, model: str, ranks: Sequence[RankFact], say: Callable[[str], None]) -> bool:
        """End the ranks and release their memory. If that fails, say so.

        Each next try waits longer: a process that hangs in a driver still hangs a second later.
        """
        record = self._registry.records.get(model)
        self._retry_at_s[key] = math.inf
        with self._boundary.around(kind, model, lambda error: say(error.message)):
            try:
                hangs = record is not None and record.attempt.reason in HANGS
                for error in await self.stop_all(ranks, hangs=hangs):
                    raise error
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

    def is_waiting(self, key: str) -> bool:
        """Whether it is being ended, or the next try is later. key: the model's name for a stop, the start for a destroy."""
        return self._clock() < self._retry_at_s.get(key, float("-inf"))

    def retry_now(self) -> None:
        """A node can be seen again: whatever would not end is tried at once, and waits anew from the shortest pause."""
        self._unended.clear()
        self._retry_at_s = {key: at_s for key, at_s in self._retry_at_s.items() if at_s == math.inf}

    async def stop_all(self, ranks: Sequence[RankFact], *, hangs: bool) -> list[BaseException]:
        """Stop each, whatever becomes of the others. Returns the errors of those that were not stopped."""
        results = await asyncio.gather(*(self._cluster.launcher.destroy(fact, hangs=hangs) for fact in ranks), return_exceptions=True)
        for fact, left in zip(ranks, results, strict=True):
            if not isinstance(left, BaseException):
                self._journal.forget_handle(fact.handle.rank_id)
                self._note_left_files(fact.handle, left)
        return [result for result in results if isinstance(result, BaseException)]

    def _note_left_files(self, handle: RankHandle, files: Sequence[Mapping[str, Any]]) -> None:
        """Write events for the files that a rank has left on its node (see workers.rank.lifecycle.stop)."""
        node = handle.node_id
        if removed := [file for file in files if file["removed"]]:
            size = sum(file["bytes"] for file in removed)
            more = f" and {len(removed) - NAMED} more" if len(removed) > NAMED else ""
            named = f"{', '.join(str(file['path']) for file in removed[:NAMED])}{more}"
            message = f"sparkd removed {named} ({_size(size)}), which it left on {node}; no process holds them."
            self._journal.say("release", handle.model, message, node=node, removed_bytes=size)
        for file in files:
            if not file["removed"]:
                cure = f"no process holds it; if it is not needed, `rm {file['path']}` on {node}"
                message = f"It may have left {file['path']} ({_size(file['bytes'])}) on {node}. It stays, because {file['why']}: {cure}."
                self._journal.say("release", handle.model, message, node=node, left_bytes=file["bytes"])


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / (1 << 20):.1f} MiB"
