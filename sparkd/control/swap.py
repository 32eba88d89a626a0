"""Carries out the scheduler's decisions: shows why each model waits, evicts one for another, and brings it back if that was in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparkd import metrics
from sparkd.control.facts import ModelFacts
from sparkd.control.means import Means
from sparkd.control.record import Evicted, Record
from sparkd.control.scheduler import Schedule, make_schedule
from sparkd.control.wait_reasons import Wait
from sparkd.control.wishes import Wishes
from sparkd.state.nouns import ModelState, Want


class Swap:
    """Evicts models for others, and brings them back."""

    def __init__(self, means: Means, wishes: Wishes) -> None:
        self._registry = means.registry
        self._journal = means.journal
        self._cluster = means.cluster
        self._wishes = wishes
        self._clock = means.clock

    def schedule(self, models: Mapping[str, ModelFacts], bar: Wait | None = None) -> Schedule:
        """bar: see LoadGate.block_reason."""
        return make_schedule(models, self._cluster.reservations.book(), self._registry.ties, bar)

    def show(self, schedule: Schedule) -> None:
        """Note for each waiting model its queue position and reason. An eviction that no model needs any more is withdrawn."""
        for record in self._registry.records.values():
            place = schedule.queue.index(record.name) + 1 if record.name in schedule.queue else None
            record.turn = place if record.name in schedule.waits else None
            if place is not None:
                record.queue.ask(self._clock())
            before, record.wait = record.wait, schedule.waits.get(record.name)
            # Seconds that are left change with every look.
            if record.wait is not None and not record.wait.is_as(before):
                self._journal.say("waits", record.name, record.wait.message)
            if (
                record.evicted_for is not None
                and record.name not in schedule.victims
                and record.state in (ModelState.READY, ModelState.DRAINING)
            ):
                record.evicted_for = None

    def evict(self, record: Record, other: Record) -> None:
        """Evict the model for another one. A request for it waits behind that one meanwhile."""
        record.evicted_for = to = other.name
        record.takes_turns = other.takes_turns = True
        running = record.queue.in_flight
        requests = f"; its {running} request{'' if running == 1 else 's'} may finish first" if running else ""
        record.evicted = Evicted(to, record.desired.by)
        self._journal.say("swap", record.name, f"It makes room for {to}{requests}.", to=to)
        metrics.SWAPS.labels(record.name).inc()
        self._wishes.want(record.name, Want.STOPPED, "swap")

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
                self._wishes.want(record.name, Want.RUNNING, evicted.by)

    def is_used(self, name: str, since_s: float) -> bool:
        """Whether a companion of the model was used since then: they are unloaded after their ttl together, or not."""
        records = self._registry.records
        companions = [records[other] for other in self._registry.ties.companions_of(name) if other in records]
        return any(record.queue.in_flight or record.queue.waiters or record.queue.last_used_s > since_s for record in companions)
