"""Owns the facts of one model that decisions are made from, as one look at the nodes and the requests gives them. Never decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkd.state.memory_book import Lack
from sparkd.state.nouns import STARTING, ModelState, RankFact, Want

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
    """Everything the plan may know of one model. Times are seconds on one monotonic clock.

    config_hash is None where the model is no longer configured. `rank_id` names the start that the present attempt made or adopted, and
    the rank 0 of that start; `world` is the number of its ranks. `busy` names the action in flight, if any: only a stop may overtake it.

    `ranks` is None where no node could be observed. For a model on several nodes it may lack the ranks of a node that does not answer:
    then `unseen` is true, and dark_s counts the seconds without a sign of life of that node; no_raylet names a node whose Ray has ended,
    where Ray started the model's workers (executor: ray). halted_s: for how long a signal has stopped a rank; deaf_s: for how long
    the engine's socket has been gone. frozen: the message about an engine that no longer computes (sparkd.control.watchdog). still_s: for
    how long no rank has read, written or computed; silent_s: for how long none has read or written.

    claims: a client waits for the model or an operator has requested it, so others make room; asked_since_s: since when. lack: the memory
    that it requested when there was no room. lost_load_s: how long its last load took, if that failed. yields: it is being evicted for
    another model.
    """

    name: str
    want: Want
    generation: int
    state: ModelState
    state_since_s: float
    config_hash: str | None
    rank_id: str | None = None
    ranks: tuple[RankFact, ...] | None = ()
    world: int = 1
    unseen: bool = False
    dark_s: float = 0.0
    no_raylet: str | None = None
    halted_s: float = 0.0
    deaf_s: float = 0.0
    still_s: float = float("inf")
    silent_s: float = float("inf")
    frozen: str | None = None
    busy: str | None = None
    in_flight: int = 0
    queued: int = 0
    last_used_s: float = 0.0
    last_asked_s: float = float("-inf")
    attempt_since_s: float = 0.0
    backoff_until_s: float = float("-inf")
    start_deadline_s: float = 1800.0
    drain_deadline_s: float = 60.0
    stop_deadline_s: float = 60.0
    ttl_s: float = 0.0
    claims: bool = False
    asked_since_s: float = 0.0
    lack: Lack | None = None
    lost_load_s: float = 0.0
    pinned: bool = False
    priority: int = 50
    stay: Stay = field(default_factory=Stay)
    yields: bool = False

    @property
    def starts(self) -> bool:
        return self.state in STARTING or self.busy == "place"

    def ends(self, now_s: float) -> bool:
        """Whether one of its ranks is being ended or must be. Other models do not wait for a rank that will not die: the book still has its
        memory."""
        if self.state is ModelState.STOPPING:
            return now_s - self.state_since_s < self.stop_deadline_s
        away = self.state in (ModelState.STOPPED, ModelState.FAILED)
        return self.busy == "destroy" or any(fact.alive and (away or fact.handle.start != self.rank_id) for fact in self.ranks or ())
