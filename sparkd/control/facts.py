"""The facts of one model in one tick: its record, and its part of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkd.config.config import Config
from sparkd.control.observed import Observed
from sparkd.control.record import Record
from sparkd.control.request_queue import PROMISE_S
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
    frozen: the message about an engine that no longer computes (sparkd.control.watchdog).
    stay: for how long it may not be evicted.
    """

    record: Record
    now_s: float
    frozen: str | None = None
    start_deadline_s: float = 1800.0
    drain_deadline_s: float = 60.0
    stop_deadline_s: float = 60.0
    ttl_s: float = 0.0
    stay: Stay = field(default_factory=Stay)

    @classmethod
    def of(cls, record: Record, config: Config, now_s: float, frozen: str | None) -> ModelFacts:
        spec = record.spec
        return cls(
            record,
            now_s,
            frozen,
            start_deadline_s=config.start_deadline_s(spec) if spec else 0.0,
            drain_deadline_s=config.unload_timeout_s,
            stop_deadline_s=config.engine.stop_timeout_s + ENDS_S,
            ttl_s=config.ttl_s(spec) if spec else 0.0,
            stay=_stay(record, config),
        )

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def observed(self) -> Observed:
        return self.record.observed

    @property
    def ranks(self) -> tuple[RankFact, ...] | None:
        """None where they are unknown. A model on several nodes may lack the ranks of a node that does not answer."""
        return self.record.observed.current

    @property
    def is_evicted(self) -> bool:
        """Whether it is being evicted for another model."""
        return self.record.evicted_for is not None

    @property
    def starts(self) -> bool:
        return self.record.state in STARTING or self.record.busy == "place"

    @property
    def ends(self) -> bool:
        """Whether one of its ranks is being ended or must be. Other models do not wait for a rank that will not die: the book still has its
        memory."""
        record = self.record
        if record.state is ModelState.STOPPING:
            return self.now_s - record.since_s < self.stop_deadline_s
        away = record.state in (ModelState.STOPPED, ModelState.FAILED)
        return record.busy == "destroy" or any(
            fact.alive and (away or fact.handle.start != record.attempt.rank_id) for fact in self.ranks or ()
        )


def _stay(record: Record, config: Config) -> Stay:
    if record.attempt.ready_since_s is None:
        return Stay()
    busy = record.queue.in_flight or record.queue.waiters
    idle_at_s = float("inf") if busy else record.queue.last_used_s + config.swap_idle_s
    least_s = config.min_residency_s
    if record.queue.promised_at_s is not None:
        comes_back_s = record.queue.promised_at_s + PROMISE_S
        idle_at_s, least_s = max(idle_at_s, comes_back_s), max(least_s, comes_back_s - record.attempt.ready_since_s)
    until_s = min(idle_at_s, record.attempt.ready_since_s + least_s)
    return Stay(record.attempt.ready_since_s, until_s, (record.attempt.load_s or 0.0) if record.takes_turns else 0.0)
