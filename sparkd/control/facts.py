"""The facts of one model in one tick: its record, and its part of the observation and the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkd.control.record import Record
from sparkd.state.nouns import STARTING, ModelState, RankFact

# After the engine's own time (stop_timeout_s) a stop takes so long at most, with SIGKILL.
ENDS_S = 30.0


@dataclass(frozen=True, slots=True)
class Stay:
    """How long a READY model keeps its place when another model needs it.

    until_s: when it counts as idle, or when a model in use has stayed for min_residency_s, whichever comes first.
    load_s: how long its load took, if it and another model have taken each other's place; else 0.
    """

    ready_since_s: float = float("-inf")
    until_s: float = float("-inf")
    load_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Times are seconds on one monotonic clock.

    record: the decision only reads it.
    ranks: None where no node could be observed. A model on several nodes may lack the ranks of a node that does not answer.
    unseen: whether a node of it does not answer.
    dark_s: for how long that node has shown no sign of life.
    no_raylet: a node whose Ray has ended, where Ray started the model's workers (executor: ray).
    halted_s: for how long a signal has stopped a rank.
    deaf_s: for how long the engine's socket has been gone.
    still_s: for how long no rank has read, written or computed.
    silent_s: for how long no rank has read or written.
    frozen: the message about an engine that no longer computes (sparkd.control.watchdog).
    stay: for how long it may not be evicted.
    """

    record: Record
    ranks: tuple[RankFact, ...] | None = ()
    unseen: bool = False
    dark_s: float = 0.0
    no_raylet: str | None = None
    halted_s: float = 0.0
    deaf_s: float = 0.0
    still_s: float = float("inf")
    silent_s: float = float("inf")
    frozen: str | None = None
    start_deadline_s: float = 1800.0
    drain_deadline_s: float = 60.0
    stop_deadline_s: float = 60.0
    ttl_s: float = 0.0
    stay: Stay = field(default_factory=Stay)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def yields(self) -> bool:
        """Whether it is being evicted for another model."""
        return self.record.yields_to is not None

    @property
    def starts(self) -> bool:
        return self.record.state in STARTING or self.record.busy == "place"

    def ends(self, now_s: float) -> bool:
        """Whether one of its ranks is being ended or must be. Other models do not wait for a rank that will not die: the book still has its
        memory."""
        record = self.record
        if record.state is ModelState.STOPPING:
            return now_s - record.since_s < self.stop_deadline_s
        away = record.state in (ModelState.STOPPED, ModelState.FAILED)
        return record.busy == "destroy" or any(
            fact.alive and (away or fact.handle.start != record.attempt.rank_id) for fact in self.ranks or ()
        )
