"""Starts the ranks of one model on nodes that were chosen before, workers first and rank 0 last; finds them and ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from sparkd.capacity.launch import rank_fields
from sparkd.capacity.requirement import Placement
from sparkd.cluster.ray_connection import RayConnection
from sparkd.config.config import Config, ModelConfig
from sparkd.config.kv_cache import without_cpu_space
from sparkd.errors import ClusterError, RankError
from sparkd.fabric.checks import Finding
from sparkd.fabric.environment import wants_rdma
from sparkd.fabric.fabric_nodes import FabricNodes
from sparkd.fabric.transport import proof
from sparkd.gateway.upstream import Upstream
from sparkd.state.nouns import RankFact, RankHandle
from sparkd.units import GIB
from workers.rank.command import parallel_flags

log = logging.getLogger("sparkd.cluster")

SPAWN_TIMEOUT_S = 60.0
DESTROY_TIMEOUT_S = 60.0
UNSERVED_GRACE_S = 2.0
READ_TIMEOUT_S = 3.0
NCCL_TIMEOUT_S = 15.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class StartId:
    """One start of a model. rank_id: rank 0's, which also names the attempt."""

    rank_id: str
    generation: int
    config_hash: str

    def rank_id_of(self, rank: int) -> str:
        return f"{self.rank_id}-r{rank}" if rank else self.rank_id


class Launcher:
    """Starts and ends ranks through the nodes' agents.

    config: returns the present one
    ask: see Cluster.ask
    here: the daemon's node, where rank 0 listens on a Unix socket
    read_here: reads a log there
    """

    def __init__(
        self,
        config: Callable[[], Config],
        link: RayConnection,
        fabric: FabricNodes,
        ask: Callable[..., Awaitable[Any]],
        here: str,
        read_here: Callable[[str, str | None, int], dict[str, str]],
    ) -> None:
        self._config = config
        self._link = link
        self._fabric = fabric
        self._ask = ask
        self._here = here
        self._read_here = read_here

    async def start(self, placement: Placement, spec: ModelConfig, attempt: StartId, tell: Tell | None = None) -> tuple[RankHandle, ...]:
        """Start all ranks. Returns their handles, rank 0's first. `tell` gets the messages for the operator.

        Raises RankError or AgentLost, and then leaves nothing running on the nodes that it can reach.
        """
        config = self._config()
        if placement.spec is not None and placement.spec.model != spec.model:
            (tell or log.info)(f"quantize: auto takes {placement.spec.model}, which is {spec.model} quantized already.")
        spec = placement.spec or spec
        env = without_cpu_space(spec, spec.environment(config.engine))
        await self._prepare_nodes(placement, tell or log.info)
        port = await self._rendezvous(placement)
        shared = await asyncio.to_thread(_shared_fields, config, placement, spec, attempt)
        if placement.peers and spec.executor == "ray":
            shared["ray"] = {"address": self._link.address, "group": await self._link.make_group(attempt.rank_id, placement.nodes)}

        async def spawn(rank: int) -> RankHandle:
            node = placement.nodes[rank]
            peers = [peer for peer in placement.nodes if peer != node]
            on_gpu, is_pipeline = placement.platform == "cuda", placement.tensor == 1
            computed = await self._fabric.environment(node, peers, rdma=on_gpu, configured=env, pipeline=is_pipeline)
            if peers and not computed and wants_rdma(placement.platform, env):
                # Without NCCL_NET=IB, NCCL would use sockets without a warning.
                problem = f"{spec.name} cannot be started over {len(placement.nodes)} nodes: the network of one of them cannot be read"
                raise RankError(f"{problem}, so the links between its ranks are unknown. Run `sparkd fabric` for the reason.")
            parallel = parallel_flags(placement.tensor, placement.pipeline, rank, placement.node_id, port, spec.executor)
            fields = shared | {
                "rank_id": attempt.rank_id_of(rank),
                "node_id": node,
                "rank": rank,
                # A file name only: each node has its own log folder.
                "log_path": f"{placement.slug}.rank{rank}.log" if rank else f"{placement.slug}.log",
                "flags": [*shared["flags"], *parallel],
                "env": shared["env"] | computed | env,
            }
            private = node != self._here
            return RankHandle(**await self._link.call(node, "spawn", fields, private, timeout_s=SPAWN_TIMEOUT_S))

        if not placement.peers:
            return (await spawn(0),)
        # Workers wait for rank 0, so rank 0 starts last and waits for no worker that failed to start.
        results = await asyncio.gather(*map(spawn, range(1, len(placement.nodes))), return_exceptions=True)
        workers = [result for result in results if isinstance(result, RankHandle)]
        try:
            if failure := next((result for result in results if isinstance(result, BaseException)), None):
                raise failure
            return (await spawn(0), *workers)
        except BaseException:
            # BaseException covers the unreadable answer of another release's agent, and a cancelled start.
            await asyncio.shield(self._undo(placement, attempt))
            raise

    async def destroy(self, fact: RankFact, *, hangs: bool = False) -> Sequence[Mapping[str, Any]]:
        """Stop a rank and verify that no process of it is left. Raises RankError naming those that would not die.

        hangs: its engine has been found to; it will finish nothing, and is killed at once. Returns what else it left behind on its node:
        see workers.rank.lifecycle.stop.
        """
        # An engine that never served has nothing to finish, and one that compiles does not listen to SIGTERM.
        grace_s = float(self._config().engine.stop_timeout_s) if fact.progress.server_up else UNSERVED_GRACE_S
        grace_s = 0.0 if hangs else grace_s
        handle = {name: getattr(fact.handle, name) for name in RankHandle.__slots__}
        node_ip = fact.handle.node_id
        ended = await self._ask(node_ip, "destroy", handle, grace_s, timeout_s=grace_s + DESTROY_TIMEOUT_S)
        if not ended["gone"]:
            pids = ", ".join(str(pid) for pid in ended["survivors"])
            raise RankError(
                f"Processes {pids} of rank {fact.handle.rank_id} do not end even after SIGKILL: they hang in the kernel, usually in "
                "the GPU driver. If they stay, the node must be rebooted."
            )
        if fact.handle.world > 1 and fact.handle.rank == 0:
            # Its workers are gone by now; only the rank of an `executor: ray` has a group.
            with suppress(ClusterError):
                await self._link.remove_group(fact.handle.start)
        return ended.get("left") or ()

    async def upstream(self, handle: RankHandle) -> Upstream:
        """The way to a rank 0: its Unix socket on this node, else its private address with its own key."""
        if handle.socket_path:
            return Upstream(socket_path=handle.socket_path)
        key = await self._link.call(handle.node_id, "api_key", handle.rank_id, timeout_s=READ_TIMEOUT_S)
        return Upstream(base_url=f"http://{handle.host}:{handle.port}", api_key=key)

    async def transport(self, handles: Sequence[RankHandle], configured: Mapping[str, str]) -> tuple[Finding, ...]:
        """See transport.proof: of the ranks of one model."""

        def lines(rank: RankHandle) -> Awaitable[list[str]]:
            return self._ask(rank.node_id, "nccl_lines", rank.log_path, timeout_s=NCCL_TIMEOUT_S)

        return await proof(handles, self._fabric, lines, configured)

    async def read_log(self, node_id: str | None, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        if node_id and node_id != self._here:
            return dict(await self._link.call(node_id, "read_log", path, cursor, max_bytes, timeout_s=READ_TIMEOUT_S))
        return await asyncio.to_thread(self._read_here, path, cursor, max_bytes)

    async def _prepare_nodes(self, placement: Placement, tell: Tell) -> None:
        """On every node: report other engines, and drop the page cache, which CUDA cannot use."""
        nodes = placement.nodes
        on_gpu = placement.platform == "cuda"
        for node, others in zip(nodes, await self._each(placement, "foreign", on_gpu), strict=True):
            for process in others:
                tell(_foreign(node, process))
        if placement.platform == "cuda":
            dropped = await self._each(placement, "drop_page_cache")
            for node, answer in zip(nodes, dropped, strict=True):
                log.info("page cache of %s: %s, %d MiB freed", node, answer["how"], answer["freed_bytes"] >> 20)
                if len(nodes) > 1 and not answer["dropped"]:
                    tell(f"The page cache of {node} was not dropped: {answer['how']}. Install the helper of deploy/ on that node.")

    async def _rendezvous(self, placement: Placement) -> int:
        """A free port on rank 0's node, another one for each start, so that no rank of an earlier start can join."""
        if not placement.peers:
            return 0
        return int(await self._link.call(placement.node_id, "free_port", timeout_s=SPAWN_TIMEOUT_S))

    async def _each(self, placement: Placement, method: str, *arguments: Any) -> list[Any]:
        calls = (self._link.call(node, method, *arguments, timeout_s=SPAWN_TIMEOUT_S) for node in placement.nodes)
        return list(await asyncio.gather(*calls))

    async def _undo(self, placement: Placement, attempt: StartId) -> None:
        """End all ranks of the attempt. A rank on an unreachable node is removed when the node is back, as a stray."""
        for rank, node in enumerate(placement.nodes):
            handle = {"rank_id": attempt.rank_id_of(rank)}
            with suppress(ClusterError):
                await self._link.call(node, "destroy", handle, 0.0, timeout_s=SPAWN_TIMEOUT_S)
        with suppress(ClusterError):
            await self._link.remove_group(attempt.rank_id)


def _foreign(node: str, process: Mapping[str, Any]) -> str:
    kind = "a vLLM" if process["vllm"] else "on the GPU"
    name = f"Process {process['pid']} on {node} ({process['name']})"
    return (
        f"{name} is {kind}, was not started by sparkd and holds {process['bytes'] / GIB:.1f} GiB. sparkd leaves it running. If this model "
        "does not fit in the rest, end that process, or let sparkd serve its model too."
    )


def _shared_fields(config: Config, placement: Placement, spec: ModelConfig, attempt: StartId) -> dict[str, Any]:
    """The fields of workers.rank.spec.RankSpec that all ranks of the model share. Reads the checkpoint's headers."""
    return {
        **rank_fields(config, spec, placement.platform, placement.entrypoint, placement.vllm),
        "generation": attempt.generation,
        "world": len(placement.nodes),
        "attempt": attempt.rank_id if placement.peers else "",
        "memory_gib": placement.memory_gib,
        "parsers": None if placement.parsers is None else asdict(placement.parsers),
        "config_hash": attempt.config_hash,
        "log_max_bytes": config.engine.log_max_bytes,
        "log_backups": config.engine.log_backups,
        "stop_timeout_s": float(config.engine.stop_timeout_s),
    }
