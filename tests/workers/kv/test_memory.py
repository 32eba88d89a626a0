from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from workers.kv.memory import MemoryReading, host, lowest, taken_by_session

FIXTURES = Path(__file__).parents[2] / "fixtures" / "meminfo"
GIB = 2**30


def machine(tmp_path: Path, meminfo: str, cgroup: str = "") -> Path:
    (tmp_path / "self").mkdir(exist_ok=True)
    (tmp_path / "meminfo").write_text(meminfo)
    (tmp_path / "self" / "cgroup").write_text(cgroup)
    return tmp_path


@pytest.mark.parametrize(
    ("capture", "room_gib"),
    [
        ("page-cache-flood", 86.57),  # the driver sees 3.17 GiB free
        ("three-models-resident", 19.9),
        ("tight-pool", 7.13),
        ("almost-dead", 0.12),
    ],
)
def test_the_room_of_real_sparks(tmp_path, capture, room_gib):
    host_alone = host(machine(tmp_path, (FIXTURES / f"{capture}.txt").read_text()))
    # On a GB10 the driver's free memory is MemFree.
    reading = replace(host_alone, device_free=host_alone.free, device_total=host_alone.total, integrated=True)
    assert reading.room / GIB == pytest.approx(room_gib, abs=0.01)
    assert reading.size == reading.total
    assert reading.room <= reading.available
    assert host_alone.room == host_alone.available  # an engine on the CPU takes page cache as any process does


@pytest.mark.parametrize(
    ("device_free", "integrated", "room"),
    [
        (100, False, 100),  # a discrete GPU's own memory, whatever the host has
        (30, True, 30 + 16),  # GB10: MemFree and what the kernel gives back at once
        (500, True, 60),  # never more than the host has
        (None, False, 60),
    ],
)
def test_both_numbers_hold_on_unified_memory(device_free, integrated, room):
    reading = MemoryReading(200, 60, 50, 20, device_free=device_free, device_total=200, integrated=integrated)
    assert reading.room == room


def test_ranks_on_one_host_take_equal_parts():
    reading = MemoryReading(200, 40, 50, 20, sharers=2)
    assert (reading.room, reading.size) == (20, 100)


def test_the_least_of_a_window_counts():
    numbers = iter([(60, 50), (40, 55), (70, 20)])
    slept: list[float] = []
    found = lowest(lambda: MemoryReading(100, *next(numbers), 0), 0.1, sleep=slept.append)
    assert (found.available, found.free, len(slept)) == (40, 20, 2)
    assert lowest(lambda: MemoryReading(100, 1, 2, 0), 0.0).free == 2


def test_what_a_session_holds(tmp_path):
    session = os.getsid(0)
    for pid, of, kib in ((11, session, 300), (12, session, 20), (13, session + 1, 5000)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S 1 {pid} {of} 0 -1{' 0' * 20}")
        (tmp_path / str(pid) / "status").write_text(f"Name:\ta\nVmRSS:\t 9999 kB\nRssAnon:\t {kib} kB\nRssFile:\t 1 kB\n")
    (tmp_path / "14").mkdir()
    (tmp_path / "meminfo").write_text("")

    assert taken_by_session(tmp_path) == 320 * 1024
    assert taken_by_session() > 10 << 20
