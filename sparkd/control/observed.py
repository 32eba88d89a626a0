"""The last observation of one model's ranks, and since when those stand still."""

from __future__ import annotations

from sparkd.state.combined_progress import progress_of
from sparkd.state.nouns import Progress, RankFact

# A share of one core: a compiler, or a rank that converts weights, uses more, and one that waits less. Looks may be a fraction of a second
# apart.
BUSY_SHARE = 0.1
BUSY_LEAST_S = 5.0


class Observed:
    """Times are monotonic seconds.

    ranks: None before the first observation. halted_since_s, deaf_since_s: first observation at which a signal had stopped a rank, or a
    rank's socket had been removed; None for no such rank.
    moved_at_s: when a rank last read, wrote or computed; told_at_s: when a rank last read or wrote.
    """

    __slots__ = ("_moved", "deaf_since_s", "halted_since_s", "log_path", "moved_at_s", "progress", "ranks", "told_at_s")

    def __init__(self, now_s: float) -> None:
        self.ranks: tuple[RankFact, ...] | None = None
        self.progress: Progress | None = None
        self.log_path: str | None = None
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """An attempt begins: nothing is known of its ranks yet."""
        self.progress = None
        self.halted_since_s: float | None = None
        self.deaf_since_s: float | None = None
        # The bytes that its ranks had read and written, with their CPU seconds, when one of them last moved.
        self._moved: tuple[object, float] = (None, 0.0)
        self.moved_at_s = self.told_at_s = now_s

    def forget(self) -> None:
        """The last rank has gone."""
        self.progress = None

    def take_in(self, ranks: tuple[RankFact, ...] | None, start: str | None, now_s: float) -> None:
        """Store an observation. ranks: the ranks on all nodes, None where no node could be observed. start: that of the present attempt."""
        if ranks is None:
            return
        self.ranks = ranks
        ours = [fact for fact in ranks if fact.handle.start == start]
        self.progress = progress_of(ours) or self.progress
        for fact in ours:
            if fact.handle.rank == 0:
                self.log_path = fact.handle.log_path
        self._note_movement(ours, now_s)
        self.halted_since_s = _since(self.halted_since_s, now_s, any(fact.halted for fact in ours))
        self.deaf_since_s = _since(self.deaf_since_s, now_s, any(fact.deaf for fact in ours))

    def _note_movement(self, ranks: list[RankFact], now_s: float) -> None:
        progress = [fact.progress for fact in ranks]
        seen = tuple((rank.line_at_s, rank.bytes_done, rank.units_done) for rank in progress)
        cpu_s, (before, cpu_before_s) = sum(fact.cpu_s for fact in ranks), self._moved
        if seen != before:
            self.told_at_s = now_s
        if seen != before or cpu_s - cpu_before_s > BUSY_SHARE * max(BUSY_LEAST_S, now_s - self.moved_at_s):
            self._moved, self.moved_at_s = (seen, cpu_s), now_s


def _since(before_s: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
