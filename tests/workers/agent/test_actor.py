"""A node's agent, in this process: what it sees, how the page cache is freed, whose logs it reads, what a foreign engine may import."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkd.cluster.node_tracker import reading
from sparkd.errors import NodeRefused, RankError
from sparkd.state.nouns import RankHandle
from tests.stub import stub_engine
from tests.support.daemon_process import ROOT
from tests.support.waiting import HUNG_S, until
from workers.agent import actor as module
from workers.agent import page_cache
from workers.agent.actor import Agent, _make_key
from workers.guard.guard import Guard
from workers.host import node_variables
from workers.kv.report import Report
from workers.load.progress import ProgressFile
from workers.rank import lifecycle

FIXTURES = Path(__file__).parents[2] / "fixtures" / "meminfo"
SHOWN = ["sparkd", "sparkd_plugin-0.dist-info", "workers"]
NEVER_S = 60.0  # the sampler's thread sleeps through the test


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own paths are too long for a socket."""
    made = Path(tempfile.mkdtemp(prefix="agent-"))
    (made / "proc").mkdir()
    shutil.copy(FIXTURES / "tight-pool.txt", made / "proc" / "meminfo")
    yield made
    shutil.rmtree(made)


@pytest.fixture(autouse=True)
def _no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A guard that goes on would measure the GPU of the next test."""
    started, start = list[Guard](), Guard.start
    monkeypatch.setattr(Guard, "start", lambda guard: (started.append(guard), start(guard))[1])
    yield
    for guard in started:
        guard.stop()


@pytest.fixture
def made(folder: Path) -> Agent:
    return Agent("127.0.0.1", str(folder / "run"), str(folder / "log"), NEVER_S, str(folder / "proc"))


def test_its_folders_are_for_this_user_only(made: Agent) -> None:
    for path in (made.run_dir, made.log_dir, f"{made.run_dir}/plugin"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700


@pytest.mark.parametrize(
    ("elsewhere", "told", "folders"),
    [(False, True, "given"), (True, True, "own"), (True, False, "given")],
    ids=["the daemon's own node", "another node", "another node, whose Ray sparkd did not start"],
)
def test_another_node_keeps_its_own_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool, told: bool, folders: str
) -> None:
    for name, variable in (("run", node_variables.NODE_RUN_DIR), ("log", node_variables.NODE_LOG_DIR)):
        monkeypatch.delenv(variable, raising=False)
        if told:
            monkeypatch.setenv(variable, str(folder / "own" / name))
    made = Agent("n", str(folder / "given" / "run"), str(folder / "given" / "log"), NEVER_S, str(folder / "proc"), elsewhere)

    assert (made.run_dir, made.log_dir) == (str(folder / folders / "run"), str(folder / folders / "log"))


@pytest.mark.parametrize("folder_of", ["run", "log"])
def test_a_folder_of_another_user_is_told_until_it_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch, folder_of: str) -> None:
    (folder / folder_of).mkdir()

    def check(path: Path, **_: bool) -> None:
        path.mkdir(exist_ok=True)
        if path == folder / folder_of:
            raise PermissionError(errno.EPERM, "it belongs to another user", str(path))

    places = ("n", str(folder / "run"), str(folder / "log"), NEVER_S, str(folder / "proc"))
    with monkeypatch.context() as patched:
        patched.setattr("workers.agent.actor.private_folder", check)
        with pytest.raises(NodeRefused, match=str(folder / folder_of)):
            Agent(*places)
        made = Agent(*places, actor=True)
        for call in (made.open, made.observe, lambda: made.spawn(spec(folder), False)):
            with pytest.raises(NodeRefused, match=f"chown -R {os.geteuid()} "):
                call()

    made.open()
    assert made.observe()["reading"]["mem_total_bytes"] > 0


def test_it_observes_reading_ranks_and_its_own_clock(made: Agent) -> None:
    facts = made.observe()

    assert (facts["node_id"], facts["ranks"]) == ("127.0.0.1", [])
    seen = reading(facts["node_id"], facts["reading"], facts["now_s"])
    assert (seen.mem_total_bytes, seen.mem_free_bytes) == (127535272 * 1024, 1118800 * 1024)
    assert seen.age_s >= 0
    assert (made.version(), made.pid()) == (module.VERSION, os.getpid())


def test_it_tells_what_its_node_s_network_is(made: Agent) -> None:
    known = {"host", "interfaces", "rdma", "routes", "neighbours", "hotplug", "unified", "environment", "trouble", "answers"}
    assert made.fabric().keys() == known


def test_what_sparkd_told_its_ray_is_not_taken_for_the_operators_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {node_variables.NODE_LINKS: "GLOO_SOCKET_IFNAME,NCCL_DEBUG", "GLOO_SOCKET_IFNAME": "eth0", "MAX_JOBS": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    made = Agent("n", str(folder / "run"), str(folder / "log"), NEVER_S, str(folder / "proc"))

    assert made.fabric()["environment"] == {"MAX_JOBS": "8"}
    assert not {node_variables.NODE_LINKS, "GLOO_SOCKET_IFNAME"} & os.environ.keys()


def test_it_samples_again_and_again_also_after_a_look_that_failed(folder: Path) -> None:
    made = Agent("n", str(folder / "run"), str(folder / "log"), 0.001, str(folder / "proc"))
    meminfo = folder / "proc" / "meminfo"
    meminfo.rename(folder / "away")
    before = made.observe()["reading"]
    fresh = folder / "fresh"
    fresh.write_text((FIXTURES / "almost-dead.txt").read_text())
    fresh.rename(meminfo)

    until(lambda: made.observe()["reading"]["mem_free_bytes"] == 121964 * 1024)
    assert before["mem_free_bytes"] == 1118800 * 1024


# The page cache


@contextlib.contextmanager
def helper(path: Path, answer: bytes, freed: Callable[[], object] = lambda: None) -> Iterator[None]:
    """The root helper: one connection, one line, whatever is sent."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                freed()
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join(HUNG_S)


@pytest.fixture
def user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ordinary user, and where the helper would listen."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(page_cache, "DROP_SOCKET", folder / "drop.sock")
    return folder / "drop.sock"


@pytest.mark.parametrize(
    ("answer", "dropped", "how"),
    [
        (b"ok 1118800 121964\n", True, "helper"),
        (b"error cannot write\n", False, "error cannot write"),
        (b"\xff\xfe" * 300, False, "\ufffd" * 100),
    ],
)
def test_an_ordinary_user_asks_the_helper(made: Agent, user: Path, answer: bytes, dropped: bool, how: str) -> None:
    with helper(user, answer):
        answer = made.drop_page_cache()
    assert (answer["dropped"], answer["freed_bytes"]) == (dropped, 0)
    assert how == (answer["how"] if dropped else answer["how"].partition(": ")[2])


def test_what_was_freed_is_measured(made: Agent, user: Path, folder: Path) -> None:
    with helper(user, b"ok\n", lambda: shutil.copy(FIXTURES / "idle.txt", folder / "proc" / "meminfo")):
        assert made.drop_page_cache()["freed_bytes"] == (102000000 - 1118800) * 1024


def test_without_a_helper_it_says_so(made: Agent, user: Path) -> None:
    answer = made.drop_page_cache()
    assert (answer["dropped"], answer["freed_bytes"]) == (False, 0)
    assert str(user) in answer["how"] and os.strerror(errno.ENOENT) in answer["how"]

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(user))
    how = made.drop_page_cache()["how"]
    assert str(user) in how and os.strerror(errno.ECONNREFUSED) in how


def test_root_drops_it_directly(made: Agent, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "sync", lambda: synced.append(True))
    monkeypatch.setattr(page_cache, "DROP_CACHES", folder / "drop_caches")
    assert made.drop_page_cache()["how"] == "directly"
    assert ((folder / "drop_caches").read_text(), synced) == ("1\n", [True])

    monkeypatch.setattr(page_cache, "DROP_CACHES", folder)
    answer = made.drop_page_cache()
    assert (answer["dropped"], answer["freed_bytes"]) == (False, 0)
    assert answer["how"].endswith(os.strerror(errno.EISDIR)) and str(user) not in answer["how"]


# Logs


def test_it_reads_the_logs_of_its_own_folder_only(made: Agent, folder: Path) -> None:
    inside, secret = Path(made.log_dir, "m.log"), folder / "secret"
    inside.write_text("one\ntwo\n")
    secret.write_text("secret\n")
    Path(made.log_dir, "way-out.log").symlink_to(secret)
    Path(made.log_dir, "alias.log").symlink_to(inside)
    Path(made.log_dir, "below").mkdir()
    Path(made.log_dir, "below", "x.log").write_text("secret\n")

    first = made.read_log(str(inside), None, 1000)
    assert first["text"] == "one\ntwo\n"
    assert made.read_log(str(inside), first["cursor"], 1000)["text"] == ""
    assert made.read_log(f"{made.log_dir}/alias.log", None, 1000)["text"] == "one\ntwo\n"
    for path in (
        *(str(secret), f"{made.log_dir}/../secret", f"{made.log_dir}/way-out.log", f"{made.log_dir}/below/x.log"),
        *("/etc/hostname", "", "m.log", made.log_dir),
    ):
        assert made.read_log(path, None, 1000) == {"text": "", "cursor": ""}, path
    assert made.read_log(str(secret), "5:5", 1000) == {"text": "", "cursor": "5:5"}


@pytest.mark.parametrize("cursor", ["²:5", "9" * 5000 + ":1", "\ud800"])
def test_a_cursor_that_a_client_made_up_begins_again(made: Agent, cursor: str) -> None:
    log = Path(made.log_dir, "m.log")
    log.write_text("one\n")
    assert made.read_log(str(log), cursor, 1000)["text"] == "one\n"

    inode = made.read_log(str(log), None, 1000)["cursor"].partition(":")[0]
    log.rename(f"{log}.1")
    log.write_text("two\n")
    assert made.read_log(str(log), f"{inode}:{'9' * 30}", 1000)["text"] == "two\n"


# What an engine may import


def test_a_foreign_interpreter_sees_the_plugin_and_nothing_else_of_ours(made: Agent) -> None:
    assert sorted(os.listdir(f"{made.run_dir}/plugin")) == SHOWN
    code = """
import importlib.metadata, importlib.util, sys
import workers, sparkd.checkpoint, sparkd.errors
(point,) = importlib.metadata.entry_points(group="vllm.general_plugins")
print(workers.__file__, importlib.util.find_spec("tests"), point.name, point.value)
print({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"} == {"workers", "sparkd"})
"""
    done = _python(code, f"{made.run_dir}/plugin", "-S")
    assert done.split() == [f"{made.run_dir}/plugin/workers/__init__.py", "None", "sparkd", "workers.plugin:register", "True"]


def test_an_interpreter_that_has_sparkd_installed_sees_one_plugin(made: Agent, folder: Path) -> None:
    """vLLM keeps plugins by the entry point's name. The version of sparkd stays that of its own distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    info = folder / "site" / "sparkd-7.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sparkd\nVersion: 7\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "\n".join(f"{name} = {value}" for name, value in project.items()))
    code = """
from importlib.metadata import entry_points, version
print(version("sparkd"), *{each.name + "=" + each.value for each in entry_points(group="vllm.general_plugins")})
"""
    assert _python(code, f"{made.run_dir}/plugin:{folder / 'site'}", "-S") == "7 sparkd=workers.plugin:register\n"


def _python(code: str, path: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], capture_output=True, text=True, cwd="/", env={"PYTHONPATH": path}, timeout=HUNG_S, check=True
    )
    return done.stdout


def test_the_plugins_folder_follows_an_upgrade(made: Agent, folder: Path) -> None:
    link = Path(made.run_dir, "plugin", "workers")
    link.unlink()
    link.symlink_to("/an/older/release/workers")
    Agent("n", made.run_dir, made.log_dir, NEVER_S, str(folder / "proc")).guard.stop()

    assert link.resolve() == Path(module.__file__).resolve().parents[1]
    assert sorted(os.listdir(link.parent)) == SHOWN


# Ranks


def spec(folder: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rank_id": "m-1-0123abcd", "model_name": "m", "served_names": ["m"], "model": str(folder), "generation": 1, "node_id": "127.0.0.1",
        "rank": 0, "runtime": sys.executable, "log_path": str(folder / "log" / "m.log"), "config_hash": "c",
        "platform": "cpu", "stop_timeout_s": 2.0, **stub_engine(),
    }  # fmt: skip
    return values | changes


def test_an_engine_that_asks_for_no_key_is_started_on_no_address(made: Agent, folder: Path) -> None:
    with pytest.raises(RankError, match=r"my\.engine"):
        made.spawn(spec(folder, entrypoint="my.engine"), True)
    assert (made.observe()["ranks"], os.listdir(made.run_dir)) == ([], ["plugin"])


@pytest.mark.parametrize("private", [False, True], ids=["socket", "address"])
def test_a_rank_from_its_start_to_its_end(made: Agent, folder: Path, private: bool) -> None:
    handle = made.spawn(spec(folder), private)
    try:
        assert [fact["handle"] for fact in made.observe()["ranks"]] == [handle]
        known = RankHandle(**handle)
        if private:
            assert (known.host, known.socket_path, known.api_key_path) == ("127.0.0.1", None, f"{made.run_dir}/m-1-0123abcd.key")
            assert len(made.api_key("m-1-0123abcd")) == 64
            assert stat.S_IMODE(os.stat(str(known.api_key_path)).st_mode) == 0o600
            argv = Path(f"/proc/{made.observe()['ranks'][0]['engine_pid']}/cmdline").read_bytes()
            assert made.api_key("m-1-0123abcd").encode() not in argv
        else:
            assert (known.host, known.socket_path, known.api_key_path) == (None, f"{made.run_dir}/0123abcd.sock", None)
    finally:
        ended = made.destroy(handle, 2.0)

    assert (ended["gone"], ended["survivors"]) == (True, [])
    assert made.observe()["ranks"] == []
    assert os.listdir(made.run_dir) == ["plugin"]
    with pytest.raises(RankError, match="m-1-0123abcd"):
        made.api_key("m-1-0123abcd")


@pytest.mark.parametrize(
    ("elsewhere", "profiles", "cache_dir"), [(False, "/theirs", "/theirs"), (True, "/ours", "/cache"), (True, None, None)]
)
def test_the_worker_and_the_loader_tell_their_own_node_how_it_sized_and_how_far_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool, profiles: str | None, cache_dir: str | None
) -> None:
    monkeypatch.setenv(node_variables.NODE_KV_DIR, "/ours")
    monkeypatch.setenv(node_variables.NODE_CACHE_DIR, "/cache")
    made = Agent("127.0.0.1", str(folder / "run"), str(folder / "log"), NEVER_S, str(folder / "proc"), elsewhere)
    sized = {"bytes": 5, "profiles": profiles and "/theirs"}
    loaded = {"quantize": {"format": "fp8", "layers": []}, "cache_dir": cache_dir and "/theirs", "cache_limit_bytes": None}
    own = {"worker_cls": "other.Worker", "kv_cache": sized, "load_format": "spark_stream", "loader_extra_config": loaded}
    handle = made.spawn(spec(folder, **own), False)
    try:
        pid = made.observe()["ranks"][0]["engine_pid"]
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        environ = dict(one.split("=", 1) for one in Path(f"/proc/{pid}/environ").read_text().split("\0") if one)
        report = f"{made.run_dir}/m-1-0123abcd.report"
        assert (argv[argv.index("--worker-cls") + 1], argv[argv.index("--load-format") + 1]) == ("other.Worker", "spark_stream")
        assert json.loads(environ["SPARKD_KV"]) == {"bytes": 5, "profiles": profiles, "report": report}
        assert json.loads(argv[argv.index("--model-loader-extra-config") + 1]) == loaded | {"cache_dir": cache_dir, "progress": report}

        for rank, pool in enumerate((9, 5)):
            Report(report, rank).tell("ready", pool_bytes=pool, tokens=pool)
            ProgressFile(report, rank).begin(5, 1, "fp8", "checkpoint")
        seen = made.observe()["ranks"][0]["progress"]
        assert (seen["kv"]["pool_bytes"], seen["kv_tokens"], seen["kv"]["ranks"]) == (5, 5, 2)
        assert (seen["bytes_done"], seen["bytes_total"]) == (0, 10)
    finally:
        made.destroy(handle, 2.0)
    assert os.listdir(made.run_dir) == ["plugin"]


def test_a_rank_that_cannot_start_leaves_no_key(made: Agent, folder: Path) -> None:
    with pytest.raises(RankError):
        made.spawn(spec(folder, runtime="/nowhere/python"), True)

    assert os.listdir(made.run_dir) == ["plugin"]


@pytest.mark.parametrize("where", ["workers.rank.lifecycle.spawn", "workers.agent.actor._make_key", "workers.agent.actor.Agent.free_port"])
def test_a_disk_that_is_full_is_named_and_leaves_no_key(made: Agent, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/x")

    monkeypatch.setattr(where, full)
    with pytest.raises(NodeRefused, match=rf"127\.0\.0\.1 .*{os.strerror(errno.ENOSPC)} \(/run/x\)") as refused:
        made.spawn(spec(folder), True)

    assert isinstance(refused.value.__cause__, OSError)
    assert not list(Path(made.run_dir).glob("*.key"))


def test_a_key_that_cannot_be_written_is_not_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank.key"

    def full(length: int) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("workers.agent.actor.secrets.token_hex", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        _make_key(path)
    assert not path.exists()

    path.write_text("another's")
    with pytest.raises(FileExistsError):
        _make_key(path)
    assert path.read_text() == "another's"


def test_only_keys_of_its_own_folder_are_given_out(made: Agent, folder: Path) -> None:
    (folder / "other.key").write_text("secret")
    with pytest.raises(RankError):
        made.api_key("../other")


def test_a_runtime_that_is_not_there_is_a_rank_error(made: Agent) -> None:
    with pytest.raises(RankError, match="/nowhere/python"):
        made.runtime("/nowhere/python")
    assert lifecycle.scan(made.run_dir) == []
