"""The pure decision: the next actions, from desired and observed state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.control.facts import ModelFacts
from sparkd.control.scheduler import Schedule
from sparkd.state.combined_progress import progress_of
from sparkd.state.nouns import STARTING, ModelState, Progress, RankFact, Want, by_cause
from workers.rank.log_parser import ROOT_CAUSE_WINDOW_S, signal_name
from workers.rank.signatures import HINT

ASK_EVERY_S = 1.0
# A log that the parser does not understand must not hide a server that is up, so sparkd also asks without a sign of one, but less often.
ASK_BLINDLY_EVERY_S = 5.0
# A late start is given up after STILL_S without a byte read, a line logged or CPU time used. Ranks that wait for a lost rank use CPU time,
# so after LATEST times the start deadline CPU time no longer counts: SILENT_S without a byte or a line then ends the start.
STILL_S = 60.0
LATEST, SILENT_S = 3, 300.0
# How long a node may be silent before its models fail. A touched cable is silent for less. Meanwhile its ranks wait for each other.
DARK_S = 6.0
ALONE_DARK_S = 10.0
# Errors in a log that show only that a part of the engine ended, not why.
_LOST = ("EngineDeadError", "Engine core initialization failed", "EngineCore encountered a fatal error")
# How long a rank may be stopped by a signal (state T; a debugger's is t), so that two observations show it.
HALTED_S = 1.0
# How long the socket's file of a server that is up may be gone. An engine that ends removes it, and has ended within that time.
DEAF_S = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Find the nodes, reserve their memory, start the ranks."""

    model: str


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over an engine that an earlier daemon started, with all its ranks alive.

    rank_id: that of rank 0 of the start.
    """

    model: str
    rank_id: str


@dataclass(frozen=True, slots=True)
class Move:
    """Go to this state: a load's next phase as the rank's log has it, DRAINING, or READY again."""

    model: str
    state: ModelState


@dataclass(frozen=True, slots=True)
class Ask:
    """Send one real request to a server that is up; its answer makes the model READY."""

    model: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The model was idle for its ttl: request its stop."""

    model: str
    idle_s: float


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict this model for another that waits. Its requests may finish, and it returns only after the other had its turn."""

    model: str
    to: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop every rank of the model and verify that its processes are gone."""

    model: str


@dataclass(frozen=True, slots=True)
class MarkStopped:
    """No process of the model is left."""

    model: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up this attempt.

    reason: one CamelCase word.
    message: for the operator.
    client_message: for clients.
    """

    model: str
    reason: str
    message: str
    client_message: str | None = None


@dataclass(frozen=True, slots=True)
class Destroy:
    """Remove every rank of a start that cannot be adopted, or that died.

    rank_id: that of rank 0 of the start.
    """

    rank_id: str
    model: str
    why: str


Action = Place | Adopt | Move | Ask | Expire | Evict | Stop | MarkStopped | Fail | Destroy


def plan(
    models: Mapping[str, ModelFacts], strangers: tuple[RankFact, ...], can_place: bool, schedule: Schedule | None = None
) -> list[Action]:
    """The next actions, at most one for each model and one for each stray rank.

    strangers: ranks of models that are not configured.
    schedule: which model may start (sparkd.control.scheduler); None: any.

    Only one model starts at a time: two that load together each see memory that the other is about to take, and on unified memory that
    freezes the host. A model that is being ended counts as starting: it may still load, and the book does not hold what an earlier daemon
    started.
    """
    unknown = {fact.handle.start: fact.handle.model for fact in strangers}
    actions: list[Action] = [Destroy(start, model, "no such model is configured") for start, model in unknown.items()]
    starting = any(facts.starts or facts.ends for facts in models.values())
    starting = starting or any(fact.alive for fact in strangers)
    for name in sorted(models, key=lambda n: (models[n].record.queue.waiting == 0, n)):
        facts = models[name]
        may_start = can_place and not starting and (schedule is None or schedule.next_to_start == name)
        action = _next(facts, may_start) or _of_schedule(facts, schedule, can_place and not starting)
        if action is None:
            continue
        actions.append(action)
        if isinstance(action, Place | Adopt):
            starting = True
    return actions


def _next(facts: ModelFacts, can_start: bool) -> Action | None:
    if facts.ranks is None:
        # The node did not answer. A wish to stop or start waits. An engine runs on, but its clients are not kept waiting.
        return _dark(facts) if facts.record.attempt.world == 1 and not facts.record.busy else None
    if facts.record.busy:
        # If a rank is broken, the question in progress would wait until the start deadline.
        return _broken(facts) if facts.record.busy == "ask" and facts.record.attempt.world > 1 and facts.record.state in STARTING else None
    stray = _stray(facts)
    if stray:
        return stray
    if facts.record.desired.want is Want.STOPPED or facts.is_evicted:
        return _towards_stopped(facts)
    return _towards_running(facts, can_start)


def _of_schedule(facts: ModelFacts, schedule: Schedule | None, now: bool) -> Action | None:
    """The action that the scheduler asks of this model. now: a model could be started if it had room."""
    if schedule is None or not now:
        return None
    if (refusal := schedule.rejected.get(facts.name)) is not None:
        return Fail(facts.name, "DoesNotFit", refusal.message)
    to = schedule.victims.get(facts.name)
    return Evict(facts.name, to) if to is not None and facts.record.desired.want is Want.RUNNING and not facts.is_evicted else None


def _starts(facts: ModelFacts) -> dict[str, list[RankFact]]:
    """The model's ranks by the start that they belong to."""
    starts: dict[str, list[RankFact]] = {}
    for fact in facts.ranks or ():
        starts.setdefault(fact.handle.start, []).append(fact)
    return starts


def _stray(facts: ModelFacts) -> Destroy | None:
    """The removal of a start of this model that is neither the present one nor can be adopted."""
    for start, ranks in _starts(facts).items():
        if start == facts.record.attempt.rank_id or facts.record.state is ModelState.STOPPING:
            continue
        if facts.record.attempt.rank_id is None and _adoptable(facts, ranks, whole=not facts.observed.unseen):
            continue
        if any(fact.handle.config_hash != facts.record.hash for fact in ranks):
            reason = "its configuration changed"
        elif all(fact.alive for fact in ranks):
            whole = facts.record.attempt.rank_id is not None or len(ranks) == ranks[0].handle.world
            reason = "it is not the present rank of its model" if whole else "the other ranks of its start have ended"
        else:
            reason = "it died while no daemon watched it"
        return Destroy(start, facts.name, reason)
    return None


def _adoptable(facts: ModelFacts, ranks: list[RankFact], *, whole: bool = True) -> bool:
    """Whether these ranks of one start can be adopted. whole: all of its ranks are required; an engine without one answers nothing."""
    if facts.record.desired.want is not Want.RUNNING or any(not fact.alive or fact.stop_ordered for fact in ranks):
        return False
    if any(fact.handle.config_hash != facts.record.hash for fact in ranks):
        return False
    return not whole or sorted(fact.handle.rank for fact in ranks) == list(range(ranks[0].handle.world))


def _towards_stopped(facts: ModelFacts) -> Action | None:
    match facts.record.state:
        case ModelState.STOPPED:
            return None
        case ModelState.READY:
            return Move(facts.name, ModelState.DRAINING) if facts.record.queue.in_flight else Stop(facts.name)
        case ModelState.DRAINING:
            expired = facts.now_s - facts.record.since_s >= facts.drain_deadline_s
            return Stop(facts.name) if facts.record.queue.in_flight == 0 or expired else None
        case ModelState.FAILED:
            return _end(facts)
        case ModelState.STOPPING:
            return _end(facts)
        case _:
            return Stop(facts.name)


def _end(facts: ModelFacts) -> Action | None:
    """The next step towards STOPPED. A model with a node that does not answer cannot be said to have ended."""
    if facts.ranks:
        return Stop(facts.name)
    return None if facts.observed.unseen else MarkStopped(facts.name)


def _towards_running(facts: ModelFacts, can_start: bool) -> Action | None:
    match facts.record.state:
        case ModelState.STOPPED | ModelState.FAILED:
            return _start(facts, can_start)
        case ModelState.STOPPING:
            return _end(facts)
        case ModelState.PLANNED:
            # No action is in progress, so the one that placed the model was lost.
            return Fail(facts.name, "PlacementLost", "The placement ended without a result; it is tried again.")
        case _:
            return _watch(facts)


def _start(facts: ModelFacts, can_start: bool) -> Action | None:
    for start, ranks in _starts(facts).items():
        if start == facts.record.attempt.rank_id:
            return Destroy(start, facts.name, "the attempt it belonged to failed")
        if _adoptable(facts, ranks):
            return Adopt(facts.name, start)
    if facts.record.hash is None or facts.observed.unseen or not can_start or facts.now_s < facts.record.backoff_until_s:
        # Ranks on a node that does not answer may still hold its memory.
        return None
    return Place(facts.name)


def _watch(facts: ModelFacts) -> Action | None:
    if failed := _broken(facts):
        return failed
    present = _present(facts)
    if not present:
        return None
    if any(fact.handle.config_hash != facts.record.hash for fact in present):
        return _towards_stopped(facts)
    if facts.record.state in STARTING:
        return _advance(facts, present)
    if facts.record.state is ModelState.DRAINING:
        return Move(facts.name, ModelState.READY)
    idle_s = facts.now_s - facts.record.queue.last_used_s
    if facts.ttl_s > 0 and facts.record.queue.in_flight == 0 and facts.record.queue.waiting == 0 and idle_s >= facts.ttl_s:
        return Expire(facts.name, idle_s)
    return None


def _dark(facts: ModelFacts) -> Fail | None:
    """The failure of a READY model whose only node does not answer."""
    if facts.record.state is not ModelState.READY or facts.observed.dark_s < ALONE_DARK_S:
        return None
    cause = f"Its node has not answered for {facts.observed.dark_s:.0f} s"
    return Fail(facts.name, "NodeLost", f"{cause}. sparkd starts it again when the node is back, or elsewhere if the node is lost.")


def _present(facts: ModelFacts) -> list[RankFact]:
    start = facts.record.attempt.rank_id
    return sorted((fact for fact in facts.ranks or () if fact.handle.start == start), key=lambda fact: fact.handle.rank)


def _broken(facts: ModelFacts) -> Fail | None:
    """The failure of an engine with a rank that is dead, missing, stopped by a signal, unreachable, without its socket or frozen."""
    present = _present(facts)
    if not present and not facts.observed.unseen:
        return Fail(facts.name, "RankLost", "Its rank has disappeared from the node; sparkd starts it again.")
    dead = [fact for fact in present if not fact.alive]
    if dead:
        # The first error speaks, also of a rank that has not ended yet: the others end because of it.
        first = next(filter(_says_why, by_cause(present)), dead[0])
        return Fail(facts.name, *_epitaph(facts.name, first, dead[0] if first.alive else first))
    missing = sorted(set(range(facts.record.attempt.world)) - {fact.handle.rank for fact in present})
    if missing and not facts.observed.unseen:
        numbers = " and ".join(map(str, missing))
        message = f"Rank {numbers} of {facts.record.attempt.world} has disappeared from its node; sparkd starts all ranks again."
        return Fail(facts.name, "RankMissing", message)
    if facts.observed.deaf_s(facts.now_s) >= DEAF_S:
        path = next((fact.handle.socket_path for fact in present if fact.deaf), "")
        return Fail(facts.name, "SocketLost", f"Its socket {path} was removed, so no request reaches it; sparkd starts it again.")
    if facts.record.attempt.world == 1:
        return Fail(facts.name, "EngineFrozen", facts.frozen) if facts.frozen else None
    if facts.observed.dark_s >= DARK_S:
        cause = f"one of its nodes has not answered for {facts.observed.dark_s:.0f} s"
        return Fail(facts.name, "NodeLost", f"Its ranks cannot reach each other: {cause}. sparkd starts them again when the node is back.")
    spec, no_raylet = facts.record.spec, facts.observed.no_raylet
    if no_raylet and spec and spec.executor == "ray":
        cause = f"Ray on {no_raylet} has ended, and with it the workers of this engine (`executor: ray`)"
        return Fail(facts.name, "NodeLost", f"{cause}. sparkd starts them again when Ray is back.")
    if facts.observed.halted_s(facts.now_s) >= HALTED_S:
        halted = next((fact for fact in present if fact.halted), present[0]).handle
        cause = f"Rank {halted.rank} on {halted.node_id} is stopped by a signal (SIGSTOP)"
        return Fail(facts.name, "RankHangs", f"{cause}; sparkd starts all ranks again.")
    if facts.frozen:
        return Fail(facts.name, "EngineFrozen", facts.frozen)
    return None


def _advance(facts: ModelFacts, present: list[RankFact]) -> Action | None:
    progress = progress_of(present) or Progress()
    late_s = facts.now_s - facts.record.attempt.since_s - facts.start_deadline_s
    still_s, silent_s = facts.now_s - facts.observed.last_activity_s, facts.now_s - facts.observed.last_output_s
    spins = late_s >= (LATEST - 1) * facts.start_deadline_s and silent_s >= SILENT_S
    if late_s >= 0 and (still_s >= STILL_S or spins):
        hung = "hung" if still_s >= STILL_S else f"computed for {silent_s:.0f} s without reading a byte or writing a line"
        took_s = facts.start_deadline_s + late_s
        cause = f"It was not ready after {took_s:.0f} s and {hung} in {facts.record.state}. {_why(present)}"
        cure = f"Look at `sparkd logs {facts.name}`; if it was only slow, raise health_check_timeout_s."
        return Fail(facts.name, "StartTimeout", cause + cure)
    if failed := next(filter(None, (_reported_failure(facts.name, fact) for fact in by_cause(present))), None):
        # The engine may take long to end, or hang, but its load has failed already.
        return Fail(facts.name, *failed)
    phase = _PHASES.get(progress.phase)
    if phase and _ORDER.index(phase) > _ORDER.index(facts.record.state):
        return Move(facts.name, phase)
    if facts.now_s - facts.record.last_asked_s >= (ASK_EVERY_S if progress.server_up else ASK_BLINDLY_EVERY_S):
        return Ask(facts.name)
    return None


_ORDER = [ModelState.PLANNED, ModelState.LOADING, ModelState.WARMING, ModelState.SIZING]
_PHASES = {"loading": ModelState.LOADING, "warming": ModelState.WARMING, "sizing": ModelState.SIZING}


def _why(present: list[RankFact]) -> str:
    diagnosis = next((fact.diagnosis for fact in by_cause(present) if fact.diagnosis), None)
    return f"{diagnosis.cause} {diagnosis.cure} " if diagnosis else ""


def _says_why(fact: RankFact) -> bool:
    """Whether a rank knows the cause of an end. An error long before its log's last line is another story, and an error that names another
    rank's end is a consequence."""
    if not fact.alive and (fact.killed or (fact.exit_code or 0) < 0):
        return True
    progress, diagnosis = fact.progress, fact.diagnosis
    if progress.failure:
        return True
    if diagnosis is not None and diagnosis.name == "RankGone":
        return False
    is_recent = (progress.line_at_s or 0.0) - (progress.error_at_s or 0.0) <= ROOT_CAUSE_WINDOW_S
    return is_recent and (progress.last_error is not None or (diagnosis is not None and diagnosis.weight > HINT))


def _epitaph(name: str, fact: RankFact, ended: RankFact) -> tuple[str, str, str | None]:
    """Reason, message and client message for a rank that has ended. fact: of the rank that knows the cause, which may be another.

    Any exit without an order is a failure, exit code 0 included (vllm-project/vllm issue 48966). A cause that the guard, the loader or the
    KV sizing reported comes before one from the log.
    """
    if fact.killed:
        return "MemoryGuard", fact.killed, None
    if failed := _reported_failure(name, fact):
        return (*failed, None)
    where = f"Rank {ended.handle.rank} of {ended.handle.world}, on {ended.handle.node_id}," if ended.handle.world > 1 else "The engine"
    how, last_error = _end_of(ended), fact.progress.last_error
    if fact.diagnosis and fact.diagnosis.weight > HINT:
        message = f"{fact.diagnosis.cause} {fact.diagnosis.cure} The engine ended ({how}); see `{_logs(name, fact)}`."
        return fact.diagnosis.name, message, fact.diagnosis.client_message
    is_cause = last_error is not None and not (fact.progress.lost and any(word in last_error for word in _LOST))
    log = "its log" if fact is ended else f"the log of rank {fact.handle.rank}"
    last = f" Last error in {log}: {last_error}" if is_cause else ""
    return "EngineExited", f"{where} ended by itself ({how}).{last} See `{_logs(name, fact)}`.", None


def _end_of(fact: RankFact) -> str:
    """How the rank ended. If an engine lost its core, the exit code 0 is its API server's and shows nothing."""
    if fact.progress.lost:
        return fact.progress.lost
    if fact.exit_code is None:
        return "killed, with no exit code left behind"
    return f"exit code {fact.exit_code}" if fact.exit_code >= 0 else f"signal {signal_name(-fact.exit_code).removeprefix('signal ')}"


def _logs(name: str, fact: RankFact) -> str:
    return f"sparkd logs {name} --rank {fact.handle.rank}" if fact.handle.rank else f"sparkd logs {name}"


def _reported_failure(name: str, fact: RankFact) -> tuple[str, str] | None:
    """Reason and message of a failure that the loader, or the worker that sizes the KV cache, reported."""
    progress, logs = fact.progress, _logs(name, fact)
    if progress.server_up:
        return None
    if progress.failure:
        reason = "LoadRefused" if progress.failure_lasts else "LoadFailed"
        return reason, f"{progress.failure.rstrip('.')}. See `{logs}`."
    if progress.kv and progress.kv.get("phase") == "refused":
        return "KvCacheDoesNotFit", f"{str(progress.kv.get('why') or 'The KV cache does not fit').rstrip('.')}. See `{logs}`."
    return None
