"""The pure decision: the next actions, from desired and observed state."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.config.config import Config
from sparkd.control.record import Record
from sparkd.control.registry import Registry
from sparkd.control.scheduler import Schedule
from sparkd.state.combined_progress import progress_of
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.nouns import Progress, RankFact, Want, by_cause
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


def decide(registry: Registry, strangers: tuple[RankFact, ...], schedule: Schedule, now_s: float) -> list[Action]:
    """The next actions, at most one for each model and one for each stray rank.

    strangers: ranks of models that are not configured.
    now_s: monotonic seconds.
    """
    unknown = {fact.handle.start: fact.handle.model for fact in strangers}
    actions: list[Action] = [Destroy(start, model, "no such model is configured") for start, model in unknown.items()]
    for _, record in sorted(registry.records.items()):
        action = _next(record, registry, schedule, now_s) or _of_schedule(record, schedule)
        if action is not None:
            actions.append(action)
    return actions


def _next(record: Record, registry: Registry, schedule: Schedule, now_s: float) -> Action | None:
    if record.ranks is None:
        # The node did not answer. A wish to stop or start waits. An engine runs on, but its clients are not kept waiting.
        return _dark(record) if record.attempt.world == 1 and not record.busy else None
    if record.busy:
        # If a rank is broken, the question in progress would wait until the start deadline.
        asking = record.busy == "ask" and record.attempt.world > 1 and record.state in STARTING
        return _broken(record, now_s) if asking else None
    stray = _stray(record)
    if stray:
        return stray
    if record.desired.want is Want.STOPPED or record.evicted_for is not None:
        return _towards_stopped(record, registry.config, now_s)
    return _towards_running(record, registry, schedule, now_s)


def _of_schedule(record: Record, schedule: Schedule) -> Action | None:
    """The action that the scheduler asks of a model that may not start."""
    if not schedule.is_open:
        return None
    if (refusal := schedule.rejected.get(record.name)) is not None:
        return Fail(record.name, "DoesNotFit", refusal.message)
    to = schedule.victims.get(record.name)
    return Evict(record.name, to) if to is not None and not record.is_leaving else None


def _starts(record: Record) -> dict[str, list[RankFact]]:
    """The model's ranks by the start that they belong to."""
    starts: dict[str, list[RankFact]] = {}
    for fact in record.ranks or ():
        starts.setdefault(fact.handle.start, []).append(fact)
    return starts


def _stray(record: Record) -> Destroy | None:
    """The removal of a start of this model that is neither the present one nor can be adopted."""
    for start, ranks in _starts(record).items():
        if start == record.attempt.rank_id or record.state is ModelState.STOPPING:
            continue
        if record.attempt.rank_id is None and _adoptable(record, ranks, whole=not record.observed.unseen):
            continue
        if any(fact.handle.config_hash != record.hash for fact in ranks):
            reason = "its configuration changed"
        elif all(fact.alive for fact in ranks):
            whole = record.attempt.rank_id is not None or len(ranks) == ranks[0].handle.world
            reason = "it is not the present rank of its model" if whole else "the other ranks of its start have ended"
        else:
            reason = "it died while no daemon watched it"
        return Destroy(start, record.name, reason)
    return None


def _adoptable(record: Record, ranks: list[RankFact], *, whole: bool = True) -> bool:
    """Whether these ranks of one start can be adopted. whole: all of its ranks are required; an engine without one answers nothing."""
    if record.desired.want is not Want.RUNNING or any(not fact.alive or fact.stop_ordered for fact in ranks):
        return False
    if any(fact.handle.config_hash != record.hash for fact in ranks):
        return False
    return not whole or sorted(fact.handle.rank for fact in ranks) == list(range(ranks[0].handle.world))


def _towards_stopped(record: Record, config: Config, now_s: float) -> Action | None:
    match record.state:
        case ModelState.STOPPED:
            return None
        case ModelState.READY:
            return Move(record.name, ModelState.DRAINING) if record.queue.in_flight else Stop(record.name)
        case ModelState.DRAINING:
            expired = now_s - record.since_s >= config.unload_timeout_s
            return Stop(record.name) if record.queue.in_flight == 0 or expired else None
        case ModelState.FAILED:
            return _end(record)
        case ModelState.STOPPING:
            return _end(record)
        case _:
            return Stop(record.name)


def _end(record: Record) -> Action | None:
    """The next step towards STOPPED. A model with a node that does not answer cannot be said to have ended."""
    if record.ranks:
        return Stop(record.name)
    return None if record.observed.unseen else MarkStopped(record.name)


def _towards_running(record: Record, registry: Registry, schedule: Schedule, now_s: float) -> Action | None:
    match record.state:
        case ModelState.STOPPED | ModelState.FAILED:
            return _start(record, schedule)
        case ModelState.STOPPING:
            return _end(record)
        case ModelState.PLANNED:
            # No action is in progress, so the one that placed the model was lost.
            return Fail(record.name, "PlacementLost", "The placement ended without a result; it is tried again.")
        case _:
            return _watch(record, registry, now_s)


def _start(record: Record, schedule: Schedule) -> Action | None:
    for start, ranks in _starts(record).items():
        if start == record.attempt.rank_id:
            return Destroy(start, record.name, "the attempt it belonged to failed")
        if _adoptable(record, ranks):
            return Adopt(record.name, start)
    if schedule.is_open and schedule.next_to_start == record.name:
        return Place(record.name)
    return None


def _watch(record: Record, registry: Registry, now_s: float) -> Action | None:
    if failed := _broken(record, now_s):
        return failed
    present = _present(record)
    if not present:
        return None
    if any(fact.handle.config_hash != record.hash for fact in present):
        return _towards_stopped(record, registry.config, now_s)
    if record.state in STARTING:
        return _advance(record, present, registry.config, now_s)
    if record.state is ModelState.DRAINING:
        return Move(record.name, ModelState.READY)
    return _unload_after_ttl(record, registry, now_s)


def _unload_after_ttl(record: Record, registry: Registry, now_s: float) -> Expire | None:
    """The unload of a model that was idle for its ttl. It is unloaded once its companions were idle for as long."""
    ttl_s = registry.config.ttl_s(record.spec) if record.spec else 0.0
    companions = registry.ties.companions_of(record.name)
    together = [record, *(other for name, other in registry.records.items() if name in companions)]
    if ttl_s <= 0 or any(other.queue.in_use or now_s - other.queue.last_used_s < ttl_s for other in together):
        return None
    return Expire(record.name, now_s - record.queue.last_used_s)


def _dark(record: Record) -> Fail | None:
    """The failure of a READY model whose only node does not answer."""
    if record.state is not ModelState.READY or record.observed.dark_s < ALONE_DARK_S:
        return None
    cause = f"Its node has not answered for {record.observed.dark_s:.0f} s"
    return Fail(record.name, "NodeLost", f"{cause}. sparkd starts it again when the node is back, or elsewhere if the node is lost.")


def _present(record: Record) -> list[RankFact]:
    start = record.attempt.rank_id
    return sorted((fact for fact in record.ranks or () if fact.handle.start == start), key=lambda fact: fact.handle.rank)


def _broken(record: Record, now_s: float) -> Fail | None:
    """The failure of an engine with a rank that is dead, missing, stopped by a signal, unreachable, without its socket or frozen."""
    present = _present(record)
    if not present and not record.observed.unseen:
        return Fail(record.name, "RankLost", "Its rank has disappeared from the node; sparkd starts it again.")
    dead = [fact for fact in present if not fact.alive]
    if dead:
        # The first error speaks, also of a rank that has not ended yet: the others end because of it.
        first = next(filter(_says_why, by_cause(present)), dead[0])
        return Fail(record.name, *_epitaph(record.name, first, dead[0] if first.alive else first))
    missing = sorted(set(range(record.attempt.world)) - {fact.handle.rank for fact in present})
    if missing and not record.observed.unseen:
        numbers = " and ".join(map(str, missing))
        message = f"Rank {numbers} of {record.attempt.world} has disappeared from its node; sparkd starts all ranks again."
        return Fail(record.name, "RankMissing", message)
    if record.observed.deaf_s(now_s) >= DEAF_S:
        path = next((fact.handle.socket_path for fact in present if fact.deaf), "")
        return Fail(record.name, "SocketLost", f"Its socket {path} was removed, so no request reaches it; sparkd starts it again.")
    if record.attempt.world == 1:
        return Fail(record.name, "EngineFrozen", record.observed.hang) if record.observed.hang else None
    if record.observed.dark_s >= DARK_S:
        cause = f"one of its nodes has not answered for {record.observed.dark_s:.0f} s"
        return Fail(record.name, "NodeLost", f"Its ranks cannot reach each other: {cause}. sparkd starts them again when the node is back.")
    spec, no_raylet = record.spec, record.observed.no_raylet
    if no_raylet and spec and spec.executor == "ray":
        cause = f"Ray on {no_raylet} has ended, and with it the workers of this engine (`executor: ray`)"
        return Fail(record.name, "NodeLost", f"{cause}. sparkd starts them again when Ray is back.")
    if record.observed.halted_s(now_s) >= HALTED_S:
        halted = next((fact for fact in present if fact.halted), present[0]).handle
        cause = f"Rank {halted.rank} on {halted.node_id} is stopped by a signal (SIGSTOP)"
        return Fail(record.name, "RankHangs", f"{cause}; sparkd starts all ranks again.")
    if record.observed.hang:
        return Fail(record.name, "EngineFrozen", record.observed.hang)
    return None


def _advance(record: Record, present: list[RankFact], config: Config, now_s: float) -> Action | None:
    progress = progress_of(present) or Progress()
    deadline_s = config.start_deadline_s(record.spec) if record.spec else 0.0
    late_s = now_s - record.attempt.since_s - deadline_s
    still_s, silent_s = now_s - record.observed.last_activity_s, now_s - record.observed.last_output_s
    spins = late_s >= (LATEST - 1) * deadline_s and silent_s >= SILENT_S
    if late_s >= 0 and (still_s >= STILL_S or spins):
        hung = "hung" if still_s >= STILL_S else f"computed for {silent_s:.0f} s without reading a byte or writing a line"
        took_s = deadline_s + late_s
        cause = f"It was not ready after {took_s:.0f} s and {hung} in {record.state}. {_why(present)}"
        cure = f"Look at `sparkd logs {record.name}`; if it was only slow, raise health_check_timeout_s."
        return Fail(record.name, "StartTimeout", cause + cure)
    if failed := next(filter(None, (_reported_failure(record.name, fact) for fact in by_cause(present))), None):
        # The engine may take long to end, or hang, but its load has failed already.
        return Fail(record.name, *failed)
    phase = _PHASES.get(progress.phase)
    if phase and _ORDER.index(phase) > _ORDER.index(record.state):
        return Move(record.name, phase)
    if now_s - record.last_asked_s >= (ASK_EVERY_S if progress.server_up else ASK_BLINDLY_EVERY_S):
        return Ask(record.name)
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
