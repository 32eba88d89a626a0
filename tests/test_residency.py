"""How long a model stays that another would take the place of, as a table, and what becomes of time where models take turns for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.residency import EARNED_S, KEPT_LOADS, Budget, Stay

BUSY = float("inf")


@pytest.mark.parametrize(
    ("stay", "until_s"),
    [
        (Stay(), float("-inf")),
        (Stay(100, 154, 60, idle_at_s=BUSY), 160),
        (Stay(100, 154, 60, idle_at_s=105), 105),
        (Stay(100, 154, 60, idle_at_s=300), 160),
        (Stay(100, 39, 60, idle_at_s=105, budget=Budget(78, 39, 100)), 105),
        (Stay(100, 39, 60, idle_at_s=105, budget=Budget(78, 79, 100)), 100 + 40 / EARNED_S),
        (Stay(100, 39, 60, idle_at_s=BUSY, budget=Budget(78, 119, 100)), 100 + 80 / EARNED_S),
        (Stay(100, 0, 60, idle_at_s=105, budget=Budget(78, 78, 100)), 105),
    ],
    ids=[
        *("it is not there", "in use", "idle", "used since its time was over"),
        *("idle, and covered", "idle, not covered yet", "in use, not covered yet", "nobody knows how long it loads"),
    ],
)
def test_until_when_it_stays(stay: Stay, until_s: float) -> None:
    assert stay.until_s == pytest.approx(until_s)


@pytest.mark.parametrize(
    ("before", "seconds", "loading", "longest_s", "after"),
    [
        (Budget(), 100, False, 0, Budget(float("inf"), 0, 100)),
        (Budget(), 100, True, 40, Budget(80, 0, 100)),
        (Budget(80, 50), 30, True, 40, Budget(80, 50, 30)),
        (Budget(80, 50), 50, False, 40, Budget(80, 50 - 50 * EARNED_S, 50)),
        (Budget(80, 50), 5000, False, 40, Budget(80, 0, 5000)),
        (Budget(80, 50), 50, True, 400, Budget(800, 50, 50)),
        (Budget(800, 500), 100, False, 40, Budget(80, 80, 100)),
    ],
    ids=[
        "no load is known",
        "none is spent",
        "a load runs",
        "none runs",
        "long ago",
        "a longer load is known",
        "the long load was the first",
    ],
)
def test_what_time_makes_of_the_budget(before: Budget, seconds: float, loading: bool, longest_s: float, after: Budget) -> None:
    assert before.passed(seconds, loading=loading, longest_s=longest_s) == after


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.lists(st.floats(1, 300), min_size=6, max_size=6), st.integers(0, 1 << 30), st.booleans())
def test_less_than_half_of_the_time_is_spent_on_loading_whoever_asks(models: int, loads_s: list[float], seed: int, cycles: bool) -> None:
    """Room for one. Each is idle as soon as it is READY, and another is asked for at once: in a circle, or any. A full budget, and
    one load that it did not foresee, come on top once."""
    rng, there = random.Random(seed), 0
    now_s, budget, loading_s = 0.0, Budget(), 0.0
    longest_s = max(loads_s[:models])
    for _ in range(400):
        other = (there + 1) % models if cycles else rng.choice([one for one in range(models) if one != there])
        budget = budget.passed(now_s, loading=False, longest_s=longest_s)
        now_s = max(now_s, Stay(now_s, loads_s[there], 0.0, now_s, budget).until_s)
        budget = budget.passed(now_s, loading=False, longest_s=longest_s).spend(loads_s[there])
        now_s, there = now_s + loads_s[other], other
        budget = budget.passed(now_s, loading=True, longest_s=longest_s)
        loading_s += loads_s[other]
    assert loading_s <= EARNED_S * (now_s - loading_s) + (KEPT_LOADS + 1) * longest_s + 1e-6


@pytest.mark.parametrize(("first_s", "other_s"), [(154, 154), (30, 300), (30, 1800), (300, 30)])
def test_one_who_changes_his_mind_waits_for_the_load_alone(first_s: float, other_s: float) -> None:
    """`a` was used for 30 s after its load, and so was `b`: back to `a`. The budget learns of a load when it has ended."""
    budget = Budget().passed(30, loading=False, longest_s=first_s)
    assert Stay(0, first_s, 60, idle_at_s=13, budget=budget).until_s < 30
    ready_s = 30 + other_s
    budget = budget.spend(first_s).passed(ready_s, loading=True, longest_s=first_s)
    budget = budget.passed(ready_s + 30, loading=False, longest_s=max(first_s, other_s))
    assert Stay(ready_s, other_s, 60, idle_at_s=ready_s + 13, budget=budget).until_s < ready_s + 30
