"""Plain fakes for unit tests: a clock that is turned by hand and a cluster that is told what it shows."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkd.admin.operator import Operator
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.requirement import Placement
from sparkd.cluster.launcher import StartId
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.config.config import Config, ModelConfig, load_config
from sparkd.control.effects import AskFunction
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.errors import MemoryReturns, ModelUnusable, NoRoom, RankError, SparkdError
from sparkd.execution.boundary import Boundary
from sparkd.fabric.checks import Finding
from sparkd.gateway.upstream import ServedModels, Upstream
from sparkd.state.abilities import Abilities
from sparkd.state.memory_book import Held, Lack, MemoryBook
from sparkd.state.nouns import Progress, RankFact, RankHandle, Reading
from sparkd.state.snapshot import NodeView
from sparkd.state.store import Store
from sparkd.vllm.parsers import Parsers

READING = Reading("n", 0.0, 100, 90, 80, 5, 0, 0)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Loop(asyncio.SelectorEventLoop):
    """A loop whose time is turned by hand."""

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        super().__init__()

    def time(self) -> float:
        return self.clock.now_s


class FakeCluster:
    """Ranks live in `ranks`; what is started, adopted and destroyed is recorded in `log`."""

    def __init__(self) -> None:
        self.launcher = self.placer = self.reservations = self.models = self
        self.ranks: dict[str, RankFact] | None = {}
        self.reading: Reading | None = READING
        self.connected = True
        self.total_gib = 100
        self.nodes: tuple[str, ...] = ("n",)
        self.dark_s: dict[str, float] = {}
        self.trouble: Condition | None = None
        self.no_raylet: frozenset[str] = frozenset()
        self.agents: tuple[str, ...] = ()
        self.node_readings: dict[str, Reading] = {}
        self.log: list[str] = []
        self.place_error: SparkdError | None = None
        self.immortal = False
        self.left: tuple[Mapping[str, Any], ...] = ()
        self.names: list[str] | None = None
        self.placing = asyncio.Event()
        self.placing.set()
        self.expected: set[str] = set()
        self.unseen: frozenset[str] = frozenset()
        self.readings: dict[str, dict[str, Any] | None] = {}
        self.links: dict[int, str] = {}
        self.answers: dict[str, dict[str, Any]] = {}
        self.offered: dict[str, float] = {}
        self.held: dict[str, Held] = {}
        self.cordoned: frozenset[str] = frozenset()
        self.room_gib: Mapping[str, float] = {}
        self.leaked_gib: Mapping[str, float] = {}
        self.known_abilities = Abilities()
        self.expected_parsers: Parsers | None = None
        self.proof: Callable[[], tuple[Finding, ...]] = tuple

    def expect(self, nodes: Iterable[str]) -> None:
        self.expected = set(nodes)

    async def observe(self) -> Observation:
        ranks = None if self.ranks is None else tuple(fact for fact in self.ranks.values() if fact.handle.node_id not in self.unseen)
        nodes = tuple(NodeView(one, one, one == "n", True, self.node_readings.get(one), 100.0, 0.0) for one in self.agents)
        about_ray: Any = {"no_raylet": self.no_raylet, "trouble": self.trouble}
        return Observation(ranks, self.reading, self.connected, nodes=nodes, unseen=self.unseen, dark_s=self.dark_s, **about_ray)

    def book(self) -> MemoryBook:
        offered = {node: gib for node, gib in self.offered.items() if node not in self.cordoned}
        return MemoryBook(offered, dict(self.held), self.cordoned, self.room_gib, self.leaked_gib)

    def cordon(self, nodes: frozenset[str], room_gib: Mapping[str, float], leaked_gib: Mapping[str, float]) -> None:
        self.cordoned, self.room_gib, self.leaked_gib = nodes, room_gib, leaked_gib

    async def place(self, spec: ModelConfig) -> Placement:
        self.log.append(f"place {spec.name}")
        await self.placing.wait()
        if self.place_error:
            raise self.place_error
        gib = 4 if spec.memory_gib == "auto" else int(spec.memory_gib)
        if self.offered:
            if not self.book().has_room(spec.name, Lack(gib)):
                raise NoRoom(f"{spec.name} asks for {gib} GiB.", gib, 1)
            if why := self.book().returning(spec.name, Lack(gib)):
                raise MemoryReturns(why, gib, 1)
            self.held[spec.name] = (("n", gib),)
        return Placement(self.nodes[0], spec.name, gib, "cpu", "tests.stub", peers=self.nodes[1:], tensor=len(self.nodes))

    async def start(self, placement: Placement, spec: ModelConfig, attempt: StartId, tell: Any = None) -> tuple[RankHandle, ...]:
        self.log.append(f"spawn {spec.name}")
        handles = []
        for rank, node in enumerate(placement.nodes):
            rank_id, world = attempt.rank_id_of(rank), len(placement.nodes)
            handle = RankHandle(
                *(rank_id, spec.name, attempt.generation, node, rank, 42 + rank, 7, "b", None if rank else "/run/x.sock"),
                *(None, None, None, attempt.config_hash, f"/log/{spec.name}", 0.0, world, attempt.rank_id if world > 1 else ""),
            )
            handles.append(handle)
            if self.ranks is not None:
                self.ranks[rank_id] = RankFact(handle, True, 3, None, False, Progress(phase="loading"))
        return tuple(handles)

    def hold(self, model: str, gib: int, nodes: Iterable[str]) -> None:
        self.log.append(f"hold {model}")
        if self.offered:
            self.held[model] = tuple((node, gib) for node in nodes)

    async def destroy(self, fact: RankFact, *, hangs: bool = False) -> Sequence[Mapping[str, Any]]:
        self.log.append(f"{'kill' if hangs else 'destroy'} {fact.handle.model}")
        if self.immortal:
            raise RankError("Processes 42 do not end.")
        if self.ranks is not None:
            self.ranks.pop(fact.handle.rank_id, None)
        return self.left

    async def unusable(self, spec: ModelConfig) -> ModelUnusable | None:
        return None

    async def abilities(self, spec: ModelConfig) -> Abilities:
        return self.known_abilities

    async def parsers(self, spec: ModelConfig) -> Parsers | None:
        return self.expected_parsers

    async def served_abilities(self, upstream: Upstream, known: Abilities, models: ServedModels) -> Abilities:
        return known

    def release(self, model: str) -> None:
        self.log.append(f"release {model}")
        self.held.pop(model, None)

    async def upstream(self, handle: RankHandle) -> Upstream:
        return Upstream(socket_path=handle.socket_path)

    async def served_models(self, upstream: Upstream) -> ServedModels | None:
        return None if self.names is None else ServedModels(tuple(self.names))

    async def unlinked(self, *, rdma: bool) -> dict[int, str]:
        return self.links

    async def runtime(self, interpreter: str) -> NodeRuntime:
        return NodeRuntime({"platform": "cpu", "vllm": None, "entrypoint": None, "packages": ""}, "n")

    async def transport(self, handles: Sequence[RankHandle], configured: Mapping[str, str]) -> tuple[Finding, ...]:
        self.log.append(f"transport {' '.join(handle.node_id for handle in handles)}")
        return self.proof()

    def costs(self) -> dict[str, Any]:
        return {}

    async def fabric(self) -> dict[str, dict[str, Any] | None]:
        return self.readings

    def set_guard_hints(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        self.told = told

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        return self.answers.get(method, {}).get(node_ip, [])

    async def ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.log.append(f"ask_all {method}")
        return self.answers.get(method, {})

    async def read_log(self, node_id: str | None, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        return {"text": f"log of {path}", "cursor": "1"}

    def only(self) -> RankFact:
        (fact,) = (self.ranks or {}).values()
        return fact

    def serve(self, model: str) -> None:
        """The one rank of this model is up."""
        for rank_id, fact in (self.ranks or {}).items():
            if fact.handle.model == model and self.ranks is not None:
                self.ranks[rank_id] = replace(fact, progress=Progress(phase="serving", server_up=True))

    def of(self, rank: int) -> RankFact:
        return next(fact for fact in (self.ranks or {}).values() if fact.handle.rank == rank)

    def show_rank(self, rank: int, **changes: Any) -> None:
        """Change the fact of one rank of several."""
        fact = self.of(rank)
        if self.ranks is not None:
            self.ranks[fact.handle.rank_id] = replace(fact, **changes)

    def show(self, **changes: Any) -> None:
        """Change the one rank's fact."""
        fact = self.only()
        if self.ranks is not None:
            self.ranks[fact.handle.rank_id] = replace(fact, **changes)


@dataclass
class Scene:
    """A supervisor over fakes, ticked by hand."""

    config: Config
    store: Store
    cluster: FakeCluster
    clock: FakeClock
    supervisor: Supervisor
    asked: list[str] = field(default_factory=list)
    answer: Callable[[str], None] = lambda model: None

    async def tick(self, times: int = 1, *, seconds: float = 1.0) -> None:
        """Tick, and let every action that was started come as far as it can."""
        for _ in range(times):
            self.clock.now_s += seconds
            await self.settle()
            await self.supervisor.tick()
            await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def take_over(self) -> None:
        """The next daemon begins over what runs; of this one nothing is heard any more."""
        tasks, before = self.supervisor.tasks.group, self.supervisor
        self.supervisor = supervised(self.config, self.store, self.cluster, before._effects._ask, self.clock, before.journal.wall)
        self.supervisor.tasks.group = tasks

    @property
    def operator(self) -> Operator:
        """What the admin API does besides wishing."""
        return Operator(self.supervisor.want, self.supervisor.registry, self.supervisor.journal, self.cluster)  # type: ignore[arg-type]

    def limit_wait(self, model: str, wait_s: float) -> None:
        """From now on, requests wait so long for the model's load: the wait_for_load_s of its entry."""
        record = self.supervisor.registry.find(model)
        record.spec = record.spec and record.spec.model_copy(update={"wait_for_load_s": wait_s})

    def state(self, model: str = "m") -> str:
        return self.supervisor.snapshot().models[model].state.value


def supervised(
    config: Config,
    store: Store,
    cluster: Any,
    ask: AskFunction,
    clock: Callable[[], float],
    wall: Callable[[], float],
) -> Supervisor:
    boundary = Boundary(clock)
    registry, journal = Registry(config, store, clock, wall), Journal(store, wall, boundary)
    return Supervisor(registry, journal, cluster, ask=ask, clock=clock, rng=random.Random(1), boundary=boundary)


def scene(tmp_path: Path, *, cluster: FakeCluster | None = None, **flags: Any) -> Scene:
    """`flags` are configuration keys, dots as double underscores; one model `m` unless they give others."""
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    models = flags.pop("models", {"m": {"model": str(folder), "aliases": ["gpt-4o"]}})
    settings = {name.replace("__", "."): value for name, value in flags.items()} | {"models": models, "state_dir": str(tmp_path / "state")}
    config = load_config(None, flags=settings, environ={})
    store = Store(config.state_dir / "state.db")
    clock = FakeClock()
    made = cluster or FakeCluster()

    async def ask(model: str, timeout_s: float) -> None:
        found.asked.append(model)
        found.answer(model)

    wall = lambda: clock.now_s - 995.0  # noqa: E731
    supervisor = supervised(config, store, made, ask, clock, wall)
    found = Scene(config, store, made, clock, supervisor)
    return found


@asynccontextmanager
async def stage(tmp_path: Path, *, cluster: FakeCluster | None = None, **flags: Any) -> AsyncIterator[Scene]:
    """A scene whose tasks run and end with the block."""
    made = scene(tmp_path, cluster=cluster, **flags)
    async with asyncio.TaskGroup() as tasks:
        made.supervisor.tasks.group = tasks
        yield made
        for task in list(tasks._tasks):  # type: ignore[attr-defined]
            task.cancel()
    for record in made.supervisor.registry.records.values():
        record.close_upstream()
    made.store.close()
