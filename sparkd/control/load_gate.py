"""Decides on which nodes a load may begin now, evicts an idle model where memory is short, and sends away clients that would wait in vain.

The hard end, a kill, is the guard's own, on the node (workers.guard.policy).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.journal import Journal
from sparkd.control.lease import LeaseQueue
from sparkd.control.memory_release import MEMORY_RETURNS, MemoryRelease, readings_of
from sparkd.control.record import Record
from sparkd.control.wait_reasons import AGENT_SILENT, LEFT_BEHIND, MEMORY, RAY_STARTS, Wait
from sparkd.control.wishes import Wishes
from sparkd.errors import Unavailable
from sparkd.state.nouns import ModelState, RankFact, Reading, Want
from sparkd.units import GIB
from workers.host.memory_limits import MemoryLimits

MEMORY_SHORT = "MemoryShort"
RETRY_AFTER_S = 30
# Memory takes up to a minute to come back from an engine that ended: the next one is evicted only if that was not enough.
EVICT_EVERY_S = 60.0
IDLE_S = 30.0
# Other nodes wait that long for a node that is short: an engine that has just ended releases its memory. Then loads begin on them.
SHUT_AFTER_S = 90.0


class LoadGate:
    """Updated once in each tick.

    allows: whether a load may begin somewhere.
    shut: the nodes on which none may.
    release: the gate for memory of engines that ended.
    holders: the models that hold memory that a model lacks, as rows of Unavailable.held_by.
    limits: the guard's, of a node with so many bytes.
    """

    def __init__(
        self,
        journal: Journal,
        queue: LeaseQueue,
        wishes: Wishes,
        clock: Callable[[], float],
        holders: Callable[[Record, float], list[dict[str, Any]]],
        limits: Callable[[int], MemoryLimits] = MemoryLimits.of,
    ) -> None:
        self._journal = journal
        self._queue = queue
        self._wishes = wishes
        self._clock = clock
        self._holders = holders
        self.release = MemoryRelease(journal, clock, limits)
        self.shut: frozenset[str] = frozenset()
        self.allows = True
        # By node that is short of memory: its level, since when, and a clause about it.
        self._levels: dict[str, str] = {}
        self._short_since_s: dict[str, float] = {}
        self._shortages: dict[str, str] = {}
        self._evicted_at_s = float("-inf")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        if self._shortages and not self.allows:
            short: tuple[Condition, ...] = (Condition(MEMORY_SHORT, f"{'; '.join(self._shortages.values())}; no load begins."),)
        else:
            short = tuple(Condition(MEMORY_SHORT, f"{clause}; no load begins there.", node) for node, clause in self._shortages.items())
        return (*short, *self.release.conditions)

    def look(self, observation: Observation, records: Mapping[str, Record]) -> None:
        if observation.ranks is None:
            return  # no node could be observed: closed nodes stay closed, and waiting clients receive no message
        readings = readings_of(observation)
        short = {node: reading for node, reading in readings.items() if reading.level != "ok"}
        lasting = self._note_shortage(short, observation.unseen)
        self._evict(short, records)
        self.release.look(observation)
        self.shut = lasting | self.release.shut
        somewhere = observation.has_beside(self.shut)
        is_news = not short.keys() <= lasting
        self.allows = somewhere and not is_news and bool(readings.keys() - lasting or not short)
        # An open node that misses a look may be back with the next one.
        if is_news or not (somewhere or observation.unseen - self.shut):
            for record in records.values():
                if record.queue.waiters and record.state in (ModelState.STOPPED, ModelState.FAILED) and not _may_live(record, observation):
                    self._send_away(record)

    def block_reason(self, observation: Observation, strangers: Collection[RankFact]) -> Wait | None:
        """Why no model can load now; None where one can. strangers: ranks of models that are not configured."""
        if not observation.connected:
            trouble = observation.trouble
            if trouble is None:
                return Wait(AGENT_SILENT, "It waits for this node's agent to answer.")
            return Wait(trouble.reason, "It waits for Ray to start." if trouble.reason == RAY_STARTS else trouble.message)
        if not self.allows:
            blocks = [condition for condition in self.conditions if condition.reason != MEMORY_RETURNS]
            if not blocks:
                return Wait(MEMORY, "It waits for memory of a node.")
            return Wait(blocks[0].reason, " ".join(block.message for block in blocks))
        if any(fact.alive for fact in strangers):
            return Wait(LEFT_BEHIND, "It waits for ranks of an earlier daemon to end.")
        return None

    def _note_shortage(self, short: Mapping[str, Reading], unseen: Collection[str]) -> frozenset[str]:
        """Write events for the nodes whose level changed. Returns those that have been short for SHUT_AFTER_S."""
        now_s = self._clock()
        # An agent that is short of memory may miss a look: the time goes on.
        earlier = {node: since_s for node, since_s in self._short_since_s.items() if node in short or node in unseen}
        self._short_since_s = dict.fromkeys(short, now_s) | earlier
        self._shortages = {
            node: f"{node} is {reading.level}, {reading.mem_available_bytes / GIB:.1f} GiB available" for node, reading in short.items()
        }
        for node, reading in short.items():
            if self._levels.get(node) != reading.level:
                self._journal.say("memory", None, f"{self._shortages[node]}.", node=node, level=reading.level)
        for node in self._levels.keys() - short.keys() - set(unseen):
            self._journal.say("memory", None, f"{node} has memory again.", node=node, level="ok")
        hidden = {node: level for node, level in self._levels.items() if node in unseen}
        self._levels = hidden | {node: reading.level for node, reading in short.items()}
        return frozenset(node for node, since_s in self._short_since_s.items() if now_s - since_s >= SHUT_AFTER_S)

    def _evict(self, short: Mapping[str, Reading], records: Mapping[str, Record]) -> None:
        pressed, now_s = {node for node, reading in short.items() if reading.level in ("pressed", "critical")}, self._clock()
        if now_s - self._evicted_at_s < EVICT_EVERY_S or (victim := evictable(records.values(), pressed, now_s)) is None:
            return
        self._evicted_at_s = now_s
        metrics.GUARD_ACTIONS.labels("evict", victim.name).inc()
        node = next(node for node in victim.attempt.nodes if node in pressed)
        reason = short[node].level_why or self._shortages[node]
        self._journal.say("evict", victim.name, f"It was idle and memory is short, so sparkd unloads it. {reason}")
        self._wishes.want(victim.name, Want.STOPPED, "guard")

    def _send_away(self, record: Record) -> None:
        held_by = self._holders(record, self._clock())
        named = [f"{holder['model'] or 'another model'} ({holder['memory_gib']:g} GiB)" for holder in held_by]
        held = f" Memory is held by {', '.join(named)}." if named else ""
        shortage = "; ".join((*self._shortages.values(), *self.release.shortages.values()))
        metrics.GUARD_ACTIONS.labels("shed", record.name).inc(len(record.queue.waiters))
        problem = f"{record.name} cannot be loaded now: {shortage}.{held}"
        self._queue.turn_away(record, Unavailable(problem, retry_after_s=RETRY_AFTER_S, held_by=held_by), keeps_place=True)
        if record.desired.by == "request":
            self._wishes.want(record.name, Want.STOPPED, "request")


def evictable(records: Iterable[Record], nodes: set[str], now_s: float) -> Record | None:
    """The idle model with a rank on one of these nodes that is evicted first: unpinned, of the lowest priority, idle for longest."""
    idle = [
        record
        for record in records
        if record.state is ModelState.READY
        and nodes.intersection(record.attempt.nodes)
        and not (record.queue.in_flight or record.queue.waiting or record.pinned)
        and now_s - record.queue.last_used_s >= IDLE_S
    ]
    return min(idle, key=lambda record: (record.priority, record.queue.last_used_s, record.name), default=None)


def _may_live(record: Record, observation: Observation) -> bool:
    """Whether the model has an engine, or may have one on an unreachable node. Its clients wait for that engine and not for a load, and
    sparkd would end it if it withdrew their request."""
    return bool(observation.unseen.intersection(record.attempt.nodes)) or any(
        fact.alive and fact.handle.model == record.name for fact in observation.ranks or ()
    )
