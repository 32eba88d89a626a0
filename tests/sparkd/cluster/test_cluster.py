"""The cluster over a fake Ray: what keeps it from joining is a condition, a call is made once, and what cannot be read is not gone."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkd.cluster.cluster import Cluster
from sparkd.cluster.node_tracker import NODE_GRACE_S
from sparkd.cluster.ray_head import RayHead, RayOptions
from sparkd.config.config import Config
from sparkd.errors import AgentLost, ClusterError, CodeDiffers, NodeRefused, RayUnavailable
from tests.support.fakes import FakeClock
from tests.support.waiting import eventually, until
from workers.host import processes
from workers.rank import lifecycle
from workers.rank.status import status_path, write_status


class FakeHead:
    """Raises what `troubles` holds, one after another; then it lives."""

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        self.kept_elsewhere = False
        self.stops = self.closed = 0

    def ensure(self) -> str:
        if self.troubles:
            raise self.troubles.pop(0)
        return "127.0.0.1:6379"

    def keep_closed(self) -> None:
        self.closed += 1

    def living_address(self) -> str | None:
        return "127.0.0.1:6379"

    def stop(self) -> None:
        self.stops += 1


class FakeLink:
    def __init__(self) -> None:
        self.connected = False
        self.address: str | None = None
        self.error: ClusterError | None = None
        self.calls = 0
        self.unmet: dict[str, ClusterError] = {}
        self.port_of: dict[str, int] = {}
        self.gib_of: dict[str, float] = {}
        self.joins: list[ClusterError] = []

    def nodes(self) -> list[str]:
        return ["127.0.0.1"] if self.connected else []

    async def connect(self, address: str, node_ip: str) -> None:
        if self.joins:
            raise self.joins.pop(0)
        self.connected, self.address = True, address

    async def disconnect(self) -> None:
        self.connected = False

    async def refresh(self) -> set[str]:
        return set()

    async def call(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        self.calls += 1
        if self.error:
            raise self.error
        return {}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("sparkd.cluster.cluster.RECONNECT_EVERY_S", 0.0)
    made = Cluster(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"), {})
    made._link = FakeLink()  # type: ignore[assignment]
    yield made
    made._here.guard.stop()


@pytest.mark.parametrize(
    "trouble",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/run/x"), RayUnavailable("Ray did not start.")],
    ids=["the system", "Ray"],
)
async def test_what_keeps_ray_from_starting_is_a_condition_and_it_is_tried_again(cluster: Cluster, trouble: Exception) -> None:
    reasons: list[str | None] = []
    joined = asyncio.Event()
    head = FakeHead(trouble, trouble)
    ensure = head.ensure

    def ensured() -> str:
        reasons.append(cluster._trouble.reason if cluster._trouble else None)
        return ensure()

    head.ensure = ensured  # type: ignore[method-assign]
    cluster._head = head  # type: ignore[assignment]

    running = asyncio.create_task(cluster.run(joined.set))
    await joined.wait()
    assert cluster._link.connected, "no caller hears of a connection that failed"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert reasons[1:] == 2 * ["RayUnavailable" if isinstance(trouble, RayUnavailable) else "NodeRefused"]
    assert cluster._trouble is None


async def test_the_end_of_the_heads_raylet_is_a_condition_until_it_is_started_again(cluster: Cluster) -> None:
    head, reasons, joined = FakeHead(), [], asyncio.Event()

    def ensured() -> str:
        reasons.append(cluster._upkeep_trouble.reason if cluster._upkeep_trouble else None)
        head.living_address = lambda: "127.0.0.1:6379"  # type: ignore[method-assign]
        return "127.0.0.1:6379"

    head.ensure, head.living_address = ensured, lambda: None  # type: ignore[method-assign, assignment]
    cluster._head, cluster._trouble = head, None  # type: ignore[assignment]
    cluster._link.connected = True  # type: ignore[misc]
    running = asyncio.create_task(cluster.run(joined.set))
    await joined.wait()
    assert cluster._upkeep_trouble is not None, "the next look tells it"
    await eventually(lambda: cluster._upkeep_trouble is None, "the new one is kept up")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert reasons == ["RayUnavailable"]


@pytest.mark.parametrize("credentials", [True, False], ids=["a unit with credentials", "none"])
async def test_no_ray_starts_where_its_engines_could_read_the_daemons_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, credentials: bool
) -> None:
    """Below /run/credentials, in the mount namespace that every process of the unit has."""
    started: list[RayHead] = []

    def start(head: RayHead) -> str:
        started.append(head)
        raise RayUnavailable("Ray did not start.")

    monkeypatch.setattr(RayHead, "_start", start)
    environ = {"CREDENTIALS_DIRECTORY": str(tmp_path)} if credentials else {}
    made = Cluster(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"), environ)
    made._link = FakeLink()  # type: ignore[assignment]
    assert not await made._connect()
    assert (started == []) is credentials
    assert ("`systemctl enable --now sparkd-ray`" in str(made._trouble)) is credentials
    made._here.guard.stop()


async def test_a_ray_that_a_keeper_has_is_joined_from_a_unit_with_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayHead, "living_address", lambda head: "127.0.0.1:6379")
    made = Cluster(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"), {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    monkeypatch.setattr(made._head, "keep_closed", lambda: None)
    made._link = FakeLink()  # type: ignore[assignment]
    assert await made._connect()
    made._here.guard.stop()


async def test_a_head_is_not_ended_for_what_this_process_lacks(cluster: Cluster) -> None:
    head, joined = FakeHead(), asyncio.Event()
    cluster._head = head  # type: ignore[assignment]
    cluster._link.joins = [NodeRefused("This node refused it: too many open files."), RayUnavailable("It hangs.")]  # type: ignore[attr-defined]
    running = asyncio.create_task(cluster.run(joined.set))
    await joined.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert head.stops == 1, "for the one that hangs"


@pytest.mark.parametrize(("reached", "made_here"), [(True, 0), (False, 1)])
async def test_a_call_that_may_be_under_way_is_not_made_again_here(cluster: Cluster, reached: bool, made_here: int) -> None:
    cluster._link.error = AgentLost("It did not answer.", reached=reached)  # type: ignore[attr-defined]
    calls: list[str] = []
    cluster._here.copy = lambda program, order, environ: calls.append(program)  # type: ignore[method-assign,assignment,return-value]
    try:
        await cluster.ask(cluster.node_ip, "copy", "source", {}, {}, timeout_s=1.0)
    except AgentLost:
        assert reached

    assert (cluster._link.calls, len(calls)) == (1, made_here)  # type: ignore[attr-defined]


async def test_what_the_system_refuses_here_says_why(cluster: Cluster) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/lib/x")

    cluster._link.error = AgentLost("It is not connected.", reached=False)  # type: ignore[attr-defined]
    cluster._here.copy = full  # type: ignore[method-assign,assignment]
    with pytest.raises(NodeRefused, match=r"No space left on device \(/var/lib/x\)"):
        await cluster.ask(cluster.node_ip, "copy", "source", {}, {}, timeout_s=1.0)


async def test_an_agent_that_cannot_look_is_not_lost(cluster: Cluster) -> None:
    """Its own node is looked at from here then."""
    link: FakeLink = cluster._link  # type: ignore[assignment]
    link.connected, link.error = True, NodeRefused("Node 127.0.0.1 refused it: Too many open files.")
    cluster._trouble = None
    for _ in range(5):
        observation = await cluster.observe()

    assert (cluster._misses, observation.ranks) == (0, ())
    assert observation.trouble is not None and observation.trouble.reason == "NodeUnreadable"


@pytest.mark.parametrize(
    ("error", "lost"),
    [(CodeDiffers("It has another."), False), (AgentLost("It does not answer."), True)],
    ids=["its code", "silence"],
)
async def test_what_runs_on_a_node_with_other_code_is_unknown_for_as_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: ClusterError, lost: bool
) -> None:
    now = FakeClock()
    monkeypatch.setattr("sparkd.cluster.cluster.time.monotonic", now)
    cluster._head = FakeHead()  # type: ignore[assignment]
    assert await cluster._connect()
    cluster.expect({"10.0.0.2"})
    link: FakeLink = cluster._link  # type: ignore[assignment]
    link.unmet = {"10.0.0.2": error}
    looks = []
    for _ in range(int(NODE_GRACE_S) + 2):
        looks.append(await cluster.observe())
        now.now_s += 1.0
    assert [look.unseen for look in (looks[0], looks[-1])] == [{"10.0.0.2"}, set() if lost else {"10.0.0.2"}]
    assert looks[1].trouble is not None and looks[1].trouble.reason == ("NodeUnseen" if lost else "CodeDiffers")
    assert lost or looks[-1].dark_s == {"10.0.0.2": 0.0}


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def child(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A raylet of the head in tmp_path, by its name and its session."""
    (tmp_path / "raylet").symlink_to(str(shutil.which("sleep")))
    made = subprocess.Popen([tmp_path / "raylet", "300"], start_new_session=True)
    starter = processes.identity(made.pid)
    assert starter is not None
    session = {"sessions": [made.pid], "start_ticks": starter.start_ticks, "boot_id": starter.boot_id}
    (tmp_path / "ray.json").write_text(json.dumps({"address": "127.0.0.1:1"} | session))
    yield made
    made.kill()
    made.wait()


async def test_ranks_and_rays_head_are_unknown_not_gone_while_no_file_can_be_opened(
    cluster: Cluster, tmp_path: Path, child: subprocess.Popen[bytes]
) -> None:
    run_dir, who = cluster._here.run_dir, processes.identity(child.pid)
    assert who is not None
    handle = {"pid": child.pid, "start_ticks": who.start_ticks, "boot_id": who.boot_id}
    engine = {"engine_pid": child.pid, "engine_start_ticks": who.start_ticks}
    write_status(status_path(run_dir, "m-1-00000000"), {"handle": handle, "state": "running", **engine})
    assert [fact["alive"] for fact in lifecycle.scan(run_dir)] == [True]
    head = RayHead(RayOptions(tmp_path, tmp_path / "token"))
    until(head.costs, "the child is Ray's")
    with no_descriptors():
        for look in (lambda: lifecycle.scan(run_dir), head.living_address, head.essential):
            with pytest.raises(OSError, match="Too many open files"):
                look()
        with pytest.raises(RayUnavailable, match="Too many open files"):
            head.ensure()
        observation = await cluster.observe()

    assert (observation.ranks, observation.connected) == (None, False)
    assert child.poll() is None


async def test_no_node_was_dark_while_the_daemon_was_held_during_a_look(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer waits in a socket then, and the look's own timeout ends before it is read."""
    clock = FakeClock()
    monkeypatch.setattr("sparkd.cluster.cluster.time", SimpleNamespace(monotonic=clock, time=time.time))
    cluster._link.connected = True
    monkeypatch.setattr(cluster._link, "nodes", lambda: ["192.0.2.7"])
    cluster.expect(["192.0.2.7"])
    cluster._tracker.heard("192.0.2.7", clock(), refused=False)

    async def call(*_arguments: Any, **_named: Any) -> Any:
        clock.now_s += 30.0
        raise AgentLost("192.0.2.7 did not answer.")

    monkeypatch.setattr(cluster._link, "call", call)
    observation = await cluster.observe()

    assert observation.unseen == {"192.0.2.7"}
    assert observation.dark_s == {"192.0.2.7": 0.0}
