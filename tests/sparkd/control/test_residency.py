"""How long a model stays that another would take the place of, and what evictions may cost, as tables."""

from __future__ import annotations

import pytest

from sparkd.control.residency import EARNED_S, Budget, Stay

BUSY = float("inf")


@pytest.mark.parametrize(
    ("stay", "until_s"),
    [
        (Stay(), float("-inf")),
        (Stay(100, 154, 60, idle_at_s=BUSY), 160),
        (Stay(100, 154, 60, idle_at_s=105), 105),
        (Stay(100, 154, 60, idle_at_s=300), 160),
    ],
    ids=["it is not there", "in use", "idle", "used since its time was over"],
)
def test_until_when_it_stays(stay: Stay, until_s: float) -> None:
    assert stay.until_s == pytest.approx(until_s)


@pytest.mark.parametrize(
    ("budget", "loads_s", "at_s"),
    [
        (Budget(78, 39, 100), 39, float("-inf")),
        (Budget(78, 79, 100), 39, 100 + 40 / EARNED_S),
        (Budget(78, 78, 100), 0, float("-inf")),
        (Budget(78, 100, 100), 0, 100 + 22 / EARNED_S),
        (Budget(78, 39, 100), 78, 100 + 39 / EARNED_S),
        (Budget(78, 39, 100), 117, 100 + 39 / EARNED_S),
        (Budget(78, 0, 100), 117, float("-inf")),
    ],
    ids=[
        *("it covers one", "it covers one later", "nobody knows how long it loads", "nor that, with a debt"),
        *("two together", "three together wait for all of it", "three together with all of it"),
    ],
)
def test_when_the_budget_covers_the_loads_of_those_that_go(budget: Budget, loads_s: float, at_s: float) -> None:
    assert budget.covers_at_s(loads_s) == pytest.approx(at_s)


@pytest.mark.parametrize(
    ("before", "seconds", "loading", "longest_s", "after"),
    [
        (Budget(), 100, False, 0, Budget(float("inf"), 0, 100)),
        (Budget(), 40, True, 40, Budget(80, 40, 40)),
        (Budget(80, 50), 30, True, 40, Budget(80, 80, 30)),
        (Budget(80, 50), 50, False, 40, Budget(80, 50 - 50 * EARNED_S, 50)),
        (Budget(80, 50), 5000, False, 40, Budget(80, 0, 5000)),
        (Budget(80, 50), 50, True, 400, Budget(800, 100, 50)),
        (Budget(800, 500), 100, False, 40, Budget(80, 160, 100)),
        (Budget(80, 50, 100), 90, False, 40, Budget(80, 50, 100)),
    ],
    ids=[
        "no load is known",
        "none was spent",
        "a load runs",
        "none runs",
        "long ago",
        "a longer load is known",
        "the long load was the first",
        "a clock that goes back",
    ],
)
def test_what_time_makes_of_the_budget(before: Budget, seconds: float, loading: bool, longest_s: float, after: Budget) -> None:
    assert before.passed(seconds, loading=loading, longest_s=longest_s) == after
