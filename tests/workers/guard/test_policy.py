"""The guard's decision over captured readings, recorded collapses, and what only looks like one."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from random import Random

import pytest

from tests.support.collapses import STILL, TOTAL, Course, Lived, Story, line, live
from workers.guard.memory_sampler import MemorySample, MemorySampler, Trend
from workers.guard.policy import (
    CALM_S,
    CAPTURE,
    CREEP_SHARE,
    CRITICAL,
    FAST_SHARE_PER_S,
    HORIZON_S,
    LOAD,
    LOOKS,
    OK,
    PRESSED,
    REACH,
    SCANNED_PER_S,
    SERVE,
    SLOW_HORIZON_S,
    SWAPPED_PER_S,
    TIGHT,
    GuardedEngine,
    GuardState,
    choose_victim,
    decide,
    hard_in,
    pace_s,
)
from workers.host.memory_limits import GIB, MemoryLimits, spare

MEMINFO = Path(__file__).parents[2] / "fixtures" / "meminfo"
LIMITS = MemoryLimits.of(TOTAL)
SERVING = GuardedEngine("a", "a", SERVE, 60 * GIB, in_flight=1)
LOADING = GuardedEngine("b", "b", LOAD, 30 * GIB, in_flight=0)
CAPTURING = replace(LOADING, phase=CAPTURE)

# Real ones: (what happens, the engines, the rank that must go, GiB that must still be available then, seconds from the crossing of hard)
COLLAPSES = {
    "9.9 to 2.4 GiB in 3 s": (Story(line((5, 9.9), (8, 2.4), (9.0, 0)), 12), [SERVING], "a", 4.0),
    "29 to 2.5 GiB in 9 s": (Story(line((5, 29), (14, 2.5), (15, 0)), 20), [SERVING], "a", 4.0),
    "7.39 GiB in 5 s, on the first long prompt": (Story(line((5, 12.07), (10, 4.68), (13, 0.2)), 20), [SERVING], "a", 3.0),
    "the load that does not end": (Story(line((0, 115), (32, 0)), 40), [SERVING, LOADING], "b", 3.0),
    "a slow creep": (Story(line((0, 7), (7200, 0)), 7200), [SERVING], "a", 1.9),
    "a slow creep that the kernel answers by swapping": (
        Story(line((0, 7), (600, 3.5), (3600, 3.4)), 3600, swapped=line((600, 0), (3600, 3000 * 400))), [SERVING], "a", 3.3),
    "reclaim at a low level": (Story(lambda t: 3.0, 60, scanned=lambda t: 2000 * t), [SERVING], "a", 2.9),
    "a capture that does not come back": (Story(line((5, 40), (6, 2.6), (9, 2.4), (12, 0)), 20), [CAPTURING], "b", 1.5),
    "nobody tells who is idle": (Story(line((5, 9.9), (8, 2.4), (9.0, 0)), 12), [replace(SERVING, in_flight=None)], "a", 4.0),
}  # fmt: skip
# False ones: nobody may be killed.
HEALTHY = {
    "a page-cache flood": (Story(lambda t: 110 - 0.01 * (t % 5), 300, free=lambda t: 3.2), [SERVING]),
    "60 GB written and deleted": (Story(lambda t: 115.8, 60, free=line((5, 103), (25, 41.5), (40, 41.5), (41, 103))), [SERVING]),
    "a large mapped table, low for 15 hours": (
        Story(lambda t: 1.4 + 0.004 * ((t % 60) / 60), 3600, scanned=lambda t: 100 * t / 60, swapped=lambda t: 50 * t / 60), [SERVING]),
    "4 % available for days": (Story(lambda t: 4.8 + 0.1 * ((t % 7) / 7), 3600), [SERVING]),
    "three models resident": (Story(lambda t: 22.06, 600, free=lambda t: 4.3), [SERVING, replace(SERVING, rank_id="c")]),
    "a pool that was taken beforehand": (Story(lambda t: 7.13, 600, free=lambda t: 1.07), [SERVING]),
    "a load at 3.6 GiB/s that ends at 7 GiB": (Story(line((1, 115), (31, 7)), 90), [LOADING]),
    "a load at 1 GiB/s that ends at 5 GiB": (Story(line((1, 115), (111, 5)), 140), [LOADING]),
    "graph capture dips to 4 GiB and comes back": (Story(lambda t: 3.9 if 5 <= t < 5.2 else 36, 30), [CAPTURING]),
    "graph capture: MemFree 2.39 and 41.7 available": (Story(lambda t: 41.7, 60, free=lambda t: 2.39), [CAPTURING]),
    "compilers come and go above the limit": (Story(lambda t: 9 - 4 * ((t % 40) / 40), 400), [CAPTURING]),
}  # fmt: skip


@pytest.mark.parametrize(("story", "engines", "victim", "left"), COLLAPSES.values(), ids=COLLAPSES)
def test_every_real_collapse_is_stopped_in_time(story: Story, engines: list[GuardedEngine], victim: str, left: float) -> None:
    lived = live(story, engines)

    assert lived.victims[0] == victim, lived
    _, available, _, why = lived.kills[0]
    assert available >= left, lived
    assert "GiB available" in why


@pytest.mark.parametrize("base_s", [0.5, 1.0], ids=["every 0.5 s", "every second"])
def test_the_collapses_are_met_above_the_floor_at_any_phase_of_the_clock(base_s: float) -> None:
    floor = LIMITS.floor / GIB
    for late_s in (0.0, 0.1, 0.2, 0.3, 0.4):
        for start, rate in ((9.9, 2.5), (29.0, 2.944)):
            story = Story(line((5 + late_s, start), (5 + late_s + start / rate, 0)), 20)
            (_, available, *_), *_ = live(story, [SERVING], base_s=base_s).kills
            assert available > floor, (late_s, start, available)


@pytest.mark.parametrize(("story", "engines"), HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_model_is_left_alone(story: Story, engines: list[GuardedEngine]) -> None:
    assert live(story, engines).kills == []


@pytest.mark.parametrize(
    ("file", "level"),
    [
        ("three-models-resident", OK), ("one-model-swap-off", OK), ("page-cache-flood", OK), ("tight-pool", OK), ("after-unload", OK),
        ("one-model-and-desktop", OK), ("idle", OK), ("with-cma-fields", OK), ("almost-dead", TIGHT),
    ],
)  # fmt: skip
def test_captured_readings_alone_kill_nobody(file: str, level: str, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text((MEMINFO / f"{file}.txt").read_text())
    sampler, state = MemorySampler(tmp_path), GuardState()
    for tenth in range(50):
        look = sampler.look(tenth / 10)
        assert look is not None
        decision, state = decide(look, sampler.trend(), [SERVING], MemoryLimits.of(look.total), state)
        assert decision.kill is None
    assert decision.level == level


# Within plan: nobody may be killed, whatever the course. Beyond it: before the floor.

COURSES = 1000


def eased(random: Random, start_s: float, taken_gib: float) -> Course:
    """Takes so much from start_s on, within 0.1 to 5 s: at once, in steps as of a long prefill, or in bursts that come back."""
    lasts_s, steps, kind = random.uniform(0.1, 5.0), random.randint(1, 12), random.choice(("line", "steps", "bursts"))

    def at(t: float) -> float:
        share = min(1.0, max(0.0, (t - start_s) / lasts_s))
        if kind == "steps":
            share = ceil(share * steps) / steps
        if kind == "bursts" and t > start_s:
            share = 1.0 if int((t - start_s) / lasts_s * steps) % 2 == 0 else 0.0
        return taken_gib * share

    return at


def test_engines_that_stay_within_plan_are_never_killed() -> None:
    """The first full batch of an engine that was sized, a second engine's beside it, a backup that reads the whole disk meanwhile."""
    random = Random(34)
    for number in range(COURSES):
        growths = [random.uniform(0.0, 8.0) for _ in range(random.randint(1, 2))]
        courses = [eased(random, random.uniform(2, 8), growth * random.uniform(0.3, 1.0)) for growth in growths]
        scans = random.choice((0.0, 3000.0))
        free_gib = spare(TOTAL) / GIB + sum(growths)

        def available(t: float, free_gib: float = free_gib, courses: list[Course] = courses) -> float:
            return free_gib - sum(course(t) for course in courses)

        story = Story(available, 20, scanned=lambda t, scans=scans: scans * t)
        engines = [replace(SERVING, rank_id=str(rank), growth=int(growth * GIB)) for rank, growth in enumerate(growths)]
        lived = live(story, engines)
        assert lived.kills == [], (number, growths, lived)
        assert set(lived.levels) == {OK}, "an engine that auto has sized does not make its node tight"


def test_engines_that_run_away_beyond_plan_are_killed_before_the_floor() -> None:
    random = Random(35)
    for number in range(COURSES):
        growth, rate = random.uniform(0.0, 4.0), random.uniform(0.2, 4.0)
        free_gib, start_s = spare(TOTAL) / GIB + growth, random.uniform(2, 8)
        story = Story(line((start_s, free_gib), (start_s + free_gib / rate, 0)), start_s + free_gib / rate)
        lived = live(story, [replace(SERVING, growth=int(growth * GIB))])
        assert lived.kills and lived.kills[0][1] > LIMITS.floor / GIB, (number, growth, rate, lived)


def test_a_flood_while_a_model_loads_is_answered_by_dropping_the_cache_now_and_then() -> None:
    flood = Story(lambda t: 110, 60, free=lambda t: 3.2)
    assert live(flood, [LOADING]).drops == 7
    assert live(flood, [SERVING]).drops == 0, "mapped weights would be evicted"
    assert live(flood, [LOADING], unified=False).drops == 0


# The proof of a collapse, at its edge: what is known then -> the look at which an engine goes, None where none does

CREPT = CREEP_SHARE * TOTAL
FAST = FAST_SHARE_PER_S * TOTAL
SLOW = CREPT / SLOW_HORIZON_S
FLOOR, HARD = LIMITS.floor, LIMITS.hard
PROOFS = {
    "reclaim below hard": (HARD - 1, Trend(scanned_per_s=SCANNED_PER_S), SERVE, 2),
    "swapping below hard": (HARD - 1, Trend(swapped_per_s=SWAPPED_PER_S), SERVE, 2),
    "reclaim while graphs are captured": (hard_in(LIMITS, CAPTURE) - 1, Trend(scanned_per_s=SCANNED_PER_S), CAPTURE, 3),
    "reclaim at hard": (HARD, Trend(scanned_per_s=SCANNED_PER_S), SERVE, None),
    "a slow fall that ends in 30 s": (FLOOR + int(SLOW * SLOW_HORIZON_S), Trend(middle=-SLOW), SERVE, 2),
    "one that ends later": (FLOOR + int(SLOW * SLOW_HORIZON_S) + 1, Trend(middle=-SLOW), SERVE, None),
    "a fast fall that ends in 2 s": (FLOOR + int(FAST * HORIZON_S[SERVE]), Trend(last=-FAST, short=-FAST, dropped=1), SERVE, 2),
    "a fall in GiB that ends in 2 s": (int(REACH[SERVE] * FLOOR), Trend(last=-5 * GIB, short=-5 * GIB, dropped=1), SERVE, 2),
    "one from further above": (int(REACH[SERVE] * FLOOR) + 1, Trend(last=-6 * GIB, short=-6 * GIB, dropped=1), SERVE, None),
    "below the floor after a creep": (FLOOR - 1, Trend(fell=CREPT), SERVE, 2),
    "below the floor by reclaim alone": (FLOOR - 1, Trend(scanned_per_s=SCANNED_PER_S), SERVE, 2),
    "at the floor after a creep": (FLOOR, Trend(fell=CREPT), SERVE, None),
    "a quarter of the floor is proof enough": (FLOOR // 4 - 1, STILL, SERVE, 2),
    "a little more is not": (FLOOR // 4, STILL, SERVE, None),
}  # fmt: skip


@pytest.mark.parametrize(("available", "trend", "phase", "expected"), PROOFS.values(), ids=PROOFS)
def test_a_proof_counts_from_its_edge_and_after_its_looks(available: int, trend: Trend, phase: str, expected: int | None) -> None:
    state, killed = GuardState(), []
    for number in range(1, 6):
        look = MemorySample(float(number), TOTAL, available, available, 0, 0)
        decision, state = decide(look, trend, [replace(SERVING, phase=phase)], LIMITS, state)
        killed += [number] if decision.kill else []
    assert killed[:1] == ([] if expected is None else [expected])


# Who goes

SMALL_IDLE = GuardedEngine("s", "s", SERVE, 1 * GIB, in_flight=0)
WHO = {
    "the idle one": ([SERVING, replace(SERVING, rank_id="i", in_flight=0)], "i"),
    "the one that is starting": ([replace(SERVING, in_flight=0), LOADING], "b"),
    "the lower priority": ([replace(SERVING, priority=60), replace(SERVING, rank_id="l", priority=10)], "l"),
    "not the pinned": ([replace(SERVING, pinned=True, priority=0), replace(SERVING, rank_id="u")], "u"),
    "the largest of equals": ([SERVING, replace(SERVING, rank_id="big", held=70 * GIB)], "big"),
    "not one whose end is not enough": ([SMALL_IDLE, SERVING], "a"),
    "the largest where nobody's end is enough": ([replace(SMALL_IDLE, held=GIB // 8), replace(SMALL_IDLE, rank_id="t", held=2 * GIB)], "t"),
    "one of unknown size as well": ([replace(SERVING, held=None, in_flight=0), SERVING], "a"),
    "nobody where nobody is": ([], None),
}


@pytest.mark.parametrize(("engines", "expected"), WHO.values(), ids=WHO)
def test_who_goes(engines: list[GuardedEngine], expected: str | None) -> None:
    found = choose_victim(engines, 8 * GIB)
    assert (found.rank_id if found else None) == expected


def test_one_victim_at_a_time_and_the_next_only_when_the_first_was_not_enough() -> None:
    hog = Story(line((5, 12), (10, 2), (30, -40)), 30)
    small = replace(SERVING, held=10 * GIB, in_flight=0)
    lived = live(hog, [small, replace(small, rank_id="z", held=60 * GIB, in_flight=1)])
    assert lived.victims == ["a", "z"]
    (first_s, *_), (second_s, *_) = lived.kills
    assert second_s - first_s >= 1.5


def test_a_victim_that_dies_slowly_is_waited_for() -> None:
    state = GuardState(killed_at_s=10.0)
    low = MemorySample(12.0, TOTAL, GIB // 4, GIB // 4, 0, 0)
    state = replace(state, quarter_looks=5)
    assert decide(low, STILL, [SERVING], LIMITS, state, dying=True)[0].kill is None
    assert decide(low, STILL, [SERVING], LIMITS, state, dying=False)[0].kill == "a"
    assert decide(replace(low, at_s=15.0), STILL, [SERVING], LIMITS, state, dying=True)[0].kill == "a"


# Levels


def test_levels_rise_at_once_and_fall_late() -> None:
    course = line((0, 20), (10, 20), (30, 5), (60, 5), (61, 7), (80, 7), (81, 9), (120, 9))
    lived = live(Story(course, 120), [SERVING])
    assert lived.levels == [OK, TIGHT, PRESSED, TIGHT, OK], "pressure while it goes, none while it is low and still"
    assert not lived.kills

    state = GuardState(level=TIGHT)
    for second in range(int(CALM_S) + 1):
        decision, state = decide(MemorySample(float(second), TOTAL, 9 * GIB, 9 * GIB, 0, 0), STILL, [], LIMITS, state)
        assert decision.level == (OK if second >= CALM_S else TIGHT)


def test_memory_is_tight_below_the_limit_and_not_at_it() -> None:
    for missing, level in ((0, OK), (1, TIGHT)):
        look = MemorySample(0, TOTAL, LIMITS.soft - missing, 0, 0, 0)
        assert decide(look, STILL, [SERVING], LIMITS, GuardState())[0].level == level


def test_without_an_engine_there_is_nobody_to_kill_and_the_level_says_it() -> None:
    lived: Lived = live(COLLAPSES["9.9 to 2.4 GiB in 3 s"][0], [])
    assert CRITICAL in lived.levels and not lived.kills


def test_the_limit_is_lower_while_a_model_starts() -> None:
    assert LIMITS.floor < hard_in(LIMITS, LOAD) == hard_in(LIMITS, CAPTURE) < hard_in(LIMITS, SERVE) == LIMITS.hard
    assert set(LOOKS) == {LOAD, CAPTURE, SERVE}


def test_it_looks_five_times_as_often_while_memory_goes() -> None:
    assert pace_s(MemorySample(0, TOTAL, 50 * GIB, 0, 0, 0), STILL, LIMITS, 0.5) == 0.5
    assert pace_s(MemorySample(0, TOTAL, 5 * GIB, 0, 0, 0), STILL, LIMITS, 0.5) == 0.1
    assert pace_s(MemorySample(0, TOTAL, 50 * GIB, 0, 0, 0), Trend(short=-GIB), LIMITS, 0.5) == 0.1
