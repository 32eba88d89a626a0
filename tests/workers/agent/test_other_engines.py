"""Engines that sparkd did not start: which processes of a node are such, and which are sparkd's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.stuck_driver import a_stuck_driver
from tests.support.waiting import HUNG_S
from workers.agent.other_engines import foreign
from workers.host import inspection, processes
from workers.rank.status import living_workers, status_path, worker_path, write_status

# It names itself, as vLLM's front end does, or a shim of sparkd's, and has a child with a name of its own.
CHILDREN = """
import ctypes, os, subprocess, sys, time
name, *child = sys.argv[1:]
ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
held = bytearray(8 << 20)
if child:
    child = subprocess.Popen([sys.executable, "-S", "-c", os.environ["CHILDREN"], *child], stdout=subprocess.PIPE)
    child.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""
Start = Callable[..., int]
stuck_driver = pytest.fixture(name="stuck_driver")(a_stuck_driver)


@pytest.fixture
def start() -> Iterator[Start]:
    """A process of this name, in a session of its own, with a child of that name."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*names: str) -> int:
        command = [sys.executable, "-S", "-c", CHILDREN, *names]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={"CHILDREN": CHILDREN}, start_new_session=True)
        started.append(process)
        if process.stdout is not None:
            process.stdout.readline()
        return process.pid

    yield one
    for process in started:
        os.killpg(process.pid, 9)
        process.wait(HUNG_S)
        if process.stdout is not None:
            process.stdout.close()


def rows(run_dir: Path, *, device: bool = False) -> dict[int, dict[str, Any]]:
    return {row["pid"]: row for row in foreign(str(run_dir), ask_device=device)}


def test_a_vllm_that_somebody_else_started_is_found_with_all_that_it_holds(start: Start, tmp_path: Path, stuck_driver: list[str]) -> None:
    """Also while a driver holds a process: doctor, too, reads no command line and no environment."""
    pid, other = start("vllm", "VLLM::EngineCore"), start("http.server")
    found = rows(tmp_path)
    assert found[pid] | {"bytes": 0} == {"pid": pid, "name": "vllm", "vllm": True, "bytes": 0}
    assert found[pid]["bytes"] >= 16 << 20
    assert other not in found

    examined = {engine["pid"]: engine for engine in inspection.sample()["engines"]}
    assert examined[pid] == {"pid": pid, "name": "vllm", "ours": False}
    assert stuck_driver == []


def test_a_rank_of_some_sparkd_and_a_ray_worker_of_a_rank_of_ours_are_not_found(start: Start, tmp_path: Path) -> None:
    shim, worker = start("sparkd-rank", "VLLM::EngineCore"), start("ray::RayWorkerProc", "VLLM::Worker")
    assert worker in rows(tmp_path)
    write_status(status_path(str(tmp_path), "m-1-0123abcd"), {"handle": {}})
    me = processes.identity(worker)
    assert me is not None
    write_status(worker_path(str(tmp_path), "m-1-0123abcd"), asdict(me))
    family = {shim, worker, *processes.descendants([shim, worker], processes.table())}

    assert len(family) == 4 and not family & rows(tmp_path).keys()
    workers = living_workers(str(tmp_path))
    assert {engine["ours"] for engine in inspection.sample(workers=workers)["engines"] if engine["pid"] in family} == {True}


def test_who_holds_gpu_memory_and_is_hidden_from_us_is_another_users(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under ProtectProc=invisible."""
    pid, small, ended = start("vllm"), start("http.server"), subprocess.Popen(["true"])
    ended.wait(HUNG_S)
    table = processes.table
    monkeypatch.setattr(processes, "table", lambda: {one: stat for one, stat in table().items() if one not in (pid, small)})
    monkeypatch.setattr("workers.agent.other_engines._device", lambda: {pid: 40 << 30, small: 100 << 20, ended.pid: 40 << 30})

    # The machine may run engines of others.
    assert [row for row in rows(tmp_path, device=True).values() if row["pid"] in (pid, small, ended.pid)] == [
        {"pid": pid, "name": "another user's process", "vllm": False, "bytes": 40 << 30}
    ]


def test_gpu_memory_tells_of_engines_with_other_names(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pid, small = start("sglang"), start("http.server")
    monkeypatch.setattr("workers.agent.other_engines._device", lambda: {pid: 40 << 30, small: 100 << 20})
    found = rows(tmp_path, device=True)

    assert (found[pid]["vllm"], found[pid]["bytes"] >= 40 << 30, small in found) == (False, True, False)
    assert pid not in rows(tmp_path)
