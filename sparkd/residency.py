"""Owns for how long a model stays that another one would take the place of. Pure.

A model that has been idle for swap_idle_s makes room, and one in use after min_residency_s. Either waits until the budget covers its load,
because an evicted model is loaded again if it is still in demand. An eviction spends the load of the model that goes, and each second in
which no eviction's load runs gives EARNED_S of it back. The budget is KEPT_LOADS loads of the longest, so one client may change its mind at
once, also between a quick model and a slow one. Over time loading takes at most EARNED_S / (1 + EARNED_S), 43 %, whatever the demand: each
load is spent when its model goes. A budget that is empty, and loads that are shorter the second time, come on top once
(tests/bench/swap.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# How long a client that was told to come back may take: twice the longest Retry-After.
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
        """loading: whether a model for which another one was evicted loads; longest_s: the longest load that is known, 0 if none is."""
        back_s = 0.0 if loading else EARNED_S * (now_s - self.at_s)
        full_s = KEPT_LOADS * longest_s or float("inf")
        # A load that was long the first time only leaves no debt that its next ones could not make.
        return Budget(full_s, min(max(self.spent_s - back_s, 0.0), full_s), now_s)

    def spend(self, load_s: float) -> Budget:
        """load_s: of the model that goes."""
        return replace(self, spent_s=self.spent_s + load_s)

    def covers_at_s(self, load_s: float) -> float:
        """When it will cover such a load, if none runs meanwhile; -inf where it does."""
        lacking_s = load_s - (self.full_s - self.spent_s)
        return float("-inf") if lacking_s <= 0 else self.at_s + lacking_s / EARNED_S


@dataclass(frozen=True, slots=True)
class Stay:
    """ready_since_s, load_s: of a model that is there. least_s: min_residency_s; idle_at_s: when it will count as idle, inf while it has
    requests; a client that was told to come back has PROMISE_S to do so."""

    ready_since_s: float = float("-inf")
    load_s: float = 0.0
    least_s: float = 0.0
    idle_at_s: float = float("inf")
    budget: Budget = Budget()

    @property
    def until_s(self) -> float:
        """Until when it does not go for another one."""
        return max(min(self.idle_at_s, self.ready_since_s + self.least_s), self.budget.covers_at_s(self.load_s))
