"""Sees and steers the nodes through Ray: membership, agents and their readings."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from sparkd.capacity.node_runtime import RUNTIME_S, NodeRuntime, runtime_in_sight
from sparkd.capacity.requirement import offered_gib
from sparkd.cluster.launcher import UNSERVED_GRACE_S, Launcher
from sparkd.cluster.model_files import ModelFiles
from sparkd.cluster.node_paths import agent_arguments, rank_folders, remove_empty
from sparkd.cluster.node_tracker import (
    NodeObservation,
    NodeTracker,
    Observation,
    facts_of,
    missing_condition,
    reading,
    unreadable_condition,
    unusable_condition,
)
from sparkd.cluster.placer import Placer
from sparkd.cluster.ray_connection import RayConnection, or_none
from sparkd.cluster.ray_head import LOOPBACK, RayHead, RayOptions, costs_of, node_environment
from sparkd.cluster.reservations import Reservations
from sparkd.condition import Condition
from sparkd.config.config import Config
from sparkd.errors import AgentLost, ClusterError, CodeDiffers, NodeRefused, RayUnavailable, refused_by
from sparkd.execution.boundary import Boundary
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.state.nouns import Machine
from sparkd.state.rows import noun_of
from sparkd.state.snapshot import NodeView
from workers.agent.actor import Agent

log = logging.getLogger("sparkd.cluster")

OBSERVE_TIMEOUT_S = 3.0
# Between two ends of a cable: a tick waits for it.
KNOCK_TIMEOUT_S = 0.3
FABRIC_TIMEOUT_S = 15.0
RECONNECT_EVERY_S = 2.0
MISSES_BEFORE_RECOVERY = 3


class Cluster:
    """One Spark is a cluster of one: our own Ray head unless an address is given.

    placer chooses nodes, reservations books their memory, launcher starts and ends ranks, models says what a model's files show.

    proved: see FabricNodes.

    The node that the daemon runs on is also looked at directly, by the agent's own code, while Ray is away: engines that outlive Ray stay
    in sight, and a restarted daemon finds them before Ray is connected.
    """

    def __init__(
        self,
        config: Config,
        environ: Mapping[str, str],
        boundary: Boundary | None = None,
        proved: Callable[[], frozenset[frozenset[str]]] = frozenset,
    ) -> None:
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
                RayOptions(
                    config.runtime_path,
                    token_path,
                    node_ip=self.node_ip,
                    port=config.cluster.port,
                    memory_gib=self.total_gib,
                    object_store_mib=config.cluster.object_store_memory_mib,
                    starts="CREDENTIALS_DIRECTORY" not in environ,
                    rank_folders=self._rank_folders,
                )
            )
        )
        self.costs = partial(costs_of, self._head)
        self._link = RayConnection(node_environment(token_path, self.node_ip), partial(agent_arguments, config, self.node_ip))
        self._here = Agent(self.node_ip, *agent_arguments(config, self.node_ip, self.node_ip))
        self.fabric_nodes = FabricNodes(lambda node_ip: self.ask(node_ip, "fabric", timeout_s=FABRIC_TIMEOUT_S), proved)
        self._guard_hints: Mapping[str, Mapping[str, Any]] = {}
        self._misses = 0
        self._trouble: Condition | None = Condition("RayStarting", "Ray is not connected yet.")
        # Apart from the other, which each look at this node clears.
        self._upkeep_trouble: Condition | None = None
        self.reservations = Reservations(self.node_ip, self._offered)

        def present() -> Config:
            return self._config

        self.placer = Placer(present, self._link, self.fabric_nodes, self.reservations, self._here.runtime, self.in_sight, self.total_gib)
        self.launcher = Launcher(present, self._link, self.fabric_nodes, self.ask, self.node_ip, self._here.read_log)
        self.models = ModelFiles(present, self.placer)
        self._tracker = NodeTracker()
        # Out of sight: the tick does not wait for them, `run` looks whether they are back.
        self._silent: set[str] = set()
        self._ahead_s: dict[str, float] = {}
        # The conditions of reports that the last looks could not use, by node or rank.
        self._unreadable: dict[str, Condition] = {}
        # A head of ours that lives but cannot be joined (its token is gone, its GCS hangs) is ended: engines do not depend on it.
        self._head_is_suspect = False

    def reconfigure(self, config: Config) -> None:
        """Settings of engines take effect with their next start, the guard's at once; where Ray and the folders are stays as it was."""
        self._config = config
        self._here.guard.set(config.memory.guard_settings())

    def expect(self, nodes: Iterable[str]) -> None:
        """An earlier daemon started ranks there: until those nodes were seen, or not for NODE_GRACE_S, what runs there is unknown."""
        self._tracker.expect(set(nodes) - {self.node_ip}, time.monotonic())

    async def run(self, joined: Callable[[], None]) -> None:
        """Connect, and connect again whenever Ray is lost, until cancelled. `joined` is called after each connection that was made."""
        while True:
            died = await asyncio.to_thread(self._head_died)
            if died and (self._trouble is None or self._trouble.reason == AgentLost.__name__):
                # It stays until the new one is kept up: a look in between may still reach the old agent.
                self._upkeep_trouble = Condition(RayUnavailable.__name__, "The raylet or GCS of this node has ended. It is started again.")
            lost = died or not self._link.connected or self._misses >= MISSES_BEFORE_RECOVERY
            if (lost or not await self._kept_up()) and await self._connect():
                joined()
            await asyncio.sleep(RECONNECT_EVERY_S)

    async def observe(self) -> Observation:
        """Reading and ranks of every node, from its agent; of this node directly while its agent does not answer."""
        self._tracker.begin(time.monotonic())
        could_look = self._link.connected
        differing = {address for address, error in self._link.unmet.items() if isinstance(error, CodeDiffers)}
        for address in differing:
            self._tracker.stays(address, time.monotonic())
        before, self._unreadable = self._unreadable, {}
        addresses = [ip for ip in self._link.nodes() if ip != self.node_ip and ip not in self._silent]
        away = [ip for ip in self._link.port_of if (ip in self._silent or not could_look) and self._tracker.awaits(ip)]
        (here, *others), _ = await asyncio.gather(
            asyncio.gather(self._look_here(), *(self._look(ip) for ip in addresses)),
            asyncio.gather(*(self._knock(ip) for ip in away)),
        )
        if here is None:
            message = "/proc or the runtime directory of this node cannot be read."
            return Observation(None, None, False, trouble=Condition("NodeUnreadable", message))
        looks = [here, *(look for look in others if look is not None)]
        self._tracker.begin(time.monotonic())  # the daemon may have been held in the middle of this look
        missing = self._tracker.look([look.node for look in looks], could_look=could_look, now_s=time.monotonic())
        for of in self._unreadable.keys() - before.keys():
            log.warning("%s", self._unreadable[of].message)
        unseen = frozenset(node.node_id for node in missing)
        about = {"address": self._link.address, "own_head": self._head is not None, "connected": self._link.connected}
        return Observation(
            ranks=tuple(fact for look in looks for fact in look.ranks),
            reading=here.node.reading,
            connected=could_look and here.node.agent,
            nodes=(*(look.node for look in looks), *missing),
            unseen=unseen,
            dark_s={node.node_id: self._tracker.dark_s(node.node_id, time.monotonic()) for node in missing},
            no_raylet=self._tracker.no_raylet,
            trouble=self._trouble
            or self._upkeep_trouble
            or missing_condition([node for node in missing if node.address not in differing])
            or next(iter(self._unreadable.values()), None)
            or unusable_condition(self._link.unmet, self._clocks()),
            cluster=about,
        )

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        """By node, what workers.host.network.sample says there now; None of a node whose agent does not answer."""
        return await self.ask_all("fabric")

    def set_guard_hints(self, hints: Mapping[str, Mapping[str, Any]]) -> None:
        """By model, what the guards of the nodes must know: see workers.guard.guard.Guard. They hear it with the next look."""
        self._guard_hints = hints
        self._here.guard.hear(hints)

    async def ask_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """By node, what this method of its agent answers; None of a node that does not answer."""
        nodes = list(dict.fromkeys([self.node_ip, *self._link.nodes()]))
        asking = (self.ask(node_ip, method, *arguments, timeout_s=FABRIC_TIMEOUT_S) for node_ip in nodes)
        return dict(zip(nodes, await asyncio.gather(*(or_none(answer) for answer in asking)), strict=True))

    async def runtime(self, interpreter: str) -> NodeRuntime:
        """The runtime of this node, or of another node where this one has no vLLM for it. Raises RankError where no node has it."""
        return await runtime_in_sight(self.in_sight(), partial(self._runtime_on, interpreter), vllm=True)

    async def _runtime_on(self, interpreter: str, node: str) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = await self.ask(node, "runtime", interpreter, timeout_s=RUNTIME_S)
        return facts

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
        for raw in self._here.observe()["ranks"]:
            self._here.destroy({"rank_id": raw["rank_id"]}, UNSERVED_GRACE_S)
        if not self._here.observe()["ranks"]:
            shutil.rmtree(run_dirs, ignore_errors=True)
        remove_empty(run_dirs.parent)

    async def ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """One method of a node's agent; of this node, while its agent is not connected, of the agent's own code here.

        A call that may have come to the agent is never made a second time: it may be under way.
        """
        try:
            return await self._link.call(node_ip, method, *arguments, timeout_s=timeout_s)
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
            await self._link.refresh()
            for ip in self._silent & set(self._link.nodes()):
                await self._look(ip)
        except ClusterError as error:
            self._upkeep_trouble = Condition(error.reason, error.message)
            return isinstance(error, NodeRefused)
        self._upkeep_trouble = None
        return True

    async def _connect(self) -> bool:
        """Join Ray; return whether that worked. If not, the condition says why, and sparkd tries again."""
        try:
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
        except (ClusterError, OSError) as error:
            fault = error if isinstance(error, ClusterError) else refused_by(error, "This node")
            trouble = Condition(fault.reason, fault.message)
            if self._trouble != trouble:
                log.error("%s", fault.message)
            self._trouble = trouble
            if isinstance(fault, NodeRefused):
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
        view = await self._look(self.node_ip) if self._link.connected else None
        self._here.guard.claims = view is None
        if view:
            return view
        with self._boundary.around("look"):
            try:
                return self._looked_at(self.node_ip, await asyncio.to_thread(self._here.observe), agent=False)
            except OSError as error:
                log.error("this node cannot be read: %s", error)
        return None

    async def _look(self, node_ip: str) -> NodeObservation | None:
        """None where its agent does not answer, or nothing that can be used: other nodes are looked at all the same."""
        look = None
        with self._boundary.around("look"):
            look = await self._ask_for_look(node_ip)
        return look  # noqa: RET504 - None where an error ended the block

    async def _ask_for_look(self, node_ip: str) -> NodeObservation | None:
        ours, asked_s, guard = node_ip == self.node_ip, time.time(), self._config.memory.guard_settings()
        try:
            facts = await self._link.call(node_ip, "observe", self._guard_hints, guard, timeout_s=OBSERVE_TIMEOUT_S)
        except NodeRefused as error:
            # The agent answers: its node lives, but its ranks are unknown.
            self._tracker.stays(node_ip, time.monotonic())
            self._unreadable[node_ip] = unreadable_condition(f"node {node_ip}", error.message, node_ip)
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
            self._tracker.heard(node_ip, time.monotonic(), refused=True)
        except (OSError, TimeoutError):
            return
        else:
            self._tracker.heard(node_ip, time.monotonic(), refused=False)

    def _looked_at(self, node_ip: str, facts: dict[str, Any], *, agent: bool) -> NodeObservation:
        lent_gib = float(self.total_gib) if node_ip == self.node_ip else self._link.gib_of.get(node_ip)
        now = reading(node_ip, facts["reading"], facts["now_s"])
        machine = noun_of(Machine, facts["machine"]) if facts["machine"] else None  # empty before the agent's first look
        reserved_gib = float(self.reservations.reserved_gib(node_ip))
        view = NodeView(node_ip, node_ip, node_ip == self.node_ip, agent, now, lent_gib, reserved_gib, machine)
        ranks, left_out = facts_of(facts["ranks"])
        for rank_id, reason in left_out.items():
            self._unreadable[rank_id] = unreadable_condition(f"rank {rank_id} on {node_ip}", reason, node_ip)
        return NodeObservation(view, ranks)
