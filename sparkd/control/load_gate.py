"""Owns on which nodes a load may begin now: what pressure and release say, put together. A model that waits where none is open is sent
away.

Never looks at a node itself, never decides what is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sparkd import metrics
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.control.journal import Ledger
from sparkd.control.lease import LeaseQueue
from sparkd.control.memory_release import Release
from sparkd.control.pressure import Pressure
from sparkd.control.record import Record
from sparkd.control.wishes import Wishes
from sparkd.errors import Unavailable
from sparkd.state.nouns import ModelState, Want
from workers.host.memory_limits import MemoryLimits

RETRY_AFTER_S = 30


class Gate:
    """Asked once in each tick. `allows` says whether a load may begin somewhere, `shut` on which nodes none may. room_gib: see Release.

    limits: the guard's, of a node with so many bytes.
    """

    def __init__(
        self,
        ledger: Ledger,
        door: LeaseQueue,
        wishes: Wishes,
        clock: Callable[[], float],
        holders: Callable[[Record, float], list[dict[str, Any]]],
        limits: Callable[[int], MemoryLimits] = MemoryLimits.of,
    ) -> None:
        self.pressure = Pressure(ledger, wishes, clock)
        self.release = Release(ledger, clock, limits)
        self._door = door
        self._wishes = wishes
        self._clock = clock
        self._holders = holders
        self.shut: frozenset[str] = frozenset()
        self.allows = True

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return (*self.pressure.conditions, *self.release.conditions)

    @property
    def room_gib(self) -> dict[str, float]:
        return self.release.room_gib

    def look(self, observation: Observation, records: Mapping[str, Record]) -> None:
        if observation.ranks is None:
            return  # no node could be observed: closed nodes stay closed, and waiting clients receive no message
        self.pressure.relieve(observation, records)
        self.release.look(observation)
        self.shut = self.pressure.shut | self.release.shut
        somewhere = observation.has_beside(self.shut)
        self.allows = self.pressure.allows and somewhere
        # An open node that misses a look may be back with the next one.
        if self.pressure.is_news or not (somewhere or observation.unseen - self.shut):
            for record in records.values():
                if record.queue.waiters and record.state in (ModelState.STOPPED, ModelState.FAILED) and not _may_live(record, observation):
                    self._shed(record)

    def _shed(self, record: Record) -> None:
        held_by = self._holders(record, self._clock())
        named = [f"{holder['model'] or 'another model'} ({holder['memory_gib']:g} GiB)" for holder in held_by]
        held = f" Memory is held by {', '.join(named)}." if named else ""
        shortage = "; ".join((*self.pressure.told.values(), *self.release.told.values()))
        metrics.GUARD_ACTIONS.labels("shed", record.name).inc(len(record.queue.waiters))
        problem = f"{record.name} cannot be loaded now: {shortage}.{held}"
        self._door.turn_away(record, Unavailable(problem, retry_after_s=RETRY_AFTER_S, held_by=held_by), keeps_place=True)
        if record.desired.by == "request":
            self._wishes.want(record.name, Want.STOPPED, "request")


def _may_live(record: Record, observation: Observation) -> bool:
    """Whether an engine of it is there, or may be on a node that is out of sight: who waits for that waits for no load, and a wish that is
    taken back would end it."""
    return bool(observation.unseen.intersection(record.attempt.nodes)) or any(
        fact.alive and fact.handle.model == record.name for fact in observation.ranks or ()
    )
