"""The slope bench's verdicts on readings: a leak, the allocator's noise, and too few of either."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.bench.trend import FEWEST, Verdict, trend

BAR_KIB, PER_STEP, START_KIB = 1.0, 6000, 92_000.0
# 2 KiB of each of 1,000 clients that left among 6,000 requests, as it was found once; KiB of a step.
LEAK_KIB = 2.0 * 1000


def readings(grown_kib: Callable[[int, random.Random], float], count: int = 60) -> list[tuple[float, float]]:
    """grown_kib of a step, and of noise."""
    noise = random.Random(5)
    return [(step * PER_STEP, START_KIB + grown_kib(step, noise)) for step in range(count)]


def judged(points: list[tuple[float, float]]) -> Verdict:
    return trend(points).verdict(BAR_KIB)


@pytest.mark.parametrize(
    ("verdict", "grown_kib"),
    [
        pytest.param(Verdict.OK, lambda _step, _noise: 0.0, id="flat"),
        pytest.param(Verdict.OK, lambda _step, noise: noise.uniform(-60, 60), id="noise of 0.1 MiB"),
        pytest.param(Verdict.OK, lambda step, noise: 0.2 * 6 * step + noise.uniform(-60, 60), id="0.2 KiB per 1000, in noise"),
        pytest.param(Verdict.UNSURE, lambda step, _noise: 512.0 * (step >= 30), id="one step of half a MiB"),
        pytest.param(Verdict.UNSURE, lambda step, noise: 6 * step + noise.uniform(-60, 60), id="just the bar"),
        pytest.param(Verdict.MISSED, lambda step, _noise: LEAK_KIB * step, id="the leak"),
        pytest.param(Verdict.MISSED, lambda step, noise: LEAK_KIB / 100 * step + noise.uniform(-60, 60), id="a hundredth of it, in noise"),
        pytest.param(Verdict.MISSED, lambda step, _noise: LEAK_KIB * step // 8192 * 8192, id="the leak, by steps of 8 MiB"),
        pytest.param(Verdict.MISSED, lambda step, _noise: LEAK_KIB * step * step / 60, id="a leak that grows"),
    ],
)
def test_a_verdict_says_what_the_readings_bear(verdict: Verdict, grown_kib: Callable[[int, random.Random], float]) -> None:
    assert judged(readings(grown_kib)) is verdict


def test_three_readings_a_tenth_of_a_mib_apart_are_no_leak() -> None:
    """The bench once called this a leak of 4.94 KiB for each 1000."""
    points = [(0.0, 92_364.8), (10_000.0, 92_467.2), (20_000.0, 92_467.2)]
    line = trend(points)
    assert line.slope > BAR_KIB
    assert line.verdict(BAR_KIB) is Verdict.UNSURE


@pytest.mark.parametrize("count", [1, 2, FEWEST - 1])
def test_few_readings_decide_nothing(count: int) -> None:
    assert judged(readings(lambda step, _noise: LEAK_KIB * step, count)) is Verdict.UNSURE


def test_the_error_is_that_of_the_growth_between_the_eighths() -> None:
    """16 readings, two in each eighth, 1000 apart; every second eighth is 1 KiB higher than the line."""
    points = [(1000.0 * x, 5.0 * x + x // 2 % 2) for x in range(16)]
    line = trend(points)
    growths = [5.0 + sign * 0.5 for sign in (1, -1, 1, -1, 1, -1, 1)]
    assert line.slope == pytest.approx(1000 * np.polyfit(*zip(*points, strict=True), 1)[0])
    assert line.error == pytest.approx(np.std(growths, ddof=1) / math.sqrt(7))
