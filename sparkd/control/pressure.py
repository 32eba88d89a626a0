"""Owns the control plane's part where a node's guard says that memory is short: it begins no load, evicts an idle model.

The hard end, a kill, is the guard's own, on the node (workers.guard.policy). Never reads memory itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.journal import Ledger
from sparkd.control.record import Record
from sparkd.control.wishes import Wishes
from sparkd.state.nouns import ModelState, Reading, Want

GIB = 1 << 30
MEMORY_SHORT = "MemoryShort"
# Memory takes up to a minute to come back from an engine that ended: the next one goes only if that was not enough.
EVICT_EVERY_S = 60.0
IDLE_S = 30.0
# So long other nodes wait for one that is short: what has just ended gives its memory back. Then loads begin beside it.
SHUT_AFTER_S = 90.0


class Pressure:
    """Updated once in each tick. allows: whether a load may begin; shut: the nodes on which none may. told: a clause for each node that is
    short of memory; is_news: a node has become short of it within SHUT_AFTER_S."""

    def __init__(self, ledger: Ledger, wishes: Wishes, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._wishes = wishes
        self._clock = clock
        self._levels: dict[str, str] = {}
        self._short_since_s: dict[str, float] = {}
        self._evicted_at_s = float("-inf")
        self.allows = True
        self.shut: frozenset[str] = frozenset()
        self.told: dict[str, str] = {}
        self.is_news = False
        self.conditions: tuple[Condition, ...] = ()

    def relieve(self, observation: Observation, records: Mapping[str, Record]) -> None:
        readings, now_s = readings_of(observation), self._clock()
        short = {node: reading for node, reading in readings.items() if reading.level != "ok"}
        # An agent that is short of memory may miss a look: the time goes on.
        earlier = {node: since_s for node, since_s in self._short_since_s.items() if node in short or node in observation.unseen}
        self._short_since_s = dict.fromkeys(short, now_s) | earlier
        self.shut = frozenset(node for node, since_s in self._short_since_s.items() if now_s - since_s >= SHUT_AFTER_S)
        self.is_news = not short.keys() <= self.shut
        self.allows = not self.is_news and bool(readings.keys() - self.shut or not short)
        self.told = {node: _told(node, reading) for node, reading in short.items()}
        self._tell(short, observation.unseen)
        if not short:
            return
        pressed = {node for node, reading in short.items() if reading.level in ("pressed", "critical")}
        if now_s - self._evicted_at_s >= EVICT_EVERY_S and (victim := evictable(records.values(), pressed, now_s)):
            self._evicted_at_s = now_s
            metrics.GUARD_ACTIONS.labels("evict", victim.name).inc()
            node = next(node for node in victim.attempt.nodes if node in pressed)
            reason = short[node].level_why or self.told[node]
            self._ledger.say("evict", victim.name, f"It was idle and memory is short, so sparkd unloads it. {reason}")
            self._wishes.want(victim.name, Want.STOPPED, "guard")

    def _tell(self, short: Mapping[str, Reading], unseen: Collection[str]) -> None:
        for node, reading in short.items():
            if self._levels.get(node) != reading.level:
                self._ledger.say("memory", None, f"{self.told[node]}.", node=node, level=reading.level)
        for node in self._levels.keys() - short.keys() - set(unseen):
            self._ledger.say("memory", None, f"{node} has memory again.", node=node, level="ok")
        hidden = {node: level for node, level in self._levels.items() if node in unseen}
        self._levels = hidden | {node: reading.level for node, reading in short.items()}
        if short and not self.allows:
            self.conditions = (Condition(MEMORY_SHORT, f"{'; '.join(self.told.values())}; no load begins."),)
        else:
            shortages = self.told.items()
            self.conditions = tuple(Condition(MEMORY_SHORT, f"{clause}; no load begins there.", node) for node, clause in shortages)


def told_of(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """By model, what the guards of the nodes must know of it: see workers.guard.guard.Sentry."""
    return {
        record.name: {
            "in_flight": record.queue.in_flight,
            "priority": record.spec.priority if record.spec else 0,
            "pinned": bool(record.spec and record.spec.pin),
            "state": record.state.value,
            "by": record.desired.by,
            "predicted_gib": record.attempt.memory_gib,
        }
        for record in records
        if record.attempt.rank_id
    }


def evictable(records: Iterable[Record], nodes: set[str], now_s: float) -> Record | None:
    """The idle model with a rank on one of these nodes that goes first: unpinned, of the lowest priority, idle for longest."""
    idle = [
        record
        for record in records
        if record.state is ModelState.READY
        and nodes.intersection(record.attempt.nodes)
        and not (record.queue.in_flight or record.queue.waiting or (record.spec and record.spec.pin))
        and now_s - record.queue.last_used_s >= IDLE_S
    ]
    return min(idle, key=lambda record: (record.spec.priority if record.spec else 0, record.queue.last_used_s, record.name), default=None)


def readings_of(observation: Observation) -> dict[str, Reading]:
    """By node; of this node alone before the agents have answered."""
    readings = {node.node_id: node.reading for node in observation.nodes if node.reading}
    return readings or ({observation.reading.node_id: observation.reading} if observation.reading else {})


def _told(node: str, reading: Reading) -> str:
    return f"{node} is {reading.level}, {reading.mem_available_bytes / GIB:.1f} GiB available"
