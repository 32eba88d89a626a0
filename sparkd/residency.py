"""Owns for how long a model stays that another one would take the place of. Pure.

An idle model makes room at once. A model in use stays for min_residency_s, and at least as long as its load took. Models that evict
each other in turns are always in use by somebody, however short each use is. So a model that was evicted comes back before that only once
two stays, its own last one and that of the model in its place, are together as long as their two loads. Over all turns each stay counts
twice, as the last one of one model and as the present one of another, and so does each load: at most half of the time is spent on loading.
"""

from __future__ import annotations

from dataclasses import dataclass

# How long a client that was told to come back may take: twice the longest Retry-After.
PROMISE_S = 120.0


@dataclass(frozen=True, slots=True)
class Evicted:
    """A stay that ended for the sake of another model. to: that one; by: whose wish kept it before; owed: whether it comes back where the
    other one's load ends without being READY."""

    to: str
    by: str
    stayed_s: float
    load_s: float
    owed: bool = True


@dataclass(frozen=True, slots=True)
class Stay:
    """ready_since_s, load_s: of a model that is there. least_s: min_residency_s; idle_at_s: when it will count as idle, inf while it has
    requests; a client that was told to come back has PROMISE_S to do so."""

    ready_since_s: float = float("-inf")
    load_s: float = 0.0
    least_s: float = 0.0
    idle_at_s: float = float("inf")

    def until_s(self, evicted: Evicted | None) -> float:
        """Until when it does not go for another one. evicted: how that one's own last stay ended, None where it was not evicted."""
        in_use_s = self.ready_since_s + max(self.least_s, self.load_s)
        alternates_s = float("-inf") if evicted is None else self.ready_since_s + self.load_s + evicted.load_s - evicted.stayed_s
        return min(in_use_s, max(self.idle_at_s, alternates_s))
