"""Owns for how long a model stays that another one would take the place of. Pure.

A model that has been idle for swap_idle_s makes room, and one in use after min_residency_s. Either waits until the budget covers its load,
because an evicted model is loaded again if it is still in demand. Each second in which no eviction's load runs adds EARNED_S to the budget,
and each second of such a load takes one away. The budget keeps at most KEPT_LOADS loads. So one client may change its mind at once, and
over time loading takes at most EARNED_S / (1 + EARNED_S) of it, 44 %, whatever the demand. What the budget keeps comes on top once: with it
and three first loads of four times the length, an hour of the worst alternation is still below one half (tests/bench/swap.py).
"""

from __future__ import annotations

from dataclasses import dataclass

# How long a client that was told to come back may take: twice the longest Retry-After.
PROMISE_S = 120.0
EARNED_S = 0.8
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
    """Seconds of loading that evictions may still cost, as of at_s; inf until a load was measured."""

    left_s: float = float("inf")
    at_s: float = 0.0

    def passed(self, now_s: float, *, loading: bool, longest_s: float) -> Budget:
        """loading: whether a model for which another one was evicted loads; longest_s: the longest load of the models that are there, 0 if
        none is known."""
        change_s = (now_s - self.at_s) * (-1.0 if loading else EARNED_S)
        kept_s = KEPT_LOADS * longest_s or float("inf")
        return Budget(min(self.left_s + change_s, kept_s), now_s)

    def covers_at_s(self, load_s: float) -> float:
        """When it will cover such a load, if none runs meanwhile; -inf where it does."""
        return float("-inf") if self.left_s >= load_s else self.at_s + (load_s - self.left_s) / EARNED_S


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
