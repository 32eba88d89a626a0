"""The meter of a node's GPU against an nvidia-smi that prints, hangs, fails, or is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.facts import lacking
from tests.support.fake_nvidia_smi import ROW, FakeNvidiaSmi
from tests.support.waiting import HUNG_S, until
from workers.guard import consumers, gpu_meter
from workers.guard.consumers import Consumers
from workers.guard.gpu_meter import ARGUMENTS, GpuMeter, gpu_of
from workers.host import processes
from workers.host.interpreter import PACKAGE_DIR

# A row at the first start alone: what comes of its end stays, and is not overtaken by the next row.
ONCE = f"""[ $(wc -l < "$0.starts") -gt 1 ] || echo '{ROW}'"""
DRAWN = {"gpu_power_w": 120.4, "gpu_busy_percent": 97.0, "gpu_celsius": 41.0}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("120.40, 97, 41\n", DRAWN),
        (
            "4.31, 96, 71, 2411, 0x0000000000000064, NVIDIA GB10",
            {
                "gpu_power_w": 4.31,
                "gpu_busy_percent": 96.0,
                "gpu_celsius": 71.0,
                "gpu_clock_mhz": 2411.0,
                "gpu_throttled": ["sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown"],
                "gpu_name": "NVIDIA GB10",
            },
        ),
        (
            "[N/A], 97, [Unknown Error], 345, 0x0000000000000001, [N/A]",
            {"gpu_busy_percent": 97.0, "gpu_clock_mhz": 345.0, "gpu_throttled": []},
        ),
        (
            "4,31, 96, 71, 2411, 0x0000000000000000, NVIDIA GB10",
            {
                "gpu_power_w": 4.31,
                "gpu_busy_percent": 96.0,
                "gpu_celsius": 71.0,
                "gpu_clock_mhz": 2411.0,
                "gpu_throttled": [],
                "gpu_name": "NVIDIA GB10",
            },
        ),
        (
            "inf, 97, nan, -Infinity, 0x0000000000000000, NVIDIA GB10",
            {"gpu_busy_percent": 97.0, "gpu_throttled": [], "gpu_name": "NVIDIA GB10"},
        ),
        ("No devices were found", {}),
    ],
    ids=[
        "an older driver",
        "a GB10, held down",
        "idle, and it does not tell all",
        "a decimal comma",
        "numbers that are none",
        "no GPU",
    ],
)
def test_what_a_row_says(text: str, values: dict[str, object]) -> None:
    assert gpu_of(text) == values


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvidiaSmi]:
    monkeypatch.setattr(gpu_meter, "RETRY_S", 0.02)
    monkeypatch.setattr(gpu_meter, "_LOOK_MS", 20)
    made = FakeNvidiaSmi(tmp_path, monkeypatch)
    yield made
    for process in made.living:
        processes.send(process, signal.SIGKILL)


def troubled(meter: GpuMeter) -> tuple[dict[str, object], str] | None:
    """What it shows, once that is trouble."""
    values, trouble = meter._shown
    return (values, trouble) if trouble else None


@pytest.fixture
def meter() -> Iterator[GpuMeter]:
    made = GpuMeter()
    yield from _measuring(made)


def _measuring(made: GpuMeter) -> Iterator[GpuMeter]:
    ended = threading.Event()

    def measure() -> None:
        while not ended.is_set():
            made.measure()

    thread = threading.Thread(target=measure)
    thread.start()
    yield made
    ended.set()
    made.stop()
    thread.join()


def test_the_values_are_those_of_the_last_row_of_one_program(fake: FakeNvidiaSmi, meter: GpuMeter) -> None:
    fake.prints(ROW)
    assert meter.values == {}
    meter.want(True)
    until(lambda: meter.values)
    first_s = meter.values["gpu_at_s"]
    assert meter.values == gpu_of(ROW) | {"gpu_at_s": first_s}

    fake.prints("88.00, [N/A], 30, 345, [N/A], [N/A]", "an Xid error that the driver reports", "")
    until(lambda: meter.values.get("gpu_power_w") == 88.0)
    now_s = meter.values["gpu_at_s"]
    assert meter.values == {"gpu_power_w": 88.0, "gpu_celsius": 30.0, "gpu_clock_mhz": 345.0, "gpu_at_s": now_s}
    assert (now_s >= first_s, meter.trouble) == (True, None)
    assert [arguments for _, arguments in fake.starts] == [list(ARGUMENTS)]


def test_a_row_that_comes_in_two_pieces_is_read_once_it_is_whole(fake: FakeNvidiaSmi, meter: GpuMeter) -> None:
    gate = f"{fake.path}.gate"
    fake.does(f"printf '{ROW[:9]}'; while [ ! -e {gate} ]; do sleep 0.02; done; printf '{ROW[9:]}\\n1.00, '; exec sleep 600")
    meter.want(True)
    until(lambda: fake.starts)
    assert meter.values == {}
    Path(gate).touch()
    until(lambda: meter.values)
    assert meter.values["gpu_power_w"] == 120.4


@pytest.mark.parametrize("does", ["exec sleep 600", f"{ONCE}; exec sleep 600"], ids=["from the start", "after a row"])
def test_one_that_hangs_is_trouble_and_is_ended_and_then_tried_again(
    does: str, fake: FakeNvidiaSmi, meter: GpuMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as soon:
        soon.setattr(gpu_meter, "FIRST_ROW_S", 1.0)
        soon.setattr(gpu_meter, "NEXT_ROW_S", 1.0)
        fake.does(does)
        meter.want(True)
        values, trouble = until(lambda: troubled(meter))
        assert (values, lacking(trouble, "nvidia-smi", "1 s")) == ({}, [])
        until(lambda: len(fake.starts) > 1)
        assert len(fake.living) <= 1, "never two at a time"
        fake.prints(ROW)
    until(lambda: meter.values)
    assert (meter.trouble, len(fake.living)) == (None, 1)


def test_one_that_cannot_be_ended_is_not_joined_by_another(fake: FakeNvidiaSmi, meter: GpuMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def stuck() -> int:
        asked.append(1)
        return 1

    monkeypatch.setattr(gpu_meter, "stuck", stuck)
    fake.prints(ROW)
    meter.want(True)
    until(lambda: len(asked) > 3)
    assert (lacking(meter.trouble, "nvidia-smi"), fake.starts) == ([], [])

    monkeypatch.setattr(gpu_meter, "stuck", lambda: 0)
    until(lambda: meter.values)
    assert meter.trouble is None


@pytest.mark.parametrize(
    ("does", "facts"),
    [
        ("echo 'ERROR: Option -lms is unknown.'; echo; echo 'Run nvidia-smi -h'; exit 2", ("2", "ERROR: Option -lms is unknown.")),
        (f"{ONCE}; printf 'GPU is lost' >&2; exit 15", ("15", "GPU is lost")),
        ("kill -9 $$", ("-9",)),
    ],
    ids=["it knows no loop", "it gives up", "it is killed"],
)
def test_one_that_ends_is_trouble_and_is_tried_again(does: str, facts: tuple[str, ...], fake: FakeNvidiaSmi, meter: GpuMeter) -> None:
    fake.does(does)
    meter.want(True)
    values, trouble = until(lambda: troubled(meter))
    assert (values, lacking(trouble, "nvidia-smi", *facts)) == ({}, [])

    fake.prints(ROW)
    until(lambda: meter.values)
    assert meter.trouble is None


def test_one_that_is_missing_is_no_trouble_and_is_not_looked_for_again(
    meter: GpuMeter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_meter, "PLACES", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    meter.want(True)
    until(lambda: meter.missing)
    assert (meter.trouble, meter.values) == (None, {})

    fake = FakeNvidiaSmi(tmp_path, monkeypatch)
    fake.prints(ROW)
    meter.want(False)
    meter.want(True)
    assert (meter.trouble, meter.values, fake.starts) == (None, {}, [])


def test_it_ends_with_the_last_engine_and_begins_with_the_next(
    fake: FakeNvidiaSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = ["m-1"]
    # Of this node alone: what another test left of a guard must not start the fake.
    monkeypatch.setattr(consumers, "rank_ids", lambda run_dir: ids if run_dir == str(tmp_path) else [])
    fake.prints(ROW)
    holders = Consumers(str(tmp_path), unified=False)
    for _ in _measuring(holders.meter):
        holders.refresh(100.0)
        until(lambda: holders.meter.values)
        ids.clear()
        holders.refresh(101.0)
        assert (holders.meter.values, holders.device_trouble) == ({}, None)
        until(lambda: not fake.living)

        ids.append("m-2")
        holders.refresh(102.0)
        until(lambda: holders.meter.values)
        assert len(fake.living) == 1
    assert fake.living == []


def test_no_descriptor_is_left_open(fake: FakeNvidiaSmi, meter: GpuMeter) -> None:
    fake.does("exit 3")
    meter.want(True)
    until(lambda: len(fake.starts) > 1)
    before = len(os.listdir("/proc/self/fd"))
    until(lambda: len(fake.starts) > 8)
    meter.want(False)
    until(lambda: not fake.living)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_reader_waits_for_nothing(meter: GpuMeter) -> None:
    """The guard's thread reads while another holds what the meter's own threads wait for."""
    read: list[object] = []
    with meter._changed:
        reader = threading.Thread(target=lambda: read.append((meter.values, meter.trouble)))
        reader.start()
        reader.join(HUNG_S)
        assert read == [({}, None)]


OWNER = """
import threading
from workers.guard.gpu_meter import GpuMeter
meter = GpuMeter()
thread = threading.Thread(target=meter.measure)
thread.start()
meter.want(True)
thread.join()
"""


def test_it_ends_with_the_agent_that_started_it(fake: FakeNvidiaSmi) -> None:
    """Also where it never writes again, so that no closed pipe ends it."""
    fake.does("trap '' PIPE; exec sleep 600")
    owner = subprocess.Popen([sys.executable, "-P", "-c", OWNER], env=dict(os.environ) | {"PYTHONPATH": PACKAGE_DIR})
    try:
        until(lambda: fake.living)
        (child,) = fake.living
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    until(lambda: not processes.is_alive(child))
