"""Engines that sparkd did not start: which processes of a node are such, and which are sparkd's own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import HUNG_S, until
from workers.agent.other_engines import foreign, found
from workers.host import processes

CHILDREN = """
import subprocess, sys, time
held = bytearray(8 << 20)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; held = bytearray(8 << 20); print(1, flush=True); time.sleep(600)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
child.wait()
"""
Start = Callable[..., int]


@pytest.fixture
def start() -> Iterator[Start]:
    """A process with a child that names itself on its command line as vLLM's front end does."""
    started: list[subprocess.Popen[bytes]] = []

    def one(module: str = "vllm.entrypoints.cli.main", **environ: str) -> int:
        command = [sys.executable, "-S", "-c", CHILDREN, "-m", module, "serve", "--api-key", "swordfish"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={"PATH": os.defpath, **environ}, start_new_session=True)
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


def of(pid: int) -> dict[str, Any] | None:
    return next((one for one in foreign(Path("/proc"), ask_device=False) if one["pid"] == pid), None)


def test_a_vllm_that_somebody_else_started_is_found_with_all_that_it_holds_and_without_its_arguments(start: Start) -> None:
    row = of(start())

    assert row is not None
    assert row["vllm"]
    assert row["bytes"] >= 16 << 20
    assert "swordfish" not in str(row)


@pytest.mark.parametrize(
    ("module", "environ"),
    [("vllm.entrypoints.cli.main", {"SPARKD_RANK_ID": "m-1-abc", "SPARKD_RUN_DIR": "/elsewhere"}), ("http.server", {})],
    ids=["a rank of some sparkd", "no engine"],
)
def test_what_is_sparkds_or_no_engine_is_not(start: Start, module: str, environ: dict[str, str]) -> None:
    assert of(start(module, **environ)) is None


def test_who_holds_gpu_memory_and_is_hidden_from_us_is_another_users(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ProtectProc=invisible."""
    pid, small, ended = start("vllm.entrypoints.cli.main"), start("http.server"), subprocess.Popen(["true"])
    ended.wait(HUNG_S)
    table = processes.table
    monkeypatch.setattr(processes, "table", lambda: {one: stat for one, stat in table().items() if one not in (pid, small)})
    monkeypatch.setattr("workers.agent.other_engines._device", lambda: {pid: 40 << 30, small: 100 << 20, ended.pid: 40 << 30})

    assert [one for one in found() if one["bytes"] >= 1 << 30] == [
        {"pid": pid, "name": "another user's process", "vllm": False, "bytes": 40 << 30}
    ]


def test_gpu_memory_tells_of_engines_with_other_names(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, small = start("sglang.launch_server"), start("http.server")
    monkeypatch.setattr("workers.agent.other_engines._device", lambda: {pid: 40 << 30, small: 100 << 20})
    rows = {one["pid"]: one for one in found()}

    assert (rows[pid]["vllm"], rows[pid]["bytes"] >= 40 << 30, small in rows) == (False, True, False)
    until(lambda: of(pid) is None)
