"""What the control plane does so that several models share the nodes: whose turn it is, who goes for whom, and what they are told.

Who is to go is sparkd.turns' decision. Never ends a model itself: it wishes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from sparkd import metrics
from sparkd.config_groups import Ties
from sparkd.facts import ModelFacts
from sparkd.gate import Gate
from sparkd.ledger import Ledger
from sparkd.record import Record
from sparkd.residency import Budget, Evicted
from sparkd.room import Book
from sparkd.sight import Observation
from sparkd.state import STARTING, ModelState, RankFact, Want
from sparkd.turns import Turn, turn


def bar_of(observation: Observation, gate: Gate, strangers: Collection[RankFact]) -> str | None:
    """Why no load can begin now, whichever model is first; None where one can. strangers: ranks of models that nobody knows."""
    if not observation.connected:
        kind, _, reason = (observation.trouble or "").partition(": ")
        return "It waits for Ray to start." if kind == "RayStarting" else reason or "It waits for this node's agent to answer."
    if not gate.allows:
        told = [condition.partition(": ") for condition in gate.conditions if condition]
        return " ".join(why for kind, _, why in told if kind != "MemoryReturns") or "It waits for memory of a node."
    if any(fact.alive for fact in strangers):
        return "It waits for what an earlier daemon left to end."
    return None


class Swap:
    """`book()` is the cluster's, `ties()` the configuration's, `want(name, Want, by)` the supervisor's."""

    def __init__(
        self,
        ledger: Ledger,
        book: Callable[[], Book],
        ties: Callable[[], Ties],
        want: Callable[[str, Want, str], Any],
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._book = book
        self._ties = ties
        self._want = want
        self._clock = clock
        self._told: dict[str, str] = {}
        self.budget = Budget(at_s=clock())

    def turn(self, models: Mapping[str, ModelFacts], bar: str | None = None) -> Turn:
        """bar: as bar_of says it."""
        return turn(models, self._book(), self._ties(), self._clock(), bar)

    def show(self, found: Turn, records: Mapping[str, Record]) -> None:
        """Who waits is told why and at which place; who would go for nobody any more need not."""
        for record in records.values():
            place = found.line.index(record.name) + 1 if record.name in found.line else None
            record.turn = place if record.name in found.told else None
            if place is not None and record.asked_since_s is None:
                record.asked_since_s = self._clock()
            if record.state is ModelState.STOPPED or (record.state is ModelState.FAILED and record.name in found.told):
                record.message = found.told.get(record.name)
            if record.yields_to is not None and record.name not in found.leave and record.state in (ModelState.READY, ModelState.DRAINING):
                record.yields_to = None
        # Seconds that are left change with every look.
        news = {name: why for name, why in found.told.items() if _gist(self._told.get(name)) != _gist(why)}
        for name, why in news.items():
            self._ledger.say("waits", name, why)
        self._told = dict(found.told)

    def leave(self, record: Record, to: str) -> None:
        """It goes for the sake of `to`. Who asks for it meanwhile waits behind that one."""
        record.yields_to = to
        requests = f"; its {record.in_flight} requests may finish first" if record.in_flight else ""
        record.evicted = Evicted(to, record.desired.by)
        self.budget = self.budget.spend(record.load_s or 0.0)
        self._ledger.say("swap", record.name, f"It makes room for {to}{requests}.", to=to)
        metrics.SWAPS.labels(record.name).inc()
        self._want(record.name, Want.STOPPED, "swap")

    def count(self, records: Mapping[str, Record]) -> None:
        """Give the budget back what time brings: nothing while a model loads for which another one was evicted."""
        evictors = {record.evicted.to for record in records.values() if record.evicted is not None}
        loading = any(record.name in evictors and record.state in STARTING for record in records.values())
        may_go = (record for record in records.values() if record.spec is None or not record.spec.pin)
        longest_s = max((record.load_s or 0.0 for record in may_go), default=0.0)
        self.budget = self.budget.passed(self._clock(), loading=loading, longest_s=longest_s)

    def settle(self, records: Mapping[str, Record]) -> None:
        """Bring an evicted model back where the load for which it went was cancelled, or has failed and no client waits for it any more."""
        for record in records.values():
            evicted = record.evicted
            if evicted is None:
                continue
            other = records.get(evicted.to)
            ended = other is None or other.desired.want is Want.STOPPED or (other.state is ModelState.FAILED and not other.claims)
            owed = evicted.owed and record.desired.want is Want.STOPPED and record.desired.by == "swap"
            if ended and owed:
                record.evicted = None
                self._ledger.say("swap", record.name, f"It is loaded again: {evicted.to}, for which it was evicted, is not.", to=evicted.to)
                self._want(record.name, Want.RUNNING, evicted.by)
            elif ended or (other is not None and other.state is ModelState.READY):
                record.evicted = None
            else:
                record.evicted = replace(evicted, owed=owed)

    def follow(self, name: str, want: Want, by: str, records: Mapping[str, Record]) -> None:
        """The wish for one model is one for those that accompany it, too. An operator's unload ends them all; every other end only those
        that were wished as companions and that nobody uses."""
        for other in sorted(self._ties().companions_of(name)):
            record = records.get(other)
            if record is None or record.desired.want is want:
                continue
            unused = record.desired.by == "group" and not (record.in_flight or record.waiters)
            if want is Want.RUNNING or by == "admin" or unused:
                self._want(other, want, "group")

    def is_used(self, name: str, records: Mapping[str, Record], since_s: float) -> bool:
        """Whether a companion of it was used since then: they go after their ttl together, or not."""
        found = [records[other] for other in self._ties().companions_of(name) if other in records]
        return any(one.in_flight or one.waiters or one.last_used_s > since_s for one in found)


def _gist(why: str | None) -> str:
    return "" if why is None else "".join(letter for letter in why if not letter.isdigit())
