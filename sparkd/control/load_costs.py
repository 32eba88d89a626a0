"""Owns which loads evictions have caused, how long each model's last one took, and the budget that they spend. Never evicts anything.

At its start a daemon works out the costs of earlier evictions from the journal's events, so a restart does not refill the budget.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from sparkd.control.residency import Budget
from sparkd.state.nouns import STARTING, Event, ModelState, ages_s


class Loads:
    """Times are seconds of one clock, from now_s on."""

    def __init__(self, now_s: float) -> None:
        self.budget = Budget(at_s=now_s)
        self._seconds: dict[str, float] = {}
        # Models that were evicted or had another one evicted, and have not been loaded since; those that load now, and since when.
        self._caused: set[str] = set()
        self._loading: dict[str, float] = {}

    def evict(self, model: str, to: str) -> None:
        """Note that `model` is evicted for `to`: the next load of each counts as caused by this eviction."""
        self._caused |= {model, to}

    def stand(self, model: str, state: ModelState) -> None:
        """Note the state of a model from now on."""
        if state in STARTING:
            self._loading.setdefault(model, self.budget.at_s)
        elif self._loading.pop(model, None) is not None and state is ModelState.READY:
            self._caused.discard(model)

    def end(self, model: str, seconds: float, state: ModelState) -> None:
        """Note the seconds that a load took. A failed load may have ended early, so the longer duration of the last load stays."""
        self._seconds[model] = seconds if state is ModelState.READY else max(seconds, self._seconds.get(model, 0.0))

    def settle(self) -> None:
        """Forget the loads in progress: another daemon has started and will report them again."""
        self._loading.clear()

    def advance(self, now_s: float, pinned: Container[str] = ()) -> None:
        """Spend or refill the budget for the time that has passed. pinned: models that are never evicted; their loads cost nothing."""
        seconds = {model: now_s - since_s for model, since_s in self._loading.items()}
        for model, last_s in self._seconds.items():
            seconds[model] = max(seconds.get(model, 0.0), last_s)
        longest_s = max((seconds[model] for model in seconds if model not in pinned), default=0.0)
        self.budget = self.budget.passed(now_s, loading=bool(self._caused & self._loading.keys()), longest_s=longest_s)


def recalled(events: Sequence[Event], now_s: float, wall_s: float) -> Loads:
    """The loads that the events tell of, oldest first. now_s, wall_s: this moment, of the clock of the answer and of the events' clock."""
    begun_s: dict[str, float] = {}
    ages = ages_s(events, wall_s)
    loads = Loads(now_s - max(ages, default=0.0))
    for event, age_s in zip(events, ages, strict=True):
        at_s = now_s - age_s
        loads.advance(at_s)
        if event.kind == "settled":
            loads.settle()
        elif event.kind == "swap" and event.model is not None:
            loads.evict(event.model, str(event.data.get("to", event.model)))
        elif event.kind == "state" and event.model is not None and event.data.get("new") in ModelState.__members__:
            state = ModelState(event.data["new"])
            loads.stand(event.model, state)
            if state is ModelState.PLANNED:
                begun_s[event.model] = at_s
            elif state in (ModelState.READY, ModelState.FAILED) and event.model in begun_s:
                loads.end(event.model, at_s - begun_s.pop(event.model), state)
    loads.advance(now_s)
    return loads
