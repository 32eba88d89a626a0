"""Decides the order in which waiting models start, and which others are evicted for the first. Pure.

A model is claimed if a request waits for it or an operator requested it. Claimed models start before others, in the order of their claims.
The others wait even if there is room, so that small ones do not keep a large one out for ever.

A model in use stays for min_residency_s after it was ready, and an idle one yields at once. Two models that take each other's place wait
for each other at least as long as the load took, so at most half of the time goes into loading (tests/bench/swap.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from sparkd.config.groups import Ties
from sparkd.control.facts import ModelFacts
from sparkd.control.wait_reasons import (
    ASKED_FIRST,
    ENDS,
    EXCLUDED,
    LEAVE,
    LOADS,
    NO_ROOM,
    PASS,
    RETURNS,
    STARTED_FIRST,
    STAY,
    UNCLAIMED,
    Wait,
)
from sparkd.state.memory_book import MemoryBook
from sparkd.state.nouns import ModelState, Want

_THERE = (ModelState.READY, ModelState.DRAINING)
_AWAY = (ModelState.STOPPED, ModelState.FAILED)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The scheduler's decision.

    next_to_start: the model that is placed once no other model starts or ends.
    victims: the models to evict, each with the model that needs its place.
    waits: why each waiting model waits, the first one too unless it is placed now.
    rejected: the models that would wait in vain, and why.
    queue: all waiting models, in their order.
    """

    next_to_start: str | None = None
    victims: Mapping[str, str] = field(default_factory=dict)
    waits: Mapping[str, Wait] = field(default_factory=dict)
    rejected: Mapping[str, Wait] = field(default_factory=dict)
    queue: tuple[str, ...] = ()


def make_schedule(models: Mapping[str, ModelFacts], book: MemoryBook, ties: Ties, bar: Wait | None = None) -> Schedule:
    """Choose the model that starts next: the first claimed one in order of request, or one that fits without evicting any.

    bar: why no model can be placed now.
    """
    waiting = [facts for facts in models.values() if _is_startable(facts)]
    waiting.sort(key=lambda facts: (not facts.record.has_claim, _asked_since_s(facts), facts.name))
    next_to_start: str | None = None
    evicted: dict[str, str] = {}
    waits: dict[str, Wait] = {}
    rejected: dict[str, Wait] = {}
    for position, facts in enumerate(waiting):
        name = facts.name
        others = [other.name for other in waiting[position + 1 :]]
        rivals = ties.rivals_of(name) & _present(models, book)
        lacks = facts.record.lack is not None and not book.has_room(name, facts.record.lack)
        if not rivals and not lacks:
            waits |= dict.fromkeys(others, Wait(STARTED_FIRST, f"It waits for its turn: {name} is started first.", (name,)))
            returning = book.returning(name, facts.record.lack) if facts.record.lack else None
            if (wait := bar or _before(models)) is not None:
                waits[name] = wait
            elif returning is not None:
                waits[name] = Wait(RETURNS, returning)
            next_to_start = None if returning else name
            break
        if not facts.record.has_claim:
            unclaimed = Wait(UNCLAIMED, f"until that is free or {name} is requested")
            waits[name] = _waits_for(facts, rivals, unclaimed)
            continue
        victims = _victims(facts, models, book, ties, rivals)
        if isinstance(victims, Wait):
            rejected[name] = victims
            continue
        leaving, wait = _evicted(facts, victims)
        evicted = dict.fromkeys(leaving, name)
        waits[name] = _waits_for(facts, rivals, wait)
        message = f"It waits for its turn: {name} was requested first and waits for memory."
        waits |= dict.fromkeys(others, Wait(ASKED_FIRST, message, (name,)))
        break
    queue = tuple(facts.name for facts in waiting if facts.name not in rejected)
    return Schedule(next_to_start, evicted, waits, rejected, queue)


def _asked_since_s(facts: ModelFacts) -> float:
    since_s = facts.record.queue.asked_since_s
    return float("inf") if since_s is None else since_s


def _is_startable(facts: ModelFacts) -> bool:
    """Whether the model itself is ready to be started now."""
    wanted = facts.record.desired.want is Want.RUNNING and not facts.is_evicted and facts.record.hash is not None
    free = facts.record.state in _AWAY and not facts.record.busy and facts.ranks == () and not facts.observed.unseen
    return wanted and free and facts.now_s >= facts.record.backoff_until_s


def _before(models: Mapping[str, ModelFacts]) -> Wait | None:
    """The models to start or end before the first of those that wait: one at a time (sparkd.control.plan)."""
    if starts := sorted(name for name, facts in models.items() if facts.starts):
        return Wait(LOADS, f"It waits for {' and '.join(starts)} to be loaded: one model is started at a time.", tuple(starts))
    if ends := sorted(name for name, facts in models.items() if facts.ends):
        return Wait(ENDS, f"It waits for {' and '.join(ends)} to end and release memory.", tuple(ends))
    return None


def _present(models: Mapping[str, ModelFacts], book: MemoryBook) -> set[str]:
    """The models that run, start or end, or still hold memory."""
    return {name for name, facts in models.items() if facts.record.state not in _AWAY or facts.ranks} | set(book.held)


def _victims(
    asker: ModelFacts,
    models: Mapping[str, ModelFacts],
    book: MemoryBook,
    ties: Ties,
    rivals: Collection[str],
) -> list[ModelFacts] | Wait:
    """The fewest models to evict, unused ones first; a Wait if evicting every evictable model would not suffice."""
    spared = {asker.name, *ties.companions_of(asker.name)}
    resident = {name for name, facts in models.items() if facts.record.state in _THERE}
    may_go = [models[name] for name in sorted(resident - spared) if not _pinned(models[name], models, ties)]
    passing = {name for name in (_present(models, book) & models.keys()) - resident if not models[name].record.pinned}
    chosen = [facts for facts in may_go if facts.name in rivals]
    names = {facts.name for facts in may_go} | passing
    if staying := sorted(set(rivals) - names):
        pinned = "that is pinned" if len(staying) == 1 else "those are pinned"
        sentence = f"{asker.name} cannot run with {' and '.join(staying)} (groups.exclude), and {pinned}. Unload the pinned model first."
        return Wait(EXCLUDED, sentence, tuple(staying))
    if asker.record.lack is None:
        return _with_companions(chosen, models, ties)
    if not book.has_room(asker.name, asker.record.lack, names):
        keepers = sorted(set(book.held) - names - {asker.name})
        kept_by = " and ".join(keepers) or "no model that sparkd could unload"
        free = book.free_gib({asker.name, *names})
        there = ", ".join(f"{node} {gib:.0f} of {book.offered[node]:.0f} GiB" for node, gib in sorted(free.items()))
        lacks = f"{asker.name} needs {_size(asker)} of unified memory, more than is free even with every evictable model unloaded ({there})"
        if book.cordoned:
            cure = f"Wait for that, unload {kept_by}" if keepers else "Wait for that"
            sentence = f"{lacks}. {book.cordon_message} {cure}, or ask for less (memory_gib, kv_cache)."
        elif book.leaked_gib:
            cure = "`sparkd status` says how much. Ask for less (memory_gib, kv_cache)."
            sentence = f"{lacks}: memory of an ended engine has not come back. {cure}"
        else:
            holders = f"{kept_by} {'hold' if len(keepers) > 1 else 'holds'} the rest"
            sentence = f"{lacks}: {holders}. Unload or unpin it, or ask for less (memory_gib, kv_cache)."
        return Wait(NO_ROOM, sentence, tuple(keepers))
    spare = sorted((facts for facts in may_go if facts not in chosen), key=lambda facts: _eviction_order(asker, facts))
    while not book.has_room(asker.name, asker.record.lack, passing | {facts.name for facts in chosen}) and spare:
        chosen.append(spare.pop(0))
    for facts in [facts for facts in chosen if facts.name not in rivals]:
        rest = [other for other in chosen if other is not facts]
        if not _is_leaving(facts) and book.has_room(asker.name, asker.record.lack, passing | {other.name for other in rest}):
            chosen = rest
    return _with_companions(chosen, models, ties)


def _eviction_order(asker: ModelFacts, facts: ModelFacts) -> tuple[object, ...]:
    """The sort key of victims: those that leave already, then the idle, the unimportant, the longest unused."""
    stays, busy = _until_s(asker, [facts]) > facts.now_s, facts.record.queue.in_flight > 0
    return not _is_leaving(facts), stays, busy, facts.record.priority, facts.record.queue.last_used_s, facts.name


def _with_companions(chosen: list[ModelFacts], models: Mapping[str, ModelFacts], ties: Ties) -> list[ModelFacts]:
    """The chosen models and their companions, which are evicted with them."""
    names = {name for facts in chosen for name in (facts.name, *ties.companions_of(facts.name))}
    return [models[name] for name in sorted(names) if name in models and models[name].record.state in _THERE]


def _pinned(facts: ModelFacts, models: Mapping[str, ModelFacts], ties: Ties) -> bool:
    return facts.record.pinned or any(models[name].record.pinned for name in ties.companions_of(facts.name) if name in models)


def _is_leaving(facts: ModelFacts) -> bool:
    return facts.is_evicted or facts.record.desired.want is Want.STOPPED


def _until_s(asker: ModelFacts, victims: Collection[ModelFacts]) -> float:
    """Until when these models are not evicted together."""
    stays = [facts.stay for facts in victims if not _is_leaving(facts)]
    if not stays:
        return float("-inf")
    # A load that failed had no stay of its own: the victims' stay covers it too.
    loads_s = asker.record.lost_load_s + sum(stay.load_s for stay in stays)
    return max(max(stay.ready_since_s for stay in stays) + loads_s, *(stay.until_s for stay in stays))


def _evicted(asker: ModelFacts, victims: list[ModelFacts]) -> tuple[list[str], Wait]:
    """The models that are evicted now, and the reason for the waiting one. They are evicted together, or none yet."""
    models = tuple(facts.name for facts in victims)
    names, stay_s = " and ".join(models), _until_s(asker, victims) - asker.now_s
    if not victims:
        return [], Wait(PASS, "models that are starting or ending come first")
    if stay_s > 0:
        leaving = [facts.name for facts in victims if _is_leaving(facts)]
        return leaving, Wait(STAY, f"{names} may stay for another {stay_s:.0f} s", models)
    busy = sum(facts.record.queue.in_flight for facts in victims)
    requests = f", {busy} request{'' if busy == 1 else 's'} may finish first" if busy else ""
    return list(models), Wait(LEAVE, f"{names} is unloaded for it{requests}", models)


def _waits_for(facts: ModelFacts, rivals: Collection[str], wait: Wait) -> Wait:
    """wait: with the end of its sentence."""
    if rivals:
        before = f"It waits for {' and '.join(sorted(rivals))} to go (groups.exclude)"
    else:
        before = f"It waits for memory, {_size(facts)}"
    return replace(wait, message=f"{before}: {wait.message}.")


def _size(facts: ModelFacts) -> str:
    lack = facts.record.lack
    if lack is None:
        return "memory"
    return f"{lack.gib} GiB" if lack.nodes == 1 else f"{lack.gib} GiB on each of {lack.nodes} nodes"
