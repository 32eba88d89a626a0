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
        (Stay(100, 39, 60, idle_at_s=105, budget=Budget(39, 100)), 105),
        (Stay(100, 39, 60, idle_at_s=105, budget=Budget(-1, 100)), 150),
        (Stay(100, 39, 60, idle_at_s=BUSY, budget=Budget(-41, 100)), 200),
        (Stay(100, 0, 60, idle_at_s=105, budget=Budget(-80, 100)), 200),
    ],
    ids=[
        *("it is not there", "in use", "idle", "used since its time was over"),
        *("idle, and covered", "idle, not covered yet", "in use, not covered yet", "nobody knows how long it loads, and there are debts"),
    ],
)
def test_until_when_it_stays(stay: Stay, until_s: float) -> None:
    assert stay.until_s == pytest.approx(until_s)


@pytest.mark.parametrize(
    ("before", "seconds", "loading", "longest_s", "left_s"),
    [
        (Budget(), 100, False, 0, float("inf")),
        (Budget(), 100, True, 0, float("inf")),
        (Budget(), 100, False, 40, 80),
        (Budget(80, 0), 30, True, 40, 50),
        (Budget(10, 0), 30, True, 40, -20),
        (Budget(10, 0), 50, False, 40, 50),
        (Budget(10, 0), 5000, False, 40, 80),
        (Budget(80, 0), 1, False, 10, 20),
    ],
)
def test_what_the_budget_has(before: Budget, seconds: float, loading: bool, longest_s: float, left_s: float) -> None:
    assert before.passed(seconds, loading=loading, longest_s=longest_s) == Budget(left_s, seconds)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.lists(st.floats(1, 300), min_size=6, max_size=6), st.integers(0, 1 << 30), st.booleans())
def test_less_than_half_of_the_time_is_spent_on_loading_whoever_asks(models: int, loads_s: list[float], seed: int, cycles: bool) -> None:
    """Room for one. Each is idle as soon as it is READY, and another is asked for at once: in a circle, or any. What the budget keeps, and
    one load that it did not foresee, come on top once."""
    rng, there = random.Random(seed), 0
    now_s, budget, loading_s = 0.0, Budget(), 0.0
    for _ in range(400):
        other = (there + 1) % models if cycles else rng.choice([one for one in range(models) if one != there])
        budget = budget.passed(now_s, loading=False, longest_s=loads_s[there])
        now_s = max(now_s, Stay(now_s, loads_s[there], 0.0, now_s, budget).until_s)
        budget = budget.passed(now_s, loading=False, longest_s=loads_s[there])
        now_s, there = now_s + loads_s[other], other
        budget = budget.passed(now_s, loading=True, longest_s=0.0)
        loading_s += loads_s[other]
    assert loading_s <= EARNED_S * (now_s - loading_s) + (KEPT_LOADS + 1) * max(loads_s[:models]) + 1e-6


def test_one_who_changes_his_mind_waits_for_the_load_alone() -> None:
    """`a` loaded for 154 s, was used for 30 s, `b` loaded for 154 s and was used for 30 s: back to `a`."""
    budget = Budget().passed(0, loading=False, longest_s=154)
    budget = budget.passed(30, loading=False, longest_s=154).passed(184, loading=True, longest_s=0)
    budget = budget.passed(214, loading=False, longest_s=154)
    assert Stay(184, 154, 60, idle_at_s=197, budget=budget).until_s < 214 + 1
