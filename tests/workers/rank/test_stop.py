"""The end of a rank as real processes: what it survives, what ends it, and that a stop leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import STUBBORN, Place, a_place, stop
from tests.support.stuck_driver import a_stuck_driver
from tests.support.waiting import HUNG_S, until
from workers.host import processes
from workers.rank import lifecycle

place = pytest.fixture(name="place")(a_place)
stuck_driver = pytest.fixture(name="stuck_driver")(a_stuck_driver)


# What it survives, and what ends it


def test_it_survives_the_process_group_that_started_it(place: Place) -> None:
    spec = place.root / "spec.json"
    spec.write_text(json.dumps(place.spec().to_dict()), encoding="utf-8")
    code = (
        "import json, sys, time\nfrom workers.rank.lifecycle import RankSpec, spawn\n"
        "spec = RankSpec.from_dict(json.load(open(sys.argv[1])))\nprint(json.dumps(spawn(spec)), flush=True)\ntime.sleep(600)\n"
    )
    actor = subprocess.Popen(
        [sys.executable, "-c", code, str(spec)], stdout=subprocess.PIPE, start_new_session=True, env={"PYTHONPATH": lifecycle.PACKAGE_DIR}
    )
    assert actor.stdout
    with actor.stdout:
        handle = json.loads(actor.stdout.readline())
        before = place.fact()
        os.killpg(actor.pid, signal.SIGKILL)
        actor.wait()
    until(lambda: "up" in place.lines())
    after = place.fact()
    assert after["alive"]
    assert (after["handle"], after["engine_pid"]) == (handle, before["engine_pid"])
    assert stop(place, handle)["gone"]


def test_stop_ends_every_kind_of_child(place: Place) -> None:
    handle = place.start(STUBBORN)
    fact = place.fact()
    pids = lifecycle.verify_gone("r1", place.run_dir)
    assert fact["processes"] == len(pids) - 1
    assert fact["processes"] >= 7
    ended = stop(place, handle)
    assert ended.items() >= {"gone": True, "survivors": [], "exit_code": -signal.SIGKILL, "stop_ordered": True}.items()
    assert [pid for pid in pids if processes.read_stat(pid) and pid in processes.table()] == []
    fact = place.fact()
    assert (fact["alive"], fact["processes"], fact["state"], fact["stop_ordered"]) == (False, 0, "exited", True)


def test_a_willing_engine_is_not_killed(place: Place) -> None:
    code = """
    import signal, sys, time
    def end(*_):
        print("last words", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, end)
    print("up", flush=True)
    time.sleep(600)
    """
    handle = place.start(code, stop_timeout_s=HUNG_S)
    assert stop(place, handle, HUNG_S).items() >= {"gone": True, "survivors": [], "exit_code": 3, "stop_ordered": True}.items()
    assert "last words" in place.lines()


def test_the_caller_can_shorten_the_grace(place: Place) -> None:
    handle = place.start(STUBBORN, stop_timeout_s=600.0)
    ended = stop(place, handle, 0.0)
    assert (ended["gone"], ended["exit_code"], ended["stop_ordered"]) == (True, -signal.SIGKILL, True)


def test_stop_twice_is_harmless(place: Place) -> None:
    handle = place.start()
    first = stop(place, handle)
    assert stop(place, handle) == first
    lifecycle.forget("r1", place.run_dir)
    assert stop(place, handle) == {"gone": True, "survivors": [], "exit_code": None, "stop_ordered": False, "left": []}


def test_an_engine_that_ends_by_itself_was_not_ordered_to(place: Place) -> None:
    """A dead vLLM exits 0 (vllm#48966)."""
    handle = place.start(STUBBORN.replace("print('up', flush=True)\ntime.sleep(600)\n", "print('up', flush=True)\nsys.exit(0)\n"))
    until(lambda: place.fact()["state"] == "exited")
    fact = place.fact()
    assert (fact["alive"], fact["processes"], fact["exit_code"], fact["stop_ordered"]) == (False, 0, 0, False)
    assert stop(place, handle)["stop_ordered"] is False
    assert any("exit code 0" in line for line in place.lines())


def test_kill_9_of_the_engine_takes_its_children_along(place: Place) -> None:
    place.start(STUBBORN)
    os.kill(place.fact()["engine_pid"], signal.SIGKILL)
    until(lambda: place.fact()["state"] == "exited")
    fact = place.fact()
    assert (fact["alive"], fact["processes"], fact["exit_code"], fact["stop_ordered"]) == (False, 0, -signal.SIGKILL, False)


def test_kill_9_of_the_shim_is_seen_and_cleaned_up(place: Place) -> None:
    """Of processes in sessions of their own nothing tells whose they were, once shim and engine are dead: no engine makes them."""
    handle = place.start(STUBBORN.replace("start_new_session=True", "start_new_session=False").replace("os.setsid()", "pass"))
    engine, pids = place.fact()["engine_pid"], lifecycle.verify_gone("r1", place.run_dir)
    os.kill(handle["pid"], signal.SIGKILL)
    until(lambda: not processes.read_stat(engine) or engine not in processes.table())
    fact = place.fact()
    assert (fact["alive"], fact["state"], fact["exit_code"], fact["stop_ordered"]) == (False, "running", None, False)
    assert fact["processes"] >= 4
    assert stop(place, handle)["gone"]
    assert place.fact()["processes"] == 0
    assert [pid for pid in pids if pid in processes.table()] == []


def test_a_process_that_a_driver_holds_keeps_nobody_from_starting_looking_and_stopping(place: Place, stuck_driver: list[str]) -> None:
    handle = place.start(STUBBORN)
    assert place.fact()["processes"] >= 4
    assert len(lifecycle.verify_gone("r1", place.run_dir)) >= 4
    assert stop(place, handle, 0.1)["gone"]
    lifecycle.forget("r1", place.run_dir)
    assert stuck_driver == []


def test_a_stuck_shim_is_ended_from_outside(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SHIM_TIMEOUT_S", 0.1)
    handle = place.start(STUBBORN)
    pids = lifecycle.verify_gone("r1", place.run_dir)
    os.kill(handle["pid"], signal.SIGSTOP)
    ended = stop(place, handle, 0.1)
    assert (ended["gone"], ended["stop_ordered"]) == (True, True)
    until(lambda: not set(pids) & processes.table().keys())
    assert place.fact()["state"] == "exited"


@pytest.mark.parametrize("lie", [{"start_ticks": 1}, {"boot_id": "00000000-0000-0000-0000-000000000000"}])
def test_a_reused_pid_is_never_signalled(place: Place, lie: dict[str, Any]) -> None:
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        me = processes.identity(stranger.pid)
        assert me
        handle = {"rank_id": "r1", "pid": me.pid, "start_ticks": me.start_ticks, "boot_id": me.boot_id, "socket_path": None} | lie
        os.makedirs(place.run_dir)
        status = {"handle": handle, "state": "running", "engine_pid": me.pid, "engine_start_ticks": handle["start_ticks"]}
        Path(place.run_dir, "r1.json").write_text(json.dumps(status), encoding="utf-8")
        assert place.fact()["alive"] is False
        assert place.fact()["processes"] == 0
        assert stop(place, handle, 0.0)["gone"]
        assert stranger.poll() is None
        assert processes.is_alive(me)
    finally:
        stranger.kill()
        stranger.wait()


def test_another_run_directory_s_rank_of_the_same_name_is_left_alone(place: Place) -> None:
    handle = place.start()
    elsewhere = place.root / "elsewhere"
    elsewhere.mkdir()
    assert lifecycle.stop({"rank_id": "r1"}, run_dir=str(elsewhere), grace_s=0)["gone"]
    assert place.fact()["alive"]
    assert stop(place, handle)["gone"]


def test_sockets_go_with_the_rank(place: Place) -> None:
    code = """
    import os, socket, sys, time
    for path in (sys.argv[sys.argv.index("--uds") + 1], os.environ["VLLM_RPC_BASE_PATH"] + "/inner"):
        socket.socket(socket.AF_UNIX).bind(path)
    print("up", flush=True)
    time.sleep(600)
    """
    handle = place.start(code)
    assert Path(place.run_dir, "r1.sock").is_socket()
    stop(place, handle)
    assert sorted(os.listdir(place.run_dir)) == ["r1.json", "r1.shm"]
