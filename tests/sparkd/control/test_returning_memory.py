"""How memory comes back after an engine's end, as courses: when a load that needs so much may begin, and what is missing in the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparkd.control.returning_memory import GIB, NodeSample, RankMemory, Returning, last_held
from workers.host.memory_limits import MemoryLimits

LIMITS = MemoryLimits.of(121 * GIB)
# By a second since the end: GiB available, and GiB that living engines hold.
Course = Callable[[float], tuple[float, float]]
# 50 GiB are available while it serves with 58.
BEFORE = RankMemory(NodeSample(0.0, 50 * GIB, 58 * GIB), 58 * GIB)


def returning(course: Course, before: RankMemory = BEFORE, need_gib: float = 0) -> tuple[Returning, float]:
    """The end of a course of 90 s, and seconds until a load that needs so much may begin."""
    memory = Returning(before.bytes, before.look.available + before.look.living, 0.0)
    begins_s = float("inf")
    for quarter in range(4 * 90 + 1):
        at_s = quarter / 4
        available, living = course(at_s)
        memory.look(NodeSample(at_s, int(available * GIB), int(living * GIB)))
        if memory.is_back or memory.room(LIMITS) >= need_gib * GIB:
            begins_s = min(begins_s, at_s)
    return memory, begins_s


def slowly(at_s: float) -> tuple[float, float]:
    return 50 + 58 * min(1.0, at_s / 60), 0


def by_half(at_s: float) -> tuple[float, float]:
    return (50.0 if at_s < 1 else 79.0), 0


@pytest.mark.parametrize(
    ("course", "need_gib", "begins_s", "missing_gib"),
    [
        (lambda at_s: (108, 0), 114, 0.0, 0),
        (slowly, 114, 53.5, 0),
        (slowly, 60, 16.75, 0),
        (slowly, 40, 0.0, 0),
        (lambda at_s: (50, 0), 114, float("inf"), 58),
        (lambda at_s: (50, 0), 45, 3.0, 58),
        (lambda at_s: (50, 0), 44, 0.0, 58),
        (by_half, 114, float("inf"), 29),
        (by_half, 74, 4.0, 29),
        (by_half, 73, 1.0, 29),
    ],
    ids=[
        *("at once", "slowly, a load that needs all", "slowly, one that needs some", "slowly, and what is free is enough"),
        *("never", "never, and it rests and suffices", "never, and what is free is enough"),
        *("by half", "by half, and it rests and suffices", "by half, and that is enough"),
    ],
)
def test_a_load_begins_once_what_it_needs_is_free(course: Course, need_gib: float, begins_s: float, missing_gib: float) -> None:
    memory, found_s = returning(course, need_gib=need_gib)
    # The load's need plus the guard's soft limit, 6 GiB; or the hard one, 4, once no more memory comes back.
    assert found_s == begins_s
    assert memory.missing == missing_gib * GIB


def test_page_cache_that_grows_meanwhile_is_no_memory_that_is_missing() -> None:
    """The next model's files are read already: MemFree stays where it was, and MemAvailable counts what the kernel would give back."""
    memory, begins_s = returning(lambda at_s: (50 + 57.5 * min(1.0, at_s), 0), need_gib=114)
    assert (memory.is_back, begins_s) == (True, 1.0)


def test_another_engine_that_loads_meanwhile_is_not_missing_either() -> None:
    """From the fifth second on it takes 1 GiB each second, up to 40."""

    def loading(at_s: float) -> tuple[float, float]:
        taken = min(40.0, max(0.0, at_s - 5))
        return slowly(at_s)[0] - taken, taken

    memory, _ = returning(loading)
    assert memory.is_back and memory.missing == 0


def test_another_engine_that_ends_meanwhile_brings_back_only_its_own() -> None:
    """40 GiB of it are back at once, and none of the first."""
    before = RankMemory(NodeSample(0.0, 10 * GIB, 98 * GIB), 58 * GIB)
    memory, _ = returning(lambda at_s: (10, 40) if at_s < 5 else (50, 0), before)
    assert memory.missing == 58 * GIB


def test_what_was_back_once_is_not_missing_where_something_else_takes_it() -> None:
    memory, _ = returning(lambda at_s: (107, 0) if at_s < 2 else (60, 0))
    assert memory.is_back


def looks(*held: tuple[float, float]) -> list[RankMemory]:
    """GiB that it held, and GiB available then."""
    return [
        RankMemory(NodeSample(float(at_s), int(available * GIB), int(gib * GIB)), int(gib * GIB))
        for at_s, (gib, available) in enumerate(held)
    ]


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        ([(58, 50)] * 3, 2),
        # It is weighed by its processes, which go before the driver gives back what they had.
        ([(58, 50), (58, 50), (11, 50), (1, 52)], 1),
        ([(40, 68), (50, 58), (58, 50)], 2),
    ],
    ids=["it serves", "it ends", "it loads"],
)
def test_what_a_rank_held_last_is_what_it_held_before_it_began_to_end(held: list[tuple[float, float]], chosen: int) -> None:
    found = looks(*held)
    assert last_held(found) == found[chosen]


def test_what_nobody_looked_at_is_not_known() -> None:
    assert last_held([]) is None


def test_the_h200s_course_waits_for_less_than_a_second() -> None:
    """4.2 GiB of host memory while it loaded, 2.5 of them when it ended; MemAvailable is whole 0.9 s after the kill. Compared with the
    4.2, it never was."""
    before = looks((2.5, 100), (2.5, 100))[-1]
    memory, begins_s = returning(lambda at_s: ((102.5 if at_s >= 0.9 else 100), 0), before, need_gib=114)
    assert (begins_s, memory.missing) == (1.0, 0)
    # One that needs no more than is free waits for nothing at all.
    assert returning(lambda at_s: ((102.5 if at_s >= 0.9 else 100), 0), before, need_gib=90)[1] == 0.0
