"""Chooses the models that are evicted for another one or for free memory, carries it out, and brings a model back if it was in vain.

A model in use stays for min_residency_s after it was READY, and an idle one is evicted at once. Two models that take each other's place
wait for each other at least as long as the load took, so at most half of the time goes into loading (tests/bench/swap.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from sparkd import metrics
from sparkd.config.config import Config
from sparkd.control.context import Context
from sparkd.control.desired_states import DesiredStates
from sparkd.control.record import Evicted, Record
from sparkd.control.registry import Registry
from sparkd.control.request_queue import PROMISE_S
from sparkd.state.memory_book import MemoryBook
from sparkd.state.model_state import AWAY, SERVING, ModelState
from sparkd.state.nouns import Wait, Want

# A model waits in vain: a pinned model excludes it, or evicting all others would not suffice.
EXCLUDED, NO_ROOM = "Excluded", "NoRoom"
# For how long a model was not used before it is evicted for free memory.
IDLE_S = 30.0


class Evictions:
    """Evicts models for others, and brings them back."""

    def __init__(self, context: Context, desired: DesiredStates) -> None:
        self._registry = context.registry
        self._journal = context.journal
        self._desired = desired

    def evict(self, record: Record, other: Record) -> None:
        """Evict the model for another one. A request for it waits behind that one meanwhile."""
        record.evicted_for = to = other.name
        record.takes_turns = other.takes_turns = True
        running = record.queue.in_flight
        requests = f"; its {running} request{'' if running == 1 else 's'} may finish first" if running else ""
        record.evicted = Evicted(to, record.desired.by)
        self._journal.say("swap", record.name, f"It makes room for {to}{requests}.", to=to)
        metrics.SWAPS.labels(record.name).inc()
        self._desired.want(record.name, Want.STOPPED, "swap")

    def withdraw(self, victims: Collection[str]) -> None:
        """Let the models go on that are being evicted and are not among these any more."""
        for record in self._registry.records.values():
            if record.name not in victims and record.state in SERVING:
                record.evicted_for = None

    def settle(self) -> None:
        """Bring an evicted model back if the load that evicted it was cancelled, or has failed and no client waits for it any more."""
        for record in self._registry.records.values():
            if record.state is ModelState.STOPPED:
                record.evicted_for = None
            elif record.state is ModelState.READY and record.desired.want is Want.RUNNING:
                record.evicted = None
            evicted = record.evicted
            if evicted is None:
                continue
            other = self._registry.records.get(evicted.to)
            is_ready = other is not None and other.state is ModelState.READY
            has_ended = other is None or other.desired.want is Want.STOPPED or (other.state is ModelState.FAILED and not other.has_claim)
            owed = evicted.owed and record.desired.want is Want.STOPPED and record.desired.by == "swap"
            record.evicted = None if is_ready or has_ended else replace(evicted, owed=owed)
            if has_ended and owed:
                message = f"sparkd loads it again: {evicted.to}, for which it was evicted, was not loaded."
                self._journal.say("swap", record.name, message, to=evicted.to)
                self._desired.want(record.name, Want.RUNNING, evicted.by)


def idle_victim(records: Iterable[Record], nodes: Collection[str], now_s: float) -> Record | None:
    """The model with a rank on one of these nodes that is evicted for free memory: unpinned, of the lowest priority, idle for longest."""
    idle = [
        record
        for record in records
        if record.state is ModelState.READY
        and not record.pinned
        and not record.queue.in_use
        and now_s - record.queue.last_used_s >= IDLE_S
        and any(node in nodes for node in record.attempt.nodes)
    ]
    return min(idle, key=lambda record: (record.priority, record.queue.last_used_s, record.name), default=None)


def present_models(records: Mapping[str, Record], book: MemoryBook) -> set[str]:
    """The models that run, start or end, or still hold memory."""
    return {name for name, record in records.items() if record.state not in AWAY or record.ranks} | set(book.held)


def victims_for(asker: Record, registry: Registry, book: MemoryBook, rivals: Collection[str], now_s: float) -> list[Record] | Wait:
    """The fewest models to evict for `asker`, unused ones first; a Wait if evicting every evictable model would not suffice.

    rivals: present models with which it cannot run.
    now_s: monotonic seconds.
    """
    records = registry.records
    spared = {asker.name, *registry.ties.companions_of(asker.name)}
    resident = {name for name, record in records.items() if record.state in SERVING}
    may_go = [records[name] for name in sorted(resident - spared) if not _is_pinned(records[name], registry)]
    passing = {name for name in (present_models(records, book) & records.keys()) - resident if not records[name].pinned}
    chosen = [record for record in may_go if record.name in rivals]
    names = {record.name for record in may_go} | passing
    if staying := sorted(set(rivals) - names):
        pinned = "that is pinned" if len(staying) == 1 else "those are pinned"
        sentence = f"{asker.name} cannot run with {' and '.join(staying)} (groups.exclude), and {pinned}. Unload the pinned model first."
        return Wait(EXCLUDED, sentence, tuple(staying))
    lack = asker.lack
    if lack is None:
        return _with_companions(chosen, registry)
    if not book.has_room(asker.name, lack, names):
        return _no_room(asker, book, names)
    spare = sorted((record for record in may_go if record not in chosen), key=lambda r: _eviction_order(asker, r, registry.config, now_s))
    while not book.has_room(asker.name, lack, passing | {record.name for record in chosen}) and spare:
        chosen.append(spare.pop(0))
    for record in [record for record in chosen if record.name not in rivals]:
        rest = [other for other in chosen if other is not record]
        if not record.is_leaving and book.has_room(asker.name, lack, passing | {other.name for other in rest}):
            chosen = rest
    return _with_companions(chosen, registry)


def stay_until_s(asker: Record, victims: Collection[Record], config: Config) -> float:
    """Until when these models are not evicted together, monotonic seconds. A load that failed had no stay of its own: the victims' stay
    covers it too."""
    staying = [(record, since_s) for record in victims if (since_s := record.attempt.ready_since_s) is not None and not record.is_leaving]
    if not staying:
        return float("-inf")
    loads_s = asker.lost_load_s + sum(record.attempt.load_s or 0.0 for record, _ in staying if record.takes_turns)
    return max(max(since_s for _, since_s in staying) + loads_s, *(_residency_until_s(*stay, config) for stay in staying))


def needed_memory(asker: Record) -> str:
    lack = asker.lack
    if lack is None:
        return "memory"
    return f"{lack.gib} GiB" if lack.nodes == 1 else f"{lack.gib} GiB on each of {lack.nodes} nodes"


def _no_room(asker: Record, book: MemoryBook, names: Collection[str]) -> Wait:
    """Why evicting all of `names` would not make room."""
    keepers = sorted(set(book.held) - {asker.name, *names})
    kept_by = " and ".join(keepers) or "no model that sparkd could unload"
    free = book.free_gib({asker.name, *names})
    there = ", ".join(f"{node} {gib:.0f} of {book.offered[node]:.0f} GiB" for node, gib in sorted(free.items()))
    need = needed_memory(asker)
    lacks = f"{asker.name} needs {need} of unified memory, more than is free even with every evictable model unloaded ({there})"
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


def _eviction_order(asker: Record, record: Record, config: Config, now_s: float) -> tuple[object, ...]:
    """The sort key of victims: those that leave already, then the idle, the unimportant, the longest unused."""
    stays, busy = stay_until_s(asker, [record], config) > now_s, record.queue.in_flight > 0
    return not record.is_leaving, stays, busy, record.priority, record.queue.last_used_s, record.name


def _residency_until_s(record: Record, ready_since_s: float, config: Config) -> float:
    """When a READY model counts as idle, or has stayed for min_residency_s, whichever comes first. It stays for a client that was asked
    to retry."""
    idle_at_s = float("inf") if record.queue.in_use else record.queue.last_used_s + config.swap_idle_s
    stayed_at_s = ready_since_s + config.min_residency_s
    if record.queue.promised_at_s is not None:
        comes_back_s = record.queue.promised_at_s + PROMISE_S
        idle_at_s, stayed_at_s = max(idle_at_s, comes_back_s), max(stayed_at_s, comes_back_s)
    return min(idle_at_s, stayed_at_s)


def _with_companions(chosen: Iterable[Record], registry: Registry) -> list[Record]:
    """The chosen models and their companions, which are evicted with them."""
    names = {name for record in chosen for name in (record.name, *registry.ties.companions_of(record.name))}
    return [record for name, record in sorted(registry.records.items()) if name in names and record.state in SERVING]


def _is_pinned(record: Record, registry: Registry) -> bool:
    companions = registry.ties.companions_of(record.name)
    return record.pinned or any(other.pinned for name, other in registry.records.items() if name in companions)
