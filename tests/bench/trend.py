"""Whether readings of a process's memory grow with what it did, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

# Below this many readings nothing is said: an allocator takes and gives back 0.1 MiB at a time.
FEWEST, ERRORS = 10, 2.0


class Verdict(StrEnum):
    OK = "ok"
    UNSURE = "unsure"
    MISSED = "MISSED"


@dataclass(frozen=True, slots=True)
class Trend:
    """A least-squares line: its slope per 1,000 and the slope's standard error. effective: how many independent readings they are worth."""

    slope: float
    error: float
    readings: int
    effective: float

    def verdict(self, bar: float) -> Verdict:
        """MISSED where the slope is above the bar by more than two errors, ok where it is below by as much."""
        if self.readings < FEWEST:
            return Verdict.UNSURE
        if self.slope - ERRORS * self.error > bar:
            return Verdict.MISSED
        return Verdict.OK if self.slope + ERRORS * self.error <= bar else Verdict.UNSURE


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """points: (how many were done so far, KiB).

    A heap that has grown stays so for many readings, which makes them fewer than they look. With r, the correlation of what the line leaves
    of one reading and of the next, n of them are worth n (1 - r) / (1 + r) (Santer et al. 2000, doi:10.1029/1999JD901105, equation 6).
    At least three, so that growth along a curve has an error, too.
    """
    count = len(points)
    mean_x, mean_y = (sum(column) / count for column in zip(*points, strict=True))
    across = sum((x - mean_x) ** 2 for x, _ in points)
    if not across or count < 3:
        return Trend(0.0, math.inf, count, 0.0)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / across
    rests = [y - mean_y - slope * (x - mean_x) for x, y in points]
    squares = sum(rest * rest for rest in rests)
    again = sum(first * second for first, second in pairwise(rests))
    alike = max(0.0, again / squares) if squares else 0.0
    effective = max(3.0, count * (1 - alike) / (1 + alike))
    return Trend(1000 * slope, 1000 * math.sqrt(squares / (effective - 2) / across), count, effective)
