"""The daemon's connection to Ray: what it says of Ray's errors, that its end does not hang on one that is being made, and that it outlives
the raylet and the head."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

from sparkd import __version__
from sparkd.cluster.ray_connection import OTHER_CODE_S, RayConnection
from sparkd.errors import AgentLost, ClusterError, CodeDiffers, NodeRefused, RankError, RayUnavailable
from tests.support.daemon_process import ROOT, alive
from tests.support.fakes import FakeClock
from tests.support.waiting import HUNG_S, until
from workers.agent.version import VERSION

LEAVES_WHILE_CONNECTING = """
import os, threading
from sparkd.cluster.ray_connection import RayConnection
RayConnection({}, lambda node_ip: ("/run", "/log", 1.0))._ray()
from ray._private import worker
held = threading.Event()
def connect():
    with worker._connect_or_shutdown_lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=connect, daemon=True).start()
held.wait()
print("leaving", os.environ["RAY_RAYLET_PID"] == str(os.getpid()))
"""


def test_a_process_ends_although_it_is_still_connecting_and_names_itself_as_the_one_that_ray_ends_it_with() -> None:
    words = [sys.executable, "-c", LEAVES_WHILE_CONNECTING]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HUNG_S, check=True)

    assert done.stdout == "leaving True\n"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "number"), [("raylet", signal.SIGKILL), ("gcs_server", signal.SIGSTOP)], ids=["the raylet ends", "the head stands still"]
)
def test_a_driver_whose_parent_is_process_1_outlives_its_ray_and_joins_the_next(name: str, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "tests.support.orphan_driver"]
    with (
        tempfile.TemporaryDirectory(prefix="orphan-") as folder,  # pytest's own paths are too long for Ray's sockets
        subprocess.Popen([*words, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter,
    ):
        assert starter.stdout is not None
        # Ray's own words about a raylet that ended come to the driver's output, too.
        facts = (json.loads(line) for line in starter.stdout if line.startswith("{"))
        told = next(facts)
        if told["parent"] != 1:
            pytest.skip("orphans of this process go to another one of this machine than process 1")
        driver, first = told["driver"], next(facts)
        os.kill(first[name], number)
        again = next((head for head in facts if head.get(name) != first[name]), None)
        if again is None:
            os.kill(first["gcs_server"], signal.SIGKILL)
        assert again is not None, "the driver ended with its Ray"
        os.kill(driver, signal.SIGINT)
        until(lambda: not any(map(alive, (driver, *first.values(), *again.values()))), "driver and Ray are gone")


async def test_who_never_joined_has_nothing_to_leave() -> None:
    link = RayConnection({}, lambda node_ip: ("/run", "/log", 1.0))
    await link.disconnect()

    assert not link.connected


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (OSError(28, "No space left on device", "/run/x"), NodeRefused, r"Node n .*No space left on device \(/run/x\)"),
        (TimeoutError("its own"), NodeRefused, "its own"),
        (RankError("The rank exists."), RankError, "The rank exists."),
        (KeyError("x"), AgentLost, "KeyError"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else None,
)
async def test_what_an_agent_raises_keeps_its_cause(raised: Exception, kind: type[ClusterError], words: str) -> None:
    from ray.exceptions import RayTaskError

    async def fail() -> None:
        raise RayTaskError("spawn", "traceback", raised).as_instanceof_cause()

    link = RayConnection({}, lambda node_ip: ())
    link._agents["n"] = "id", SimpleNamespace(spawn=SimpleNamespace(remote=fail))
    with pytest.raises(kind, match=words) as error:
        await link.call("n", "spawn", timeout_s=HUNG_S)
    assert type(error.value) is kind


@pytest.mark.parametrize(
    ("where", "raised"), [("_ray", ImportError("x")), ("_alive_nodes", KeyError("Alive")), ("_start_agent", AssertionError("x"))]
)
async def test_whatever_ray_raises_while_it_is_joined_is_a_named_error(
    where: str, raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise raised

    link = RayConnection({}, lambda node_ip: ())
    monkeypatch.setattr("sparkd.cluster.ray_connection._knock", lambda address: None)
    monkeypatch.setattr(link, "_ray", lambda: SimpleNamespace(init=lambda **_: None, shutdown=fail))
    monkeypatch.setattr(link, "_alive_nodes", lambda: {"n": "id"})
    monkeypatch.setattr(link, where, fail)
    with pytest.raises(RayUnavailable):
        await link.connect("n:1", "n")
    await link.disconnect()

    assert not link.connected


@pytest.mark.parametrize("member", ["_serialize", "_py_driver_sys_path"])
async def test_a_ray_without_the_private_members_is_named(member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class JobConfig:
        """As Ray's, but for one member."""

        def __init__(self) -> None:
            if member != "_py_driver_sys_path":
                self._py_driver_sys_path: list[str] = []
            if member != "_serialize":
                self._serialize = bytes

    joined: list[object] = []
    link = RayConnection({}, lambda node_ip: ())
    monkeypatch.setattr("ray.job_config.JobConfig", JobConfig)
    monkeypatch.setattr(link, "_ray", lambda: SimpleNamespace(init=lambda **given: joined.append(given)))
    with pytest.raises(RayUnavailable, match=member):
        await link.connect("n:1", "n")

    assert joined == []


class Actor:
    """An agent as Ray has it, whose folders belong to another user at first."""

    def __init__(self) -> None:
        self.refusals = [NodeRefused("Node n cannot use /run/x.")]
        self.version, self.open = SimpleNamespace(remote=self._version), SimpleNamespace(remote=self._open)

    async def _version(self) -> str:
        return VERSION

    async def _open(self) -> None:
        from ray.exceptions import RayTaskError

        if self.refusals:
            raise RayTaskError("open", "traceback", self.refusals.pop()).as_instanceof_cause()


async def test_a_node_whose_folders_are_refused_is_not_met_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    link, actor = RayConnection({}, lambda node_ip: ()), Actor()
    monkeypatch.setattr(link, "_alive_nodes", lambda: {"n": "id"})
    monkeypatch.setattr(link, "_start_agent", lambda node_ip, node_id: actor)
    monkeypatch.setattr("sparkd.cluster.ray_connection._knock", lambda address: None)

    assert (await link.refresh(), link.nodes()) == (set(), [])
    assert link.unmet["n"].message == "Node n cannot use /run/x."
    assert (await link.refresh(), link.unmet, link.nodes()) == ({"n"}, {}, ["n"])


class OtherActor:
    """The agent of a node with other code. dies: Ray ends it, since its constructor takes other arguments."""

    def __init__(self, version: str, *, dies: bool) -> None:
        self._told, self._dies = version, dies
        self.version, self.open = SimpleNamespace(remote=self._version), SimpleNamespace(remote=self._open)

    async def _version(self) -> str:
        from ray.exceptions import ActorDiedError

        if self._dies:
            raise ActorDiedError
        return self._told

    async def _open(self) -> None:
        raise AssertionError("it is not used")


@pytest.mark.parametrize("dies", [True, False])
async def test_an_agent_of_another_release_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    clock, starts = FakeClock(), list[str]()
    link = RayConnection({}, lambda node_ip: ())
    link._labels = {"n": {"sparkd-version": "0.0.9", "sparkd-agent": "1"}}

    def start(node_ip: str, node_id: str) -> OtherActor:
        starts.append(node_id)
        return OtherActor("1", dies=dies)

    monkeypatch.setattr(link, "_alive_nodes", lambda: {"n": "id"})
    monkeypatch.setattr(link, "_start_agent", start)
    monkeypatch.setattr(link, "_replace_agent", lambda agent, node_ip, node_id: agent)
    monkeypatch.setattr("sparkd.cluster.ray_connection._knock", lambda address: None)
    monkeypatch.setattr("sparkd.cluster.ray_connection.time.monotonic", clock)

    assert (await link.refresh(), link.nodes(), starts) == (set(), [], ["id"])
    assert type(link.unmet["n"]) is CodeDiffers
    assert {"n", "0.0.9", "1,", VERSION, "`pip"} <= {word.strip(":") for word in link.unmet["n"].message.split()}
    first = link.unmet["n"]
    assert (await link.refresh(), type(link.unmet["n"]), starts) == (set(), CodeDiffers, ["id"]), "not looked at for a while"
    assert link.unmet["n"] is not first, "an error that was raised once is not raised again"
    clock.now_s += OTHER_CODE_S
    assert (await link.refresh(), type(link.unmet["n"]), starts) == (set(), CodeDiffers, ["id", "id"])


async def test_an_agent_of_this_code_that_died_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    link = RayConnection({}, lambda node_ip: ())
    monkeypatch.setattr(link, "_alive_nodes", lambda: {"n": "id"})
    monkeypatch.setattr(link, "_start_agent", lambda node_ip, node_id: OtherActor(VERSION, dies=True))
    link._labels = {"n": {"sparkd-version": __version__, "sparkd-agent": VERSION}}
    monkeypatch.setattr("sparkd.cluster.ray_connection._knock", lambda address: None)
    assert (await link.refresh(), type(link.unmet["n"])) == (set(), AgentLost)


async def test_only_a_call_that_was_not_sent_surely_did_not_reach_its_agent() -> None:
    link = RayConnection({}, lambda node_ip: ())
    with pytest.raises(AgentLost) as unsent:
        await link.call("n", "spawn", timeout_s=HUNG_S)
    link._agents["n"] = "id", SimpleNamespace(spawn=SimpleNamespace(remote=asyncio.Event().wait))
    with pytest.raises(AgentLost) as late:
        await link.call("n", "spawn", timeout_s=0.0)

    assert (unsent.value.reached, late.value.reached) == (False, True)
