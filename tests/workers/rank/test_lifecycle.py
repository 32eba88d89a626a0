"""Starting a rank: what it is given, what it is told, what it refuses; and what scanning finds of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import httptools
import pytest

import sparkd
import tests
import workers
from sparkd.errors import RankError
from sparkd.state.nouns import Progress, RankHandle
from tests.support.facts import facts
from tests.support.processes import alive
from tests.support.ranks import SECRET, STUBBORN, Place, a_place, stop, venv
from tests.support.waiting import HUNG_S, until
from workers.host import processes
from workers.load.progress import ProgressFile
from workers.rank import lifecycle
from workers.rank.lifecycle import RankSpec
from workers.rank.report import report_path

place = pytest.fixture(name="place")(a_place)


# What a rank is started as


def test_the_handle_is_on_disk_before_spawn_returns(place: Place) -> None:
    handle = lifecycle.spawn(place.spec())
    path = Path(place.run_dir, "r1.json")
    assert place.status()["handle"] == handle
    assert path.stat().st_mode & 0o777 == 0o600
    assert Path(place.run_dir).stat().st_mode & 0o777 == 0o700
    known = RankHandle(**handle)
    assert (known.rank_id, known.model, known.generation, known.node_id, known.rank) == ("r1", "m", 3, "n1", 0)
    assert (known.socket_path, known.config_hash, known.log_path) == (f"{place.run_dir}/r1.sock", "c0ffee", str(place.log))
    assert processes.is_alive(processes.Identity(known.pid, known.start_ticks, known.boot_id))


def test_a_fact_fits_the_state(place: Place) -> None:
    handle = place.start()
    fact = place.fact()
    assert fact["handle"] == handle
    assert (fact["alive"], fact["processes"], fact["state"], fact["exit_code"], fact["stop_ordered"]) == (True, 1, "running", None, False)
    own = {"kv_requests", "failure_at_s"}  # which the rank's files need for themselves
    assert set(fact["progress"]) - own <= {one.name for one in fields(Progress)}


@pytest.mark.parametrize("loader", [False, True])
def test_the_age_of_its_error_is_told_whatever_the_clock_is_set_to(place: Place, monkeypatch: pytest.MonkeyPatch, loader: bool) -> None:
    place.start("import time\nprint('RuntimeError: no device\\nup', flush=True)\ntime.sleep(600)\n")
    assert 0 <= until(lambda: place.fact()["cause_age_s"]) < HUNG_S
    shift_s = 86_400.0
    real = time.time
    if loader:
        monkeypatch.setattr(time, "time", lambda: real() + shift_s - 1000)
        ProgressFile(str(report_path(place.run_dir, "r1"))).failed("NaN in a.weight")
    monkeypatch.setattr(lifecycle.time, "time", lambda: real() + shift_s)
    age_s = place.fact()["cause_age_s"]
    assert 1000 <= age_s < 1000 + HUNG_S if loader else 0 <= age_s < HUNG_S


def test_the_engine_stands_alone(place: Place) -> None:
    code = """
    import json, os, resource, signal, time
    print(json.dumps({
        "parent": os.getppid(), "session": os.getsid(0), "group": os.getpgid(0), "pid": os.getpid(), "cwd": os.getcwd(),
        "umask": os.umask(0), "stdin": os.readlink("/proc/self/fd/0"), "core": resource.getrlimit(resource.RLIMIT_CORE),
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")),
        "oom": open("/proc/self/oom_score_adj").read().strip(), "sigint": signal.getsignal(signal.SIGHUP) is signal.SIG_DFL,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }), flush=True)
    print("up", flush=True)
    time.sleep(600)
    """
    inherited = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inherited, True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    try:
        handle = place.start(code)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        os.close(inherited)
    seen = json.loads(next(line for line in place.lines() if line.startswith("{")))
    assert seen["parent"] == seen["session"] == handle["pid"]
    assert seen["group"] == seen["pid"] == place.fact()["engine_pid"]
    assert (seen["cwd"], seen["umask"], seen["stdin"], seen["core"]) == ("/", 0o077, os.devnull, [0, 0])
    assert seen["fds"] == [0, 1, 2]
    assert seen["oom"] == "500"
    assert seen["sigint"]
    assert seen["blocked"] == 0
    shim = processes.read_stat(handle["pid"])
    assert shim
    assert shim.session == handle["pid"]
    assert shim.parent != os.getpid()
    assert {os.readlink(f"/proc/{handle['pid']}/fd/{fd}") for fd in (0, 1, 2)} == {os.devnull}
    assert Path(f"/proc/{handle['pid']}/comm").read_text().strip() == "sparkd-rank"


def test_secrets_are_in_no_argv_and_not_in_the_shim(place: Place) -> None:
    key = place.root / "engine.key"
    key.write_text(SECRET, encoding="utf-8")
    key.chmod(0o600)
    code = "import os\nprint(os.environ['SPARKD_ENGINE_KEY_FILE'], 'Authorization: Bearer abcdefgh12345678')\n"
    code += "print('up', flush=True)\nos.read(0, 1)\n"
    handle = place.start(code + "import time\ntime.sleep(600)", socket_path=None, host="127.0.0.1", port=9, api_key_path=str(key))
    engine = place.fact()["engine_pid"]
    seen = {name: Path(f"/proc/{pid}/{name}").read_bytes() for pid in (handle["pid"],) for name in ("cmdline", "environ")}
    seen["engine's cmdline"] = Path(f"/proc/{engine}/cmdline").read_bytes()
    seen["log"] = place.log.read_bytes()
    seen["status"] = Path(place.run_dir, "r1.json").read_bytes()
    assert [name for name, text in seen.items() if SECRET.encode() in text or b"abcdefgh12345678" in text] == []
    environ = Path(f"/proc/{engine}/environ").read_bytes()
    assert SECRET.encode() not in environ and str(key).encode() in environ
    assert place.log.stat().st_mode & 0o777 == 0o640


def test_a_foreign_interpreter_needs_nothing_of_ours(place: Place) -> None:
    site, runtime = venv(place.root / "venv"), str(place.root / "venv" / "bin" / "python")
    (site / "httptools").symlink_to(Path(httptools.__file__).parent)  # what the stub needs, as vLLM's environment has it
    plugin = place.root / "plugin"
    plugin.mkdir()
    for package in (workers, sparkd, tests):  # the first two as the agent's plugin folder has them
        (plugin / package.__name__).symlink_to(Path(package.__file__).parent)
    bare = subprocess.run([runtime, "-I", "-c", "import sparkd"], capture_output=True, text=True, check=False)
    assert "No module named 'sparkd'" in bare.stderr
    lifecycle.spawn(place.spec(runtime=runtime, entrypoint="tests.stub", pythonpath=(str(plugin),)))
    until(lambda: place.fact()["progress"]["server_up"])
    assert place.fact()["alive"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runtime": "/nonexistent/python"}, "r1 /nonexistent/python engine.runtime"),
        ({"rank_id": "../r1"}, "../r1 1 128 . _ -"),
        ({"runtime": "python3"}, "python3 r1 /"),
        ({"model": "--trust-remote-code"}, "--trust-remote-code r1 -"),
        ({"flags": ("--a\0b",)}, "r1"),
        ({"env": {"A=B": "c"}}, "A=B r1 _"),
        ({"socket_path": "/" + "s" * 120}, f"/{'s' * 120} 107 7 runtime_dir"),
        ({"socket_path": None, "host": "10.0.0.2"}, "r1 10.0.0.2 api_key_path socket_path"),
    ],
)
def test_what_cannot_be_started_says_why_and_leaves_nothing(place: Place, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RankError) as caught:
        lifecycle.spawn(place.spec(**changes))
    assert facts(caught.value) == told
    assert lifecycle.scan(place.run_dir) == []
    assert not os.path.exists(place.run_dir) or os.listdir(place.run_dir) == []


def test_an_id_is_used_once(place: Place) -> None:
    handle = place.start()
    with pytest.raises(RankError, match=f"r1 .*{re.escape(place.run_dir)}"):
        lifecycle.spawn(place.spec())
    assert place.fact()["alive"]
    with pytest.raises(RankError, match=rf"r1 .*{handle['pid']}"):
        lifecycle.forget("r1", place.run_dir)
    stop(place, handle)
    lifecycle.forget("r1", place.run_dir)
    assert os.listdir(place.run_dir) == []
    place.log.unlink()
    place.start()


def test_a_specification_travels_as_json(place: Place) -> None:
    spec = place.spec(env={"A": "b"}, flags=("--x",), loader_extra_config={"quantize": {"a": "nvfp4"}})
    assert RankSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(RankError, match="'colour'"):
        RankSpec.from_dict(spec.to_dict() | {"colour": "red"})
    with pytest.raises(RankError, match="model_name"):
        RankSpec.from_dict({name: value for name, value in spec.to_dict().items() if name != "model_name"})


# Scanning


def test_damaged_status_files_are_reported_and_can_be_cleaned(place: Place) -> None:
    handle = place.start()
    whole = Path(place.run_dir, "r1.json").read_text(encoding="utf-8")
    for name, text in {"half": whole[: len(whole) // 2], "empty": ""}.items():
        Path(place.run_dir, f"{name}.json").write_text(text, encoding="utf-8")
    Path(place.run_dir, "not a rank.json").write_text("{}", encoding="utf-8")
    facts = {fact["rank_id"]: fact for fact in lifecycle.scan(place.run_dir)}
    assert sorted(facts) == ["empty", "half", "r1"]
    assert facts["r1"]["alive"]
    for name in ("half", "empty"):
        assert (facts[name]["handle"], facts[name]["state"], facts[name]["alive"]) == (None, "unreadable", False)
        assert f"{place.run_dir}/{name}.json" in facts[name]["error"]
        lifecycle.forget(name, place.run_dir)
    assert [fact["handle"] for fact in lifecycle.scan(place.run_dir)] == [handle]


def test_the_run_directory_need_not_exist(place: Place) -> None:
    assert lifecycle.scan(place.run_dir) == []


@pytest.mark.parametrize("lost", ["its status file", "its folder"])
def test_a_status_file_is_written_again_and_without_its_folder_an_engine_ends(place: Place, lost: str) -> None:
    """With the folder its socket and its key are gone: no daemon could reach it or find it any more."""
    handle = place.start(STUBBORN)
    engine = place.status()["engine_pid"]
    if lost == "its folder":
        shutil.rmtree(place.run_dir)
        until(lambda: not alive(engine) and not alive(handle["pid"]))
        return
    Path(place.run_dir, "r1.json").unlink()
    until(lambda: Path(place.run_dir, "r1.json").exists())
    assert alive(engine)


SERVER = """
import socket, sys, time
socket.socket(socket.AF_UNIX).bind(sys.argv[sys.argv.index("--uds") + 1])
print("INFO:     Application startup complete.\\nup", flush=True)
time.sleep(600)
"""


# The status file of the second is written again in the time of another test.
@pytest.mark.parametrize("lost", ["its socket", pytest.param("its folder, which another start made again", marks=pytest.mark.rest)])
def test_an_engine_whose_socket_was_removed_is_seen_as_deaf(place: Place, lost: str) -> None:
    handle = place.start(SERVER)
    until(lambda: place.fact()["progress"]["server_up"])
    assert (place.fact()["alive"], place.fact()["deaf"]) == (True, False)
    os.kill(handle["pid"], signal.SIGSTOP)  # it must not look between the end of its folder and the next one
    if lost == "its socket":
        Path(place.run_dir, "r1.sock").unlink()
    else:
        shutil.rmtree(place.run_dir)
        Path(place.run_dir).mkdir()
    os.kill(handle["pid"], signal.SIGCONT)
    until(lambda: lifecycle.scan(place.run_dir))
    assert (place.fact()["alive"], place.fact()["deaf"]) == (True, True)


def test_an_old_boot_s_rank_is_dead(place: Place) -> None:
    handle = place.start()
    status = place.status()
    stop(place, handle)
    status["handle"]["boot_id"] = "00000000-0000-0000-0000-000000000000"
    Path(place.run_dir, "r1.json").write_text(json.dumps(status), encoding="utf-8")
    fact = place.fact()
    assert (fact["alive"], fact["processes"], fact["state"]) == (False, 0, "running")
