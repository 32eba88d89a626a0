"""The nodes, through Ray: membership, agents, placement and ranks. Never decides what should run, never talks to an engine's users."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from sparkd.capacity.reservation import Placement, offered_gib
from sparkd.cluster.launcher import Attempt, Starter, Tell
from sparkd.cluster.node_paths import agent_arguments, rank_folders, remove_empty
from sparkd.cluster.node_tracker import (
    NodeObservation,
    Observation,
    Sight,
    UnreadableFacts,
    facts_of,
    told_of,
    told_of_strangers,
    told_of_unreadable,
)
from sparkd.cluster.placer import HUB, Siting
from sparkd.cluster.ray_connection import RayLink, or_none
from sparkd.cluster.ray_head import LOOPBACK, RayHead, RayOptions, costs_of, node_environment
from sparkd.cluster.read_memory import reading
from sparkd.cluster.reservations import Places
from sparkd.condition import Condition
from sparkd.config.config import Config, ModelConfig
from sparkd.engine.upstream import ServedModels, Upstream, served_models, served_routes
from sparkd.entry.node_runtime import RUNTIME_S, NodeRuntime, runtime_in_sight, runtimes_in_sight
from sparkd.entry.parser_choice import expected
from sparkd.entry.tasks import abilities_of
from sparkd.entry.trusted_commits import at_trusted_commit
from sparkd.errors import AgentLost, ClusterError, CodeDiffers, ModelUnusable, NodeRefused, RankError, refused_by
from sparkd.execution.boundary import Boundary
from sparkd.fabric.checks import Finding
from sparkd.fabric.interfaces import Fabric
from sparkd.fabric.readings import FabricNodes, ray_environment
from sparkd.fabric.transport import proof
from sparkd.models.folder import unusable
from sparkd.state.abilities import Abilities
from sparkd.state.memory_book import MemoryBook
from sparkd.state.nouns import RankFact, RankHandle
from sparkd.state.snapshot import NodeView
from sparkd.vllm.parsers import Parsers
from workers.agent.actor import Agent

log = logging.getLogger("sparkd.cluster")

OBSERVE_TIMEOUT_S = 3.0
# Between two ends of a cable: a tick waits for it.
KNOCK_TIMEOUT_S = 0.3
FABRIC_TIMEOUT_S = 15.0
DESTROY_TIMEOUT_S = 60.0
RECONNECT_EVERY_S = 2.0
RECONCILE_EVERY_S = 60.0
MISSES_BEFORE_RECOVERY = 3
UNSERVED_GRACE_S = 2.0

T = TypeVar("T")


class Cluster:
    """One Spark is a cluster of one: our own Ray head unless an address is given.

    The node that the daemon runs on is also looked at directly, by the agent's own code, while Ray is away: engines that outlive Ray stay
    in sight, and a restarted daemon finds them before Ray is connected.
    """

    def __init__(self, config: Config, environ: Mapping[str, str], boundary: Boundary | None = None) -> None:
        self._config = config
        self._boundary = boundary or Boundary(time.monotonic)
        self.node_ip = config.cluster.node_ip or LOOPBACK
        self._rank_folders = rank_folders(config, self.node_ip)
        token_path = config.token_path(environ)
        self.total_gib = offered_gib(config)
        self._head = (
            None
            if config.cluster.address
            else RayHead(
                config.runtime_path,
                token_path,
                node_ip=self.node_ip,
                port=config.cluster.port,
                memory_gib=self.total_gib,
                object_store_mib=config.cluster.object_store_memory_mib,
                options=RayOptions(
                    starts="CREDENTIALS_DIRECTORY" not in environ, rank_folders=self._rank_folders, fabric=ray_environment
                ),
            )
        )
        self.costs = partial(costs_of, self._head)
        self._link = RayLink(node_environment(token_path, self.node_ip), partial(agent_arguments, config, self.node_ip))
        self._here = Agent(self.node_ip, *agent_arguments(config, self.node_ip, self.node_ip))
        self._fabric = FabricNodes(lambda node_ip: self.ask(node_ip, "fabric", timeout_s=FABRIC_TIMEOUT_S))
        self._told: Mapping[str, Mapping[str, Any]] = {}
        self._misses = 0
        self._trouble: Condition | None = Condition("RayStarting", "Ray is not connected yet.")
        # Apart from the other, which each look at this node clears.
        self._upkeep_trouble: Condition | None = None
        self._places = Places(self._link, self.node_ip, self._offered)
        self._starter = Starter(self._link, self._fabric, self.node_ip)
        self._siting = Siting(self._link, self._fabric, self._places, self._here, self.in_sight, self.total_gib)
        self._sight = Sight()
        # Out of sight: the tick does not wait for them, `run` looks whether they are back.
        self._silent: set[str] = set()
        self._ahead_s: dict[str, float] = {}
        # The last look at all of Ray's nodes: the models whose ranks were seen, and the nodes whose ranks cannot be seen.
        self._last_look: tuple[frozenset[str], frozenset[str]] | None = None
        self._reconcile_at_s = float("-inf")
        # Reports that the last looks could not use, by what they are about.
        self._unreadable: dict[str, UnreadableFacts] = {}
        # A head of ours that lives but cannot be joined (its token is gone, its GCS hangs) is ended: engines do not depend on it.
        self._head_is_suspect = False

    def reconfigure(self, config: Config) -> None:
        """Settings of engines take effect with their next start, the guard's at once; where Ray and the folders are stays as it was."""
        self._config = config
        self._here.sentry.set(config.memory.guard_settings())

    def expect(self, nodes: Iterable[str]) -> None:
        """An earlier daemon started ranks there: until those nodes were seen, or not for NODE_GRACE_S, what runs there is unknown."""
        self._sight.expect(set(nodes) - {self.node_ip}, time.monotonic())

    async def run(self, joined: Callable[[], None]) -> None:
        """Connect, and connect again whenever Ray is lost, until cancelled. `joined` is called after each connection that was made."""
        while True:
            lost = not self._link.connected or self._misses >= MISSES_BEFORE_RECOVERY or await asyncio.to_thread(self._head_died)
            if (lost or not await self._kept_up()) and await self._connect():
                joined()
            await asyncio.sleep(RECONNECT_EVERY_S)

    async def observe(self) -> Observation:
        """Reading and ranks of every node, from its agent; of this node directly while its agent does not answer."""
        self._sight.begin(time.monotonic())
        could_look, self._last_look = self._link.connected, None
        differing = {address for address, error in self._link.unmet.items() if isinstance(error, CodeDiffers)}
        for address in differing:
            self._sight.stays(address, time.monotonic())
        known, self._unreadable = self._unreadable, {}
        addresses = [ip for ip in self._link.nodes() if ip != self.node_ip and ip not in self._silent]
        away = [ip for ip in self._link.port_of if (ip in self._silent or not could_look) and self._sight.awaits(ip)]
        (here, *others), _ = await asyncio.gather(
            asyncio.gather(self._look_here(), *(self._look(ip) for ip in addresses)),
            asyncio.gather(*(self._knock(ip) for ip in away)),
        )
        if here is None:
            message = "/proc or the runtime directory of this node cannot be read."
            return Observation(None, None, False, trouble=Condition("NodeUnreadable", message))
        looks = [here, *(look for look in others if look is not None)]
        self._sight.begin(time.monotonic())  # the daemon may have been held in the middle of this look
        missing = self._sight.look([look.node for look in looks], could_look=could_look, now_s=time.monotonic())
        for of in self._unreadable.keys() - known.keys():
            log.warning("the report of %s cannot be used: %s", of, self._unreadable[of].error)
        unseen = frozenset(node.node_id for node in missing)
        if could_look and self._link.connected:
            models = frozenset(fact.handle.model for look in looks for fact in look.ranks)
            self._last_look = models, unseen.union(self._silent, self._link.unmet)
        about = {"address": self._link.address, "own_head": self._head is not None, "connected": self._link.connected}
        return Observation(
            ranks=tuple(fact for look in looks for fact in look.ranks),
            reading=here.node.reading,
            connected=could_look and here.node.agent,
            nodes=(*(look.node for look in looks), *missing),
            unseen=unseen,
            dark_s={node.node_id: self._sight.dark_s(node.node_id, time.monotonic()) for node in missing},
            no_raylet=self._sight.no_raylet,
            trouble=self._trouble
            or self._upkeep_trouble
            or told_of([node for node in missing if node.address not in differing])
            or told_of_unreadable(self._unreadable)
            or told_of_strangers(self._link.unmet, self._clocks()),
            cluster=about,
        )

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        """By node, what workers.host.network.sample says there now; None of a node whose agent does not answer."""
        return await self._fabric.readings([self.node_ip, *self._link.nodes()], kept_s=0)

    def tell(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """By model, what the guards of the nodes must know: see workers.guard.guard.Sentry. They hear it with the next look."""
        self._told = told
        self._here.sentry.hear(told)

    async def everywhere(self, method: str, *arguments: Any) -> dict[str, Any]:
        """By node, what this method of its agent answers; None of a node that does not answer."""
        nodes = list(dict.fromkeys([self.node_ip, *self._link.nodes()]))
        asked = (self.ask(node_ip, method, *arguments, timeout_s=FABRIC_TIMEOUT_S) for node_ip in nodes)
        return dict(zip(nodes, await asyncio.gather(*(or_none(one) for one in asked)), strict=True))

    async def runtime(self, interpreter: str) -> NodeRuntime:
        """That of this node, or of another where this one has no vLLM there. Raises RankError where no node in sight has it."""
        return await runtime_in_sight(self.in_sight(), partial(self._runtime_on, interpreter), vllm=True)

    async def runtimes(self, interpreter: str) -> list[NodeRuntime]:
        """The same, and one for each other release that another node has."""
        return await runtimes_in_sight(self.in_sight(), partial(self._runtime_on, interpreter), vllm=True)

    async def _runtime_on(self, interpreter: str, node: str) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = await self.ask(node, "runtime", interpreter, timeout_s=RUNTIME_S)
        return facts

    async def unlinked(self, *, rdma: bool) -> dict[int, str]:
        """See FabricNodes.unlinked: of the nodes in sight."""
        return await self._fabric.unlinked(self.in_sight(), rdma=rdma)

    def prove(self, passed: Callable[[Mapping[str, Fabric]], frozenset[frozenset[str]]]) -> None:
        """passed: see FabricNodes."""
        self._fabric.passed = passed

    def book(self) -> MemoryBook:
        """The memory that the nodes in sight lend, and how much of it each model holds."""
        return self._places.book()

    async def place(self, spec: ModelConfig) -> Placement:
        """Reserve unified memory for `spec` on as many nodes as it takes. Raises DoesNotFit, NoRoom or a ClusterError."""
        return await self._siting.place(self._config, spec)

    async def hold(self, spec: ModelConfig, nodes: Sequence[str], gib: int) -> None:
        """Reserve again what adopted ranks use already, so much on each node; while Ray is away, with the next connection.

        0: an earlier release started them and did not write it down, so it is worked out again.
        """
        gib = gib or await asyncio.to_thread(self._siting.held_gib, self._config, spec, len(nodes))
        self._places.hold(spec.name, gib, nodes)
        if self._link.connected:
            await self._places.again(nodes)

    def shut(self, nodes: frozenset[str], room_gib: Mapping[str, float]) -> None:
        """Nothing is placed on these until they are named no more, and no more than room_gib on those."""
        self._places.shut, self._places.room_gib = nodes, dict(room_gib)

    async def unusable(self, spec: ModelConfig) -> ModelUnusable | None:
        """Why there is no model to start, by its folder or its hub; None if there is one, or if that is unknown."""
        vllm, places = spec.runs_vllm(self._config.engine), self._config.model_places()
        if fault := await asyncio.to_thread(unusable, spec.model, vllm=vllm, places=places):
            return fault
        try:
            await self._siting.refuse_absent(self._config, spec)
        except ModelUnusable as error:
            return error
        except ClusterError:
            return None
        return None

    async def abilities(self, spec: ModelConfig) -> Abilities:
        """The abilities that the model's files on this node show. Another engine than vLLM has only its max_model_len."""
        if not spec.runs_vllm(self._config.engine):
            return Abilities(max_model_len=spec.max_model_len if isinstance(spec.max_model_len, int) else None)
        spec = await asyncio.to_thread(at_trusted_commit, spec, self._config)
        return await asyncio.to_thread(abilities_of, spec, spec.environment(self._config.engine))

    async def parsers(self, spec: ModelConfig) -> Parsers | None:
        """The parsers that its engine will have; None where that is unknown, or it is no vLLM."""
        engine = self._config.engine
        if not spec.runs_vllm(engine):
            return None
        spec = await asyncio.to_thread(at_trusted_commit, spec, self._config)
        return await HUB.run(expected, spec, spec.environment(engine), spec.runtime_of(engine))

    async def served_abilities(self, upstream: Upstream, known: Abilities, models: ServedModels) -> Abilities:
        """`known` with what the engine itself tells. models: its model list."""
        return replace(known, routes=await served_routes(upstream), max_model_len=models.max_model_len or known.max_model_len)

    async def release(self, model: str) -> None:
        await self._places.release(model)

    async def start(self, placement: Placement, spec: ModelConfig, attempt: Attempt, tell: Tell | None = None) -> tuple[RankHandle, ...]:
        """See Starter.start."""
        return await self._starter.start(self._config, placement, spec, attempt, tell)

    async def destroy(self, fact: RankFact, *, hangs: bool = False) -> Sequence[Mapping[str, Any]]:
        """Stop a rank and verify that no process of it is left. Raises RankError naming those that would not die.

        hangs: its engine has been found to; it will finish nothing, and is killed at once. Returns what else it left behind on its node:
        see workers.rank.lifecycle.stop.
        """
        # An engine that never served has nothing to finish, and one that compiles does not listen to SIGTERM.
        grace_s = float(self._config.engine.stop_timeout_s) if fact.progress.server_up else UNSERVED_GRACE_S
        grace_s = 0.0 if hangs else grace_s
        handle = {name: getattr(fact.handle, name) for name in RankHandle.__slots__}
        node_ip = fact.handle.node_id
        ended = await self.ask(node_ip, "destroy", handle, grace_s, timeout_s=grace_s + DESTROY_TIMEOUT_S)
        if not ended["gone"]:
            pids = ", ".join(str(pid) for pid in ended["survivors"])
            raise RankError(
                f"Processes {pids} of rank {fact.handle.rank_id} do not end even after SIGKILL: they hang in the kernel, usually in "
                "the GPU driver. If they stay, the node must be rebooted."
            )
        return ended.get("left") or ()

    async def upstream(self, handle: RankHandle) -> Upstream:
        """The way to a rank 0: its Unix socket on this node, else its private address with its own key."""
        if handle.socket_path:
            return Upstream(socket_path=handle.socket_path)
        key = await self._link.call(handle.node_id, lambda agent: agent.api_key.remote(handle.rank_id), OBSERVE_TIMEOUT_S)
        return Upstream(base_url=f"http://{handle.host}:{handle.port}", api_key=key)

    async def served_models(self, upstream: Upstream) -> ServedModels | None:
        """See upstream.served_models."""
        return await served_models(upstream)

    async def transport(self, handles: Sequence[RankHandle], configured: Mapping[str, str]) -> tuple[Finding, ...]:
        """See transport.proof: of the ranks of one model."""

        def lines(one: RankHandle) -> Awaitable[list[str]]:
            return self.ask(one.node_id, "nccl_lines", one.log_path, timeout_s=FABRIC_TIMEOUT_S)

        return await proof(handles, self._fabric, lines, configured)

    async def read_log(self, node_id: str | None, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        if node_id and node_id != self.node_ip:
            return await self._link.call(node_id, lambda agent: agent.read_log.remote(path, cursor, max_bytes), OBSERVE_TIMEOUT_S)
        return await asyncio.to_thread(self._here.read_log, path, cursor, max_bytes)

    async def close(self, *, stop_ray: bool) -> None:
        """Leave the cluster; with stop_ray, end our own head too and clear the runtime folder. Ranks are not touched."""
        await self._link.disconnect()
        if not stop_ray:
            return
        if self._head and not self._head.kept_elsewhere:
            await asyncio.to_thread(self._head.stop)
        await asyncio.to_thread(self._clear_runtime_folder)

    def _clear_runtime_folder(self) -> None:
        """Nothing is left of a run in which everything ended; what will not die keeps its folder."""
        run_dirs = self._rank_folders[0].parent
        # A rank whose start was under way when everything else was stopped shows only now that Ray, which started it, has gone.
        for rank_id in {raw["rank_id"] for raw in self._here.observe()["ranks"]} | set(self._here.strays()):
            self._here.destroy({"rank_id": rank_id}, UNSERVED_GRACE_S)
        if not self._here.observe()["ranks"]:
            shutil.rmtree(run_dirs, ignore_errors=True)
        remove_empty(run_dirs.parent)

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """One method of a node's agent; of this node, while its agent is not connected, of the agent's own code here.

        A call that may have come to the agent is never made a second time: it may be under way.
        """
        try:
            return await self._link.call(node_ip, lambda agent: getattr(agent, method).remote(*arguments), timeout_s)
        except AgentLost as error:
            if node_ip != self.node_ip or error.reached:
                raise
        try:
            return await asyncio.to_thread(getattr(self._here, method), *arguments)
        except OSError as error:
            raise refused_by(error, "This node") from error

    async def _kept_up(self) -> bool:
        """Meet nodes that have come or are back. False where Ray does not answer any more."""
        try:
            met = await self._link.refresh()
            await self._link.tell_time()
            for ip in self._silent & set(self._link.nodes()):
                await self._look(ip)
            # What Ray reserved on a node went with its raylet.
            await self._places.again(met)
            if self._last_look is not None and time.monotonic() >= self._reconcile_at_s:
                await self._places.reconcile(*self._last_look)
                self._reconcile_at_s = time.monotonic() + RECONCILE_EVERY_S
        except ClusterError as error:
            self._upkeep_trouble = Condition(type(error).__name__, error.message)
            return isinstance(error, NodeRefused)
        self._upkeep_trouble = None
        return True

    async def _connect(self) -> bool:
        """Join Ray; return whether that worked. If not, the condition says why, and sparkd tries again."""
        try:
            self._last_look, self._reconcile_at_s = None, float("-inf")
            await self._link.disconnect()
            if self._head and self._head_is_suspect:
                self._head_is_suspect = False
                await asyncio.to_thread(self._head.stop)
            address = await asyncio.to_thread(self._head.ensure) if self._head else self._config.cluster.address
            # Only now: a head that `sparkd ray-node` is starting must not be ended for being slow.
            self._head_is_suspect = True
            await self._link.connect(address or "", self.node_ip)
            if self._head:
                await asyncio.to_thread(self._head.keep_closed)
            await self._places.again(self._link.nodes())
        except (ClusterError, OSError) as error:
            told = error if isinstance(error, ClusterError) else refused_by(error, "This node")
            trouble = Condition(type(told).__name__, told.message)
            if self._trouble != trouble:
                log.error("%s", told.message)
            self._trouble = trouble
            if isinstance(told, NodeRefused):
                # That is this node's fault, not the head's.
                self._head_is_suspect = False
            return False
        self._misses = 0
        self._trouble = None
        self._head_is_suspect = False
        log.info("connected to Ray at %s", self._link.address)
        return True

    def in_sight(self) -> list[str]:
        """This node first."""
        return [self.node_ip, *(ip for ip in self._link.nodes() if ip not in self._silent and ip != self.node_ip)]

    def _offered(self) -> dict[str, float]:
        return {ip: self._link.gib_of[ip] for ip in self._link.nodes() if ip in self._link.gib_of and ip not in self._silent}

    def _head_died(self) -> bool:
        try:
            return self._head is not None and self._head.living_address() is None
        except OSError as error:
            # Unknown is not dead: sparkd must not end a head that may live.
            log.error("Ray's head cannot be looked for: %s", error)
            return False

    async def _look_here(self) -> NodeObservation | None:
        """This node, through its agent or, while that is away, with the agent's own code."""
        found = await self._look(self.node_ip) if self._link.connected else None
        self._here.sentry.claims = found is None
        if found:
            return found
        with self._boundary.around("look"):
            try:
                return self._looked_at(self.node_ip, await asyncio.to_thread(self._here.observe), agent=False)
            except OSError as error:
                log.error("this node cannot be read: %s", error)
        return None

    async def _look(self, node_ip: str) -> NodeObservation | None:
        """None where its agent does not answer, or nothing that can be used: other nodes are looked at all the same."""
        with self._boundary.around("look"):
            return await self._ask_for_look(node_ip)
        return None

    async def _ask_for_look(self, node_ip: str) -> NodeObservation | None:
        ours, asked_s, guard = node_ip == self.node_ip, time.time(), self._config.memory.guard_settings()
        try:
            facts = await self._link.call(node_ip, lambda agent: agent.observe.remote(self._told, guard), OBSERVE_TIMEOUT_S)
        except NodeRefused as error:
            # The agent answers: its node lives, but its ranks are unknown.
            self._sight.stays(node_ip, time.monotonic())
            self._unreadable[f"node {node_ip}"] = UnreadableFacts(node_ip, error.message)
            return None
        except ClusterError as error:
            if ours:
                self._misses += 1
                self._trouble = Condition(AgentLost.__name__, error.message)
            else:
                self._silent.add(node_ip)
            return None
        self._silent.discard(node_ip)
        # It was some moment between the two: outside of them the clocks differ.
        told_s = facts["now_s"]
        self._ahead_s[node_ip] = max(0.0, told_s - time.time()) + min(0.0, told_s - asked_s)
        if ours:
            self._misses = 0
            self._trouble = None
        return self._looked_at(node_ip, facts, agent=True)

    def _clocks(self) -> dict[str, float]:
        """Seconds by which the clocks of the nodes in sight are ahead of this one's."""
        return {node: self._ahead_s[node] for node in self.in_sight() if node in self._ahead_s}

    async def _knock(self, node_ip: str) -> None:
        """Whether the node itself is there, when its agent is not: who refuses a connection is alive, and the cable is in."""
        try:
            async with asyncio.timeout(KNOCK_TIMEOUT_S):
                _, writer = await asyncio.open_connection(node_ip, self._link.port_of[node_ip])
            writer.close()
        except ConnectionRefusedError:
            self._sight.heard(node_ip, time.monotonic(), refused=True)
        except (OSError, TimeoutError):
            return
        else:
            self._sight.heard(node_ip, time.monotonic(), refused=False)

    def _looked_at(self, node_ip: str, facts: dict[str, Any], *, agent: bool) -> NodeObservation:
        lent_gib = float(self.total_gib) if node_ip == self.node_ip else self._link.gib_of.get(node_ip)
        now = None
        try:
            now = reading(node_ip, facts["reading"], facts["now_s"])
        except ValueError as error:
            self._unreadable[f"the memory of {node_ip}"] = UnreadableFacts(node_ip, str(error))
        view = NodeView(node_ip, node_ip, node_ip == self.node_ip, agent, now, lent_gib, float(self._places.reserved_gib(node_ip)))
        left_out: dict[str, str] = {}
        ranks = facts_of(facts["ranks"], left_out)
        self._unreadable |= {f"rank {rank_id} on {node_ip}": UnreadableFacts(node_ip, why) for rank_id, why in left_out.items()}
        return NodeObservation(view, ranks)
