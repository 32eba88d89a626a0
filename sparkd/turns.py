"""Owns whose turn it is among the models that wait to be started, and which others go for its sake. Pure: never waits, starts or ends one.

Who claims (a request waits for it, or somebody asked by hand) goes before who does not, and who asked first goes first; the others wait
even where there is room, so that small ones do not keep a large one out for ever. For how long a model stays: sparkd.residency.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from sparkd.config_groups import Ties
from sparkd.facts import ModelFacts
from sparkd.room import Book
from sparkd.state import ModelState, Want

_THERE = (ModelState.READY, ModelState.DRAINING)
_AWAY = (ModelState.STOPPED, ModelState.FAILED)


@dataclass(frozen=True, slots=True)
class Turn:
    """first: may be placed once nothing else is started or ended. leave: by model that goes, for whom. told: why each waits, also the first
    where it is not placed now. refused: who would wait in vain, and why.

    line: all that wait, in their order.
    """

    first: str | None = None
    leave: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    line: tuple[str, ...] = ()


def turn(models: Mapping[str, ModelFacts], book: Book, ties: Ties, now_s: float, bar: str | None = None) -> Turn:
    """Of this moment; the same facts always give the same answer. bar: why nothing can be placed now, whoever is first."""
    waiting = sorted((one for one in models.values() if _waits(one, now_s)), key=lambda one: (not one.claims, one.asked_since_s, one.name))
    told: dict[str, str] = {}
    refused: dict[str, str] = {}
    for position, one in enumerate(waiting):
        others = [other.name for other in waiting[position + 1 :]]
        rivals = ties.rivals_of(one.name) & _present(models, book)
        lacks = one.lack is not None and not book.has_room(one.name, one.lack)
        if not rivals and not lacks:
            told |= dict.fromkeys(others, f"It waits for its turn: {one.name} is started first.")
            returning = book.returning(one.name, one.lack) if one.lack else None
            if (why := bar or _before(models, now_s) or returning) is not None:
                told[one.name] = why
            return Turn(None if returning else one.name, {}, told, refused, _line(waiting, refused))
        if not one.claims:
            told[one.name] = _waits_for(one, rivals, f"until that is free or somebody asks for {one.name}")
            continue
        found = _victims(one, models, book, ties, rivals, now_s)
        if isinstance(found, str):
            refused[one.name] = found
            continue
        leave, how = _leaving(found, now_s)
        told[one.name] = _waits_for(one, rivals, how)
        told |= dict.fromkeys(others, f"It waits for its turn: {one.name} asked first and waits for room.")
        return Turn(None, dict.fromkeys(leave, one.name), told, refused, _line(waiting, refused))
    return Turn(None, {}, told, refused, _line(waiting, refused))


def _waits(facts: ModelFacts, now_s: float) -> bool:
    """It could be started now, as far as it is concerned."""
    wanted = facts.want is Want.RUNNING and not facts.yields and facts.config_hash is not None
    free = facts.state in _AWAY and not facts.busy and facts.ranks == () and not facts.unseen
    return wanted and free and now_s >= facts.backoff_until_s


def _before(models: Mapping[str, ModelFacts], now_s: float) -> str | None:
    """What is started or ended before the first of those that wait: one at a time (sparkd.plan)."""
    if starts := sorted(name for name, facts in models.items() if facts.starts):
        return f"It waits for {' and '.join(starts)} to be loaded: one model is started at a time."
    if ends := sorted(name for name, facts in models.items() if facts.ends(now_s)):
        return f"It waits for {' and '.join(ends)} to end, whose memory is not free before."
    return None


def _present(models: Mapping[str, ModelFacts], book: Book) -> set[str]:
    """What runs, starts or ends, or still holds memory."""
    return {name for name, facts in models.items() if facts.state not in _AWAY or facts.ranks} | set(book.held)


def _victims(
    one: ModelFacts, models: Mapping[str, ModelFacts], book: Book, ties: Ties, rivals: Collection[str], now_s: float
) -> list[ModelFacts] | str:
    """The fewest that have to go, those first that nobody would miss; a sentence where the end of all that may go would not do."""
    kept = {one.name, *ties.companions_of(one.name)}
    may_go = [facts for name, facts in models.items() if name not in kept and facts.state in _THERE and not _pinned(facts, models, ties)]
    passing = {name for name in _present(models, book) if name in models and models[name].state not in _THERE and not models[name].pinned}
    chosen = [facts for facts in may_go if facts.name in rivals]
    names = {facts.name for facts in may_go} | passing
    if staying := sorted(set(rivals) - names):
        pinned = "that is pinned" if len(staying) == 1 else "those are pinned"
        return f"{one.name} cannot run beside {' and '.join(staying)} (groups.exclude), and {pinned}. Unload what is pinned first."
    if one.lack is None:
        return _whole(chosen, models, ties)
    if not book.has_room(one.name, one.lack, names):
        keepers = sorted(set(book.held) - names - {one.name})
        kept_by = " and ".join(keepers) or "nobody that sparkd could unload"
        free = book.free_gib({one.name, *names})
        there = ", ".join(f"{node} {gib:.0f} of {book.offered[node]:.0f} GiB" for node, gib in sorted(free.items()))
        lacks = f"{one.name} asks for {_size(one)} of unified memory, which is not there even if every model goes that may ({there})"
        if book.shut:
            cure = f"Wait for that, unload {kept_by}" if keepers else "Wait for that"
            return f"{lacks}. {book.told_shut} {cure}, or ask for less (memory_gib, kv_cache)."
        return (
            f"{lacks}: {kept_by} {'hold' if len(keepers) > 1 else 'holds'} the rest. Unload that, take its pin away, or ask for less "
            "(memory_gib, kv_cache)."
        )
    spare = sorted((facts for facts in may_go if facts not in chosen), key=lambda facts: _missed(facts, now_s))
    while not book.has_room(one.name, one.lack, passing | {facts.name for facts in chosen}) and spare:
        chosen.append(spare.pop(0))
    for facts in [facts for facts in chosen if facts.name not in rivals]:
        rest = [other for other in chosen if other is not facts]
        if not _leaves(facts) and book.has_room(one.name, one.lack, passing | {other.name for other in rest}):
            chosen = rest
    return _whole(chosen, models, ties)


def _missed(facts: ModelFacts, now_s: float) -> tuple[object, ...]:
    """How much it would be missed if it went, the least first."""
    stays, busy = facts.stay.until_s > now_s, facts.in_flight > 0
    return not _leaves(facts), stays, busy, facts.priority, facts.last_used_s, facts.name


def _whole(chosen: list[ModelFacts], models: Mapping[str, ModelFacts], ties: Ties) -> list[ModelFacts]:
    """With the companions of each, which go with it."""
    names = {name for facts in chosen for name in (facts.name, *ties.companions_of(facts.name))}
    return [models[name] for name in sorted(names) if name in models and models[name].state in _THERE]


def _pinned(facts: ModelFacts, models: Mapping[str, ModelFacts], ties: Ties) -> bool:
    return facts.pinned or any(models[name].pinned for name in ties.companions_of(facts.name) if name in models)


def _leaves(facts: ModelFacts) -> bool:
    return facts.yields or facts.want is Want.STOPPED


def _leaving(victims: list[ModelFacts], now_s: float) -> tuple[list[str], str]:
    """Who goes now, and the end of a sentence. All go together, or nobody yet."""
    names = " and ".join(facts.name for facts in victims)
    stays_s = max((facts.stay.until_s - now_s for facts in victims if not _leaves(facts)), default=0.0)
    if not victims:
        return [], "what is being started or ended comes first"
    if stays_s > 0:
        return [facts.name for facts in victims if _leaves(facts)], f"{names} may stay for another {stays_s:.0f} s"
    busy = sum(facts.in_flight for facts in victims)
    requests = f", {busy} requests may finish first" if busy else ""
    return [facts.name for facts in victims], f"{names} is unloaded for it{requests}"


def _waits_for(one: ModelFacts, rivals: Collection[str], how: str) -> str:
    if rivals:
        return f"It waits for {' and '.join(sorted(rivals))} to go (groups.exclude): {how}."
    return f"It waits for room, {_size(one)}: {how}."


def _size(one: ModelFacts) -> str:
    if one.lack is None:
        return "memory"
    return f"{one.lack.gib} GiB" if one.lack.nodes == 1 else f"{one.lack.gib} GiB on each of {one.lack.nodes} nodes"


def _line(waiting: list[ModelFacts], refused: Collection[str]) -> tuple[str, ...]:
    return tuple(facts.name for facts in waiting if facts.name not in refused)
