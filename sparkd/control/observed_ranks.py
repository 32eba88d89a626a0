"""The last observation of one model's ranks, and since when those stand still."""

from __future__ import annotations

from collections.abc import Collection

from sparkd.cluster.node_tracker import Observation
from sparkd.state.combined_progress import progress_of
from sparkd.state.nouns import Progress, RankFact

# A share of one core: a compiler, or a rank that converts weights, uses more, and one that waits less. Looks may be a fraction of a second
# apart.
BUSY_SHARE = 0.1
BUSY_LEAST_S = 5.0


class ObservedRanks:
    """Times are monotonic seconds.

    ranks: of the last observation that showed them; None before the first.
    current: of this tick; None where they are unknown: the observation failed, an action was changing them, or the only node is silent.
    unseen: whether a node of the model does not answer.
    dark_s: for how long that node has shown no sign of life.
    no_raylet: such a node whose Ray has ended.
    halted_since_s: first observation at which a signal had stopped a rank.
    deaf_since_s: first observation at which a rank's socket had been removed.
    hang: the message about an engine that no longer computes (sparkd.control.watchdog).
    last_activity_s: when a rank last read, wrote or computed.
    last_output_s: when a rank last read or wrote.
    """

    def __init__(self, now_s: float) -> None:
        self.ranks: tuple[RankFact, ...] | None = None
        self.current: tuple[RankFact, ...] | None = None
        self.unseen = False
        self.dark_s = 0.0
        self.no_raylet: str | None = None
        self.progress: Progress | None = None
        self.log_path: str | None = None
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """An attempt begins: nothing is known of its ranks yet."""
        self.progress = None
        self.hang: str | None = None
        self.halted_since_s: float | None = None
        self.deaf_since_s: float | None = None
        # The bytes that its ranks had read and written, with their CPU seconds, when one of them last moved.
        self._moved: tuple[object, float] = (None, 0.0)
        self.last_activity_s = self.last_output_s = now_s

    def forget(self) -> None:
        """The last rank has gone."""
        self.progress = None

    def take_in(
        self, observation: Observation, model: str, start: str | None, nodes: Collection[str], now_s: float, *, is_steady: bool
    ) -> None:
        """Store an observation.

        start: the name of its present start.
        nodes: of its present attempt.
        is_steady: no action was changing the model's ranks when the observation began.
        """
        self.current = None
        unseen = observation.unseen.intersection(nodes)
        self.unseen = bool(unseen)
        self.dark_s = max((observation.dark_s.get(node, 0.0) for node in unseen), default=0.0)
        self.no_raylet = min(unseen & observation.no_raylet, default=None)
        if observation.ranks is None or not is_steady or (unseen and len(nodes) < 2):
            return
        self.current = self.ranks = tuple(fact for fact in observation.ranks if fact.handle.model == model)
        ours = [fact for fact in self.ranks if fact.handle.start == start]
        self.progress = progress_of(ours) or self.progress
        for fact in ours:
            if fact.handle.rank == 0:
                self.log_path = fact.handle.log_path
        self._note_movement(ours, now_s)
        self.halted_since_s = _since(self.halted_since_s, now_s, any(fact.halted for fact in ours))
        self.deaf_since_s = _since(self.deaf_since_s, now_s, any(fact.deaf for fact in ours))

    def halted_s(self, now_s: float) -> float:
        """For how long a signal has stopped a rank."""
        return 0.0 if self.halted_since_s is None else now_s - self.halted_since_s

    def deaf_s(self, now_s: float) -> float:
        """For how long the engine's socket has been gone."""
        return 0.0 if self.deaf_since_s is None else now_s - self.deaf_since_s

    def _note_movement(self, ranks: list[RankFact], now_s: float) -> None:
        progress = [fact.progress for fact in ranks]
        seen = tuple((rank.line_at_s, rank.bytes_done, rank.units_done) for rank in progress)
        cpu_s, (before, cpu_before_s) = sum(fact.cpu_s for fact in ranks), self._moved
        if seen != before:
            self.last_output_s = now_s
        if seen != before or cpu_s - cpu_before_s > BUSY_SHARE * max(BUSY_LEAST_S, now_s - self.last_activity_s):
            self._moved, self.last_activity_s = (seen, cpu_s), now_s


def _since(before_s: float | None, now_s: float, holds: bool) -> float | None:
    if not holds:
        return None
    return now_s if before_s is None else before_s
