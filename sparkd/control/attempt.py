"""One attempt to have a model run, from its placement or adoption to the end of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.state.memory_book import Lack
from sparkd.state.nouns import RankHandle


@dataclass(frozen=True, slots=True)
class Attempt:
    """Times ending in _s are monotonic seconds.

    entry_hash: of the entry with which it began.
    rank_id: of the start; None before its ranks are started and once they are gone.
    handles: of every rank, rank 0's first; so are the nodes.
    memory_gib: reserved on each node.
    transport: findings on how the ranks of several nodes talk, as plain JSON.
    lack: the memory that it asked for when there was no room.
    load_s: how long its load took.
    reason: why it failed.
    lasts: another try does not help until the cause is fixed.
    client_message: what a client may read of the failure.
    message: what an operator reads now.
    """

    since_s: float
    entry_hash: str | None = None
    rank_id: str | None = None
    handles: tuple[RankHandle, ...] = ()
    nodes: tuple[str, ...] = ()
    memory_gib: float | None = None
    adopted: bool = False
    transport: tuple[Mapping[str, str], ...] = ()
    lack: Lack | None = None
    ready_since_s: float | None = None
    load_s: float | None = None
    reason: str | None = None
    lasts: bool = False
    client_message: str | None = None
    message: str | None = None

    @property
    def handle(self) -> RankHandle | None:
        """Rank 0's, which serves."""
        return self.handles[0] if self.handles else None

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return max(1, len(self.nodes))

    @property
    def node_id(self) -> str | None:
        return self.nodes[0] if self.nodes else None
