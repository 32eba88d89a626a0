"""The nodes, through Ray: membership, agents, placement and ranks. Never decides what should run, never talks to an engine's users."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sparkd.admission import free_on, no_room
from sparkd.config import Config, ModelConfig
from sparkd.errors import AgentLost, ClusterError, DoesNotFit, RankError
from sparkd.fabric_findings import Finding
from sparkd.fabric_nodes import FabricNodes, ray_environment
from sparkd.memory import reading
from sparkd.needs import Need, account_of, need_of, runtime_of, said_to, too_large
from sparkd.placement import Placement, kv_limit_bytes, nodes_with_room, offered_gib
from sparkd.rank_folders import folder_name, rank_folders, slug_of
from sparkd.rayhead import LOOPBACK, RayHead, node_environment, process_cost
from sparkd.raylink import RayLink
from sparkd.sight import Look, Observation, Sight, facts_of, told_of
from sparkd.snapshot import NodeView
from sparkd.state import RankFact, RankHandle
from sparkd.team import team_of
from sparkd.transport import proof
from sparkd.upstream import Upstream, served_names
from workers.agent import Agent
from workers.hub_cache import cache_places

log = logging.getLogger("sparkd.cluster")

OBSERVE_TIMEOUT_S = 3.0
FABRIC_TIMEOUT_S = 15.0
PLACE_TIMEOUT_S = 20.0
PLACE_AGAIN_TIMEOUT_S = 5.0
SPAWN_TIMEOUT_S = 60.0
RECONNECT_EVERY_S = 2.0
MISSES_BEFORE_RECOVERY = 3
# The gateway keeps an access log, and a scrape every five seconds would fill the engine's.
QUIET = ("--disable-uvicorn-access-log",)
# Made by systemd for the unit, and removed by it.
SYSTEM_RUNTIME_DIR = Path("/run/sparkd")
UNSERVED_GRACE_S = 2.0

T = TypeVar("T")


class Cluster:
    """One Spark is a cluster of one: our own Ray head unless an address is given.

    The node that the daemon runs on is also looked at directly, by the agent's own code, while Ray is away: engines that outlive Ray stay
    in sight, and a restarted daemon finds them before Ray is connected.
    """

    def __init__(self, config: Config, environ: Mapping[str, str]) -> None:
        self._config = config
        self.node_ip = config.cluster.node_ip or LOOPBACK
        self._rank_folders = rank_folders(config, self.node_ip)
        token_path = config.token_path(environ)
        self.total_gib = offered_gib(config)
        self._head = (
            None
            if config.cluster.address
            else RayHead(
                config.runtime_path(),
                token_path,
                node_ip=self.node_ip,
                port=config.cluster.port,
                memory_gib=self.total_gib,
                object_store_mib=config.cluster.object_store_memory_mib,
                rank_folders=self._rank_folders,
                fabric=ray_environment,
            )
        )
        self._link = RayLink(node_environment(token_path, self.node_ip), self._agent_arguments)
        self._here = Agent(self.node_ip, *self._agent_arguments(self.node_ip))
        self._fabric = FabricNodes(lambda node_ip: self._ask(node_ip, "fabric", timeout_s=FABRIC_TIMEOUT_S))
        self._misses = 0
        self._trouble: str | None = "RayStarting: Ray is not connected yet."
        self._reserved: dict[str, tuple[str, int]] = {}
        self._sight = Sight()
        # Out of sight: the tick does not wait for them, `run` looks whether they are back.
        self._silent: set[str] = set()
        # A head of ours that lives but cannot be joined (its token is gone, its GCS hangs) is ended: engines do not depend on it.
        self._head_is_suspect = False

    def reconfigure(self, config: Config) -> None:
        """Settings of engines take effect with their next start; where Ray and the folders are stays as it was."""
        self._config = config

    def expect(self, nodes: Iterable[str]) -> None:
        """An earlier daemon started ranks there: until those nodes were seen, or not for NODE_GRACE_S, what runs there is unknown."""
        self._sight.expect(set(nodes) - {self.node_ip}, time.monotonic())

    async def run(self, joined: Callable[[], None]) -> None:
        """Connect, and connect again whenever Ray is lost, until cancelled. `joined` is called after each connection."""
        while True:
            lost = not self._link.connected or self._misses >= MISSES_BEFORE_RECOVERY or await asyncio.to_thread(self._head_died)
            if lost or not await self._kept_up():
                await self._connect()
                joined()
            await asyncio.sleep(RECONNECT_EVERY_S)

    async def observe(self) -> Observation:
        """Reading and ranks of every node, from its agent; of this node directly while its agent does not answer."""
        could_look = self._link.connected
        addresses = [ip for ip in self._link.nodes() if ip != self.node_ip and ip not in self._silent]
        here, *others = await asyncio.gather(self._look_here(), *(self._look(ip) for ip in addresses))
        if here is None:
            return Observation(None, None, False, trouble="NodeUnreadable: /proc or the runtime directory of this node cannot be read.")
        looks = [here, *(look for look in others if look is not None)]
        missing = self._sight.look([look.node for look in looks], could_look=could_look, now_s=time.monotonic())
        about = {"address": self._link.address, "own_head": self._head is not None, "connected": self._link.connected}
        return Observation(
            ranks=tuple(fact for look in looks for fact in look.ranks),
            reading=here.node.reading,
            connected=could_look and here.node.agent,
            nodes=(*(look.node for look in looks), *missing),
            unseen=frozenset(node.node_id for node in missing),
            trouble=self._trouble or told_of(missing),
            cluster=about,
        )

    async def fabric(self) -> dict[str, Mapping[str, Any] | None]:
        """By node, what workers.fabric_reading.sample says there now; None of a node whose agent does not answer."""
        return await self._fabric.readings([self.node_ip, *self._link.nodes()], kept_s=0)

    async def unlinked(self, *, rdma: bool) -> dict[int, str]:
        """See FabricNodes.unlinked: of the nodes in sight."""
        return await self._fabric.unlinked(self._in_sight(), rdma=rdma)

    async def place(self, spec: ModelConfig) -> Placement:
        """Reserve unified memory for `spec` on one node. Raises DoesNotFit with the numbers, ClusterError while Ray is away."""
        if spec.tensor_parallel not in ("auto", 1):
            await self._team(spec, int(spec.tensor_parallel))
            raise DoesNotFit(
                f"tensor_parallel {spec.tensor_parallel} needs as many nodes, and this release of sparkd starts a model on one node only: "
                "leave it out or set it to 1."
            )
        if spec.executor == "ray":
            raise RankError("executor: ray serves across nodes, which this release of sparkd does not do: leave it out or set it to mp.")
        need = await asyncio.to_thread(need_of, spec, self._config, self._here, self._most_free_gib(spec.name), self.total_gib)
        if refused := said_to(need.spec, self._config, need.vllm).refused:
            raise RankError(f"{spec.name} cannot be started by the vLLM of its runtime: {refused[0]}")
        node_ip = await self._reserve(need)
        return Placement(node_ip, slug_of(spec.name), need.gib, need.platform, need.entrypoint, need.vllm, need.spec)

    async def hold(self, spec: ModelConfig, node_ip: str) -> None:
        """Reserve again what an adopted rank uses already; while Ray is away, with the next connection."""
        need = await asyncio.to_thread(need_of, spec, self._config, self._here, self.total_gib, self.total_gib)
        self._reserved[spec.name] = (node_ip, need.gib)
        if self._link.connected:
            await self._reserve_again([node_ip])

    async def release(self, model: str) -> None:
        self._reserved.pop(model, None)
        await self._link.release(model)

    async def spawn(self, placement: Placement, spec: ModelConfig, rank_id: str, generation: int, config_hash: str) -> RankHandle:
        """Free the page cache, then start the one rank of `spec`. Raises RankError or AgentLost."""
        spec = placement.spec or spec
        if placement.platform == "cuda":
            dropped = await self._link.call(placement.node_id, lambda agent: agent.drop_page_cache.remote(), SPAWN_TIMEOUT_S)
            log.info("page cache of %s: %s, %d MiB freed", placement.node_id, dropped["how"], dropped["freed_bytes"] >> 20)
        limit_bytes = await asyncio.to_thread(lambda: kv_limit_bytes(spec, account_of(spec, self._config, placement.platform)))
        said = said_to(spec, self._config, placement.vllm)
        for note in said.notes:
            log.info("%s: %s", spec.name, note)
        computed = await self._fabric.environment(
            placement.node_id, placement.peers, rdma=placement.platform == "cuda", configured=said.env, shared=spec.executor == "ray"
        )
        fields = {
            "rank_id": rank_id,
            "model_name": spec.name,
            "served_names": list(spec.served_names()),
            "model": spec.model,
            "generation": generation,
            "node_id": placement.node_id,
            "rank": 0,
            "runtime": runtime_of(spec, self._config),
            "entrypoint": placement.entrypoint,
            # A name: the node has a folder of its own for it.
            "log_path": f"{placement.slug}.log",
            "config_hash": config_hash,
            "platform": placement.platform,
            # torch.compile on a CPU takes minutes and gains little; `--no-enforce-eager` in extra_args comes later and wins.
            "flags": [*(["--enforce-eager"] if placement.platform == "cpu" else []), *QUIET],
            "extra_args": list(said.args),
            **self._config.loader_of(spec),
            **self._config.sizing_of(spec, placement.platform, placement.entrypoint, limit_bytes),
            "env": computed | dict(said.env),
            "log_max_bytes": self._config.engine.log_max_bytes,
            "log_backups": self._config.engine.log_backups,
            "stop_timeout_s": float(self._config.engine.stop_timeout_s),
        }
        private = placement.node_id != self.node_ip
        handle = await self._link.call(placement.node_id, lambda agent: agent.spawn.remote(fields, private), SPAWN_TIMEOUT_S)
        return RankHandle(**handle)

    async def destroy(self, fact: RankFact) -> None:
        """Stop a rank and verify that nothing of it is left. Raises RankError naming the processes that would not die."""
        # An engine that never served has nothing to finish, and one that compiles does not listen to SIGTERM.
        grace_s = float(self._config.engine.stop_timeout_s) if fact.progress.server_up else UNSERVED_GRACE_S
        handle = {name: getattr(fact.handle, name) for name in RankHandle.__slots__}
        node_ip = fact.handle.node_id
        ended = await self._ask(node_ip, "destroy", handle, grace_s, timeout_s=grace_s + SPAWN_TIMEOUT_S)
        if not ended["gone"]:
            pids = ", ".join(str(pid) for pid in ended["survivors"])
            raise RankError(
                f"Processes {pids} of rank {fact.handle.rank_id} do not end even after SIGKILL: they hang in the kernel, usually in "
                "the GPU driver. If they stay, the node must be rebooted."
            )

    async def upstream(self, handle: RankHandle) -> Upstream:
        """The way to a rank 0: its Unix socket on this node, else its private address with its own key."""
        if handle.socket_path:
            return Upstream(socket_path=handle.socket_path)
        key = await self._link.call(handle.node_id, lambda agent: agent.api_key.remote(handle.rank_id), OBSERVE_TIMEOUT_S)
        return Upstream(base_url=f"http://{handle.host}:{handle.port}", api_key=key)

    async def served_names(self, upstream: Upstream) -> list[str] | None:
        return await served_names(upstream)

    async def transport(self, handles: Sequence[RankHandle], configured: Mapping[str, str]) -> tuple[Finding, ...]:
        """See transport.proof: of the ranks of one model."""

        def lines(one: RankHandle) -> Awaitable[list[str]]:
            return self._ask(one.node_id, "nccl_lines", one.log_path, timeout_s=FABRIC_TIMEOUT_S)

        return await proof(handles, self._fabric, lines, configured)

    async def read_log(self, node_id: str | None, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        if node_id and node_id != self.node_ip:
            return await self._link.call(node_id, lambda agent: agent.read_log.remote(path, cursor, max_bytes), OBSERVE_TIMEOUT_S)
        return await asyncio.to_thread(self._here.read_log, path, cursor, max_bytes)

    def costs(self) -> dict[str, Any]:
        """What Ray and the daemon cost on this node: PSS bytes and CPU seconds of each process, and Ray's listeners. Blocks."""
        processes = self._head.costs() if self._head else []
        return {
            "daemon": process_cost(os.getpid()),
            "ray": [{"name": p.name, "pid": p.pid, "pss_bytes": p.pss_bytes, "cpu_s": p.cpu_s} for p in processes],
            "ray_pss_bytes": sum(p.pss_bytes for p in processes),
            "ray_listeners": self._head.listeners() if self._head else [],
        }

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
        if run_dirs.parent != SYSTEM_RUNTIME_DIR:
            with contextlib.suppress(OSError):
                run_dirs.parent.rmdir()

    async def _ask(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """One method of a node's agent; of this node, while its agent does not answer, of the agent's own code here."""
        try:
            return await self._link.call(node_ip, lambda agent: getattr(agent, method).remote(*arguments), timeout_s)
        except AgentLost:
            if node_ip != self.node_ip:
                raise
            return await asyncio.to_thread(getattr(self._here, method), *arguments)

    async def _kept_up(self) -> bool:
        """Meet nodes that have come or are back. False where Ray does not answer any more."""
        try:
            met = await self._link.refresh()
            for ip in self._silent & set(self._link.nodes()):
                await self._look(ip)
            # What Ray reserved on a node went with its raylet.
            await self._reserve_again(met)
        except ClusterError as error:
            self._trouble = f"{type(error).__name__}: {error.message}"
            return False
        return True

    async def _connect(self) -> None:
        try:
            await self._link.disconnect()
            if self._head and self._head_is_suspect:
                self._head_is_suspect = False
                await asyncio.to_thread(self._head.stop)
            address = await asyncio.to_thread(self._head.ensure) if self._head else self._config.cluster.address
            # Only now: a head that `sparkd ray-node` is starting must not be ended for being slow.
            self._head_is_suspect = True
            await self._link.connect(address or "", self.node_ip)
            await self._reserve_again(self._link.nodes())
        except ClusterError as error:
            if self._trouble != f"{type(error).__name__}: {error.message}":
                log.error("%s", error.message)
            self._trouble = f"{type(error).__name__}: {error.message}"
            return
        self._misses = 0
        self._trouble = None
        self._head_is_suspect = False
        log.info("connected to Ray at %s", self._link.address)

    async def _team(self, spec: ModelConfig, size: int) -> tuple[str, ...]:
        engine, runtime = self._config.engine, runtime_of(spec, self._config)
        platform = (await asyncio.to_thread(self._here.runtime, runtime))["platform"] if engine.platform == "auto" else engine.platform
        asked = (runtime, spec.model, spec.revision, cache_places(spec.environment(engine)))

        def identify(node_ip: str) -> Awaitable[dict[str, Any]]:
            return self._link.call(node_ip, lambda agent: agent.identity.remote(*asked), SPAWN_TIMEOUT_S)

        return await team_of(spec.name, size, self._in_sight(), self._fabric, identify, rdma=platform == "cuda")

    async def _reserve(self, need: Need) -> str:
        """The node that has room, by our own book: Ray forgets what was reserved on a node that it lost, and the rank there lives on."""
        offered, model = self._offered(), need.spec.name
        most_gib = int(max(offered.values(), default=self.total_gib))
        where = "the largest node in sight" if len(self._link.gib_of) > 1 else "this node"
        if why := await asyncio.to_thread(too_large, need, most_gib, where, need.spec.environment(self._config.engine)):
            raise DoesNotFit(why)
        others = {name: held for name, held in self._reserved.items() if name != model}
        for node_ip in nodes_with_room(offered, others.values(), self.node_ip, need.gib):
            if await self._link.reserve(model, need.gib, node_ip, PLACE_TIMEOUT_S):
                self._reserved[model] = (node_ip, need.gib)
                return node_ip
        raise DoesNotFit(no_room(model, need.gib, offered, others))

    async def _reserve_again(self, nodes: Iterable[str]) -> None:
        """What runs on these nodes already: a reservation that does not fit is a word in the log, not an end."""
        held = [(model, node_ip, gib) for model, (node_ip, gib) in self._reserved.items() if node_ip in nodes]
        for model, node_ip, gib in held:
            if not await self._link.reserve(model, gib, node_ip, PLACE_AGAIN_TIMEOUT_S):
                log.warning("%s runs on %s, and Ray has no %d GiB left there to reserve for it", model, node_ip, gib)

    def _most_free_gib(self, model: str) -> float:
        others = [held for name, held in self._reserved.items() if name != model]
        return max(free_on(self._offered(), others).values(), default=self.total_gib)

    def _in_sight(self) -> list[str]:
        """This node first."""
        return [self.node_ip, *(ip for ip in self._link.nodes() if ip not in self._silent and ip != self.node_ip)]

    def _offered(self) -> dict[str, float]:
        return {ip: self._link.gib_of[ip] for ip in self._link.nodes() if ip in self._link.gib_of and ip not in self._silent}

    def _head_died(self) -> bool:
        return self._head is not None and self._head.living_address() is None

    async def _look_here(self) -> Look | None:
        """This node, through its agent or, while that is away, with the agent's own code."""
        try:
            found = await self._look(self.node_ip) if self._link.connected else None
            if found:
                return found
            return self._looked_at(self.node_ip, await asyncio.to_thread(self._here.observe), agent=False)
        except OSError as error:
            log.error("this node cannot be read: %s", error)
            return None

    async def _look(self, node_ip: str) -> Look | None:
        ours = node_ip == self.node_ip
        try:
            facts = await self._link.call(node_ip, lambda agent: agent.observe.remote(), OBSERVE_TIMEOUT_S)
        except ClusterError as error:
            if ours:
                self._misses += 1
                self._trouble = f"AgentLost: {error.message}"
            else:
                self._silent.add(node_ip)
            return None
        self._silent.discard(node_ip)
        if ours:
            self._misses = 0
            self._trouble = None
        return self._looked_at(node_ip, facts, agent=True)

    def _looked_at(self, node_ip: str, facts: dict[str, Any], *, agent: bool) -> Look:
        reserved_gib = sum(gib for where, gib in self._reserved.values() if where == node_ip)
        lent_gib = float(self.total_gib) if node_ip == self.node_ip else self._link.gib_of.get(node_ip)
        now = reading(node_ip, facts["reading"], facts["now_s"])
        view = NodeView(node_ip, node_ip, node_ip == self.node_ip, agent, now, lent_gib, float(reserved_gib))
        return Look(view, facts_of(facts["ranks"]))

    def _agent_arguments(self, node_ip: str) -> tuple[str, str, float, str, bool]:
        """See workers.agent.Agent. Another node's folders are those of its own `sparkd ray-node`; these stand in where it has none."""
        run_dir, log_dir, *_ = self._rank_folders
        return str(run_dir.with_name(folder_name(node_ip))), str(log_dir), self._config.memory.sample_s, "/proc", node_ip != self.node_ip
