"""Chooses the fewest nodes that hold a model, and how it is split over them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sparkd.capacity.advice import outgrown, too_large
from sparkd.capacity.evidence import Ways
from sparkd.capacity.formats import AS_STORED, quality_of
from sparkd.capacity.node_runtime import RUNTIME_S, NodeRuntime, is_alike, runtime_in_sight
from sparkd.capacity.requirement import (
    Placement,
    Requirement,
    ask_vllm,
    refuse_unloadable,
    refused_flags,
    requirement_of,
    runtime_of,
    why_illegal,
)
from sparkd.cluster.compatibility import compatible_nodes
from sparkd.cluster.node_paths import slug_of
from sparkd.cluster.ray_connection import RayConnection
from sparkd.cluster.reservations import Reservations
from sparkd.config.config import Config, ModelConfig
from sparkd.config.hub_check import is_absent, look
from sparkd.config.parser_choice import with_parsers
from sparkd.config.quantize import AUTO
from sparkd.config.trusted_commits import pinned
from sparkd.errors import ClusterError, DoesNotFit, MemoryReturns, NoRoom, RankError
from sparkd.execution.threads import Threads
from sparkd.fabric.environment import wants_rdma
from sparkd.fabric.fabric_nodes import FabricNodes
from workers.host.hub_cache import cache_places
from workers.host.runtime import GUARDED

log = logging.getLogger("sparkd.cluster")

IDENTITY_TIMEOUT_S = 60.0
STAGED_TIMEOUT_S = 15.0
ALONE: Ways = (1, 1)
# A client's request may cause a question to the Hub, which may be silent for HF_HUB_DOWNLOAD_TIMEOUT, 10 s.
HUB = Threads("hub", 4)


class Placer:
    """Places models.

    config: returns the present one
    here: describes the Python environments of this node
    in_sight: returns the nodes that answer, this one first
    total_gib: the memory that this node offers
    """

    def __init__(
        self,
        config: Callable[[], Config],
        link: RayConnection,
        fabric: FabricNodes,
        reservations: Reservations,
        runtime_here: Callable[[str], Mapping[str, Any]],
        in_sight: Callable[[], list[str]],
        total_gib: int,
    ) -> None:
        self._config = config
        self._link = link
        self._fabric = fabric
        self._reservations = reservations
        self._runtime_here = runtime_here
        self._in_sight = in_sight
        self._total_gib = total_gib

    async def place(self, spec: ModelConfig) -> Placement:
        """Choose the nodes and reserve the memory on each. Raises DoesNotFit, RankError or another ClusterError, each with the remedy."""
        config = self._config()
        await self.refuse_absent(spec)
        spec = await asyncio.to_thread(pinned, spec, config)
        await asyncio.to_thread(refuse_unloadable, spec, config)
        where = await self._where(config, spec)
        ways = (spec.tensor_parallel, 1) if isinstance(spec.tensor_parallel, int) else ALONE
        await asyncio.to_thread(ask_vllm, spec, config, where.facts, ways)
        if ways != ALONE:
            return await self._team(config, spec, where, ways)
        need = await self._need(config, spec, where, ALONE)
        refusal = await self._too_large(need, 1)
        if better := await self._better(config, spec, where, need if refusal is None else None):
            return better
        if refusal is None:
            need = await self._of_its_node(config, spec, where, need)
            node = self._reservations.reserve_one(spec.name, need.gib, self._only(need))
            return _placement(need, (node,), ALONE)
        if spec.tensor_parallel == 1 or (spec.memory_gib != "auto" and not outgrown(need.known, need.args.memory_gib)):
            # memory_gib is what the model takes on each node, split or not. More nodes help only if the engine is larger than that.
            raise DoesNotFit(refusal, lasts=True)
        return await self._spread(config, spec, where, refusal)

    async def _where(self, config: Config, spec: ModelConfig) -> NodeRuntime:
        """This node's runtime, or another node's if this one has none and the engine may run there."""
        interpreter, entrypoint = runtime_of(spec, config), spec.entrypoint_of(config.engine)
        nodes = self._in_sight() if entrypoint in GUARDED or entrypoint == AUTO else self._in_sight()[:1]
        return await runtime_in_sight(nodes, partial(self._runtime_on, interpreter), vllm=spec.runs_vllm(config.engine))

    async def _runtime_on(self, interpreter: str, node: str) -> Mapping[str, Any]:
        if node == self._in_sight()[0]:
            return await asyncio.to_thread(self._runtime_here, interpreter)
        return await self._link.call(node, "runtime", interpreter, timeout_s=RUNTIME_S)

    async def _of_its_node(self, config: Config, spec: ModelConfig, where: NodeRuntime, need: Requirement) -> Requirement:
        """The requirement on the node that the model goes to, if its runtime or memory differs from this one's.

        If the model cannot run there: the requirement on this node.
        """
        node = next(iter(self._reservations.with_room(spec.name, need.gib)), where.node)
        if where.only is not None or node == where.node or not spec.runs_vllm(config.engine):
            return need
        here = replace(need, nodes=frozenset({where.node}))
        try:
            facts = await self._runtime_on(runtime_of(spec, config), node)
        except RankError:
            return here
        if is_alike(facts, where.facts) and facts.get("mem_total_bytes") in (None, need.hardware.memory_bytes):
            return need
        if facts["entrypoint"] is None:
            return here
        there = await self._need(config, spec, NodeRuntime(facts, node, frozenset({node})), ALONE)
        return here if await self._too_large(there, 1) else there

    async def _of_its_nodes(
        self, config: Config, spec: ModelConfig, need: Requirement, team: Sequence[str], ways: Ways
    ) -> list[Requirement]:
        """The requirement on each size of node in the team: a share is one of a node's own memory. need: on a node of any size."""
        facts = await asyncio.gather(*(self._runtime_on(runtime_of(spec, config), node) for node in team))
        if all(each.get("mem_total_bytes") in (None, need.hardware.memory_bytes) for each in facts):
            return [need]
        sizes = {each.get("mem_total_bytes"): NodeRuntime(each, node, need.nodes) for node, each in zip(team, facts, strict=True)}
        return [await self._need(config, spec, runtime, ways) for runtime in sizes.values()]

    async def unlinked(self, *, rdma: bool) -> dict[int, str]:
        """See FabricNodes.unlinked: of the nodes in sight."""
        return await self._fabric.unlinked(self._in_sight(), rdma=rdma)

    async def refuse_absent(self, spec: ModelConfig) -> None:
        """Raise ModelUnusable or HubUnreachable for a Hub id that no node has and the Hub does not serve.

        An engine would find that out only after its imports.
        """
        config = self._config()
        env = spec.environment(config.engine)
        if not spec.runs_vllm(config.engine) or not await asyncio.to_thread(is_absent, spec, env):
            return
        others = self._in_sight()[1:]
        asking = (self._link.call(node, "staged", spec.model, spec.revision, cache_places(env), timeout_s=STAGED_TIMEOUT_S)
                  for node in others)  # fmt: skip
        answers = await asyncio.gather(*asking, return_exceptions=True)
        if any(isinstance(answer, Mapping) and answer["files"] for answer in answers):
            return
        await HUB.run(lambda: look(spec, env, _published(config)))

    async def _better(self, config: Config, spec: ModelConfig, where: NodeRuntime, alone: Requirement | None) -> Placement | None:
        """For `quantize: auto`, a placement over several nodes if they hold a better format than one node does.

        None if they do not, or if they cannot share a model now, which is logged.
        """
        if spec.quantize != AUTO or spec.tensor_parallel != AUTO or alone is None:
            return None
        better: list[tuple[int, int, int, Ways]] = []
        for nodes in range(2, len(self._in_sight()) + 1):
            for number, ways in enumerate(await asyncio.to_thread(_ways, config, spec, where.facts, nodes)):
                need = await self._need(config, spec, where, ways)
                if _quality(need) < _quality(alone) and await self._too_large(need, nodes) is None:
                    better.append((_quality(need), nodes, number, ways))
        for *_, ways in sorted(better):
            try:
                return await self._team(config, spec, where, ways, linked=True)
            except MemoryReturns:
                raise  # the memory is back soon, while a worse format would stay
            except DoesNotFit:
                continue
            except ClusterError as error:  # missing files or a silent agent: one node can serve the model all the same
                log.warning("%s does not go over more nodes in a better format: %s", spec.name, error.message)
        return None

    async def _spread(self, config: Config, spec: ModelConfig, where: NodeRuntime, refusal: str) -> Placement:
        """Place a model that is too large for one node over the fewest that hold it.

        Raises NoRoom if a number of nodes would hold it without the other models, DoesNotFit if none would.
        """
        full: NoRoom | None = None
        lasts = True
        for nodes in range(2, len(self._in_sight()) + 1):
            for ways in await asyncio.to_thread(_ways, config, spec, where.facts, nodes):
                try:
                    return await self._team(config, spec, where, ways)
                except MemoryReturns:
                    raise
                except DoesNotFit as error:
                    full = full or (error if isinstance(error, NoRoom) else None)
                    lasts = lasts and error.lasts
                    split = f"As a pipeline of {ways[1]} stages over" if ways[1] > 1 else "Over"
                    refusal = f"{refusal} {split} {nodes} nodes: {error.message}"
        raise NoRoom(refusal, full.gib, full.nodes) if full else DoesNotFit(refusal, lasts=lasts)

    async def _team(self, config: Config, spec: ModelConfig, where: NodeRuntime, ways: Ways, *, linked: bool = False) -> Placement:
        """Place a model split in these ways. linked: a pipeline needs rails too; without it any link will do, as stages send little."""
        size, seen = ways[0] * ways[1], self._in_sight()
        if len(seen) < size:
            reachable = f"only {len(seen)} {'are' if len(seen) > 1 else 'is'} reachable ({', '.join(seen)})"
            cure = "Connect more nodes (`sparkd fabric`), or remove tensor_parallel"
            raise DoesNotFit(f"{spec.name} needs {size} nodes, and {reachable}. {cure}.")
        if illegal := await asyncio.to_thread(why_illegal, spec, config, where.facts, ways):
            cure = "Remove tensor_parallel, or choose another number"
            raise DoesNotFit(f"{spec.name} cannot be split over {size} nodes: {illegal}. {cure}.", lasts=True)
        need = await self._need(config, spec, where, ways)
        if refusal := await self._too_large(need, size):
            raise DoesNotFit(refusal, lasts=True)
        nodes = [node for node in self._reservations.with_room(spec.name, need.gib) if need.nodes is None or node in need.nodes]
        if len(nodes) < size:
            raise self._reservations.no_room(spec.name, need.gib, size)
        env = spec.environment(config.engine)
        used = need.spec if need.spec.model == spec.model else spec
        files = (runtime_of(spec, config), used.model, used.revision, cache_places(env))

        def identify(node: str) -> Awaitable[dict[str, Any]]:
            return self._link.call(node, "identity", *files, timeout_s=IDENTITY_TIMEOUT_S)

        rdma, linked = wants_rdma(need.platform, env), linked or ways[0] > 1
        team = await compatible_nodes(spec.name, size, nodes, self._fabric, identify, rdma=rdma, linked=linked)
        if need.entrypoint not in GUARDED and team[0] != seen[0]:
            problem = f"{spec.name} would be served from {team[0]}, where its engine, {need.entrypoint}, would ask for no key"
            raise RankError(f"{problem}. Unload a model on this node, so that rank 0 of {spec.name} runs here.")
        needs = await self._of_its_nodes(config, spec, need, team, ways)
        for each in needs:
            if refusal := await self._too_large(each, size):
                raise DoesNotFit(refusal, lasts=True)
        # The node with the least memory decides, and on each is reserved what any of them needs.
        need = replace(min(needs, key=lambda each: each.hardware.memory_bytes), gib=max(each.gib for each in needs))
        self._reservations.reserve(spec.name, need.gib, team)
        return _placement(need, team, ways)

    async def _need(self, config: Config, spec: ModelConfig, where: NodeRuntime, ways: Ways) -> Requirement:
        free_gib = self._reservations.most_free_gib(spec.name, self._total_gib, ways[0] * ways[1])
        # A file next to the model on this node may be missing on another.
        beside = ways == ALONE and len(self._in_sight()) == 1
        lent_gib = self._reservations.offered.get(where.node, self._total_gib)
        need = await asyncio.to_thread(requirement_of, spec, config, where.facts, free_gib, lent_gib, ways, beside)
        if spec.runs_vllm(config.engine):
            parsed, parsers = await asyncio.to_thread(with_parsers, need.spec, need.args.env)
            need = replace(need, spec=parsed, parsers=parsers)
        if notes := await asyncio.to_thread(refused_flags, need.spec, config, need.vllm, ask=True):
            refused = f"{spec.name} cannot be started by the vLLM of its runtime"
            client_message = f"{refused}, which does not take one of its flags."
            raise RankError(f"{refused}: {notes[0]}", reason="FlagRefused", client_message=client_message)
        return replace(need, nodes=where.only)

    def _only(self, need: Requirement) -> str | None:
        """The node that must serve the model; None if any may.

        An engine that asks for no key listens on a Unix socket, which only the daemon's node reaches. If some nodes lack the runtime, this
        is a node that has it, one with room if there is one.
        """
        if need.entrypoint not in GUARDED:
            return self._in_sight()[0]
        if need.nodes is None:
            return None
        with_room = (node for node in self._reservations.with_room(need.spec.name, need.gib) if node in need.nodes)
        return next(with_room, min(need.nodes))

    async def _too_large(self, need: Requirement, size: int) -> str | None:
        only = self._only(need) if size == 1 else None
        offered = sorted((gib for node, gib in self._reservations.offered.items() if only in (None, node)), reverse=True)
        most_gib = int(offered[size - 1] if len(offered) >= size else self._total_gib)
        where = f"each of {size} nodes" if size > 1 else "the largest node in sight" if len(offered) > 1 else "this node"
        found = await asyncio.to_thread(too_large, need, most_gib, where)
        refusal = None if found is None else found.message
        if refusal and only and need.entrypoint not in GUARDED and len(self._in_sight()) > 1:
            refusal += f" No other node can serve it: its engine, {need.entrypoint}, is not vLLM and asks for no key on an address."
        return refusal


def _published(config: Config) -> Iterator[str]:
    """The Hub ids of the recipes, to suggest one for a mistyped id."""
    book = config.book()
    for name in book.names():
        file, _ = book.read(name)
        if file is not None:
            yield file.recipe.model


def _quality(need: Requirement) -> int:
    return quality_of(str(need.spec.quantize["format"]) if isinstance(need.spec.quantize, dict) else AS_STORED)


def _ways(config: Config, spec: ModelConfig, facts: Mapping[str, Any], nodes: int) -> Sequence[Ways]:
    """The splits that vLLM accepts, most tensor parallelism first: it is faster than a pipeline over as many nodes."""
    split: Sequence[Ways] = [(nodes // stages, stages) for stages in range(1, nodes + 1) if nodes % stages == 0]
    return [ways for ways in split if why_illegal(spec, config, facts, ways) is None] or split[:1]


def _placement(need: Requirement, nodes: Sequence[str], ways: Ways) -> Placement:
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
        need.parsers,
    )
