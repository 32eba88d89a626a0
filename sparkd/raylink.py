"""The daemon's one connection to Ray: the driver, the agent's actor handle and the placement groups. Never starts a Ray process.

Ray is imported here only, and only on the first connection: its import costs as much as the rest of the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from sparkd.errors import AgentLost, ClusterError, DoesNotFit, RankError, RayUnavailable
from workers.agent import VERSION, Agent

NAMESPACE = "sparkd"
RESOURCE = "unified_memory_gib"
CONNECT_TIMEOUT_S = 60.0
AGENT_TIMEOUT_S = 45.0
DISCONNECT_TIMEOUT_S = 10.0

T = TypeVar("T")

log = logging.getLogger("sparkd.cluster")


class RayLink:
    """Ray's calls that block run on threads; everything that can hang has a deadline."""

    def __init__(self, environment: Mapping[str, str], run_dir: str, log_dir: str, sample_s: float) -> None:
        self._environment = environment
        self._agent_arguments = (run_dir, log_dir, sample_s)
        self._agent: Any = None
        self._joined = False
        self.address: str | None = None

    @property
    def connected(self) -> bool:
        return self._agent is not None

    async def connect(self, address: str, node_ip: str) -> None:
        """Join as a driver and find or start the node's agent. Raises RayUnavailable or AgentLost."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _in_thread(self._init, address, node_ip)
        except TimeoutError:
            raise RayUnavailable(f"Ray at {address} did not answer within {CONNECT_TIMEOUT_S:.0f} s.") from None
        agent = await _in_thread(self._start_agent, node_ip)
        try:
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                if await agent.version.remote() != VERSION:
                    agent = await _in_thread(self._replace_agent, agent, node_ip)
                    await agent.version.remote()
        except _errors(TimeoutError) as error:
            raise AgentLost(f"The agent of node {node_ip} did not start: {type(error).__name__}.") from error
        self._agent, self.address = agent, address

    async def disconnect(self) -> None:
        """Leave Ray, if it was ever joined. The agent and its ranks stay."""
        self._agent = None
        if self._joined:
            self._joined = False
            try:
                async with asyncio.timeout(DISCONNECT_TIMEOUT_S):
                    await _in_thread(self._ray().shutdown)
            except TimeoutError:
                log.warning("Ray did not let go within %.0f s", DISCONNECT_TIMEOUT_S)

    async def call(self, method: Callable[[Any], Awaitable[T]], timeout_s: float) -> T:
        """One method of the agent. A SparkdError raised there is raised here; anything else is AgentLost."""
        if self._agent is None:
            raise AgentLost("Ray is not connected; sparkd is connecting again.")
        try:
            async with asyncio.timeout(timeout_s):
                return await method(self._agent)
        except TimeoutError:
            raise AgentLost(f"The node's agent did not answer within {timeout_s:.0f} s.") from None
        except _errors() as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ClusterError):
                raise cause from None
            if isinstance(error, RankError):
                raise
            raise AgentLost(f"The node's agent could not do it: {type(error).__name__}.") from error

    async def reserve(self, model: str, gib: int, timeout_s: float) -> None:
        """One placement group of the model, kept beyond the daemon. Raises DoesNotFit with the numbers."""
        await self.release(model)
        await _in_thread(self._reserve, model, gib, timeout_s)

    async def release(self, model: str) -> None:
        if self.connected:
            await _in_thread(self._release, model)

    def _init(self, address: str, node_ip: str) -> None:
        ray = self._ray()
        self._joined = True
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                _node_ip_address=node_ip,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except _errors(ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RayUnavailable(f"Ray at {address} cannot be joined: {str(error).splitlines()[0][:200]}") from error

    def _ray(self) -> Any:
        """The module. Ray reads some of its variables while it is imported, so they are set before; ours never reach a child of ours."""
        os.environ.update({name: value for name, value in self._environment.items() if name.startswith("RAY_")})
        os.environ["RAY_BACKEND_LOG_LEVEL"] = "error"
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        return ray

    def _start_agent(self, node_ip: str) -> Any:
        ray = self._ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == node_ip]
        if not nodes:
            raise RayUnavailable(f"Ray has no living node with the address {node_ip}: set cluster.node_ip to this node's address in Ray.")
        actor = ray.remote(Agent).options(
            name=f"agent:{nodes[0]['NodeID']}",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[0]["NodeID"], soft=False),
        )
        return actor.remote(node_ip, *self._agent_arguments)

    def _replace_agent(self, agent: Any, node_ip: str) -> Any:
        ray = self._ray()
        ray.kill(agent, no_restart=True)
        return self._start_agent(node_ip)

    def _reserve(self, model: str, gib: int, timeout_s: float) -> None:
        ray = self._ray()
        from ray.util import placement_group

        group = placement_group([{RESOURCE: gib}], strategy="STRICT_PACK", name=_group(model), lifetime="detached")
        if group.wait(timeout_s):
            return
        free = ray.available_resources().get(RESOURCE, 0.0)
        total = ray.cluster_resources().get(RESOURCE, 0.0)
        self._release(model)
        raise DoesNotFit(
            f"{model} asks for {gib} GiB of unified memory; {free:.0f} of {total:.0f} GiB are not reserved by other models. Unload one "
            "(`sparkd ps`), or set memory_gib to what it really needs."
        )

    def _release(self, model: str) -> None:
        from ray.util import get_placement_group, remove_placement_group

        try:
            remove_placement_group(get_placement_group(_group(model)))
        except ValueError:
            # Ray's word for "no such group".
            return


async def _in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Like asyncio.to_thread, on a daemon thread: a call into Ray that never returns must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except Exception as raised:  # noqa: BLE001 - handed to the caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="ray call", daemon=True).start()
    return await done


def _group(model: str) -> str:
    return f"model:{model}"


def _errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Ray's root exception, known only once Ray is imported, and others."""
    from ray.exceptions import RayError

    return (RayError, *others)
