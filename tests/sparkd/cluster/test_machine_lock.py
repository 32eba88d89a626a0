"""One daemon for each machine: the second is refused by name, and a name is free as soon as its process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkd.cluster import machine_lock
from sparkd.cluster.ray_node import run_node
from sparkd.config.config import load_config
from sparkd.daemon.daemon import Options, serve
from sparkd.errors import StateError
from sparkd.gateway.server import bind
from tests.support.lone_sparkd import alone
from tests.support.waiting import HUNG_S

HOLDER = """
import sys
from sparkd.cluster import machine_lock
machine_lock.NAME = "\\0" + sys.argv[1]
with machine_lock.machine_lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_lock, "NAME", machine_lock.NAME)
    alone()


def test_the_second_of_a_machine_is_refused_until_the_first_has_ended() -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, machine_lock.NAME[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdin
    assert holder.stdout.readline() == "held\n"
    for _ in range(3):
        with pytest.raises(StateError, match=rf"process {holder.pid} of user \w+") as refused, machine_lock.machine_lock():
            pass
        assert "stop it first" in refused.value.message
    holder.kill()
    holder.communicate(timeout=HUNG_S)
    with machine_lock.machine_lock():
        pass


def test_a_machine_is_free_again_after_it_was_held() -> None:
    for _ in range(2):
        with machine_lock.machine_lock(), pytest.raises(StateError, match=f"process {os.getpid()} "), machine_lock.machine_lock():
            pass


def test_a_daemon_and_a_node_that_joins_another_head_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("x")
    # A second daemon's port is most often the first one's too.
    port = bind("127.0.0.1", 0)
    listen = f"127.0.0.1:{port.getsockname()[1]}"
    flags = {"listen": listen, "state_dir": str(tmp_path / "state"), "runtime_dir": str(tmp_path / "run")}
    joining = {"cluster.address": "192.0.2.1:6379", "cluster.node_ip": "192.0.2.2", "cluster.token_file": str(tmp_path / "token")}
    monkeypatch.setattr("sparkd.daemon.daemon.processes.hide", lambda: True)  # this process is not the daemon's
    monkeypatch.setattr("sparkd.daemon.daemon.memlock.lock", lambda: None)
    with port, machine_lock.machine_lock():
        with pytest.raises(StateError, match="lends this machine's memory"):
            serve(load_config(None, flags=flags, environ={}), Options())
        with pytest.raises(StateError, match="lends this machine's memory"):
            run_node(load_config(None, flags=flags | joining, environ={}), {})
