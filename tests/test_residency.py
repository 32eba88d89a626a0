"""How long a model stays that another would take the place of, as a table, and what becomes of time where models take turns for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.residency import Evicted, Stay

BUSY = float("inf")


def evicted(stayed_s: float, load_s: float = 39) -> Evicted:
    return Evicted("a", "request", stayed_s, load_s)


@pytest.mark.parametrize(
    ("stay", "before", "until_s"),
    [
        (Stay(), None, float("-inf")),
        (Stay(100, 39, 60, idle_at_s=BUSY), None, 160),
        (Stay(100, 154, 60, idle_at_s=BUSY), None, 254),
        (Stay(100, 154, 60, idle_at_s=105), None, 105),
        (Stay(100, 154, 60, idle_at_s=300), None, 254),
        (Stay(100, 39, 60, idle_at_s=105), evicted(0), 160),
        (Stay(100, 39, 60, idle_at_s=105), evicted(39), 139),
        (Stay(100, 39, 60, idle_at_s=105), evicted(60), 118),
        (Stay(100, 39, 60, idle_at_s=105), evicted(3600), 105),
        (Stay(100, 39, 60, idle_at_s=BUSY), evicted(3600), 160),
    ],
    ids=[
        *("it is not there", "in use, and its load was short", "in use, and its load was long", "idle", "used since its time was over"),
        *(
            "idle, and the other was evicted at once",
            "after its time",
            "after more",
            "long ago",
            "in use, and the other was there for long",
        ),
    ],
)
def test_until_when_it_stays(stay: Stay, before: Evicted | None, until_s: float) -> None:
    assert stay.until_s(before) == until_s


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.lists(st.floats(1, 300), min_size=6, max_size=6), st.integers(0, 1 << 30), st.booleans())
def test_at_most_half_of_the_time_is_spent_on_loading_whoever_asks(models: int, loads_s: list[float], seed: int, cycles: bool) -> None:
    """Room for one. Each is idle as soon as it is READY, and another is asked for at once: in a circle, or any. The first load of each
    model is its own."""
    rng, now_s, there = random.Random(seed), 0.0, 0
    last: dict[int, Evicted] = {}
    ready_s = loading_s = now_s = loads_s[0]
    for _ in range(400):
        other = (there + 1) % models if cycles else rng.choice([one for one in range(models) if one != there])
        until_s = Stay(ready_s, loads_s[there], 0.0, idle_at_s=ready_s).until_s(last.get(other))
        now_s = max(now_s, until_s)
        last[there] = Evicted("b", "request", now_s - ready_s, loads_s[there])
        there, now_s = other, now_s + loads_s[other]
        loading_s += loads_s[other]
        ready_s = now_s
    free_s = 2 * sum(loads_s[:models])
    assert loading_s <= (now_s - loading_s) + free_s
