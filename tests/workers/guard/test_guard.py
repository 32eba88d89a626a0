"""The guard at work: real processes of a stub engine, a real memory hog, and a /proc/meminfo that shows what the hog takes.

What it decides is test_policy.py's, on clocks that are turned by hand; how fast it is in a real collapse, tests/bench/hog.py's.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.capacity.requirement import Placement
from sparkd.cluster.launcher import StartId
from sparkd.cluster.node_tracker import Observation, facts_of, reading
from sparkd.config.config import ModelConfig
from sparkd.control.record import Attempt
from sparkd.control.views import guard_hints
from sparkd.errors import NotFound, Unavailable
from sparkd.gateway.upstream import ServedModels, Upstream, served_models
from sparkd.state.nouns import Machine, RankFact, RankHandle, Want
from sparkd.state.rows import noun_of
from tests.stub import stub_engine
from tests.support import memory_hog
from tests.support.descriptors import descriptors_in
from tests.support.fake_nvidia_smi import ROW, FakeNvidiaSmi
from tests.support.fakes import FakeCluster, scene
from tests.support.memory_box import GIB, MemoryBox, NoBox
from tests.support.memory_hog import show
from tests.support.processes import alive, command_of
from tests.support.stuck_driver import a_stuck_driver
from tests.support.waiting import HUNG_S, eventually, until
from workers.agent.actor import Agent
from workers.guard import consumers, incidents
from workers.guard import guard as guard_module
from workers.guard.memory_sampler import COLUMNS, MemorySample, MemorySampler
from workers.guard.policy import LEVELS, GuardedEngine, GuardState, decide
from workers.host import memlock
from workers.host.bounded_child import ProgramOutput
from workers.host.memory_limits import MemoryLimits

ROOT = Path(__file__).parents[3]
ON: Mapping[str, Any] = {"mode": "on"}
SAMPLE_S = 0.25
stuck_driver = pytest.fixture(name="stuck_driver")(a_stuck_driver)


@pytest.fixture
def folder() -> Iterator[Path]:
    """pytest's own paths are too long for a socket."""
    made = Path(tempfile.mkdtemp(prefix="guard-"))
    show(made / "proc", 9.9)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def agents(folder: Path) -> Iterator[Agents]:
    made = Agents(folder)
    yield made
    made.end()


class Agents:
    """Agents of one node. Nothing of their ranks, and no thread of theirs, is left after a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[Agent] = []

    def start(self, guard: Mapping[str, Any] | None = ON, *, actor: bool = False) -> Agent:
        run, log = str(self.folder / "run"), str(self.folder / "log")
        self.made.append(Agent("n1", run, log, SAMPLE_S, str(self.folder / "proc"), False, guard, actor))
        return self.made[-1]

    def end(self) -> None:
        for agent in self.made:
            agent.guard.stop()
        for fact in self.made[0].observe()["ranks"] if self.made else ():
            self.made[0].destroy({"rank_id": fact["rank_id"]}, 0)


def order(folder: Path, name: str = "m", **env: str) -> dict[str, Any]:
    return {
        "rank_id": f"{name}-1-0123abcd", "model_name": name, "served_names": [name], "model": "/models/m", "generation": 1, "node_id": "n1",
        "rank": 0, "runtime": sys.executable, "log_path": f"{name}.log", "config_hash": "c0ffee",
        "platform": "cpu", "flags": [], "extra_args": [], "log_max_bytes": 1 << 20, "log_backups": 1, "stop_timeout_s": 1.0,
        **stub_engine(SPARKD_STUB_CHILDREN="2", **env),
    }  # fmt: skip


def started(agent: Agent, folder: Path, name: str = "m") -> dict[str, Any]:
    """A rank that serves, and whose processes the guard has in hand."""
    handle = agent.spawn(order(folder, name), False)
    until(lambda: any(fact["progress"]["server_up"] for fact in agent.observe()["ranks"] if fact["rank_id"] == handle["rank_id"]))
    until(lambda: any(len(one.pidfds) >= 3 and one.phase == "serving" for one in agent.guard.consumers.ranks))
    return handle


def fact_of(agent: Agent) -> dict[str, Any]:
    return next(fact for fact in agent.observe()["ranks"] if fact["rank_id"] == "m-1-0123abcd")


def test_a_real_hog_ends_the_engine_and_a_bundle_says_why(
    agents: Agents, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """9.9 GiB go to nothing, without a daemon."""
    taken = lambda *_: ProgramOutput("".join(f"{pid}, 3\n" for one in agent.guard.consumers.ranks for pid in one.pids))  # noqa: E731
    monkeypatch.setattr(guard_module, "shares_memory", lambda: True)
    monkeypatch.setattr(consumers, "ask", taken)
    monkeypatch.setattr(consumers, "DEVICE_EVERY_S", 0.0)
    agent = agents.start()
    handle = started(agent, folder)
    pids = agent.guard.consumers.ranks[0].pids
    until(lambda: any(one.device_bytes == 3 * len(pids) << 20 for one in agent.guard.consumers.ranks), "nvidia-smi has told")
    agent.guard.hear({"m": {"in_flight": 1, "by": "admin", "predicted_gib": 5}})
    hog = memory_hog.start(folder / "proc", 9.9, 0.4, 1.0)
    try:
        until(lambda: fact_of(agent)["killed"])
        until(lambda: not fact_of(agent)["alive"])
        until(lambda: incidents.summaries(agent.guard.folder))
    finally:
        hog.kill()
        hog.wait()

    assert not [pid for pid in pids if alive(pid)]
    (summary,) = agent.incidents()
    bundle = agent.incident(summary["id"])
    assert bundle is not None
    assert (bundle["model"], bundle["phase"], bundle["told"]["by"], bundle["told"]["predicted_gib"]) == ("m", "serving", "admin", 5)
    (engine,) = bundle["engines"]
    assert engine["host_bytes"] > 1 << 20 and engine["device_bytes"] == 3 * len(pids) << 20
    assert re.search(r"\d GiB", bundle["why"])
    assert [second for second, kills in decided(bundle) if kills] == [bundle["readings"][-1][0]], "at the first look that was enough"
    assert any("Application startup complete" in line for line in bundle["log"])
    assert bundle["survivors"] == []
    assert stat.S_IMODE(os.stat(agent.guard.folder / f"{summary['id']}.json").st_mode) == 0o600

    facts = agent.observe()
    (fact,), _ = facts_of(facts["ranks"])
    assert fact.killed and summary["id"] in fact.killed
    assert reading("n1", facts["reading"], facts["now_s"]).level in LEVELS
    shown(agent, summary["id"], capsys)
    agent.destroy(handle, 0)
    assert agents.start(None).guard.killed(handle["rank_id"]), "another agent finds it on disk"


def decided(bundle: Mapping[str, Any]) -> Iterator[tuple[float, bool]]:
    """The decision at each of a bundle's readings, made anew."""
    assert tuple(bundle["columns"]) == COLUMNS
    vitals, state, limits = MemorySampler(Path("/nowhere")), GuardState(), MemoryLimits.of(memory_hog.TOTAL_KIB * 1024)
    for at_s, available, free, *_ in bundle["readings"]:
        look = MemorySample(at_s, memory_hog.TOTAL_KIB * 1024, int(available), int(free), 0, 0)
        vitals.add(look)
        decision, state = decide(look, vitals.trend(), [GuardedEngine("m-1-0123abcd", "m", in_flight=1)], limits, state)
        yield at_s, decision.kill is not None


def shown(agent: Agent, incident_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a person reads it."""

    def get(_client: object, path: str) -> Any:
        if path == "/incidents":
            return {"incidents": incidents.summaries(agent.guard.folder), "silent": []}
        if (bundle := incidents.read(agent.guard.folder, path.rpartition("/")[2])) is None:
            raise NotFound(path)
        return bundle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkd.admin.client.Client.get", get)
        capsys.readouterr()
        assert exit_code(["incidents", "ls"]) == 0
        assert incident_id in capsys.readouterr().out
        assert exit_code(["incidents", "show", incident_id]) == 0
        told = capsys.readouterr().out
        assert "by admin" in told and "Predicted    5 GiB" in told and "AVAILABLE" in told
        assert exit_code(["--json", "incidents", "show", incident_id]) == 0
        assert json.loads(capsys.readouterr().out)["id"] == incident_id
        assert exit_code(["incidents", "show", "20260101-000000-x"]) == 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparkd.admin.client.Client.get", lambda client, path: pytest.fail(f"{path} is asked for"))
        assert exit_code(["incidents", "show", "../../etc/passwd"]) == 5
        assert "'../../etc/passwd'" in capsys.readouterr().err


@pytest.fixture
def box(folder: Path) -> Iterator[MemoryBox]:
    """A memory cgroup of half a GiB, whose memory the guard sees as the machine's."""
    try:
        made = MemoryBox(folder / "proc", GIB // 2)
    except NoBox as why:
        pytest.skip(f"memory cgroup: {why}")
    yield made
    made.close()


def test_a_runaway_engine_in_a_cgroup_is_killed_before_the_kernel_has_to(box: MemoryBox, agents: Agents, folder: Path) -> None:
    agent = agents.start({"mode": "on", "soft_gib": 0.3, "hard_gib": 0.2, "floor_gib": 0.1})
    gate, size = folder / "gate", box.limit_bytes - (64 << 20)
    runaway = {"entrypoint": "tests.support.runaway"}
    told = {"RUNAWAY_GATE": str(gate), "RUNAWAY_BYTES": str(size), "RUNAWAY_TEST": str(os.getpid())}
    agent.spawn(order(folder, **told) | runaway, False)
    engine = until(lambda: [pid for pid in runs(agent) if "tests.support.runaway" in command_of(pid)])
    for pid in engine:
        box.take_in(pid)
    gate.touch()
    until(lambda: fact_of(agent)["killed"], "the guard has killed it")
    until(lambda: not fact_of(agent)["alive"])
    (summary,) = until(agent.incidents, "a bundle")
    until(lambda: box.available_bytes() > size, "its memory is back")

    assert box.oom_kills() == 0
    bundle = agent.incident(summary["id"])
    assert bundle is not None
    assert (bundle["model"], bundle["survivors"]) == ("m", [])
    first, *_, last = (row[1] for row in bundle["readings"])
    # Four times the floor is where a fall that reaches it counts as a collapse.
    assert last < 0.4 * GIB < first


def runs(agent: Agent) -> tuple[int, ...]:
    """The processes of the one rank, as the guard sees them."""
    return next((tuple(rank.pids) for rank in agent.guard.consumers.ranks), ())


class RealNode(FakeCluster):
    """One node whose agent and ranks are real; only Ray is left out."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        super().__init__()
        self.agent, self.folder = agent, folder

    def tell(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        self.agent.guard.hear(told)

    async def observe(self) -> Observation:
        facts = await asyncio.to_thread(self.agent.observe)
        return Observation(facts_of(facts["ranks"])[0], reading("n1", facts["reading"], facts["now_s"]), True)

    async def start(self, placement: Placement, spec: ModelConfig, attempt: StartId, tell: Any = None) -> tuple[RankHandle, ...]:
        mine = {"rank_id": attempt.rank_id, "config_hash": attempt.config_hash, "generation": attempt.generation}
        return (RankHandle(**await asyncio.to_thread(self.agent.spawn, order(self.folder) | mine, False)),)

    async def destroy(self, fact: RankFact, *, hangs: bool = False) -> Sequence[Mapping[str, Any]]:
        ended = await asyncio.to_thread(self.agent.destroy, {"rank_id": fact.handle.rank_id}, 0.0)
        return list(ended["left"])

    async def served_models(self, upstream: Upstream) -> ServedModels | None:
        return await served_models(upstream)


async def test_the_model_comes_back_when_the_hog_is_gone(agents: Agents, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.guard.policy.CALM_S", 0.5)
    agent = agents.start()
    made = scene(folder, cluster=RealNode(agent, folder), backoff__initial_s=0.01, backoff__max_s=0.01)
    made.clock = time.monotonic  # type: ignore[assignment]
    supervisor = made.supervisor
    for part in (
        supervisor,
        supervisor._effects,
        supervisor._rank_stopper,
        supervisor._queue,
        supervisor._gate,
        supervisor.registry,
    ):
        part._clock = time.monotonic
    async with asyncio.TaskGroup() as tasks:
        supervisor.tasks.group = tasks

        async def tick() -> None:
            while True:
                await supervisor.tick()
                await asyncio.sleep(0.02)

        async def reaches(state: str) -> None:
            await eventually(lambda: made.state() == state, state)

        tasks.create_task(tick())

        supervisor.want("m", Want.RUNNING, "admin")
        await reaches("READY")
        first = supervisor.registry.find("m").attempt.rank_id
        await eventually(lambda: [one for one in agent.guard.consumers.ranks if one.phase == "serving"])
        show(folder / "proc", 0.4)
        await reaches("FAILED")
        assert supervisor.registry.find("m").attempt.reason == "MemoryGuard"
        short = lambda: [one for one in supervisor.snapshot().conditions if one.reason == "MemoryShort" and "n1" in one.message]  # noqa: E731
        await eventually(short, "the node says that memory is short")
        looks = agent.guard._sampler._count
        await eventually(lambda: agent.guard._sampler._count > looks + 3, "the backoff is long over")
        assert made.state() == "FAILED", "no load begins while memory is short"
        made.limit_wait("m", 0.1)
        with pytest.raises(Unavailable):
            async with supervisor.lease("m"):
                raise AssertionError

        show(folder / "proc", 60.0)
        await reaches("READY")
        assert supervisor.registry.find("m").attempt.rank_id != first
        assert {"memory", "failed"} <= {event.kind for event in supervisor.journal.events(0, 200)}
        supervisor.want("m", Want.STOPPED, "admin")
        await reaches("STOPPED")
        for task in list(tasks._tasks):  # type: ignore[attr-defined]
            task.cancel()
    made.store.close()


def test_a_process_that_a_driver_holds_hides_no_engine_and_delays_no_bundle(agents: Agents, folder: Path, stuck_driver: list[str]) -> None:
    """Only the notes of shared memory wait for it, on a thread of their own."""
    agent = agents.start()
    started(agent, folder)
    show(folder / "proc", 0.3)
    until(lambda: incidents.summaries(agent.guard.folder))
    assert {path.rpartition("/")[2] for path in stuck_driver} <= {"maps"}


def test_of_two_guards_one_acts_and_the_other_takes_over(agents: Agents, folder: Path) -> None:
    first, second = agents.start(), agents.start()
    until(lambda: first.guard._lock_fd >= 0 or second.guard._lock_fd >= 0)
    holder, other = (first, second) if first.guard._lock_fd >= 0 else (second, first)
    assert other.guard._lock_fd < 0 and not other.guard._may_act()
    holder.guard.claims = False
    until(lambda: other.guard._lock_fd >= 0)
    assert holder.guard._lock_fd < 0
    until(lambda: len(descriptors_in(folder / "run")) == 1, "who did not get the lock has closed its file")


def test_an_agent_guards_although_a_process_that_hangs_holds_the_lock_and_the_daemon_says_that_it_does_not(
    agents: Agents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memlock, "lock", lambda: None)
    monkeypatch.setattr(guard_module, "ABSENT_S", 0.0)
    (folder / "run").mkdir(mode=0o700)
    with (folder / "run" / "guard.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        daemon = agents.start()
        until(lambda: daemon.guard.reading and daemon.guard.reading["guarded"] is False)
        daemon.guard.set({"mode": "watch"})
        assert daemon.guard.reading["guarded"] is None

        monkeypatch.setattr(guard_module, "ABSENT_S", HUNG_S)
        agent = agents.start(actor=True)
        started(agent, folder)
        show(folder / "proc", 0.3)
        until(lambda: not fact_of(agent)["alive"])
        assert agent.guard.reading["guarded"] and agent.guard._lock_fd < 0


def test_a_guard_whose_looks_fail_says_that_it_does_not_guard(agents: Agents, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memlock, "lock", lambda: None)
    monkeypatch.setattr(guard_module, "ABSENT_S", 1.0)
    agent = agents.start(actor=True)
    until(lambda: agent.guard.reading and agent.guard.reading["guarded"])
    monkeypatch.setattr(agent.guard._sampler, "look", lambda _now_s: None)
    until(lambda: not agent.guard.reading["guarded"])


def test_a_node_tells_what_it_is_besides_its_memory(agents: Agents) -> None:
    guard = agents.start().guard
    machine = noun_of(Machine, until(lambda: guard.machine))
    assert machine.host == socket.gethostname() and (machine.uptime_s or 0) > 0
    assert 0 <= (machine.disk_free_bytes or 0) <= (machine.disk_total_bytes or 0)
    guard._log_dir = guard._log_dir / "removed"
    until(lambda: "disk_free_bytes" not in guard.machine)


@pytest.mark.parametrize(
    ("claims", "mode", "holds", "asks"),
    [(True, "on", True, True), (True, "on", False, False), (True, "watch", False, True), (False, "watch", False, False)],
)
def test_one_of_two_sentries_asks_nvidia_smi(
    claims: bool, mode: str, holds: bool, asks: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = guard_module.Guard("n1", str(folder), str(folder), folder / "proc", SAMPLE_S, {"mode": mode})
    asked: list[bool] = []
    monkeypatch.setattr(made.consumers, "refresh", lambda _now_s, *, ask_device: asked.append(ask_device))
    made.claims, made._lock_fd = claims, 0 if holds else -1
    made._refresh()
    assert asked == [asks]


def test_who_only_watches_kills_nobody_and_who_may_kill_does_so_once(agents: Agents, folder: Path) -> None:
    agent = agents.start({"mode": "off"})
    started(agent, folder)
    show(folder / "proc", 0.3)
    for mode, level in (("off", "ok"), ("watch", "critical")):
        agent.observe(None, {"mode": mode})
        until(lambda level=level: agent.guard.reading["mem_available_bytes"] < memory_hog.GIB and agent.guard.reading["level"] == level)
        for _ in range(3):
            agent.guard.look(time.monotonic())
        assert fact_of(agent)["alive"]

    agent.observe(None, {"mode": "on"})
    until(lambda: not fact_of(agent)["alive"])
    time_s = time.monotonic()
    until(lambda: incidents.summaries(agent.guard.folder))
    for _ in range(5):
        agent.guard.look(time_s + 100)
    assert len(incidents.summaries(agent.guard.folder)) == 1, "nobody is killed twice"


def test_the_daemon_gets_the_last_row_of_any_gpu_and_nvidia_smi_ends_with_the_last_engine(
    agents: Agents, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with memory of its own: it tells what it draws, and holds nothing of the host's."""
    monkeypatch.setattr(guard_module, "shares_memory", lambda: False)
    monkeypatch.setattr(consumers, "DEVICE_COMMAND", ("false",))
    fake = FakeNvidiaSmi(folder, monkeypatch)
    fake.prints(ROW)
    agent = agents.start()
    assert "gpu_power_w" not in agent.observe()["reading"]
    handle = started(agent, folder)
    until(lambda: "gpu_power_w" in agent.observe()["reading"])
    assert (fact_of(agent)["device_bytes"], agent.guard.reading["device_trouble"]) == (0, None)

    monkeypatch.setattr(agent.guard, "_last_look", dict(agent.guard._last_look))
    fake.prints(ROW.replace("120.40", "61.50"))
    until(lambda: agent.guard.consumers.meter.values.get("gpu_power_w") == 61.5)
    facts = agent.observe()
    now = reading("n1", facts["reading"], facts["now_s"])
    assert (now.gpu_power_w, now.gpu_celsius, now.gpu_throttled, now.gpu_name) == (61.5, 41.0, (), "NVIDIA GB10")
    assert now.gpu_at_s is not None and now.gpu_at_s <= facts["now_s"]

    agent.destroy(handle, 0)
    until(lambda: not fake.living)
    assert "gpu_power_w" not in agent.observe()["reading"]


def test_what_the_daemon_tells_of_its_models(tmp_path: Path) -> None:
    made = scene(tmp_path, models={"m": {"model": "/x", "pin": True, "priority": 7}})
    record = made.supervisor.registry.find("m")
    assert guard_hints([record]) == {}
    record.attempt, record.queue.in_flight = Attempt(0.0, rank_id="m-1", memory_gib=30.0), 2
    assert guard_hints([record]) == {
        "m": {"in_flight": 2, "priority": 7, "pinned": True, "state": "STOPPED", "by": record.desired.by, "predicted_gib": 30.0}
    }
    made.store.close()


def test_memory_is_locked_where_that_is_allowed_and_else_it_says_why() -> None:
    code = "from workers.host import memlock; import sys; sys.stdout.write(str(memlock.lock()))\n"
    code += "print(next(line for line in open('/proc/self/status') if line.startswith('VmLck')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HUNG_S, check=True, cwd=ROOT)
    assert (int(done.stdout.split()[-2]) > 0) is done.stdout.startswith("None")
    assert memlock.MCL_ONFAULT == 4
