"""How ranks come to life over nodes, by what their agents are asked: page cache first, workers, then rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.requirement import Placement
from sparkd.cluster.launcher import Launcher, StartId
from sparkd.config.config import Config, parse_model
from sparkd.errors import AgentLost, RankError
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.state.nouns import Progress, RankFact
from tests.support.fabric_tree import readings
from tests.support.facts import lacking

A, B = "10.0.0.1", "10.0.0.2"


class FakeAgents:
    """The link to both; what their agents are asked is in `log`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.spawned: list[dict[str, Any]] = []
        self.dropped: dict[str, Any] = {"dropped": True, "how": "helper", "freed_bytes": 0}
        self.foreign: list[dict[str, Any]] = []
        self.fails: str | None = None
        self.failure: BaseException = AgentLost("it is gone.")
        self.blind: str | None = None
        self.address = f"{A}:6379"

    async def make_group(self, start: str, nodes: tuple[str, ...]) -> str:
        self.log.append(f"group of {start} on {' '.join(nodes)}")
        return "group"

    async def remove_group(self, start: str) -> None:
        self.log.append(f"no group of {start}")

    async def call(self, node: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        return await getattr(FakeAgent(self, node), method)(*arguments)


class FakeAgent:
    def __init__(self, agents: FakeAgents, node: str) -> None:
        self._agents = agents
        self._node = node

    async def drop_page_cache(self) -> dict[str, Any]:
        self._agents.log.append(f"drop {self._node}")
        return self._agents.dropped

    async def foreign(self, device: bool) -> list[dict[str, Any]]:
        return self._agents.foreign if self._node == B else []

    async def free_port(self) -> int:
        self._agents.log.append(f"port {self._node}")
        return 45678

    async def destroy(self, handle: dict[str, Any], grace_s: float) -> dict[str, Any]:
        self._agents.log.append(f"destroy {handle['rank_id']} {self._node}")
        return {"gone": True, "survivors": []}

    async def spawn(self, fields: dict[str, Any], private: bool) -> dict[str, Any]:
        self._agents.log.append(f"spawn {fields['rank']} {self._node}")
        if self._agents.fails == self._node:
            raise self._agents.failure
        self._agents.spawned.append(fields | {"private": private})
        names = ("rank_id", "generation", "node_id", "rank", "config_hash", "log_path", "world", "attempt", "memory_gib")
        blank = dict.fromkeys(("socket_path", "host", "port", "api_key_path"))
        own = {"model": fields["model_name"], "pid": 1, "start_ticks": 1, "boot_id": "b", "started_at_s": 0.0}
        return {name: fields[name] for name in names} | blank | own


async def started(
    agents: FakeAgents, tmp_path: Path, *, platform: str = "cuda", peers: tuple[str, ...] = (B,), keys: Mapping[str, Any] = {}, **env: str
) -> tuple[Any, list[str]]:
    async def read(node: str) -> dict[str, Any]:
        if agents.blind == node:
            raise AgentLost("nobody reads.")
        return readings("pair-by-subnets")["spark-1" if node == A else "spark-2"]

    told: list[str] = []
    config = Config(state_dir=tmp_path)
    spec = parse_model("m", {"model": "o/m", "tensor_parallel": 2, "env": env, **keys}, over_admin=False)
    placement = Placement(A, "m", 3, platform, "vllm.entrypoints.cli.main", "0.32.0", spec, peers, 1 + len(peers))
    engines = Launcher(lambda: config, agents, FabricNodes(read), agents.call, A, lambda *_: {})  # type: ignore[arg-type]
    return await engines.start(placement, spec, StartId("m-1-abcdef12", 1, "hash"), told.append), told


async def test_caches_go_first_then_the_workers_and_rank_0_last(tmp_path: Path) -> None:
    agents = FakeAgents()
    handles, told = await started(agents, tmp_path)

    assert agents.log == [f"drop {A}", f"drop {B}", f"port {A}", f"spawn 1 {B}", f"spawn 0 {A}"]
    assert [(one.rank_id, one.rank, one.world, one.attempt) for one in handles] == [
        ("m-1-abcdef12", 0, 2, "m-1-abcdef12"),
        ("m-1-abcdef12-r1", 1, 2, "m-1-abcdef12"),
    ]
    assert told == []


async def test_ranks_are_told_where_to_meet_and_all_but_rank_0_serve_nobody(tmp_path: Path) -> None:
    agents = FakeAgents()
    await started(agents, tmp_path)
    second, first = (one["flags"] for one in agents.spawned)

    meet = ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "0", "--master-addr", A, "--master-port", "45678"]
    meet += ["--cpu-distributed-timeout-seconds", "86400"]
    assert first[-len(meet) - 2 :] == [*meet, "--distributed-executor-backend", "mp"]
    assert second[-1] == "--headless"
    assert second[second.index("--node-rank") + 1] == "1"
    assert [one["log_path"] for one in agents.spawned] == ["m.rank1.log", "m.log"]
    assert [one["private"] for one in agents.spawned] == [True, False]


async def test_what_cannot_be_told_to_use_rdma_does_not_start(tmp_path: Path) -> None:
    agents = FakeAgents()
    agents.blind = B
    with pytest.raises(RankError, match=r"\b2 nodes: the network\b"):
        await started(agents, tmp_path)
    assert agents.spawned == []

    await started(agents, tmp_path, NCCL_NET="Socket")
    await started(agents, tmp_path, platform="cpu")
    assert [one["env"].get("NCCL_NET") for one in agents.spawned] == ["Socket", "Socket", None, None]


async def test_an_operator_s_sockets_go_to_every_rank_and_nccl_says_so(tmp_path: Path) -> None:
    agents = FakeAgents()
    await started(agents, tmp_path)
    await started(agents, tmp_path, NCCL_NET="Socket")

    assert [(one["env"]["NCCL_NET"], one["env"]["NCCL_DEBUG"]) for one in agents.spawned] == [("IB", "INFO")] * 2 + [("Socket", "INFO")] * 2


async def test_a_page_cache_that_may_not_be_dropped_is_told(tmp_path: Path) -> None:
    agents = FakeAgents()
    agents.dropped = {"dropped": False, "how": "no root helper on /run/x: No such file or directory", "freed_bytes": 0}

    _, told = await started(agents, tmp_path)
    assert lacking(told[0], "page cache", A, "no root helper on /run/x") == []
    assert len(told) == 2
    _, told = await started(agents, tmp_path, platform="cpu")
    assert told == []


async def test_somebody_elses_engine_is_told_and_stays(tmp_path: Path) -> None:
    agents = FakeAgents()
    agents.foreign = [{"pid": 77, "name": "python vllm.entrypoints.cli.main", "vllm": True, "bytes": 3 << 29}]

    handles, (told,) = await started(agents, tmp_path, platform="cpu")
    assert len(handles) == 2
    assert lacking(told, "77", B, "vllm.entrypoints.cli.main", "1.5 GiB") == []


@pytest.mark.parametrize("failure", [AgentLost("it is gone."), TypeError("another release's answer"), asyncio.CancelledError()], ids=repr)
@pytest.mark.parametrize("node", [A, B])
async def test_a_start_that_fails_half_way_leaves_no_rank(node: str, failure: BaseException, tmp_path: Path) -> None:
    agents = FakeAgents()
    agents.fails, agents.failure = node, failure

    with pytest.raises(type(failure)):
        await started(agents, tmp_path)
    assert agents.log[-3:] == [f"destroy m-1-abcdef12 {A}", f"destroy m-1-abcdef12-r1 {B}", "no group of m-1-abcdef12"]


async def test_workers_of_rays_executor_get_a_group_that_ends_with_their_start(tmp_path: Path) -> None:
    agents = FakeAgents()
    handles, _ = await started(agents, tmp_path, platform="cpu", keys={"executor": "ray"})
    assert f"group of m-1-abcdef12 on {A} {B}" in agents.log
    assert [fields["ray"] for fields in agents.spawned] == [{"address": f"{A}:6379", "group": "group"}] * 2

    async def ask(*_: object, timeout_s: float) -> dict[str, Any]:
        return {"gone": True}

    engines = Launcher(Config, agents, FabricNodes(ask), ask, A, lambda *_: {})  # type: ignore[arg-type]
    agents.log.clear()
    for handle in handles:
        await engines.destroy(RankFact(handle, True, 1, None, False, Progress()))
    assert agents.log == ["no group of m-1-abcdef12"]


async def test_a_rank_alone_asks_for_none_of_it(tmp_path: Path) -> None:
    agents = FakeAgents()
    (handle,), _ = await started(agents, tmp_path, platform="cpu", peers=())

    assert agents.log == [f"spawn 0 {A}"]
    assert (handle.world, handle.attempt, handle.start) == (1, "", "m-1-abcdef12")
    assert "--nnodes" not in agents.spawned[0]["flags"]
