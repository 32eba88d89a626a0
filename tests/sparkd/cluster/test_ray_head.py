"""sparkd's own Ray head: how it is started, which processes are its own, and one real head from its start to its end."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd import __version__
from sparkd.cluster import ray_head
from sparkd.cluster.node_paths import rank_folders
from sparkd.cluster.ray_head import RayHead, RayOptions, make_token, node_environment, process_cost
from sparkd.config.config import load_config
from sparkd.errors import RayUnavailable
from tests.support.daemon_process import alive
from tests.support.stuck_driver import a_stuck_driver
from tests.support.waiting import HUNG_S, until
from workers.agent.version import VERSION
from workers.host.node_variables import NODE_LINKS
from workers.host.processes import descendants, identity, table

stuck_driver = pytest.fixture(name="stuck_driver")(a_stuck_driver)


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own paths are too long for Ray's sockets."""
    made = Path(tempfile.mkdtemp(prefix="ray-"))
    yield made
    shutil.rmtree(made)


def head_of(folder: Path, **changes: Any) -> RayHead:
    return RayHead(RayOptions(folder, folder / "ray.token", **{"memory_gib": 4, "object_store_mib": 80} | changes))


@pytest.fixture
def head(folder: Path) -> RayHead:
    return head_of(folder)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test starts here ends with it."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(processes: list[subprocess.Popen[str]], argv: list[str], env: dict[str, str], **more: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True, **more)
    processes.append(process)
    return process


def up(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


# How it is started


def test_the_command_of_a_head(folder: Path) -> None:
    command = head_of(folder, port=6380).command()

    assert command[:5] == [sys.executable, "-P", "-m", "ray.scripts.scripts", "start"]
    assert set(command[5:]) == {
        *("--head", "--port=6380", "--include-dashboard=false", "--no-monitor", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}/ray"),
        *("--object-store-memory=83886080", '--resources={"unified_memory_gib": 4}', "--num-cpus=1", "--num-gpus=1"),
        f"--labels=sparkd-version={__version__},sparkd-agent={VERSION}",
        *("--include-log-monitor=false", "--disable-usage-stats", "--log-color=false"),
    }


def test_the_command_of_a_node_that_joins(folder: Path) -> None:
    command = head_of(folder, node_ip="10.0.0.2", join="10.0.0.1:6380").command()

    assert "--address=10.0.0.1:6380" in command
    assert "--node-ip-address=10.0.0.2" in command
    assert not [flag for flag in command if flag.startswith(("--head", "--port", "--include-dashboard"))]


def test_the_environment_is_ours_and_no_other_clusters(head: RayHead, folder: Path) -> None:
    inherited = {"PATH": "/bin", "HOME": "/h", "RAY_ADDRESS": "10.9.9.9:1", "RAY_AUTH_TOKEN": "theirs", "RAY_worker_niceness": "19"}
    environment = head.environment(inherited)

    assert (environment["PATH"], environment["HOME"]) == ("/bin", "/h")
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & environment.keys()
    assert (environment["RAY_AUTH_MODE"], environment["RAY_AUTH_TOKEN_PATH"]) == ("token", f"{folder}/ray.token")
    assert (environment["RAY_worker_niceness"], environment["RAY_memory_monitor_refresh_ms"]) == ("0", "0")


def test_ray_carries_the_names_of_its_nodes_interfaces_where_it_has_others_to_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fabric(node_ip: str, environ: Mapping[str, str]) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": f"cable of {node_ip}", "TP_SOCKET_IFNAME": environ["HOME"]}

    monkeypatch.setattr(ray_head, "ray_environment", fabric)
    names = {"GLOO_SOCKET_IFNAME": "cable of 10.0.0.2", "TP_SOCKET_IFNAME": "/h"}
    environment = head_of(folder, node_ip="10.0.0.2").environment({"HOME": "/h"})
    assert environment.items() >= (names | {NODE_LINKS: "GLOO_SOCKET_IFNAME,TP_SOCKET_IFNAME"}).items()
    assert not {*names, NODE_LINKS} & head_of(folder).environment({"HOME": "/h"}).keys()
    monkeypatch.setattr(ray_head, "ray_environment", lambda *_: {})
    assert NODE_LINKS not in head_of(folder, node_ip="10.0.0.2").environment({})


def test_ray_carries_the_folders_of_its_node(folder: Path) -> None:
    config = load_config(None, flags={"state_dir": "/s", "runtime_dir": "/r", "quantized_cache.dir": "/q"}, environ={})
    environment = head_of(folder, rank_folders=rank_folders(config, "10.0.0.2")).environment({})

    told = {name: value for name, value in environment.items() if name.startswith("SPARKD_RAY_")}
    assert told == {
        "SPARKD_RAY_RUN_DIR": "/r/ranks/10.0.0.2", "SPARKD_RAY_LOG_DIR": "/s/logs", "SPARKD_RAY_CACHE_DIR": "/q",
        "SPARKD_RAY_KV_DIR": "/s/kv-profiles", "SPARKD_RAY_PYTHON": sys.executable,
    }  # fmt: skip


@pytest.mark.parametrize(("node_ip", "single"), [("127.0.0.1", "0"), ("10.0.0.1", None)])
def test_single_machine_mode_on_loopback_only(folder: Path, node_ip: str, single: str | None) -> None:
    assert head_of(folder, node_ip=node_ip).environment({}).get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == single


def test_the_hook_can_be_imported_by_ray(head: RayHead) -> None:
    module, _, function = head.environment({})["RAY_START_HOOK"].rpartition(".")
    code = f"import importlib; assert callable(getattr(importlib.import_module({module!r}), {function!r}))"

    subprocess.run([sys.executable, "-S", "-c", code], env=head.environment({}), cwd="/", check=True, timeout=HUNG_S)


def test_a_token_is_made_once_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "ray.token"
    make_token(path)
    token = path.read_text()
    make_token(path)

    assert len(bytes.fromhex(token)) == 32
    assert path.read_text() == token
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["ray.token"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('first'); print('  the last word  '); sys.exit(3)", r"exit code 3\): the last word"),
        ("pass", r"exit code 0\): no output"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    head: RayHead, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    monkeypatch.setattr(RayHead, "command", lambda self: [sys.executable, "-S", "-c", code])
    with pytest.raises(RayUnavailable, match=words):
        head.ensure()

    assert os.listdir(folder) == ["ray.token"]


def test_a_start_that_cannot_even_begin(head: RayHead, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayHead, "command", lambda self: ["/nowhere/python"])
    with pytest.raises(RayUnavailable, match="/nowhere/python"):
        head.ensure()


@pytest.mark.parametrize("keeper", [False, True])
def test_a_python_that_cannot_name_a_process_for_sure_starts_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch, keeper: bool) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(RayUnavailable, match=r"has no os\.pidfd_open"):
        head_of(folder, keeper=keeper, starts=False).ensure()
    assert list(folder.iterdir()) == []


# What is recorded


@pytest.mark.parametrize("record", [None, '{"address": "127.0.0.1:6379"}'])
def test_no_record_and_no_process_is_no_head(head: RayHead, folder: Path, record: str | None) -> None:
    if record is not None:
        (folder / "ray.json").write_text(record)

    assert head.living_address() is None
    assert (head.costs(), head.listeners(), head.essential()) == ([], [], {})


def test_the_daemon_does_not_start_what_ray_node_keeps(folder: Path) -> None:
    (folder / "ray.json").write_text(json.dumps({"address": "127.0.0.1:1", "keeper": True}))
    head, keeper = head_of(folder), head_of(folder, keeper=True)
    assert (head.kept_elsewhere, keeper.kept_elsewhere) == (True, False)
    with pytest.raises(RayUnavailable, match="ray-node"):
        head.ensure()

    keeper.stop()
    assert head.kept_elsewhere, "the keeper will come back"
    keeper.forget()
    assert not head.kept_elsewhere


# Whose processes


# A process by this name, with one child in its session and one in another; its end: SIGTERM or, where "stubborn", SIGKILL.
SERVER = """
import ctypes, signal, subprocess, sys, time
name, *how = sys.argv[1:]
ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
if how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep, start_new_session=apart) for apart in (False, True)]
print("up", flush=True)
children[0].wait()
"""


def server(processes: list[subprocess.Popen[str]], name: str, *how: str) -> subprocess.Popen[str]:
    """As `ray start` leaves one in the session that it was given."""
    return up(start(processes, [sys.executable, "-S", "-c", SERVER, name, *how], {}, start_new_session=True))


def record(folder: Path, pid: int, **changes: Any) -> None:
    """As the record of a head whose `ray start` was this process."""
    who = identity(pid)
    assert who is not None
    session = {"sessions": [pid], "start_ticks": who.start_ticks, "boot_id": who.boot_id}
    (folder / "ray.json").write_text(json.dumps({"address": "127.0.0.1:1"} | session | changes))


@pytest.mark.parametrize("how", [[], ["stubborn"]])
def test_stop_ends_the_session_of_its_start_and_nobody_else(
    head: RayHead,
    folder: Path,
    how: list[str],
    processes: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    stuck_driver: list[str],
) -> None:
    """Also while a driver holds a process of Ray's, or any other of this machine."""
    monkeypatch.setattr(ray_head, "STOP_GRACE_S", 0.2)
    head.folder.mkdir()
    ours, other = server(processes, "raylet", *how), server(processes, "raylet")
    record(folder, ours.pid)
    mine = {stat.pid for stat in table().values() if stat.session == ours.pid}
    engines = descendants([ours.pid, other.pid], table()) - mine
    assert len(mine) == 2 and len(engines) == 3, "what Ray starts in a session of its own is not Ray's"
    assert {process.pid for process in head.costs()} == mine
    assert head.essential() == {"raylet": ours.pid}

    head.stop()
    ours.wait()
    assert not mine & table().keys()
    assert [alive(pid) for pid in (*engines, other.pid)] == [True] * 4
    assert not head.folder.exists()
    head.stop()
    assert stuck_driver == []
    for pid in engines:
        os.kill(pid, signal.SIGKILL)


def test_what_outlives_its_start_is_of_the_head_and_a_number_that_another_process_has_is_not(
    head: RayHead, folder: Path, processes: list[subprocess.Popen[str]]
) -> None:
    killed, another = server(processes, "raylet"), server(processes, "raylet")
    below = descendants([killed.pid, another.pid], table())
    (left,) = (pid for pid in below if os.getsid(pid) == killed.pid)
    for changes in ({"boot_id": "another"}, {"start_ticks": 1}):
        record(folder, another.pid, **changes)
        assert head.costs() == []

    killed.kill()
    killed.wait()
    for changes in ({"start_ticks": 1}, {"start_ticks": None}):  # an earlier release noted none
        record(folder, left, **{"sessions": [killed.pid]} | changes)
        assert [process.pid for process in head.costs()] == [left]
    head.stop()
    assert left not in table() and alive(another.pid)
    for pid in below - {left}:
        os.kill(pid, signal.SIGKILL)


def test_a_ray_of_an_earlier_release_which_noted_no_session_is_found_by_its_folder(
    head: RayHead, folder: Path, processes: list[subprocess.Popen[str]]
) -> None:
    head.folder.mkdir()
    with open(head.folder / "raylet.err", "w") as log:
        ours = up(start(processes, [sys.executable, "-S", "-c", SERVER, "raylet"], {}, start_new_session=True, stderr=log))
    other = server(processes, "raylet")
    (folder / "ray.json").write_text(json.dumps({"address": "127.0.0.1:1", "join": None, "session": "session_1"}))
    below = descendants([ours.pid, other.pid], table())
    mine = {pid for pid in below if os.getsid(pid) == ours.pid}

    assert head.essential() == {"raylet": ours.pid}
    head.stop()
    ours.wait()
    assert alive(other.pid) and not mine & table().keys()
    for pid in below - mine:
        os.kill(pid, signal.SIGKILL)


# What it costs, and where it listens


def test_listeners_and_cost_of_a_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        found = ray_head._listening(os.getpid())
        assert f"127.0.0.1:{server.getsockname()[1]}" in found
        assert f"127.0.0.1:{client.getsockname()[1]}" not in found

    anonymous_bytes, cpu_s = process_cost(os.getpid())
    assert anonymous_bytes > 1 << 20
    assert cpu_s > 0
    assert process_cost(1 << 30) == (0, 0.0)
    assert ray_head._listening(1 << 30) == set()


# A real one

FRIEND = """
import logging, sys, time
import ray
ray.init(address=sys.argv[1], namespace="sparkd", _node_ip_address="127.0.0.1", log_to_driver=False, configure_logging=False,
         logging_level=logging.CRITICAL)
print("up" if ray.cluster_resources().get("unified_memory_gib") == 4 else "another cluster", flush=True)
time.sleep(600)
"""
# What ray.init does first; by itself it would try for 20 s.
STRANGER = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    print(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=300))
except AuthenticationError:
    print("refused")
"""


@pytest.mark.rest
def test_a_real_head(head: RayHead, folder: Path, processes: list[subprocess.Popen[str]]) -> None:
    try:
        address = head.ensure()
        essential = head.essential()
        assert essential.keys() == {"gcs_server", "raylet"}
        assert socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))).close() is None

        # Another daemon finds it.
        again = head_of(folder)
        assert (again.living_address(), again.ensure()) == (address, address)
        assert again.essential() == essential

        # It listens on loopback only, and its token is in nobody's command line or environment.
        where = [ipaddress.ip_address(listener.partition(" ")[0].rpartition(":")[0]) for listener in head.listeners()]
        assert where
        assert all((getattr(ip, "ipv4_mapped", None) or ip).is_loopback for ip in where), head.listeners()
        token = head.options.token_path.read_bytes()
        costs = head.costs()
        assert costs
        for process in costs:
            assert token not in Path(f"/proc/{process.pid}/cmdline").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
            assert process.anonymous_bytes > 0
        assert stat.S_IMODE(head.folder.stat().st_mode) == 0o700

        # Who has the token may join and is not of this head; who has another may not.
        wrong = folder / "wrong.token"
        make_token(wrong)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        friend, stranger = (
            start(processes, [sys.executable, "-c", code, address], clean | node_environment(path, "127.0.0.1"), stderr=subprocess.DEVNULL)
            for code, path in ((FRIEND, head.options.token_path), (STRANGER, wrong))
        )
        up(friend)
        assert stranger.communicate(timeout=HUNG_S)[0] == "refused\n"
        pids = [process.pid for process in head.costs()]
        assert friend.pid not in pids
        assert stat.S_IMODE(head.folder.stat().st_mode) == 0o700, "joining does not open it again"
    finally:
        head.stop()

    until(lambda: not [pid for pid in pids if alive(pid)], "every process of Ray ends")
    assert head.living_address() is None
    assert alive(friend.pid)
    assert sorted(os.listdir(folder)) == ["ray.token", "wrong.token"]
    until(lambda: not _answers(address), "its port is closed")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
