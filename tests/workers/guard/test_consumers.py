"""What nvidia-smi is asked for where a node has an engine, whatever kind of NVIDIA GPU it is."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from workers.guard import consumers
from workers.guard.consumers import DEVICE_COMMAND, DEVICE_EVERY_S, DEVICE_TIMEOUT_S, Consumers, MemoryConsumer
from workers.host import processes
from workers.host.bounded_child import ProgramOutput
from workers.rank.status import status_path, write_status


class Asked:
    """Consumers whose node has the engine that is named, and what nvidia-smi was asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, unified: bool) -> None:
        self.holders, self.ids, self.answer = Consumers(str(folder), unified=unified), ["m-1"], ProgramOutput("")
        self.commands: list[tuple[str, ...]] = []
        self.wanted: list[bool] = []
        monkeypatch.setattr(consumers, "rank_ids", lambda run_dir: self.ids if run_dir == str(folder) else [])
        monkeypatch.setattr(consumers, "ask", self._ask)
        monkeypatch.setattr(self.holders.meter, "want", self.wanted.append)

    def _ask(self, command: tuple[str, ...], timeout_s: float) -> ProgramOutput:
        self.commands.append(command)
        return self.answer


@pytest.mark.parametrize(("device", "freed"), [(3, 8), (0, 5), (None, None)])
def test_what_an_end_frees_is_unknown_while_the_gpus_part_is(device: int | None, freed: int | None) -> None:
    assert MemoryConsumer("m-1", "m", "serving", "", None, None, (), (), 5, device).held_bytes == freed


@pytest.mark.parametrize("unified", [True, False])
def test_any_gpu_is_measured_and_asked_for_the_memory_of_processes_only_where_it_is_the_hosts(
    unified: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, monkeypatch, unified=unified)
    asked.holders.refresh(100.0)
    asked.holders.refresh(100.0 + DEVICE_EVERY_S / 2)
    assert asked.commands == ([DEVICE_COMMAND] if unified else [])
    assert asked.wanted == [True, True]

    asked.holders.refresh(100.0 + DEVICE_EVERY_S)
    assert asked.commands == ([DEVICE_COMMAND] * 2 if unified else [])
    assert DEVICE_TIMEOUT_S < DEVICE_EVERY_S


def test_a_node_without_an_engine_is_not_measured_and_has_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, unified=True)
    asked.answer = ProgramOutput("", "nvidia-smi failed")
    asked.holders.refresh(100.0)
    assert asked.holders.device_trouble == "nvidia-smi failed"

    asked.ids = []
    asked.holders.refresh(200.0)
    assert (asked.holders.device_trouble, asked.wanted, len(asked.commands)) == (None, [True, False], 1)


def test_a_process_that_ended_is_let_go_once_no_look_can_mean_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, unified=False)
    engine = subprocess.Popen(["sleep", "infinity"])
    who = processes.identity(engine.pid)
    assert who is not None
    status = {"engine_pid": who.pid, "engine_start_ticks": who.start_ticks, "handle": {"boot_id": who.boot_id}}
    write_status(status_path(str(tmp_path), "m-1"), status)
    asked.holders.refresh(100.0)
    ((fd,),) = [one.pidfds for one in asked.holders.ranks]
    engine.kill()
    engine.wait()

    asked.holders.refresh(101.0)
    assert asked.holders.ranks == () and is_pidfd(fd)
    asked.holders.refresh(101.0 + consumers.RETIRED_S)
    assert not is_pidfd(fd)


def test_another_process_that_has_the_number_by_now_is_not_held(tmp_path: Path) -> None:
    who = processes.identity(os.getpid())
    assert who is not None
    before = pidfds()
    assert Consumers(str(tmp_path), unified=True)._fd(replace(who, start_ticks=who.start_ticks + 1)) == -1
    assert pidfds() == before


def pidfds() -> set[int]:
    return {int(fd) for fd in os.listdir("/proc/self/fd") if is_pidfd(int(fd))}


def is_pidfd(fd: int) -> bool:
    return os.path.realpath(f"/proc/self/fd/{fd}").endswith("[pidfd]")


def test_of_two_guards_one_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, unified=True)
    asked.holders.refresh(100.0, ask_device=False)
    assert (asked.wanted, asked.commands) == ([False], [])


def test_a_missing_nvidia_smi_is_no_trouble_and_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(tmp_path, monkeypatch, unified=True)
    asked.answer = ProgramOutput("", "nvidia-smi is not installed", missing=True)
    asked.holders.refresh(100.0)
    asked.holders.refresh(200.0)
    assert (asked.holders.device_trouble, asked.holders.has_device, len(asked.commands)) == (None, False, 1)
