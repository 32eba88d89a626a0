"""Chooses the fewest nodes that hold a model, and how it is split over them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sparkd.capacity.advice import FitRefusal, outgrown, too_large
from sparkd.capacity.evidence import Ways
from sparkd.capacity.formats import AS_STORED, quality_loss_of
from sparkd.capacity.node_runtime import RUNTIME_S, NodeRuntime, is_alike, runtime_in_sight
from sparkd.capacity.placed_entry import PlacedEntry, ask_vllm, placed_entry, refused_flags, runtime_of
from sparkd.capacity.requirement import Placement, Requirement, requirement_of, why_illegal
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
from workers.quantization.recipe import QuantizationRecipe

log = logging.getLogger("sparkd.cluster")

IDENTITY_TIMEOUT_S = 60.0
STAGED_TIMEOUT_S = 15.0
ALONE: Ways = (1, 1)
# A client's request may cause a question to the Hub, which may be silent for HF_HUB_DOWNLOAD_TIMEOUT, 10 s.
HUB = Threads("hub", 4)


class Placer:
    """Places models.

    config: returns the present one
    link: calls the other nodes' agents
    runtime_here: describes a Python environment of this node
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
        entry = await asyncio.to_thread(placed_entry, spec, config, await self._runtime(config, spec))
        ways = (spec.tensor_parallel, 1) if isinstance(spec.tensor_parallel, int) else ALONE
        await asyncio.to_thread(_refuse_flags, entry)
        await asyncio.to_thread(ask_vllm, entry, ways)
        if ways != ALONE:
            return await self._team(entry, ways)
        need = await self._need(entry, ALONE)
        refusal = await self._too_large(entry, need, 1)
        if better := await self._better(entry, need if refusal is None else None):
            return better
        if refusal is None:
            entry, need = await self._on_its_node(entry, need)
            node = self._reservations.reserve_one(spec.name, need.gib, self._only_node(entry, need.gib))
            return _placement(entry, need, (node,), ALONE)
        # memory_gib is what the model takes on each node, split or not. More nodes help only if the engine is larger than that.
        limited = spec.memory_gib != "auto" and not outgrown(need.known, need.args.memory_gib)
        if spec.tensor_parallel == 1 or limited or refusal.cause == "length":
            raise _never_fits(refusal)
        return await self._spread(entry, refusal.message)

    async def _runtime(self, config: Config, spec: ModelConfig) -> NodeRuntime:
        """This node's runtime, or another node's if this one has none and the engine may run there."""
        interpreter, entrypoint = runtime_of(spec, config), spec.entrypoint_of(config.engine)
        nodes = self._in_sight() if entrypoint in GUARDED or entrypoint == AUTO else self._in_sight()[:1]
        return await runtime_in_sight(nodes, partial(self._runtime_on, interpreter), vllm=spec.runs_vllm(config.engine))

    async def _runtime_on(self, interpreter: str, node: str) -> Mapping[str, Any]:
        if node == self._in_sight()[0]:
            return await asyncio.to_thread(self._runtime_here, interpreter)
        return await self._link.call(node, "runtime", interpreter, timeout_s=RUNTIME_S)

    async def _on_its_node(self, entry: PlacedEntry, need: Requirement) -> tuple[PlacedEntry, Requirement]:
        """The entry and its requirement on the node that the model goes to, if its runtime or memory differs from this one's.

        If the model cannot run there: on this node.
        """
        spec, config, runtime = entry.spec, entry.config, entry.runtime
        node = next(iter(self._reservations.with_room(spec.name, need.gib)), runtime.node)
        if runtime.only is not None or node == runtime.node or not spec.runs_vllm(config.engine):
            return entry, need
        here = replace(entry, runtime=replace(runtime, only=frozenset({runtime.node})))
        try:
            facts = await self._runtime_on(runtime_of(spec, config), node)
        except RankError:
            return here, need
        if is_alike(facts, runtime.facts) and facts.get("mem_total_bytes") in (None, entry.node.memory_bytes):
            return entry, need
        if facts["entrypoint"] is None:
            return here, need
        there = await asyncio.to_thread(placed_entry, spec, config, NodeRuntime(facts, node, frozenset({node})))
        need_there = await self._need(there, ALONE)
        return (here, need) if await self._too_large(there, need_there, 1) else (there, need_there)

    async def _of_its_nodes(self, entry: PlacedEntry, need: Requirement, team: Sequence[str], ways: Ways) -> list[Requirement]:
        """The requirement on each size of node in the team: a share is one of a node's own memory. need: on a node of any size."""
        facts = await asyncio.gather(*(self._runtime_on(runtime_of(entry.spec, entry.config), node) for node in team))
        sizes = {each.get("mem_total_bytes") or entry.node.memory_bytes: node for node, each in zip(team, facts, strict=True)}
        if sizes.keys() == {entry.node.memory_bytes}:
            return [need]
        entries = (
            replace(entry, node=replace(entry.node, memory_bytes=size), runtime=replace(entry.runtime, node=node))
            for size, node in sizes.items()
        )
        return [await self._need(each, ways) for each in entries]

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
        await HUB.run(lambda: look(spec, env))

    async def _better(self, entry: PlacedEntry, alone: Requirement | None) -> Placement | None:
        """For `quantize: auto`, a placement over several nodes if they hold a better format than one node does.

        None if they do not, or if they cannot share a model now, which is logged.
        """
        if entry.spec.quantize != AUTO or entry.spec.tensor_parallel != AUTO or alone is None:
            return None
        better: list[tuple[int, int, int, Ways]] = []
        for nodes in range(2, len(self._in_sight()) + 1):
            for number, ways in enumerate(await asyncio.to_thread(_ways, entry, nodes)):
                need = await self._need(entry, ways)
                if _quality_loss(need) < _quality_loss(alone) and await self._too_large(entry, need, nodes) is None:
                    better.append((_quality_loss(need), nodes, number, ways))
        for *_, ways in sorted(better):
            try:
                return await self._team(entry, ways, linked=True)
            except MemoryReturns:
                raise  # the memory is back soon, while a worse format would stay
            except DoesNotFit:
                continue
            except ClusterError as error:  # missing files or a silent agent: one node can serve the model all the same
                log.warning("%s does not go over more nodes in a better format: %s", entry.spec.name, error.message)
        return None

    async def _spread(self, entry: PlacedEntry, refusal: str) -> Placement:
        """Place a model that is too large for one node over the fewest that hold it.

        Raises NoRoom if a number of nodes would hold it without the other models, DoesNotFit if none would.
        """
        full: NoRoom | None = None
        lasts = True
        for nodes in range(2, len(self._in_sight()) + 1):
            for ways in await asyncio.to_thread(_ways, entry, nodes):
                try:
                    return await self._team(entry, ways)
                except MemoryReturns:
                    raise
                except DoesNotFit as error:
                    full = full or (error if isinstance(error, NoRoom) else None)
                    lasts = lasts and error.lasts
                    split = f"As a pipeline of {ways[1]} stages over" if ways[1] > 1 else "Over"
                    refusal = f"{refusal} {split} {nodes} nodes: {error.message}"
        raise NoRoom(refusal, full.gib, full.nodes) if full else DoesNotFit(refusal, lasts=lasts)

    async def _team(self, entry: PlacedEntry, ways: Ways, *, linked: bool = False) -> Placement:
        """Place a model split in these ways. linked: a pipeline needs rails too; without it any link will do, as stages send little."""
        spec, size, seen = entry.spec, ways[0] * ways[1], self._in_sight()
        if len(seen) < size:
            reachable = f"only {len(seen)} {'are' if len(seen) > 1 else 'is'} reachable ({', '.join(seen)})"
            cure = "Connect more nodes (`sparkd fabric`), or remove tensor_parallel"
            raise DoesNotFit(f"It needs {size} nodes, and {reachable}. {cure}.")
        if illegal := await asyncio.to_thread(why_illegal, entry, ways):
            cure = "Remove tensor_parallel, or choose another number"
            raise DoesNotFit(f"It cannot be split over {size} nodes: {illegal}. {cure}.", lasts=True)
        need = await self._need(entry, ways)
        if refusal := await self._too_large(entry, need, size):
            raise _never_fits(refusal)
        only = entry.runtime.only
        nodes = [node for node in self._reservations.with_room(spec.name, need.gib) if only is None or node in only]
        if len(nodes) < size:
            raise self._reservations.no_room(spec.name, need.gib, size)
        files = (runtime_of(spec, entry.config), spec.model, spec.revision, cache_places(entry.args.env))

        def identify(node: str) -> Awaitable[dict[str, Any]]:
            return self._link.call(node, "identity", *files, timeout_s=IDENTITY_TIMEOUT_S)

        rdma, linked = wants_rdma(entry.node.platform, entry.args.env), linked or ways[0] > 1
        team = await compatible_nodes(spec.name, size, nodes, self._fabric, identify, rdma=rdma, linked=linked)
        if entry.entrypoint not in GUARDED and team[0] != seen[0]:
            problem = f"{spec.name} would be served from {team[0]}, where its engine, {entry.entrypoint}, would ask for no key"
            raise RankError(f"{problem}. Unload a model on this node, so that rank 0 of {spec.name} runs here.")
        needs = await self._of_its_nodes(entry, need, team, ways)
        for each in needs:
            if refusal := await self._too_large(entry, each, size):
                raise _never_fits(refusal)
        # The node with the least memory decides, and on each is reserved what any of them needs.
        need = replace(min(needs, key=lambda each: each.node.memory_bytes), gib=max(each.gib for each in needs))
        self._reservations.reserve(spec.name, need.gib, team)
        return _placement(entry, need, team, ways)

    async def _need(self, entry: PlacedEntry, ways: Ways) -> Requirement:
        free_gib = self._reservations.most_free_gib(entry.spec.name, self._total_gib, ways[0] * ways[1])
        # A file next to the model on this node may be missing on another.
        beside = ways == ALONE and len(self._in_sight()) == 1
        lent_gib = self._reservations.offered.get(entry.runtime.node, self._total_gib)
        need = await asyncio.to_thread(requirement_of, entry, free_gib, lent_gib, ways, beside=beside)
        if not entry.spec.runs_vllm(entry.config.engine):
            return need
        spec, parsers = await asyncio.to_thread(with_parsers, need.args.spec, need.args.env)
        return replace(need, args=replace(need.args, spec=spec), parsers=parsers)

    def _only_node(self, entry: PlacedEntry, gib: int) -> str | None:
        """The node that must serve the model; None if any may.

        An engine that asks for no key listens on a Unix socket, which only the daemon's node reaches. If some nodes lack the runtime, this
        is a node that has it, one with room if there is one.
        """
        only = entry.runtime.only
        if entry.entrypoint not in GUARDED:
            return self._in_sight()[0]
        if only is None:
            return None
        return next((node for node in self._reservations.with_room(entry.spec.name, gib) if node in only), min(only))

    async def _too_large(self, entry: PlacedEntry, need: Requirement, size: int) -> FitRefusal | None:
        only = self._only_node(entry, need.gib) if size == 1 else None
        offered = sorted((gib for node, gib in self._reservations.offered.items() if only in (None, node)), reverse=True)
        most_gib = int(offered[size - 1] if len(offered) >= size else self._total_gib)
        where = f"each of {size} nodes" if size > 1 else "the largest node in sight" if len(offered) > 1 else "this node"
        refusal = await asyncio.to_thread(too_large, need, most_gib, where)
        if refusal and only and entry.entrypoint not in GUARDED and len(self._in_sight()) > 1:
            alone = f"No other node can serve it: its engine, {entry.entrypoint}, is not vLLM and asks for no key on an address"
            return replace(refusal, reason=f"{refusal.reason}. {alone}")
        return refusal


def _never_fits(refusal: FitRefusal) -> DoesNotFit:
    return DoesNotFit(refusal.message, lasts=True, reason=refusal.failure)


def _quality_loss(need: Requirement) -> int:
    """See sparkd.capacity.formats.quality_loss_of: of the model in its format."""
    recipe = need.args.spec.quantize
    return quality_loss_of(recipe.default.spelling if isinstance(recipe, QuantizationRecipe) else AS_STORED)


def _ways(entry: PlacedEntry, nodes: int) -> Sequence[Ways]:
    """The splits that vLLM accepts, most tensor parallelism first: it is faster than a pipeline over as many nodes."""
    split: Sequence[Ways] = [(nodes // stages, stages) for stages in range(1, nodes + 1) if nodes % stages == 0]
    return [ways for ways in split if why_illegal(entry, ways) is None] or split[:1]


def _refuse_flags(entry: PlacedEntry) -> None:
    """Raise RankError for a flag that the parser of the model's vLLM refuses."""
    if notes := refused_flags(entry.spec, entry.config, entry.vllm, ask=True):
        refused = f"{entry.spec.name} cannot be started by the vLLM of its runtime"
        client_message = f"{refused}, which does not take one of its flags."
        raise RankError(f"{refused}: {notes[0]}", reason="FlagRefused", client_message=client_message)


def _placement(entry: PlacedEntry, need: Requirement, nodes: Sequence[str], ways: Ways) -> Placement:
    return Placement(
        nodes[0],
        slug_of(need.args.spec.name),
        need.gib,
        entry.node.platform,
        entry.entrypoint,
        entry.vllm,
        need.args.spec,
        tuple(nodes[1:]),
        *ways,
        need.parsers,
    )
