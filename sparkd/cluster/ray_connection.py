"""The daemon's one connection to Ray: the driver, the agents' actor handles, and the placement groups of engines on vLLM's Ray executor.

Ray is imported here only, and only on the first connection: its import costs as much as the rest of the daemon.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from sparkd import __version__
from sparkd.cluster.ray_head import AGENT_LABEL, VERSION_LABEL
from sparkd.errors import AgentLost, ClusterError, CodeDiffers, RayUnavailable, refused_by
from workers.agent.actor import Agent
from workers.agent.ray_probe import AGENT_KEY, KEYS_NAMESPACE
from workers.agent.version import VERSION
from workers.host.processes import LACKS
from workers.rank.ray_environment import DEVICE, DEVICE_SHARE

NAMESPACE = "sparkd"
RESOURCE = "unified_memory_gib"
CONNECT_TIMEOUT_S = 60.0
AGENT_TIMEOUT_S = 45.0
DISCONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 15.0
GROUP_TIMEOUT_S = 20.0
PORT_TIMEOUT_S = 1.0
# Between two looks at a node that has another sparkd: each starts a process there.
OTHER_CODE_S = 30.0
# A driver that has not reached the head for this long ends its process (60 s where nothing is said): that must not end the daemon.
HEAD_AWAY_S = 10 * 365 * 24 * 3600

T = TypeVar("T")

log = logging.getLogger("sparkd.cluster")


class RayConnection:
    """Ray's calls that block run on threads; everything that can hang has a deadline.

    `arguments(node_ip)` are those of the agent of a node. Nodes are named by the address that Ray knows them by, which outlives a raylet.
    """

    def __init__(self, environment: Mapping[str, str], arguments: Callable[[str], tuple[Any, ...]]) -> None:
        self._environment = environment
        self._arguments = arguments
        self._agents: dict[str, tuple[str, Any]] = {}
        self._joined = False
        self.address: str | None = None
        self.gib_of: dict[str, float] = {}
        # Nodes that Ray has and whose agents could not be met, with the reason.
        self.unmet: dict[str, ClusterError] = {}
        # By address, what a node said of its code when its Ray was started.
        self._labels: dict[str, Mapping[str, str]] = {}
        # By Ray's id of a node that has another sparkd: until when that is not looked at again.
        self._other_code: dict[str, tuple[str, float]] = {}
        # Where a node's raylet listens: who refuses there is alive.
        self.port_of: dict[str, int] = {}

        # Only once every node was met: before that, a rank on a node not met yet would count as gone and be started a second time.
        self.connected = False

    async def connect(self, address: str, node_ip: str) -> None:
        """Join as a driver on the node `node_ip` and find or start every node's agent. Raises RayUnavailable or AgentLost."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await _in_thread(self._init, address, node_ip)
        except TimeoutError:
            raise RayUnavailable(f"Ray at {address} did not answer within {CONNECT_TIMEOUT_S:.0f} s.") from None
        self.address = address
        alive = await self._answer(self._alive_nodes)
        if node_ip not in alive:
            addresses = ", ".join(sorted(alive)) or "none"
            raise RayUnavailable(
                f"Ray has no living node with the address {node_ip} and the resource {RESOURCE}, only: {addresses}. Set cluster.node_ip to "
                "this node's address in Ray."
            )
        await self._meet(node_ip, alive[node_ip])
        await self._answer(self._tell_agent)
        await self.refresh()
        self.connected = True

    async def refresh(self) -> set[str]:
        """Meet the agents of nodes that have come, forget those of nodes that have gone; the addresses of those that were met now.

        A node that cannot be met is tried next time. Raises RayUnavailable where Ray itself does not answer.
        """
        alive = await self._answer(self._alive_nodes)
        for node_ip in set(self._agents) - set(alive):
            del self._agents[node_ip]
        # A raylet that was started again has another id at the same address, and its node another agent.
        fresh = {node_ip for node_ip, node_id in alive.items() if node_ip not in self._agents or self._agents[node_ip][0] != node_id}
        self.unmet = {node_ip: error for node_ip, error in self.unmet.items() if node_ip in fresh}
        for node_ip in sorted(fresh):
            try:
                await self._meet(node_ip, alive[node_ip])
                self.unmet.pop(node_ip, None)
            except ClusterError as error:
                if str(error) != str(self.unmet.get(node_ip)):
                    log.warning("%s", error.message)
                self.unmet[node_ip] = error
                fresh.discard(node_ip)
        return fresh

    def nodes(self) -> list[str]:
        """Addresses of the nodes whose agents were met."""
        return list(self._agents)

    async def disconnect(self) -> None:
        """Leave Ray, if it was ever joined. Agents and ranks stay."""
        self.connected = False
        self._agents = {}
        if self._joined:
            self._joined = False
            try:
                async with asyncio.timeout(DISCONNECT_TIMEOUT_S):
                    await _in_thread(self._ray().shutdown)
            except TimeoutError:
                log.warning("leaving Ray took longer than %.0f s", DISCONNECT_TIMEOUT_S)
            except Exception as error:  # noqa: BLE001 - whatever Ray says: it is joined anew
                log.warning("Ray could not be left: %s", type(error).__name__)

    async def call(self, node_ip: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """One method of a node's agent. A ClusterError raised there is raised here, an OSError is NodeRefused, anything else AgentLost."""
        if node_ip not in self._agents:
            raise AgentLost(f"The agent of node {node_ip} is not connected; sparkd is connecting again.", reached=False)
        from ray.exceptions import RayError

        _, agent = self._agents[node_ip]
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(agent, method).remote(*arguments)
        except RayError as error:
            # First: what an agent raised is an instance of its own class, too, and may be a TimeoutError.
            raise _raised(error, node_ip, "could not do it") from error
        except TimeoutError:
            raise AgentLost(f"The agent of node {node_ip} did not answer within {timeout_s:.0f} s.") from None
        except OSError as error:
            raise refused_by(error, "This node") from error

    async def make_group(self, start: str, nodes: Sequence[str]) -> str:
        """Make the placement group in which vLLM's Ray executor starts the workers of this start; return Ray's id of it.

        It holds no memory: the daemon alone books that. It is kept beyond the daemon, as the engine is, and bound to these nodes: Ray would
        move a bundle when it loses a node, and the rank stays where it is. Raises ClusterError.
        """
        group = await self._answer(self._make_group, start, tuple(nodes), timeout_s=GROUP_TIMEOUT_S + ANSWER_TIMEOUT_S)
        if group is None:
            where = " and ".join(nodes)
            raise ClusterError(
                f"Ray found no place for workers on {where} within {GROUP_TIMEOUT_S:.0f} s. Run `sparkd nodes` for their state."
            )
        return group

    async def remove_group(self, start: str) -> None:
        """Remove the placement group of this start, if Ray has one."""
        if self.connected:
            await self._answer(self._remove_group, start)

    async def _answer(self, ask: Callable[..., T], *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> T:
        """Ask Ray's head. Raises RayUnavailable where the head does not answer or answers with an error."""
        try:
            async with asyncio.timeout(timeout_s):
                await _in_thread(_knock, self.address or "")
                return await _in_thread(ask, *arguments)
        except TimeoutError:
            raise RayUnavailable(f"Ray at {self.address} did not answer within {timeout_s:.0f} s.") from None
        except OSError as error:
            if error.errno in LACKS:
                # It says nothing of Ray: a connection that stands is not given up for it.
                raise refused_by(error, "This node") from error
            raise RayUnavailable(f"Ray's head at {self.address} cannot be reached: {error.strerror or error}.") from None
        except Exception as error:
            # Ray's own errors, and those of our calls where this Ray is of another release than they were written for.
            log.debug("Ray could not answer", exc_info=error)
            raise RayUnavailable(f"Ray at {self.address} could not answer: {type(error).__name__}.") from error

    async def _meet(self, node_ip: str, node_id: str) -> None:
        message, until_s = self._other_code.get(node_id, ("", float("-inf")))
        if time.monotonic() < until_s:
            raise CodeDiffers(message)
        agent = await self._answer(self._start_agent, node_ip, node_id)
        from ray.exceptions import ActorDiedError

        try:
            async with asyncio.timeout(AGENT_TIMEOUT_S):
                version = await agent.version.remote()
                if version != VERSION:
                    agent = await _in_thread(self._replace_agent, agent, node_ip, node_id)
                    version = await agent.version.remote()
                if version == VERSION:
                    await agent.open.remote()
        except Exception as error:
            if isinstance(error, ActorDiedError):
                # Ray does not pass on the error of the actor's constructor. An agent of another release takes other arguments.
                self._refuse_other_code(node_ip, node_id, self._labels[node_ip].get(AGENT_LABEL, "unknown"))
            raise _raised(error, node_ip, "did not start") from error
        self._refuse_other_code(node_ip, node_id, version)
        self._agents[node_ip] = node_id, agent

    def _refuse_other_code(self, node_ip: str, node_id: str, agent: str) -> None:
        """Raise CodeDiffers where the node has another agent than this code."""
        if agent != VERSION:
            release = self._labels[node_ip].get(VERSION_LABEL, "unknown")
            message = (
                f"Ray on node {node_ip} runs sparkd {release} with agent {agent}, the daemon sparkd {__version__} with agent {VERSION}: "
                "sparkd starts nothing there and leaves running engines alone. Run `pip install . -c deploy/constraints.txt` there, in the "
                "checkout that the daemon was installed from, then `systemctl restart sparkd-ray`."
            )
            self._other_code[node_id] = message, time.monotonic() + OTHER_CODE_S
            raise CodeDiffers(message)

    def _init(self, address: str, node_ip: str) -> None:
        try:
            ray = self._ray()
            self._joined = True
            ray.init(
                address=address,
                job_config=_job(),
                namespace=NAMESPACE,
                _node_ip_address=node_ip,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
        except AttributeError as error:
            lacks = f"Ray at {address} cannot be joined: this node's Ray has no {error.name or error}"
            raise RayUnavailable(f"{lacks}. Run `pip install . -c deploy/constraints.txt` in sparkd's checkout.") from error
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
            raise RayUnavailable(f"Ray at {address} cannot be joined: {reason}") from error

    def _ray(self) -> Any:
        """The module. Ray reads some of its variables while it is imported, so they are set before; ours never reach a child of ours."""
        ours = {
            "RAY_BACKEND_LOG_LEVEL": "error",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_S),
            # Where a call to its raylet fails, Ray ends the driver if this process is gone; unless it is named, if the parent is process 1
            # (raylet_ipc_client.cc, ShutdownIfLocalRayletDisconnected), as it is under systemd. The daemon outlives its raylet.
            "RAY_RAYLET_PID": str(os.getpid()),
        }
        os.environ.update({name: value for name, value in self._environment.items() if name.startswith("RAY_")} | ours)
        import ray

        # Ray's own farewell waits for a connection that is being made: where the head has gone meanwhile, for ever. Ours is disconnect().
        atexit.unregister(ray.shutdown)
        logging.getLogger("ray").setLevel(logging.ERROR)
        return ray

    def _tell_agent(self) -> None:
        """For a node that wants to join, and compares its code (workers.agent.ray_probe)."""
        self._ray()
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(AGENT_KEY, VERSION.encode(), overwrite=True, namespace=KEYS_NAMESPACE)

    def _alive_nodes(self) -> dict[str, str]:
        """Address -> Ray's id, of the living nodes that lend unified memory."""
        alive: dict[str, list[dict[str, Any]]] = {}
        for node in self._ray().nodes():
            if node["Alive"] and RESOURCE in node["Resources"]:
                alive.setdefault(node["NodeManagerAddress"], []).append(node)
        chosen = {node_ip: _present(nodes) for node_ip, nodes in alive.items()}
        self.gib_of = {node_ip: float(node["Resources"][RESOURCE]) for node_ip, node in chosen.items()}
        self.port_of |= {node_ip: int(node["NodeManagerPort"]) for node_ip, node in chosen.items()}
        self._labels = {node_ip: node["Labels"] for node_ip, node in chosen.items()}
        return {node_ip: node["NodeID"] for node_ip, node in chosen.items()}

    def _start_agent(self, node_ip: str, node_id: str) -> Any:
        ray = self._ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = ray.remote(Agent).options(
            name=f"agent:{node_id}",
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return actor.remote(node_ip, *self._arguments(node_ip), actor=True)

    def _replace_agent(self, agent: Any, node_ip: str, node_id: str) -> Any:
        self._ray().kill(agent, no_restart=True)
        return self._start_agent(node_ip, node_id)

    def _make_group(self, start: str, nodes: tuple[str, ...]) -> str | None:
        self._ray()
        from ray.util import placement_group, remove_placement_group

        bundles = [{DEVICE: DEVICE_SHARE, f"node:{node_ip}": 0.001} for node_ip in nodes]
        group = placement_group(bundles, strategy="STRICT_SPREAD", name=_group(start), lifetime="detached")
        if group.wait(GROUP_TIMEOUT_S):
            return str(group.id.hex())
        remove_placement_group(group)
        return None

    def _remove_group(self, start: str) -> None:
        from ray.util import get_placement_group, remove_placement_group

        try:
            remove_placement_group(get_placement_group(_group(start)))
        except ValueError:
            # Ray's word for "no such group".
            return


async def or_none(call: Awaitable[T]) -> T | None:
    """None where the node, or Ray, does not answer."""
    try:
        return await call
    except ClusterError:
        return None


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


def _raised(error: Exception, node_ip: str, what: str) -> ClusterError:
    """The error for the daemon, of one that an agent raised or that Ray raised instead. what: the end of a sentence about the agent."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, ClusterError):
        return cause
    if isinstance(cause, OSError):
        return refused_by(cause, f"Node {node_ip}")
    return AgentLost(f"The agent of node {node_ip} {what}: {type(error).__name__}.")


def _job() -> Any:
    """A driver that lends no folder: Ray would have its workers import from the driver's working folder first (worker.py, connect).

    Raises AttributeError where this Ray has other private members: the override below would do nothing.
    """
    from ray.job_config import JobConfig

    for member in ("_serialize", "_py_driver_sys_path"):
        getattr(JobConfig(), member)

    class Job(JobConfig):
        def _serialize(self) -> bytes:
            self._py_driver_sys_path.clear()
            return super()._serialize()

    return Job()


def _knock(address: str) -> None:
    """OSError where the head is not there. A call that waited until another head has its place would end this process.

    Ray checks the other's answer, "WrongClusterID", with an assertion (2.60: global_state_accessor.h).
    """
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), PORT_TIMEOUT_S).close()


def _present(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """The one that is there now, of those that Ray takes for alive at one address.

    After a raylet was killed and started again that is two, until Ray's health checks have missed the first often enough (15 s).
    """
    if len(nodes) == 1:
        return nodes[0]
    for node in nodes:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), PORT_TIMEOUT_S).close()
        except OSError:
            continue
        return node
    return nodes[-1]


def _group(start: str) -> str:
    return f"workers:{start}"
