"""The pure decision: what to do next, from desired and observed state. Never awaits, logs, looks at the clock or keeps anything."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.state import STARTING, ModelState, Progress, RankFact, Want

ASK_EVERY_S = 1.0
# A log that the parser does not understand must not hide a server that is up: it is asked blindly now and then.
ASK_BLINDLY_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Restart policy: delays double from initial_s to max_s, +-jitter, and start over after reset_after_s of READY."""

    initial_s: float = 10.0
    max_s: float = 300.0
    jitter: float = 0.25
    reset_after_s: float = 600.0

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Delay before the next try after `failures` (>= 1) failures in a row, seconds."""
        base = min(self.max_s, self.initial_s * 2.0 ** (failures - 1))
        return base * (1.0 + self.jitter * (2.0 * rng.random() - 1.0))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything the plan may know of one model. Times are seconds on one monotonic clock.

    config_hash is None where the model is no longer configured. `rank_id` is the rank that the present attempt started or adopted.
    `busy` names the action in flight, if any: then only a stop may overtake it. `ranks` is None where nobody could look.
    """

    name: str
    want: Want
    generation: int
    state: ModelState
    state_since_s: float
    config_hash: str | None
    rank_id: str | None = None
    ranks: tuple[RankFact, ...] | None = ()
    busy: str | None = None
    in_flight: int = 0
    queued: int = 0
    last_used_s: float = 0.0
    last_asked_s: float = float("-inf")
    attempt_since_s: float = 0.0
    backoff_until_s: float = float("-inf")
    start_deadline_s: float = 1800.0
    drain_deadline_s: float = 60.0
    ttl_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """Find a node, reserve its memory, start the rank."""

    model: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over a living rank of an earlier daemon."""

    model: str
    rank_id: str


@dataclass(frozen=True, slots=True)
class Move:
    """Follow what the rank's log says."""

    model: str
    state: ModelState


@dataclass(frozen=True, slots=True)
class Ask:
    """Put one real question to a server that is up; its answer makes the model READY."""

    model: str


@dataclass(frozen=True, slots=True)
class Unwant:
    """The model was idle for its ttl: wish it STOPPED."""

    model: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class Drain:
    model: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop every rank of the model and verify that it is gone."""

    model: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Nothing is left of it: STOPPED."""

    model: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up this attempt. reason is one CamelCase word, message a sentence."""

    model: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Destroy:
    """Remove a rank that nobody may adopt, or the remains of one that died."""

    rank_id: str
    model: str
    why: str


Action = Place | Adopt | Move | Ask | Unwant | Drain | Stop | Rest | Fail | Destroy


def plan(models: Mapping[str, ModelFacts], strangers: tuple[RankFact, ...], can_place: bool, now_s: float) -> list[Action]:
    """The next actions, at most one for each model and one for each stray rank.

    `strangers` are ranks of models nobody knows. Only one model starts at a time: two that load together each see memory that the
    other is about to take, and on unified memory that is a frozen host, not an error (reference: one STARTING worker for each node).
    """
    actions: list[Action] = [Destroy(fact.handle.rank_id, fact.handle.model, "no such model is configured") for fact in strangers]
    starting = any(facts.state in STARTING or facts.busy == "place" for facts in models.values())
    for name in sorted(models, key=lambda n: (models[n].queued == 0, n)):
        facts = models[name]
        action = _next(facts, can_place and not starting, now_s)
        if action is None:
            continue
        actions.append(action)
        if isinstance(action, Place | Adopt):
            starting = True
    return actions


def _next(facts: ModelFacts, can_start: bool, now_s: float) -> Action | None:
    if facts.ranks is None:
        # Nobody could look at the node. A wish to stop or start waits; what runs, runs on.
        return None
    if facts.busy:
        return None
    stray = _stray(facts)
    if stray:
        return stray
    if facts.want is Want.STOPPED:
        return _towards_stopped(facts, now_s)
    return _towards_running(facts, can_start, now_s)


def _stray(facts: ModelFacts) -> Destroy | None:
    """A rank of this model that is neither the present one nor adoptable."""
    for fact in facts.ranks or ():
        if fact.handle.rank_id == facts.rank_id:
            continue
        if facts.state is ModelState.STOPPING:
            continue
        if facts.rank_id is None and _adoptable(facts, fact):
            continue
        if fact.alive:
            why = "its configuration changed" if fact.handle.config_hash != facts.config_hash else "it is not the present rank of its model"
        else:
            why = "it died while nobody watched"
        return Destroy(fact.handle.rank_id, facts.name, why)
    return None


def _adoptable(facts: ModelFacts, fact: RankFact) -> bool:
    return fact.alive and not fact.stop_ordered and facts.want is Want.RUNNING and fact.handle.config_hash == facts.config_hash


def _towards_stopped(facts: ModelFacts, now_s: float) -> Action | None:
    match facts.state:
        case ModelState.STOPPED:
            return None
        case ModelState.READY:
            return Drain(facts.name) if facts.in_flight else Stop(facts.name)
        case ModelState.DRAINING:
            expired = now_s - facts.state_since_s >= facts.drain_deadline_s
            return Stop(facts.name) if facts.in_flight == 0 or expired else None
        case ModelState.FAILED:
            return Stop(facts.name) if facts.ranks else Rest(facts.name)
        case ModelState.STOPPING:
            return Stop(facts.name) if facts.ranks else Rest(facts.name)
        case _:
            return Stop(facts.name)


def _towards_running(facts: ModelFacts, can_start: bool, now_s: float) -> Action | None:
    match facts.state:
        case ModelState.STOPPED | ModelState.FAILED:
            return _start(facts, can_start, now_s)
        case ModelState.STOPPING:
            return Stop(facts.name) if facts.ranks else Rest(facts.name)
        case ModelState.PLANNED:
            # No action is in flight, so the one that placed it was lost: begin again.
            return Fail(facts.name, "PlacementLost", "The placement ended without a result; it is tried again.")
        case _:
            return _watch(facts, now_s)


def _start(facts: ModelFacts, can_start: bool, now_s: float) -> Action | None:
    for fact in facts.ranks or ():
        if fact.handle.rank_id == facts.rank_id:
            return Destroy(fact.handle.rank_id, facts.name, "the attempt it belonged to failed")
        if _adoptable(facts, fact):
            return Adopt(facts.name, fact.handle.rank_id)
    if facts.config_hash is None or not can_start or now_s < facts.backoff_until_s:
        return None
    return Place(facts.name)


def _watch(facts: ModelFacts, now_s: float) -> Action | None:
    fact = next((fact for fact in facts.ranks or () if fact.handle.rank_id == facts.rank_id), None)
    if fact is None:
        return Fail(facts.name, "RankLost", "Its rank has left no trace on the node; it is started again.")
    if not fact.alive:
        return Fail(facts.name, *_epitaph(facts.name, fact))
    if fact.handle.config_hash != facts.config_hash:
        return _towards_stopped(facts, now_s)
    if facts.state in STARTING:
        return _advance(facts, fact.progress, now_s)
    if facts.state is ModelState.DRAINING:
        return Move(facts.name, ModelState.READY)
    idle_s = now_s - facts.last_used_s
    if facts.ttl_s > 0 and facts.in_flight == 0 and facts.queued == 0 and idle_s >= facts.ttl_s:
        return Unwant(facts.name, idle_s)
    return None


def _advance(facts: ModelFacts, progress: Progress, now_s: float) -> Action | None:
    if now_s - facts.attempt_since_s >= facts.start_deadline_s:
        return Fail(
            facts.name,
            "StartTimeout",
            f"It was not ready after {facts.start_deadline_s:.0f} s and hung in {facts.state}. Look at `sparkd logs {facts.name}`; "
            "if it was only slow, raise health_check_timeout_s.",
        )
    if failed := _told_failure(facts.name, progress):
        # The engine may take its time to end, or hang: what it was started for has failed.
        return Fail(facts.name, *failed)
    said = _PHASES.get(progress.phase)
    if said and _ORDER.index(said) > _ORDER.index(facts.state):
        return Move(facts.name, said)
    if now_s - facts.last_asked_s >= (ASK_EVERY_S if progress.server_up else ASK_BLINDLY_EVERY_S):
        return Ask(facts.name)
    return None


_ORDER = [ModelState.PLANNED, ModelState.LOADING, ModelState.WARMING, ModelState.SIZING]
_PHASES = {"loading": ModelState.LOADING, "warming": ModelState.WARMING, "sizing": ModelState.SIZING}


def _epitaph(name: str, fact: RankFact) -> tuple[str, str]:
    """Any exit that nobody ordered is a failure, exit code 0 included (vllm-project/vllm issue 48966). The engine's parts know best why."""
    if failed := _told_failure(name, fact.progress):
        return failed
    how = f"exit code {fact.exit_code}" if fact.exit_code is not None else "killed, with no exit code left behind"
    last = f" Last error in its log: {fact.progress.last_error}" if fact.progress.last_error else ""
    return "EngineExited", f"The engine ended by itself ({how}).{last} See `sparkd logs {name}`."


def _told_failure(name: str, progress: Progress) -> tuple[str, str] | None:
    """(reason, sentence) where the loader, or the worker that sizes the KV cache, has said why there will be no engine."""
    if progress.server_up:
        return None
    if progress.failure:
        return "LoadFailed", f"{progress.failure.rstrip('.')}. See `sparkd logs {name}`."
    if progress.kv and progress.kv.get("phase") == "refused":
        return "KvCacheDoesNotFit", f"{str(progress.kv.get('why') or 'The KV cache does not fit').rstrip('.')}. See `sparkd logs {name}`."
    return None
