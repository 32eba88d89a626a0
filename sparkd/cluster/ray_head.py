"""Starts sparkd's own Ray head, finds it again, measures it and ends it. A Ray that sparkd did not start stays as it is."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd import __version__
from sparkd.errors import RayUnavailable
from sparkd.fabric.fabric_nodes import ray_environment
from workers.agent.version import VERSION
from workers.host import processes
from workers.host.interpreter import PACKAGE_DIR, inherited_environment, module_command
from workers.host.node_variables import NODE_CACHE_DIR, NODE_KV_DIR, NODE_LINKS, NODE_LOG_DIR, NODE_PYTHON, NODE_RUN_DIR
from workers.host.private_files import private_folder, write_private
from workers.host.processes import Stat

# Names of its two servers, of which a node that joined has the second.
SERVERS = ("gcs_server", "raylet")
# Labels of each node in Ray, which the daemon and a node that wants to join compare: sparkd's version there, and its agent's.
VERSION_LABEL, AGENT_LABEL = "sparkd-version", "sparkd-agent"
START_TIMEOUT_S = 90.0
STOP_GRACE_S = 2.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one process.

    anonymous_bytes: memory that its end frees
    cpu_s: CPU seconds of it and its ended children
    """

    anonymous_bytes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class RayProcess(Cost):
    """One process of Ray, and its cost."""

    name: str
    pid: int


@dataclass(frozen=True, slots=True)
class Costs:
    """The cost of the daemon and of Ray on this node.

    ray_listeners: `ADDRESS:PORT NAME` of each TCP socket of Ray's
    """

    daemon: Cost
    ray: list[RayProcess]
    ray_listeners: list[str]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How Ray is kept on a node, and what it is for there.

    node_ip: the address that Ray binds and gives away. On 127.0.0.1 Ray's single-machine mode (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0) keeps
        every listener on loopback; on another address its gRPC servers listen on all interfaces, and the firewall sample closes them
    memory_gib: that the node lends
    join: the head's address where this node is not the head
    keeper: true in `sparkd ray-node`, whose Ray the daemon uses and leaves alone
    starts: false in a unit with credentials, which engines of a Ray that was started there could read: then a keeper has to
    rank_folders: where this node's ranks have their status files, their logs, quantized weights and what sizing learned; a daemon on
        another node does not know
    """

    runtime_dir: Path
    token_path: Path
    node_ip: str = LOOPBACK
    port: int = 0
    memory_gib: int = 0
    object_store_mib: int = 0
    join: str | None = None
    keeper: bool = False
    starts: bool = True
    rank_folders: tuple[Path, Path, Path, Path] | None = None


class RayHead:
    """The Ray head of one runtime directory. `ray start` gets a session of its own here, which Ray's processes do not leave: so they are
    found, and only they. A daemon that has joined, and an engine's shim, have other sessions.
    """

    def __init__(self, options: RayOptions) -> None:
        self.options = options
        self.folder = options.runtime_dir / "ray"
        self._essential = set(SERVERS[options.join is not None :])
        self._record = options.runtime_dir / "ray.json"

    @property
    def kept_elsewhere(self) -> bool:
        """True where `sparkd ray-node` keeps this node's Ray: in a control group of its own, where the ranks belong too."""
        return self._kept and not self.options.keeper

    def ensure(self) -> str:
        """The address of the living head, which is started first if need be. Blocks, seconds. Raises RayUnavailable, also where the
        folder is full, missing or read-only, or this process may open no more files."""
        try:
            return self._ensure()
        except OSError as error:
            raise RayUnavailable(f"Ray cannot be started: {_refusal(error)} It is tried again.") from error

    def _ensure(self) -> str:
        if not hasattr(os, "pidfd_open"):
            # Builds that uv downloads have been without it (astral-sh/uv issue 9374).
            raise RayUnavailable(
                f"{sys.executable} has no os.pidfd_open, by which sparkd and its memory guard end exactly the process that they mean: no "
                "engine is started. Install sparkd with the system's Python, `python3 -m venv`."
            )
        # A keeper begins anew: what an earlier one left may belong to an earlier session of Ray, or to another head.
        if not self.options.keeper and (address := self.living_address()):
            return address
        if self.kept_elsewhere:
            raise RayUnavailable("Ray of this node has ended; `sparkd ray-node` starts it, not the daemon: systemctl restart sparkd-ray.")
        if not self.options.starts:
            raise RayUnavailable(
                "No Ray runs on this node, and engines of one in the daemon's own unit could read its credentials: "
                "run `systemctl enable --now sparkd-ray`."
            )
        if self.options.keeper:
            # Before anything starts, so that a daemon that looks meanwhile waits rather than start a head beside it.
            write_private(self._record, json.dumps({**self._recorded(), "address": None, "keeper": True}))
        self._end()
        return self._start()

    def living_address(self) -> str | None:
        """None unless both its GCS and its raylet live; of a node that joined, its raylet."""
        address = self._recorded().get("address")
        return str(address) if address and set(self.essential()) == self._essential else None

    def essential(self) -> dict[str, int]:
        """Name and process id of the living ones without which there is no Ray here."""
        return {stat.name: stat.pid for stat in self._processes() if stat.name in self._essential}

    def stop(self) -> None:
        """End every process of this head, SIGTERM then SIGKILL, and remove its folder. The raylet goes first: it ends its own children.

        Raises RayUnavailable where that cannot be done now.
        """
        try:
            self._end()
        except OSError as error:
            raise RayUnavailable(f"Ray cannot be ended: {_refusal(error)}") from error

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for stat in sorted(self._processes(), key=lambda stat: stat.name != "raylet"):
                _kill(stat.pid, number)
            deadline = time.monotonic() + STOP_GRACE_S
            while self._processes() and time.monotonic() < deadline:
                time.sleep(0.05)
        if not self._kept:
            self.forget()
        shutil.rmtree(self.folder, ignore_errors=True)

    def keep_closed(self) -> None:
        """Ray lets every user write to its temp-dir, where its sockets are, when it makes it and when a driver joins (ray/_common/utils.py,
        try_to_create_directory). Raises OSError."""
        self.folder.chmod(0o700)

    def forget(self) -> None:
        """Remove the record of this node's Ray, so that a daemon may start a head of its own."""
        self._record.unlink(missing_ok=True)

    def costs(self) -> list[RayProcess]:
        """Memory and CPU time of every process of this head, largest first."""
        costs = [RayProcess(*process_cost(stat.pid), stat.name, stat.pid) for stat in self._processes()]
        return sorted(costs, key=lambda process: -process.anonymous_bytes)

    def listeners(self) -> list[str]:
        """`address:port name` of every TCP socket that a process of this head listens on."""
        return sorted(f"{where} {stat.name}" for stat in self._processes() for where in _listening(stat.pid))

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of `ray start`, without the caller's own variables of Ray: another cluster's settings must not leak in."""
        clean = inherited_environment(inherited)
        names = (NODE_RUN_DIR, NODE_LOG_DIR, NODE_CACHE_DIR, NODE_KV_DIR)
        folders = dict(zip(names, map(str, self.options.rank_folders or ()), strict=False))
        # Names of this node's interfaces, for what vLLM's Ray executor starts.
        links = {} if self.options.node_ip == LOOPBACK else ray_environment(self.options.node_ip, clean)
        extra = {NODE_LINKS: ",".join(links)} if links else {}
        extra[NODE_PYTHON] = sys.executable
        return clean | node_environment(self.options.token_path, self.options.node_ip) | folders | links | extra

    def command(self) -> list[str]:
        resources = {"unified_memory_gib": self.options.memory_gib}
        head = ["--head", f"--port={self.options.port}", "--include-dashboard=false", "--no-monitor"]
        return [
            *module_command(sys.executable, "ray.scripts.scripts", "start"),
            *([f"--address={self.options.join}"] if self.options.join else head),
            f"--node-ip-address={self.options.node_ip}",
            f"--labels={VERSION_LABEL}={__version__},{AGENT_LABEL}={VERSION}",
            f"--temp-dir={self.folder}",
            f"--object-store-memory={self.options.object_store_mib << 20}",
            f"--resources={json.dumps(resources)}",
            "--num-cpus=1",
            # One of each node, shared by its models in hundredths: only vLLM's Ray executor asks for it (workers.rank.ray_environment).
            "--num-gpus=1",
            "--include-log-monitor=false",
            "--disable-usage-stats",
            "--log-color=false",
        ]

    def _start(self) -> str:
        if not self.options.join:
            make_token(self.options.token_path)
        private_folder(self.folder)
        record: dict[str, Any] = {"address": None, "keeper": self.options.keeper}
        # Before Ray starts: without its record, sparkd would start and end Ray over and over.
        write_private(self._record, json.dumps(record))
        try:
            with subprocess.Popen(
                self.command(),
                env=self.environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                umask=0o077,
            ) as starter:
                record |= _session(starter.pid)
                write_private(self._record, json.dumps(record))
                try:
                    output, _ = starter.communicate(timeout=START_TIMEOUT_S)
                except subprocess.TimeoutExpired as error:
                    self._end()
                    raise RayUnavailable(f"Ray did not start within {START_TIMEOUT_S:.0f} s. Look into {self.folder}.") from error
        except OSError:
            with suppress(OSError):  # why it did not start is what counts
                self._end()
            raise
        address = self._published_address()
        if starter.returncode != 0 or address is None:
            last = [line.strip() for line in output.splitlines() if line.strip()][-1:] or ["no output"]
            self._end()
            raise RayUnavailable(f"Ray did not start (exit code {starter.returncode}): {last[0][:300]}")
        self.keep_closed()
        write_private(self._record, json.dumps(record | {"address": address}))
        return address

    @property
    def _kept(self) -> bool:
        return bool(self._recorded().get("keeper"))

    def _recorded(self) -> dict[str, Any]:
        """Raises OSError where it may be there and cannot be read: a head that lives is not ended for that."""
        try:
            record = json.loads(self._record.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _published_address(self) -> str | None:
        """Ray writes the address of the newest head into its temp-dir."""
        try:
            return (self.folder / "ray_current_cluster").read_text().strip() or None
        except OSError:
            return None

    def _processes(self) -> list[Stat]:
        """The living processes of this head, by the session that its `ray start` began."""
        record, stats = self._recorded(), processes.table()
        if "join" in record and "sessions" not in record:
            # An earlier release noted no session.
            inside = f"{os.path.realpath(self.folder)}/"
            sessions = {stat.session for stat in stats.values() if stat.name in SERVERS and _holds_open(stat.pid, inside)}
            return [stat for stat in stats.values() if stat.session in sessions]
        if record.get("boot_id") != processes.boot_id():
            return []
        session, *_ = record["sessions"]
        # The kernel gives a session's number to no other process before its last member has ended.
        reused = session in stats and stats[session].start_ticks != record.get("start_ticks")
        return [] if reused else [stat for stat in stats.values() if stat.session == session]


def living_head(runtime_dir: Path) -> str | None:
    """The address of the head of this runtime directory, whoever started it; None where none lives."""
    return RayHead(RayOptions(runtime_dir, runtime_dir)).living_address()


def node_environment(token_path: Path, node_ip: str) -> dict[str, str]:
    """Environment that every process which starts or joins our Ray needs.

    Token authentication on (off by default in Ray; CVE-2023-48022), memory monitor off (it kills loading workers at 95 % of the node:
    ray-project/ray issue 39723), no metrics collection, no prestarted workers, no usage report.
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        "RAY_START_HOOK": "workers.host.ray_start_hook.trim",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray's defaults, 15 and 1000, would make the agent the slowest and the first to die, and every engine would inherit the former.
        "RAY_worker_niceness": "0",
        "RAY_worker_oom_score_adjustment": "0",
        # /run is memory: 16 MiB of each log at most.
        "RAY_ROTATION_MAX_BYTES": str(8 << 20),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        "PYTHONPATH": PACKAGE_DIR,
    }
    if node_ip == LOOPBACK:
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    return variables


def is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def make_token(path: Path) -> None:
    """Write a new random token, for this user only, unless there is one."""
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, secrets.token_hex(32))


def process_cost(pid: int) -> tuple[int, float]:
    """(anonymous bytes, CPU seconds) of one process of ours."""
    stat = processes.read_stat(pid)
    return processes.anonymous_bytes(pid), stat.cpu_ticks / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _refusal(error: OSError) -> str:
    of = f" ({error.filename})" if error.filename else ""
    return f"{error.strerror or error}{of}. Check that folder's disk, and who owns it."


def _session(pid: int) -> dict[str, Any]:
    """The session of a child that was not waited for: /proc shows it even if it has ended. Earlier releases noted no start_ticks."""
    stat = processes.read_stat(pid)
    return {"sessions": [pid], "start_ticks": stat.start_ticks if stat else None, "boot_id": processes.boot_id()}


def _kill(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _holds_open(pid: int, inside: str) -> bool:
    """Whether a process has a file of a folder open, as far as it is there and ours to see. psutil tells of no file that was removed."""
    with suppress(FileNotFoundError, PermissionError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(inside):
                    return True
    return False


def _listening(pid: int) -> set[str]:
    """The listening TCP sockets of a process, as far as it is there and ours to see."""
    import psutil  # only `sparkd status` asks

    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return set()
    return {f"{each.laddr.ip}:{each.laddr.port}" for each in sockets if each.status == psutil.CONN_LISTEN}


def costs_of(head: RayHead | None) -> Costs:
    """The cost of Ray and of this process. Blocks.

    Ray's part is empty if this process may open no more files. An operator who looks for the reason still gets an answer.
    """
    ray, listeners = list[RayProcess](), list[str]()
    with suppress(OSError):
        if head:
            ray, listeners = head.costs(), head.listeners()
    return Costs(Cost(*process_cost(os.getpid())), ray, listeners)
