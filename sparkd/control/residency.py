"""Owns for how long a model stays that another one would take the place of. Pure.

A model that has been idle for swap_idle_s makes room, and one in use after min_residency_s. Either waits until the budget covers the loads
of all that would go together, because an evicted model is loaded again if it is still in demand. Each second of a load that evictions
caused (sparkd.control.load_costs) spends one second, also where the load fails, and each other second gives EARNED_S back. The budget is
KEPT_LOADS loads of the longest, so one client may change its mind at once, also between a quick model and a slow one. Over time such loads
take at most EARNED_S / (1 + EARNED_S), 43 %, whatever the demand. A budget that is empty, and loads that are shorter the second time, come
on top once (tests/bench/swap.py).
"""

from __future__ import annotations

from dataclasses import dataclass

# Seconds within which a client that was asked to retry must be back: twice the longest Retry-After.
PROMISE_S = 120.0
EARNED_S = 0.75
KEPT_LOADS = 2


@dataclass(frozen=True, slots=True)
class Evicted:
    """A stay that ended for the sake of another model. to: that one; by: whose wish kept it before; owed: whether it comes back where the
    other one's load ends without being READY."""

    to: str
    by: str
    owed: bool = True


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of loading that evictions may cost. full_s: inf until a load was measured; spent_s: as of at_s."""

    full_s: float = float("inf")
    spent_s: float = 0.0
    at_s: float = 0.0

    def passed(self, now_s: float, *, loading: bool, longest_s: float) -> Budget:
        """loading: whether a load that evictions caused has run since at_s; longest_s: the longest load that is known, 0 if none is."""
        seconds = max(now_s - self.at_s, 0.0)
        spent_s = self.spent_s + (seconds if loading else -EARNED_S * seconds)
        full_s = KEPT_LOADS * longest_s or float("inf")
        # Two loads may begin at the end of a budget. A larger debt is of a load that was long the first time only.
        return Budget(full_s, min(max(spent_s, 0.0), 2 * full_s), self.at_s + seconds)

    def covers_at_s(self, loads_s: float) -> float:
        """When it will cover loads of so many seconds together, or be whole, if none runs meanwhile; -inf where it does or is."""
        lacking_s = min(loads_s, self.full_s) - (self.full_s - self.spent_s)
        return float("-inf") if lacking_s <= 0 else self.at_s + lacking_s / EARNED_S


@dataclass(frozen=True, slots=True)
class Stay:
    """ready_since_s, load_s: of a loaded model. least_s: min_residency_s; idle_at_s: when the model will count as idle, inf while it has
    requests. A client that was asked to retry has PROMISE_S to do so."""

    ready_since_s: float = float("-inf")
    load_s: float = 0.0
    least_s: float = 0.0
    idle_at_s: float = float("inf")

    @property
    def until_s(self) -> float:
        """The time before which the model may not be evicted, whatever the budget."""
        return min(self.idle_at_s, self.ready_since_s + self.least_s)
