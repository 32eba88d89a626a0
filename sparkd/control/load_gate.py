"""Decides on which nodes a load may begin now, evicts an idle model where memory is short, and sends away clients that would wait in vain.

The hard end, a kill, is the guard's own, on the node (workers.guard.policy).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.context import Context
from sparkd.control.desired_states import DesiredStates
from sparkd.control.evictions import idle_victim
from sparkd.control.lease import LeaseQueue
from sparkd.control.memory_release import MemoryRelease
from sparkd.control.record import Record
from sparkd.control.views import holders
from sparkd.errors import Unavailable
from sparkd.state.model_state import AWAY
from sparkd.state.nouns import Reading, Wait, Want
from sparkd.units import GIB

# Reasons why nothing is loaded at all; others are those of conditions.
MEMORY_SHORT, RAY_STARTS, AGENT_SILENT = "MemoryShort", "RayStarting", "AgentSilent"
RETRY_AFTER_S = 30
# Memory takes up to a minute to come back from an engine that ended: the next one is evicted only if that was not enough.
EVICT_EVERY_S = 60.0
# Other nodes wait that long for a node that is short: an engine that has just ended releases its memory. Then loads begin on them.
CORDON_AFTER_S = 90.0


@dataclass(frozen=True, slots=True)
class Shortage:
    """A node that is short of memory.

    level: the guard's.
    message: a clause with the node's name.
    """

    level: str
    since_s: float
    message: str


class LoadGate:
    """Updated once in each tick.

    allows: whether a load may begin somewhere.
    cordoned: the nodes on which none may.
    release: the gate for memory of engines that ended.
    """

    def __init__(self, context: Context, queue: LeaseQueue, desired: DesiredStates) -> None:
        self._registry = context.registry
        self._journal = context.journal
        self._queue = queue
        self._desired = desired
        self._clock = context.clock
        self.release = MemoryRelease(context.journal, context.clock, lambda total: context.registry.config.memory.limits(total))
        self.cordoned: frozenset[str] = frozenset()
        self.allows = True
        # By node.
        self._short: dict[str, Shortage] = {}
        self._evicted_at_s = float("-inf")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return (*self._shortages, *self.release.conditions)

    @property
    def _shortages(self) -> tuple[Condition, ...]:
        if self._short and not self.allows:
            return (Condition(MEMORY_SHORT, f"{self._shortage}; no load begins."),)
        return tuple(Condition(MEMORY_SHORT, f"{short.message}; no load begins there.", node) for node, short in self._short.items())

    @property
    def _shortage(self) -> str:
        return "; ".join(short.message for short in self._short.values())

    def look(self, observation: Observation, records: Mapping[str, Record]) -> None:
        if observation.ranks is None:
            return  # no node could be observed: closed nodes stay closed, and waiting clients receive no message
        readings = observation.readings
        short = {node: reading for node, reading in readings.items() if reading.level != "ok"}
        self._note_shortage(short, observation.unseen)
        self._evict(short, records)
        self.release.look(observation)
        now_s = self._clock()
        self.cordoned = frozenset(node for node, shortage in self._short.items() if now_s - shortage.since_s >= CORDON_AFTER_S)
        somewhere = not self.cordoned or bool(readings.keys() - self.cordoned)
        is_news = not short.keys() <= self.cordoned
        self.allows = somewhere and not is_news
        # An open node that misses a look may be back with the next one.
        if is_news or not (somewhere or observation.unseen - self.cordoned):
            for record in records.values():
                if record.queue.waiters and record.state in AWAY and not _may_live(record, observation):
                    self._send_away(record)

    def block_reason(self, observation: Observation) -> Wait | None:
        """Why no model can load now; None where one can."""
        if not observation.connected:
            trouble = observation.trouble
            if trouble is None:
                return Wait(AGENT_SILENT, "It waits for this node's agent to answer.")
            return Wait(trouble.reason, "It waits for Ray to start." if trouble.reason == RAY_STARTS else trouble.message)
        if not self.allows:
            return Wait(MEMORY_SHORT, f"{self._shortage}; no load begins.")
        return None

    def _note_shortage(self, short: Mapping[str, Reading], unseen: Collection[str]) -> None:
        """Write events for the nodes whose level changed."""
        # An agent that is short of memory may miss a look: its shortage goes on.
        before, self._short = self._short, {node: shortage for node, shortage in self._short.items() if node in unseen}
        for node, reading in short.items():
            message = f"{node} is {reading.level}, {reading.mem_available_bytes / GIB:.1f} GiB available"
            earlier = before.get(node)
            if earlier is None or earlier.level != reading.level:
                self._journal.say("memory", None, f"{message}.", node=node, level=reading.level)
            self._short[node] = Shortage(reading.level, earlier.since_s if earlier else self._clock(), message)
        for node in before.keys() - self._short.keys():
            self._journal.say("memory", None, f"{node} has memory again.", node=node, level="ok")

    def _evict(self, short: Mapping[str, Reading], records: Mapping[str, Record]) -> None:
        pressed, now_s = {node for node, reading in short.items() if reading.level in ("pressed", "critical")}, self._clock()
        if now_s - self._evicted_at_s < EVICT_EVERY_S or (victim := idle_victim(records.values(), pressed, now_s)) is None:
            return
        self._evicted_at_s = now_s
        metrics.GUARD_ACTIONS.labels("evict", victim.name).inc()
        node = next(node for node in victim.attempt.nodes if node in pressed)
        reason = short[node].level_why or self._short[node].message
        self._journal.say("evict", victim.name, f"It was idle and memory is short, so sparkd unloads it. {reason}")
        self._desired.want(victim.name, Want.STOPPED, "guard")

    def _send_away(self, record: Record) -> None:
        held_by = holders(self._registry, record, self._clock())
        named = [f"{holder['model'] or 'another model'} ({holder['memory_gib']:g} GiB)" for holder in held_by]
        held = f" Memory is held by {', '.join(named)}." if named else ""
        metrics.GUARD_ACTIONS.labels("shed", record.name).inc(len(record.queue.waiters))
        problem = f"{record.name} cannot be loaded now: {self._shortage}.{held}"
        self._queue.turn_away(record, Unavailable(problem, retry_after_s=RETRY_AFTER_S, held_by=held_by), keeps_place=True)
        if record.desired.by == "request":
            self._desired.want(record.name, Want.STOPPED, "request")


def _may_live(record: Record, observation: Observation) -> bool:
    """Whether the model has an engine, or may have one on an unreachable node. Its clients wait for that engine and not for a load, and
    sparkd would end it if it withdrew their request."""
    return bool(observation.unseen.intersection(record.attempt.nodes)) or any(
        fact.alive and fact.handle.model == record.name for fact in observation.ranks or ()
    )
