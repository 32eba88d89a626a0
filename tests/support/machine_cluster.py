"""A cluster for the state machine: fake nodes and engines under sparkd's real book of memory. Never decides, and never forgives a promise.

The fake engines keep their own account, so that what the daemon's book gets wrong is noticed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sparkd.capacity.requirement import Placement
from sparkd.cluster.launcher import StartId
from sparkd.cluster.node_tracker import Observation
from sparkd.cluster.reservations import Reservations
from sparkd.config.config import ModelConfig
from sparkd.errors import ClusterError
from sparkd.gateway.upstream import ServedModels, Upstream
from sparkd.state.memory_book import MemoryBook
from sparkd.state.nouns import Progress, RankFact, RankHandle, Reading
from tests.support.fakes import FakeCluster

GIB = 1 << 30
NODE_GIB = 20
UP = Progress(phase="serving", server_up=True)


class MachineCluster(FakeCluster):
    """`answered` are the starts that have answered a question; `leaked` bytes do not come back with their engine's end."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: set[str] = set()
        self.blind = False
        self.leaked = 0
        self.level = "ok"
        self.refuses_to_end = False
        self.fails_to_start = False
        self.live: dict[str, RankFact] = {}
        self.new_daemon()

    def new_daemon(self) -> None:
        """The book of the daemon before is lost."""
        self._places = Reservations("n", lambda: {"n": float(NODE_GIB)})

    def held_bytes(self) -> int:
        return sum(fact.host_bytes or 0 for fact in self.live.values() if fact.alive)

    async def observe(self) -> Observation:
        free = NODE_GIB * GIB - self.held_bytes() - self.leaked
        reading = Reading("n", 0.0, NODE_GIB * GIB, max(0, free), max(0, free), 0, 0, 0, level=self.level)
        return Observation(None if self.blind else tuple(self.live.values()), None if self.blind else reading, not self.blind)

    def book(self) -> MemoryBook:
        return self._places.book()

    async def place(self, spec: ModelConfig) -> Placement:
        gib = 4 if spec.memory_gib == "auto" else int(spec.memory_gib)
        await self.placing.wait()
        node = self._places.reserve_one(spec.name, gib)
        return Placement(node, spec.name, gib, "cpu", "tests.stub")

    async def start(self, placement: Placement, spec: ModelConfig, attempt: StartId, tell: Any = None) -> tuple[RankHandle, ...]:
        if self.fails_to_start:
            raise ClusterError("The agent does not start it.")
        living = [fact for fact in self.live.values() if fact.alive]
        assert not [fact for fact in living if fact.handle.model == spec.name], f"{spec.name} would run twice"
        loading = [fact.handle.model for fact in living if fact.handle.rank_id not in self.answered]
        assert not loading, f"{spec.name} is started while {loading} load"
        promised = sum(fact.handle.memory_gib for fact in living) + placement.memory_gib
        assert promised <= NODE_GIB, f"{promised} GiB are promised"
        handle = RankHandle(
            *(attempt.rank_id, spec.name, attempt.generation, "n", 0, 42, 7, "b", "/run/x.sock", None, None, None),
            *(attempt.config_hash, f"/log/{spec.name}", 0.0, 1, "", placement.memory_gib),
        )
        self.live[handle.rank_id] = RankFact(
            handle, True, 3, None, False, Progress(phase="loading"), host_bytes=(placement.memory_gib - 1) * GIB
        )
        return (handle,)

    def hold(self, model: str, gib: int, nodes: Iterable[str]) -> None:
        self._places.hold(model, gib, nodes)

    async def destroy(self, fact: RankFact, *, hangs: bool = False) -> tuple[()]:
        if self.refuses_to_end:
            raise ClusterError("Its processes do not end.")
        self.live.pop(fact.handle.rank_id, None)
        return ()

    def release(self, model: str) -> None:
        self._places.release(model)

    async def upstream(self, handle: RankHandle) -> Upstream:
        """Nobody listens there."""
        made = Upstream(socket_path=handle.socket_path)
        made.close()
        return made

    async def served_models(self, upstream: Any) -> ServedModels | None:
        """Every engine answers for every name: which one is asked is the supervisor's to know."""
        is_up = any(fact.alive and fact.progress.server_up for fact in self.live.values())
        return ServedModels(("a", "b", "c", "d")) if is_up else None

    def change(self, model: str, **changes: Any) -> None:
        for rank_id, fact in self.live.items():
            if fact.handle.model == model:
                self.live[rank_id] = replace(fact, **changes)

    def of_model(self, model: str) -> RankFact | None:
        return next((fact for fact in self.live.values() if fact.handle.model == model), None)

    def tell(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        self.told = told
