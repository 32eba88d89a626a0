"""The levels of free memory: in order, of a Spark and of a smaller machine, and what a sized cache leaves lies above what is tight."""

from __future__ import annotations

import pytest

from workers.host.memory_limits import GIB, RISE, MemoryLimits, spare


def test_limits_are_shares_of_a_smaller_machine_and_what_was_configured() -> None:
    limits = MemoryLimits.of(121 * GIB)
    assert [value / GIB for value in (limits.soft, limits.hard, limits.floor)] == [6, 4, 2]
    small = MemoryLimits.of(24 * GIB)
    assert small.floor < small.hard < small.soft < 1.3 * GIB
    assert MemoryLimits.of(121 * GIB, 10, 8.5, 1) == MemoryLimits(10 * GIB, int(8.5 * GIB), GIB)


@pytest.mark.parametrize("total_gib", [16, 24, 119, 121, 512])
def test_what_a_sized_cache_leaves_is_not_tight_and_ends_a_tight_time(total_gib: int) -> None:
    assert spare(total_gib * GIB) > RISE * MemoryLimits.of(total_gib * GIB).soft


def test_a_gpus_own_memory_is_not_the_guards() -> None:
    assert (spare(16 * GIB, shared=False), spare(80 * GIB, shared=False)) == (GIB, int(2.4 * GIB))
