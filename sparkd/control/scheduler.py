"""Decides the order in which waiting models start, and why each of them waits. Pure.

A model is claimed if a request waits for it or an operator requested it. Claimed models start before others, in the order of their claims.
The others wait even if there is room, so that small ones do not keep a large one out for ever. The first may have others evicted
(sparkd.control.evictions).

Only one model starts at a time: two that load together each see memory that the other is about to take, and on unified memory that
freezes the host. A model that is being ended counts as starting: it may still load, and the book does not hold what an earlier daemon
started.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sparkd.config.config import Config
from sparkd.control.evictions import needed_memory, present_models, stay_until_s, victims_for
from sparkd.control.record import Record
from sparkd.control.registry import Registry
from sparkd.state.memory_book import MemoryBook
from sparkd.state.model_state import AWAY, STARTING, ModelState
from sparkd.state.nouns import RankFact, Wait

# Reasons why a model is not loaded now. Others come first: one is started first, or asked first and waits for room.
STARTED_FIRST, ASKED_FIRST = "StartedFirst", "AskedFirst"
# One model at a time is started or ended; memory of one that has ended comes back; ranks of an earlier daemon end.
LOADS, ENDS, RETURNS, LEFT_BEHIND = "Loads", "Ends", "Returns", "LeftBehind"
# It waits for memory, or for models that it cannot run with. UNCLAIMED: no client and no operator requests it. Otherwise the other models
# may stay for now (STAY), start or end already (PASS), or are unloaded now (LEAVE).
UNCLAIMED, STAY, PASS, LEAVE = "Unclaimed", "Stay", "Pass", "Leave"
# After the engine's own time (stop_timeout_s) a stop takes so long at most, with SIGKILL.
ENDS_S = 30.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """The scheduler's decision.

    is_open: whether a model may be started, or evicted, now: nothing keeps all from it, and no other starts or ends.
    next_to_start: the model that is placed once the schedule is open.
    victims: the models to evict, each with the model that needs its place.
    waits: why each waiting model waits, the first one too unless it is placed now.
    rejected: the models that would wait in vain, and why.
    queue: all waiting models, in their order.
    """

    is_open: bool = False
    next_to_start: str | None = None
    victims: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, Wait] = field(default_factory=dict)
    rejected: Mapping[str, Wait] = field(default_factory=dict)
    queue: tuple[str, ...] = ()


def make_schedule(
    registry: Registry, strangers: Collection[RankFact], book: MemoryBook, now_s: float, block_reason: Wait | None = None
) -> Schedule:
    """Choose the model that starts next: the first claimed one in order of request, or one that fits without evicting any.

    strangers: ranks of models that are not configured.
    now_s: monotonic seconds.
    block_reason: why no model can be placed now.
    """
    records = registry.records
    first = block_reason or _comes_first(records, strangers, registry.config, now_s)
    waiting = [record for record in records.values() if _is_startable(record, now_s)]
    waiting.sort(key=lambda record: (not record.has_claim, _requested_since_s(record), record.name))
    next_to_start: str | None = None
    evicted: dict[str, str] = {}
    waits: dict[str, Wait] = {}
    rejected: dict[str, Wait] = {}
    for position, record in enumerate(waiting):
        name = record.name
        others = [other.name for other in waiting[position + 1 :]]
        rivals = registry.ties.rivals_of(name) & present_models(records, book)
        lacks = record.lack is not None and not book.has_room(name, record.lack)
        if not rivals and not lacks:
            waits |= dict.fromkeys(others, Wait(STARTED_FIRST, f"It waits for its turn: {name} is started first.", (name,)))
            returning = book.returning(name, record.lack) if record.lack else None
            if first is not None:
                waits[name] = first
            elif returning is not None:
                waits[name] = Wait(RETURNS, returning)
            next_to_start = None if returning else name
            break
        if not record.has_claim:
            unclaimed = Wait(UNCLAIMED, f"until that is free or {name} is requested")
            waits[name] = _waits_for(record, rivals, unclaimed)
            continue
        victims = victims_for(record, registry, book, rivals, now_s)
        if isinstance(victims, Wait):
            rejected[name] = victims
            continue
        leaving, wait = _evicted(record, victims, registry.config, now_s)
        evicted = dict.fromkeys(leaving, name)
        waits[name] = _waits_for(record, rivals, wait)
        message = f"It waits for its turn: {name} was requested first and waits for memory."
        waits |= dict.fromkeys(others, Wait(ASKED_FIRST, message, (name,)))
        break
    queue = tuple(record.name for record in waiting if record.name not in rejected)
    return Schedule(first is None, next_to_start, evicted, waits, rejected, queue)


def _requested_since_s(record: Record) -> float:
    since_s = record.queue.requested_since_s
    return float("inf") if since_s is None else since_s


def _is_startable(record: Record, now_s: float) -> bool:
    """Whether the model itself is ready to be started now. Ranks on a node that does not answer may still hold its memory."""
    wanted = not record.is_leaving and record.hash is not None
    free = record.state in AWAY and not record.busy and record.ranks == () and not record.observed.unseen
    return wanted and free and now_s >= record.backoff_until_s


def _comes_first(records: Mapping[str, Record], strangers: Collection[RankFact], config: Config, now_s: float) -> Wait | None:
    """The models that start or end now: the others wait for them."""
    if any(fact.alive for fact in strangers):
        return Wait(LEFT_BEHIND, "It waits for ranks of an earlier daemon to end.")
    if starts := sorted(name for name, record in records.items() if record.state in STARTING or record.busy == "place"):
        return Wait(LOADS, f"It waits for {' and '.join(starts)} to be loaded: one model is started at a time.", tuple(starts))
    if ends := sorted(name for name, record in records.items() if _is_ending(record, config, now_s)):
        return Wait(ENDS, f"It waits for {' and '.join(ends)} to end and release memory.", tuple(ends))
    return None


def _is_ending(record: Record, config: Config, now_s: float) -> bool:
    """Whether one of its ranks is being ended or must be. Other models do not wait for a rank that will not die: the book still has its
    memory."""
    if record.state is ModelState.STOPPING:
        return now_s - record.since_s < config.engine.stop_timeout_s + ENDS_S
    return record.busy == "destroy" or any(
        fact.alive and (record.state in AWAY or fact.handle.start != record.attempt.rank_id) for fact in record.ranks or ()
    )


def _evicted(asker: Record, victims: list[Record], config: Config, now_s: float) -> tuple[list[str], Wait]:
    """The models that are evicted now, and the reason for the waiting one. They are evicted together, or none yet."""
    models = tuple(record.name for record in victims)
    names, stay_s = " and ".join(models), stay_until_s(asker, victims, config) - now_s
    if not victims:
        return [], Wait(PASS, "models that are starting or ending come first")
    if stay_s > 0:
        leaving = [record.name for record in victims if record.is_leaving]
        return leaving, Wait(STAY, f"{names} may stay for another {stay_s:.0f} s", models)
    busy = sum(record.queue.in_flight for record in victims)
    requests = f", {busy} request{'' if busy == 1 else 's'} may finish first" if busy else ""
    return list(models), Wait(LEAVE, f"{names} is unloaded for it{requests}", models)


def _waits_for(record: Record, rivals: Collection[str], wait: Wait) -> Wait:
    """wait: with the end of its sentence."""
    if rivals:
        before = f"It waits for {' and '.join(sorted(rivals))} to go (groups.exclude)"
    else:
        before = f"It waits for memory, {needed_memory(record)}"
    return replace(wait, message=f"{before}: {wait.message}.")
