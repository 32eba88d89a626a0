"""Which processes are a rank's, as a table, and signals that reach nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import HUNG_S
from workers.host import processes
from workers.host.processes import Identity, Stat

BOOT = "b"
SHIM, ENGINE, WORKER = Identity(10, 100, BOOT), Identity(11, 101, BOOT), Identity(20, 200, BOOT)


def table(*rows: tuple[int, int, int, int]) -> dict[int, Stat]:
    """Rows of pid, parent, session, start_ticks."""
    return {pid: Stat(pid, "S", parent, session, start) for pid, parent, session, start in rows}


SHIM_ROW, ENGINE_ROW = (10, 1, 10, 100), (11, 10, 10, 101)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([SHIM_ROW, ENGINE_ROW], {11}, id="shim and engine"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (12, 11, 12, 102), (13, 12, 13, 103)], {11, 12, 13}, id="descendants, own sessions"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (12, 10, 12, 102)], {11, 12}, id="an orphan of another session is the shim's child"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (12, 1, 10, 102)], {11, 12}, id="in the session"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (12, 1, 12, 102)], {11}, id="a stranger"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (20, 1, 20, 200), (21, 20, 20, 201)], {11, 20, 21}, id="a worker that Ray started"),
        pytest.param([SHIM_ROW, ENGINE_ROW, (20, 1, 20, 999)], {11}, id="the worker's pid is a stranger's by now"),
        pytest.param([ENGINE_ROW, (12, 1, 10, 102)], {11, 12}, id="shim dead"),
        pytest.param([(12, 1, 10, 102)], {12}, id="shim and engine dead"),
        pytest.param([(10, 1, 10, 999), (12, 10, 10, 1000)], set(), id="the shim's pid is a stranger's by now"),
        pytest.param([SHIM_ROW, (11, 1, 11, 999), (14, 11, 11, 1000)], set(), id="the engine's pid is a stranger's by now"),
        pytest.param([], set(), id="all gone"),
    ],
)
def test_belonging(rows: list[tuple[int, int, int, int]], expected: set[int]) -> None:
    assert processes.belonging(table(*rows), BOOT, WORKER, shim=SHIM, engine=ENGINE) == expected


def test_another_boot_s_identities_count_for_nothing() -> None:
    assert processes.belonging(table(SHIM_ROW, ENGINE_ROW), "another", WORKER, shim=SHIM, engine=ENGINE) == set()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def test_send_reaches_the_one_that_was_named(sleeper: subprocess.Popen[bytes]) -> None:
    who = processes.identity(sleeper.pid)
    assert who
    assert processes.send(Identity(who.pid, who.start_ticks + 1, who.boot_id), signal.SIGKILL) is False
    assert processes.send(Identity(who.pid, who.start_ticks, "another boot"), signal.SIGKILL) is False
    assert sleeper.poll() is None
    assert processes.send(who, signal.SIGKILL) is True
    assert sleeper.wait() == -signal.SIGKILL
    assert processes.send(who, signal.SIGKILL) is False


def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    who = processes.identity(sleeper.pid)
    assert who
    processes.send(who, signal.SIGKILL)
    assert processes.wait_gone([who], timeout_s=HUNG_S)
    stat = processes.read_stat(who.pid)
    assert stat
    assert stat.state == "Z"
    assert processes.identity(who.pid) is None
    assert who.pid not in processes.table()


def test_what_does_not_die_is_named() -> None:
    undying = {3: Identity(3, -1, BOOT), 2: Identity(2, -1, BOOT)}
    assert processes.kill_all(lambda: undying, timeout_s=0.0, between=lambda _: None) == [2, 3]


def test_the_time_that_ended_children_took_stays() -> None:
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', 'sum(range(8_000_000))']); print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout
        child.stdout.readline()
        stat = processes.read_stat(child.pid)
        own = sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rsplit(") ", 1)[1].split()[11:13]))
        child.kill()
    assert stat
    assert stat.cpu_ticks > own


def test_a_strange_command_name_is_read() -> None:
    code = "import time; open('/proc/self/comm', 'w').write('a) S 1 (b'); print('up', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout
    with child.stdout:
        child.stdout.readline()
        stat = processes.read_stat(child.pid)
        child.kill()
        child.wait()
    assert stat
    assert (stat.parent, stat.session) == (os.getpid(), os.getsid(0))
