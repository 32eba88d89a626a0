"""Whether readings of a process's memory grow with what it did, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

# Growth is compared from one eighth of the readings to the next. Two readings in each are the fewest: an allocator takes 0.1 MiB at a time.
GROUPS, FEWEST = 8, 16
# Student's t for 95 % with the 6 degrees of freedom of 7 differences.
ERRORS = 2.45


class Verdict(StrEnum):
    OK = "ok"
    UNSURE = "unsure"
    MISSED = "MISSED"


@dataclass(frozen=True, slots=True)
class Trend:
    """The slope of a least-squares line per 1,000, its standard error, and the number of readings."""

    slope: float
    error: float
    readings: int

    @property
    def around(self) -> float:
        """In 95 of 100 cases the slope is within so much."""
        return ERRORS * self.error

    def verdict(self, bar: float) -> Verdict:
        """MISSED where the slope is surely above the bar, ok where it is surely not."""
        if self.slope - self.around > bar:
            return Verdict.MISSED
        return Verdict.OK if self.slope + self.around <= bar else Verdict.UNSURE


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """points: (how many were done so far, KiB), at equal steps. With fewer than FEWEST the error is infinite.

    A heap grows by steps that stay, so that a reading is hardly better known for the one before it, and the line's textbook error is much
    too small. The growth is independent: the error is that of the mean growth from one group of readings to the next.
    """
    count = len(points)
    if count < FEWEST:
        return Trend(_slope(points), math.inf, count)
    starts = [number * count // GROUPS for number in range(GROUPS + 1)]
    groups = [points[first:end] for first, end in pairwise(starts)]
    means = [(statistics.fmean(x for x, _ in group), statistics.fmean(kib for _, kib in group)) for group in groups]
    growths = [1000 * (kib - kib_before) / (x - x_before) for (x_before, kib_before), (x, kib) in pairwise(means)]
    return Trend(_slope(points), statistics.stdev(growths) / math.sqrt(len(growths)), count)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Per 1,000."""
    xs, kib = zip(*points, strict=True)
    return 1000 * statistics.linear_regression(xs, kib).slope if len(set(xs)) > 1 else 0.0
