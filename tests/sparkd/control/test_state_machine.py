"""Wishes, requests, kills, readings and exits in any order against the real supervisor: what must hold at every moment, and in the end."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparkd.config.config import Config, load_config
from sparkd.control.supervisor import Supervisor
from sparkd.errors import EngineError, SparkdError, Unavailable
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.nouns import Progress, Want
from sparkd.state.store import Store
from tests.support.fakes import FakeClock, Loop, supervised
from tests.support.machine_cluster import UP, MachineCluster

MODELS: dict[str, dict[str, Any]] = {
    "a": {"memory_gib": 12, "ttl": 200},
    "b": {"memory_gib": 12, "priority": 20},
    "c": {"memory_gib": 6, "pin": True},
    "d": {"memory_gib": 2, "preload": True, "concurrency_limit": 2},
}
NAMES = st.sampled_from(sorted(MODELS))


class Tasks:
    """Stands for the daemon's TaskGroup; with `end` it dies as a killed process does."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.all: set[asyncio.Task[Any]] = set()

    def create_task(self, work: Any, name: str | None = None) -> asyncio.Task[Any]:
        task = self._loop.create_task(work, name=name)
        self.all.add(task)
        return task

    def end(self) -> None:
        for task in self.all:
            task.cancel()

    def check(self) -> None:
        for task in [task for task in self.all if task.done()]:
            self.all.discard(task)
            if not task.cancelled() and task.exception():
                raise AssertionError(f"{task.get_name()} failed") from task.exception()


class Client:
    """One request: it waits, or is inside until `over`."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.over = asyncio.Event()
        self.inside = False
        self.task: asyncio.Task[None] | None = None

    async def run(self, supervisor: Supervisor) -> None:
        try:
            async with supervisor.lease(self.model):
                self.inside = True
                await self.over.wait()
        except SparkdError as error:
            assert isinstance(error, Unavailable) or error.status in (404, 429), error
        finally:
            self.inside = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.clock = FakeClock()
        self.loop = Loop(self.clock)
        self.cluster = MachineCluster()
        self.clients: list[Client] = []
        self.answers = True
        self.changed: dict[str, dict[str, Any]] = {}

    @initialize(exclude=st.booleans(), accompany=st.booleans(), residency_s=st.sampled_from([0, 60]), wait_s=st.sampled_from([5, 300]))
    def begin(self, exclude: bool, accompany: bool, residency_s: int, wait_s: int) -> None:
        self.groups = {"groups.exclude": [["b", "d"]] if exclude else [], "groups.accompany": [["a", "d"]] if accompany else []}
        self.waits = {"min_residency_s": residency_s, "wait_for_load_s": wait_s}
        self._start()

    def _config(self) -> Config:
        folder = Path(self._folder.name)
        models = {name: {"model": str(folder)} | keys | self.changed.get(name, {}) for name, keys in MODELS.items()}
        models = {name: keys for name, keys in models.items() if not keys.pop("gone", False)}
        groups = {} if len(models) < len(MODELS) else self.groups
        flags = {"state_dir": str(folder), "backoff.jitter": 0, "models": models} | self.waits
        return load_config(None, flags=flags | groups, environ={})

    def _start(self) -> None:
        self.store = Store(Path(self._folder.name) / "state.db")
        self.cluster.new_daemon()
        self.tasks = Tasks(self.loop)
        self.supervisor = supervised(self._config(), self.store, self.cluster, self._ask, self.clock, self.clock)
        self.supervisor.tasks.group = self.tasks  # type: ignore[assignment]

    async def _ask(self, model: str, timeout_s: float) -> None:
        fact = self.cluster.of_model(model)
        if not self.answers or fact is None or not fact.alive or not fact.progress.server_up:
            raise EngineError("It does not answer.")
        self.cluster.answered.add(fact.handle.rank_id)

    def _run(self, times: int = 1, seconds: float = 1.0) -> None:
        async def go() -> None:
            for _ in range(times):
                self.clock.now_s += seconds
                await _settle()
                await self.supervisor.tick()
                await _settle()

        self.loop.run_until_complete(go())
        self.tasks.check()

    def _record(self, name: str) -> Any:
        return self.supervisor.registry.records.get(name)

    # What happens.

    @rule(name=NAMES, want=st.sampled_from(Want), by=st.sampled_from(["admin", "config"]))
    def wish(self, name: str, want: Want, by: str) -> None:
        record = self._record(name)
        if record is not None and record.spec is not None:
            self.supervisor.want(name, want, by)

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        client = Client(name)
        client.task = self.loop.create_task(client.run(self.supervisor))
        self.clients.append(client)
        self.loop.run_until_complete(_settle())

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), politely=st.booleans())
    def leave(self, data: st.DataObject, politely: bool) -> None:
        client = data.draw(st.sampled_from(self.clients))
        self.clients.remove(client)
        if client.inside and politely:
            client.over.set()
        elif client.task:
            client.task.cancel()
        self.loop.run_until_complete(_settle())

    @rule(times=st.integers(1, 4), seconds=st.sampled_from([0.25, 1.0, 30.0, 120.0]))
    def time_passes(self, times: int, seconds: float) -> None:
        self._run(times, seconds)

    @rule(name=NAMES, phase=st.sampled_from(["warming", "sizing", "up", "up", "up"]))
    def engine_moves(self, name: str, phase: str) -> None:
        fact = self.cluster.of_model(name)
        if fact is not None and fact.alive and not fact.progress.server_up:
            self.cluster.change(name, progress=UP if phase == "up" else Progress(phase=phase))

    @rule(name=NAMES, how=st.sampled_from(["exit 0", "exit 1", "guard", "no trace"]))
    def engine_ends(self, name: str, how: str) -> None:
        fact = self.cluster.of_model(name)
        if fact is None:
            return
        if how == "no trace":
            del self.cluster.live[fact.handle.rank_id]
        else:
            killed = "The memory guard killed it." if how == "guard" else None
            self.cluster.change(name, alive=False, processes=0, exit_code=int(how == "exit 1"), killed=killed)

    @rule(level=st.sampled_from(["ok", "ok", "tight", "pressed", "critical"]), leaked_gib=st.sampled_from([0, 0, 3]))
    def memory(self, level: str, leaked_gib: int) -> None:
        self.cluster.level, self.cluster.leaked = level, leaked_gib << 30

    @rule(blind=st.booleans(), slow=st.booleans(), immortal=st.booleans(), fails=st.booleans(), mute=st.booleans())
    def nodes(self, blind: bool, slow: bool, immortal: bool, fails: bool, mute: bool) -> None:
        self.cluster.blind, self.cluster.refuses_to_end = blind, immortal
        self.cluster.fails_to_start, self.answers = fails, not mute
        (self.cluster.placing.clear if slow else self.cluster.placing.set)()

    @rule()
    def daemon_is_killed(self) -> None:
        """Its clients and its tasks go with it; ranks and Ray stay."""
        self.tasks.end()
        for client in self.clients:
            if client.task:
                client.task.cancel()
        self.clients.clear()
        self.loop.run_until_complete(_settle())
        self.store.close()
        self._start()

    @rule(name=NAMES, change=st.sampled_from([{}, {"max_model_len": 77}, {"ttl": 5}, {"gone": True}]))
    def reload(self, name: str, change: dict[str, Any]) -> None:
        self.changed[name] = dict(change)
        self.supervisor.reconfigure(self._config())

    # What must hold.

    @invariant()
    def ready_means_that_it_answered(self) -> None:
        for record in self._records():
            if record.state is ModelState.READY:
                assert record.attempt.rank_id in self.cluster.answered, record.name

    @invariant()
    def memory_is_promised_once(self) -> None:
        assert sum(fact.handle.memory_gib for fact in self.cluster.live.values() if fact.alive) <= 20
        assert min(self.cluster.book().free_gib().values()) >= 0

    @invariant()
    def nobody_is_lost_or_counted_twice(self) -> None:
        for record in self._records():
            inside = sum(client.inside for client in self.clients if client.model == record.name)
            waiting = sum(not client.inside and client.task is not None and not client.task.done() for client in self._of(record.name))
            assert record.queue.in_flight - inside in (0, 1), "one may be the question that makes it READY"
            assert record.queue.waiting <= waiting
            assert record.attempt.reason != "InternalError"

    @invariant()
    def what_waits_in_line_is_not_there(self) -> None:
        for view in self.supervisor.snapshot().models.values():
            assert view.turn is None or view.state in (ModelState.STOPPED, ModelState.FAILED, *STARTING), view.state

    def teardown(self) -> None:
        """Once nothing goes wrong any more every waiter ends, and what runs is what is wished."""
        if not hasattr(self, "supervisor"):
            return
        self.nodes(blind=False, slow=False, immortal=False, fails=False, mute=False)
        self.memory("ok", 0)
        for _ in range(50):
            for name in MODELS:
                self.engine_moves(name, "up")
            self._run(1, 5.0)
            self._run(1, 20.0)
            self.memory_is_promised_once()
        for client in self.clients:
            assert client.inside or (client.task is not None and client.task.done()), f"a client of {client.model} waits for ever"
        for client in self.clients:
            client.over.set()
        self._run(6, 5.0)
        for record in self._records():
            running = record.desired.want is Want.RUNNING
            assert running or record.state is ModelState.STOPPED, f"{record.name} is {record.state}"
            living = [fact for fact in self.cluster.live.values() if fact.handle.model == record.name]
            assert len(living) == (record.state is ModelState.READY or record.state in STARTING), f"{record.name}: {record.state}, {living}"
        assert {fact.handle.model for fact in self.cluster.live.values()} <= {record.name for record in self._records()}
        self.tasks.end()
        self.loop.run_until_complete(_settle())
        self.store.close()
        self.loop.close()
        self._folder.cleanup()

    def _records(self) -> list[Any]:
        return list(self.supervisor.registry.records.values()) if hasattr(self, "supervisor") else []

    def _of(self, name: str) -> list[Client]:
        return [client for client in self.clients if client.model == name]


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
