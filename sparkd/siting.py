"""Owns on which nodes a model goes, and how it is split over them: the fewest that hold it. Never starts a rank."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sparkd.admission import Ways
from sparkd.config import Config, ModelConfig
from sparkd.errors import ClusterError, DoesNotFit, FlagRefused, MemoryReturns, NoRoom, RankError
from sparkd.fabric_environment import wants_rdma
from sparkd.fabric_nodes import FabricNodes, Stages
from sparkd.fit import AS_STORED, quality_of
from sparkd.hub_model import is_absent, look, note_commit
from sparkd.needs import Need, Node, need_of, outgrown, refuse_unloadable, runtime_of, said_to, too_large, why_illegal
from sparkd.placement import Placement
from sparkd.places import Places
from sparkd.quantizing import AUTO
from sparkd.rank_folders import slug_of
from sparkd.raylink import RayLink
from sparkd.team import team_of
from sparkd.threads import Threads
from workers.hub_cache import cache_places
from workers.runtime import GUARDED

log = logging.getLogger("sparkd.cluster")

IDENTITY_TIMEOUT_S = 60.0
STAGED_TIMEOUT_S = 15.0
ALONE: Ways = (1, 1)
# A hub may be silent for HF_HUB_DOWNLOAD_TIMEOUT, 10 s, and clients' requests lead to it.
HUB = Threads("hub", 4)


class Siting:
    """`here` answers what a Python environment of this node has; `in_sight()` are the nodes that answer, this one first; total_gib is
    what this node lends."""

    def __init__(
        self, link: RayLink, fabric: FabricNodes, places: Places, here: Node, in_sight: Callable[[], list[str]], total_gib: int
    ) -> None:
        self._link = link
        self._fabric = fabric
        self._places = places
        self._here = here
        self._in_sight = in_sight
        self._total_gib = total_gib

    async def place(self, config: Config, spec: ModelConfig) -> Placement:
        """The memory is reserved on every node of it. Raises DoesNotFit, RankError or another ClusterError, each with the cure."""
        await self.refuse_absent(config, spec)
        await asyncio.to_thread(refuse_unloadable, spec, config)
        if isinstance(spec.tensor_parallel, int) and spec.tensor_parallel > 1:
            return await self._team(config, spec, (spec.tensor_parallel, 1))
        need = await self._need(config, spec, ALONE)
        why = await self._too_large(config, need, 1)
        if better := await self._better(config, spec, need if why is None else None):
            return better
        if why is None:
            node = await self._places.reserve_one(spec.name, need.gib, self._only(need))
            return _placement(need, (node,), ALONE)
        if spec.tensor_parallel == 1 or (spec.memory_gib != "auto" and not outgrown(need)):
            # A number of the operator's own is what it takes on each node, split or not: it helps where the engine is larger than that.
            raise DoesNotFit(why)
        return await self._spread(config, spec, why)

    async def refuse_absent(self, config: Config, spec: ModelConfig) -> None:
        """Raises ModelUnusable and HubUnreachable for a hub id of which no node has anything and that its hub does not give: an engine
        would find that out only after its imports."""
        env = spec.environment(config.engine)
        if not spec.runs_vllm(config.engine) or not await asyncio.to_thread(is_absent, spec, env):
            return
        others = self._in_sight()[1:]
        asking = (self._link.call(node, lambda agent: agent.staged.remote(spec.model, spec.revision, cache_places(env)), STAGED_TIMEOUT_S)
                  for node in others)  # fmt: skip
        answers = await asyncio.gather(*asking, return_exceptions=True)
        if there := [answer for answer in answers if isinstance(answer, Mapping) and answer["files"]]:
            if commit := there[0].get("commit"):
                note_commit(spec, env, commit)
            return
        await HUB.run(lambda: look(spec, env, _published(config)))

    def held_gib(self, config: Config, spec: ModelConfig, nodes: int) -> int:
        """What a model takes on each of so many nodes. Blocks."""
        ways = ALONE if nodes == 1 else _ways(config, spec, self._here, nodes)[0]
        return need_of(spec, config, self._here, self._total_gib, self._total_gib, ways).gib

    async def _better(self, config: Config, spec: ModelConfig, alone: Need | None) -> Placement | None:
        """With `quantize: auto` over more nodes, where those hold a better format than one does; None where none do, or they cannot share
        a model now, which the log says."""
        if spec.quantize != AUTO or spec.tensor_parallel != AUTO or alone is None:
            return None
        found: list[tuple[int, int, int, Ways]] = []
        for nodes in range(2, len(self._in_sight()) + 1):
            for number, ways in enumerate(await asyncio.to_thread(_ways, config, spec, self._here, nodes)):
                need = await self._need(config, spec, ways)
                if _quality(need) < _quality(alone) and await self._too_large(config, need, nodes) is None:
                    found.append((_quality(need), nodes, number, ways))
        for *_, ways in sorted(found):
            try:
                return await self._team(config, spec, ways, linked=True)
            except MemoryReturns:
                raise  # that is soon over, and a worse format would stay
            except DoesNotFit:
                continue
            except ClusterError as error:  # files that are not there, an agent that is silent: alone it is served all the same
                log.warning("%s does not go over more nodes in a better format: %s", spec.name, error.message)
        return None

    async def _spread(self, config: Config, spec: ModelConfig, why: str) -> Placement:
        """It is too large for one node: over the fewest that hold it. NoRoom where the first of these would without the other models."""
        full: NoRoom | None = None
        for nodes in range(2, len(self._in_sight()) + 1):
            for ways in await asyncio.to_thread(_ways, config, spec, self._here, nodes):
                try:
                    return await self._team(config, spec, ways)
                except MemoryReturns:
                    raise
                except DoesNotFit as error:
                    full = full or (error if isinstance(error, NoRoom) else None)
                    called = f"As a pipeline of {ways[1]} stages over" if ways[1] > 1 else "Over"
                    why = f"{why} {called} {nodes} nodes: {error.message}"
        raise NoRoom(why, full.gib, full.nodes) if full else DoesNotFit(why)

    async def _team(self, config: Config, spec: ModelConfig, ways: Ways, *, linked: bool = False) -> Placement:
        """linked: a pipeline too only over nodes with rails; else it goes over any, since its stages send little."""
        size, seen = ways[0] * ways[1], self._in_sight()
        if len(seen) < size:
            there = f"{len(seen)} node{'s are' if len(seen) > 1 else ' is'} in sight ({', '.join(seen)})"
            cure = "Connect the others (`sparkd fabric`), or leave tensor_parallel out"
            raise DoesNotFit(f"{spec.name} needs {size} nodes, and {there}. {cure}.")
        if illegal := await asyncio.to_thread(why_illegal, spec, config, self._here, ways):
            cure = "Leave tensor_parallel out, or choose another number"
            raise DoesNotFit(f"{spec.name} cannot be split over {size} nodes: {illegal}. {cure}.")
        need = await self._need(config, spec, ways)
        if why := await self._too_large(config, need, size):
            raise DoesNotFit(why)
        nodes = self._places.with_room(spec.name, need.gib)
        if len(nodes) < size:
            raise self._places.no_room(spec.name, need.gib, size)
        env = spec.environment(config.engine)
        used = need.spec if need.spec.model == spec.model else spec
        asked = (runtime_of(spec, config), used.model, used.revision, cache_places(env))

        def identify(node: str) -> Awaitable[dict[str, Any]]:
            return self._link.call(node, lambda agent: agent.identity.remote(*asked), IDENTITY_TIMEOUT_S)

        links = self._fabric if linked or ways[0] > 1 else Stages(self._fabric)
        team = await team_of(spec.name, size, nodes, links, identify, rdma=wants_rdma(need.platform, env))
        if self._only(need) not in (None, team[0]):
            told = f"{spec.name} would be served from {team[0]}, and its engine, {need.entrypoint}, is no vLLM: it asks for no key there"
            raise RankError(f"{told}. Unload a model of this node, so that the first part of {spec.name} runs here.")
        await self._places.reserve(spec.name, need.gib, team, devices=spec.executor == "ray")
        return _placement(need, team, ways)

    async def _need(self, config: Config, spec: ModelConfig, ways: Ways) -> Need:
        free_gib = self._places.most_free_gib(spec.name, self._total_gib, ways[0] * ways[1])
        # What lies beside a model here need not lie beside it on another node.
        beside = ways == ALONE and len(self._in_sight()) == 1
        need = await asyncio.to_thread(need_of, spec, config, self._here, free_gib, self._total_gib, ways, beside)
        said = await asyncio.to_thread(said_to, need.spec, config, need.vllm, ask=True)
        if said.refused:
            raise FlagRefused(f"{spec.name} cannot be started by the vLLM of its runtime: {said.refused[0]}")
        return replace(need, said=said)

    def _only(self, need: Need) -> str | None:
        """The node that must serve it; None where any may. An engine that asks for no key listens on a Unix socket, which is reached from
        the daemon's own node alone."""
        return None if need.entrypoint in GUARDED else self._in_sight()[0]

    async def _too_large(self, config: Config, need: Need, size: int) -> str | None:
        only = self._only(need) if size == 1 else None
        offered = sorted((gib for node, gib in self._places.offered().items() if only in (None, node)), reverse=True)
        most_gib = int(offered[size - 1] if len(offered) >= size else self._total_gib)
        where = f"each of {size} nodes" if size > 1 else "the largest node in sight" if len(offered) > 1 else "this node"
        why = await asyncio.to_thread(too_large, need, most_gib, where, need.spec.environment(config.engine))
        if why and only and len(self._in_sight()) > 1:
            why += f" No other node can serve it: its engine, {need.entrypoint}, is no vLLM and asks for no key on an address."
        return why


def _published(config: Config) -> Iterator[str]:
    """The hub ids of the recipes, for one that was mistyped."""
    book = config.book()
    for name in book.names():
        file, _ = book.read(name)
        if file is not None:
            yield from (file.model(variant) for variant in (None, *file.recipe.variants))


def _quality(need: Need) -> int:
    return quality_of(str(need.spec.quantize["format"]) if isinstance(need.spec.quantize, dict) else AS_STORED)


def _ways(config: Config, spec: ModelConfig, node: Node, nodes: int) -> Sequence[Ways]:
    """Those that vLLM accepts, the most tensor parallelism first: it is faster than a pipeline of as many nodes."""
    split: Sequence[Ways] = [(nodes // stages, stages) for stages in range(1, nodes + 1) if nodes % stages == 0]
    return [ways for ways in split if why_illegal(spec, config, node, ways) is None] or split[:1]


def _placement(need: Need, nodes: Sequence[str], ways: Ways) -> Placement:
    return Placement(
        nodes[0],
        slug_of(need.spec.name),
        need.gib,
        need.platform,
        need.entrypoint,
        need.vllm,
        need.spec,
        tuple(nodes[1:]),
        *ways,
        need.said,
        need.parsers,
    )
