"""The guard's samples of /proc and their trend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.descriptors import descriptors_in
from tests.support.memory_hog import PSI, show
from workers.guard.consumers import device_bytes
from workers.guard.memory_sampler import MemorySample, MemorySampler
from workers.guard.policy import GIB

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_a_look_reads_a_spark_s_own_files(tmp_path: Path) -> None:
    shutil.copy(FIXTURES / "meminfo" / "idle.txt", tmp_path / "meminfo")
    look = MemorySampler(tmp_path).look(1.0)
    assert look is not None and look.unaccounted is not None
    assert (look.total, look.free, look.cma_free) == (127535084 * 1024, 102000000 * 1024, None)
    assert round(look.unaccounted / GIB, 2) == 1.35
    assert (look.scanned, look.swapped, look.psi_full_us) == (0, 0, 0), "a kernel without these files"

    shutil.copy(FIXTURES / "meminfo" / "with-cma-fields.txt", tmp_path / "meminfo")
    look = MemorySampler(tmp_path).look(1.0)
    assert look is not None
    assert (look.cma_free, look.unaccounted) == (69320 * 1024, None)

    show(tmp_path, 9.9)
    (tmp_path / "vmstat").write_text("nr_free_pages 1\npswpin 5\npswpout 7\npgscan_direct 300\n")
    (tmp_path / "pressure" / "memory").write_text(PSI.replace("avg300=0.00 total=0\n", "avg300=0.00 total=77\n"))
    look = MemorySampler(tmp_path).look(1.0)
    assert look is not None
    assert (look.scanned, look.swapped, look.psi_full_us) == (300, 12, 77)
    assert MemorySampler(tmp_path / "nowhere").look(1.0) is None


def test_looks_leave_nothing_open(tmp_path: Path) -> None:
    show(tmp_path, 9.9)
    sampler = MemorySampler(tmp_path)
    assert all(sampler.look(float(second)) for second in range(3))
    assert descriptors_in(tmp_path) == []


def test_slopes_and_rates_are_of_what_happened() -> None:
    sampler = MemorySampler(Path("/nowhere"))
    for second in range(100):
        available = int((50 - 0.1 * second) * GIB)
        sampler.add(MemorySample(float(second), 120 * GIB, available, available, 0, 0, scanned=100 * second, swapped=3 * second))
    trend = sampler.trend()
    assert trend.short == pytest.approx(-0.1 * GIB)
    assert trend.fell == pytest.approx(6 * GIB)
    assert (trend.scanned_per_s, trend.swapped_per_s) == (100, 3)
    assert trend.seconds_to(40 * GIB, 30 * GIB) == pytest.approx(100)
    assert len(sampler.rows()) == 100
    sampler.forget()
    assert (len(sampler.rows()), sampler.trend().short) == (100, 0), "what happened stays, for the next bundle"


def test_two_looks_are_a_trend_unless_no_time_is_between_them() -> None:
    sampler = MemorySampler(Path("/nowhere"))
    for at_s, gib, slope in ((5.0, 50, 0.0), (5.0, 49, 0.0), (6.0, 47, -2 * GIB)):
        sampler.add(MemorySample(at_s, 120 * GIB, gib * GIB, gib * GIB, 0, 0))
        assert sampler.trend().last == slope
    sampler.forget()
    for at_s in (7.0, 8.0):
        sampler.add(MemorySample(at_s, 120 * GIB, int(at_s) * GIB, GIB, 0, 0))
    assert sampler.trend().last == GIB


def test_two_minutes_are_kept_at_the_fastest_pace() -> None:
    sampler = MemorySampler(Path("/nowhere"))
    for tenth in range(3000):
        sampler.add(MemorySample(tenth / 10, GIB, GIB, GIB, 0, 0))
    rows = sampler.rows()
    assert (rows[-1][0] - rows[0][0], len(rows)) == (pytest.approx(119.9), 1200)


def test_device_memory_is_read_with_and_without_a_name() -> None:
    text = (FIXTURES / "nvidia-smi" / "compute-apps-noheader.csv").read_text()
    assert device_bytes(text.splitlines()) == {41001: 41458 << 20, 41377: 22439 << 20, 41902: 20816 << 20}
    assert device_bytes(["41001, 5"]) == {41001: 5 << 20}
    assert device_bytes((FIXTURES / "nvidia-smi" / "compute-apps-na.txt").read_text().splitlines()) == {}
