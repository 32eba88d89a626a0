"""The Ray actor of a node: readings, and the ranks that live there. Never decides what should run."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.errors import NodeRefused, RankError, refused_by
from workers.agent.node_facts import NodeFacts
from workers.agent.page_cache import PageCache
from workers.agent.programs import Programs
from workers.agent.rank_logs import RankLogs
from workers.agent.storage import Storage
from workers.agent.version import VERSION
from workers.guard import incidents
from workers.guard.guard import Guard
from workers.host import memlock
from workers.host.node_variables import NODE_CACHE_DIR, NODE_KV_DIR, NODE_LINKS, NODE_LOG_DIR, NODE_RUN_DIR
from workers.host.plugin_folder import expose
from workers.host.private_files import private_folder
from workers.host.runtime import GUARDED
from workers.rank import lifecycle
from workers.rank.report import report_path

log = logging.getLogger("sparkd.agent")


class Agent(NodeFacts, PageCache, Programs, RankLogs, Storage):
    """One node's eyes and hands. Its own methods are about ranks and the guard; each base has another subject, since the methods of a Ray
    actor lie on one class. Every method returns facts and blocks; Ray runs them on threads of their own.

    run_dir holds the ranks' status files and sockets, log_dir their logs; both are made if missing, for this user only.

    elsewhere: they are those of another node, the daemon's, and count only where this one has not said its own; so do the folders of
        quantized weights and of what the KV cache's workers learned.
    guard: see workers.guard.guard.Guard, None looks only.
    actor: Ray runs it in a process of its own, which stays in memory.

    An error of an actor's constructor reaches no caller, so this one raises nothing: see `open`. Otherwise raises NodeRefused.
    """

    def __init__(
        self, node_id: str, run_dir: str, log_dir: str, sample_s: float = 0.5, proc: str = "/proc", elsewhere: bool = False,
        guard: Mapping[str, Any] | None = None, actor: bool = False,
    ) -> None:  # fmt: skip
        # A rank's are computed when it starts, and what stood here would look like the operator's own.
        for name in os.environ.pop(NODE_LINKS, "").split(","):
            os.environ.pop(name, None)
        run_dir = os.environ.get(NODE_RUN_DIR, run_dir) if elsewhere else run_dir
        NodeFacts.__init__(self, node_id, run_dir, Path(proc))
        PageCache.__init__(self, Path(proc))
        Programs.__init__(self)
        self.log_dir = log_dir = os.environ.get(NODE_LOG_DIR, log_dir) if elsewhere else log_dir
        self._cache_dir = os.environ.get(NODE_CACHE_DIR) if elsewhere else None
        self._kv_dir = os.environ.get(NODE_KV_DIR) if elsewhere else None
        self.unlocked = memlock.lock() if actor else None
        if self.unlocked:
            log.warning("this agent's memory may be paged out: %s", self.unlocked)
        self.guard = Guard(node_id, run_dir, log_dir, Path(proc), sample_s, guard or {}, self.drop_page_cache, actor=actor)
        self._opening, self._plugin_dir = threading.Lock(), ""
        try:
            self.open()
        except NodeRefused as error:
            if not actor:
                raise
            log.error("%s", error.message)

    def open(self) -> None:
        """Make this node's folders and begin to watch its memory, unless that was done. Raises NodeRefused, and may be called again."""
        with self._opening:
            if self._plugin_dir:
                return
            try:
                private_folder(Path(self.run_dir))
                private_folder(Path(self.log_dir), keep_group=True)
                plugin_dir = self._expose_plugin()
                self.guard.start()
            except OSError as error:
                raise self._refused(error) from error
            self._plugin_dir = plugin_dir

    def _refused(self, error: OSError) -> NodeRefused:
        if error.errno not in (errno.EPERM, errno.EACCES):
            return refused_by(error, f"Node {self.node_id}")
        problem = f"Node {self.node_id} cannot use {error.filename}: {error.strerror}"
        cure = f"`chown -R {os.geteuid()} {self.run_dir} {self.log_dir}`"
        return NodeRefused(f"{problem}. sparkd runs there as user {os.geteuid()}: run {cure} there, or start sparkd as their owner.")

    def version(self) -> str:
        return VERSION

    def pid(self) -> int:
        return os.getpid()

    def observe(self, told: Mapping[str, Mapping[str, Any]] | None = None, guard: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The node's reading and ranks at this moment. Times are this node's wall clock; now_s lets the caller compute ages.

        told: by model, the daemon's facts that the guard's choice depends on (workers.guard.guard.Guard).
        guard: the daemon's settings; an agent that an earlier daemon started has not received them yet.
        """
        self.open()
        if told is not None:
            self.guard.hear(told)
        if guard is not None:
            self.guard.set(guard)
        held = {rank.rank_id: rank for rank in self.guard.consumers.ranks}
        ranks = lifecycle.scan(self.run_dir)
        for fact in ranks:
            holder = held.get(fact["rank_id"]) if fact["alive"] else None
            fact["host_bytes"], fact["device_bytes"] = (holder.host_bytes, holder.device_bytes) if holder else (None, None)
            fact["killed"] = None if fact["alive"] else self.guard.killed(fact["rank_id"])
        return {"node_id": self.node_id, "now_s": time.time(), "reading": self.guard.reading, "machine": self.guard.machine, "ranks": ranks}

    def incidents(self) -> list[dict[str, Any]]:
        """The guard's deeds here, oldest first: see workers.guard.incidents.SUMMARY."""
        return incidents.summaries(self.guard.folder)

    def incident(self, incident_id: str) -> dict[str, Any] | None:
        """The whole bundle; None where this node has none of that id."""
        return incidents.read(self.guard.folder, incident_id)

    def spawn(self, spec: dict[str, Any], private: bool) -> dict[str, Any]:
        """Start one rank; returns its handle once that is on disk. Its log is of that name in this node's log folder.

        Raises RankError, or NodeRefused with what the system said, and leaves nothing behind.

        Rank 0 alone serves. private: the gateway is on another node, so it listens on this node's address instead of on a Unix socket,
        and answers nothing without a key of its own (workers.door).
        """
        self.open()
        try:
            return self._spawn(spec, private)
        except OSError as error:
            raise refused_by(error, f"Node {self.node_id}") from error

    def _spawn(self, spec: dict[str, Any], private: bool) -> dict[str, Any]:
        key_path = Path(self.run_dir) / f"{spec['rank_id']}.key"
        if private and str(spec["model"]).startswith("/") and not os.path.isdir(spec["model"]):
            cure = f"`sparkd pull {spec['model_name']}` copies it there"
            raise RankError(f"The folder {spec['model']} is not on node {self.node_id}: {cure}.")
        where: dict[str, Any] = {}
        if private and not spec["rank"]:
            if spec["entrypoint"] not in GUARDED:
                engine = f"{spec['entrypoint']}, the engine of {spec['model_name']},"
                raise RankError(f"{engine} asks for no key, so it may not listen on {self.node_id}. Serve it on the daemon's own node.")
            port = self.free_port()
            _make_key(key_path)
            where = {"host": self.node_id, "port": port, "api_key_path": str(key_path)}
        elif not spec["rank"]:
            where = {"socket_path": str(Path(self.run_dir) / f"{spec['rank_id'][-8:]}.sock")}
        try:
            here: dict[str, Any] = {"run_dir": self.run_dir, "log_path": str(Path(self.log_dir) / Path(spec["log_path"]).name)}
            here |= self._loader(spec) | self._kv_cache(spec) | {"pythonpath": (self._plugin_dir,)}
            return lifecycle.spawn(lifecycle.RankSpec.from_dict(spec | where | here))
        except (RankError, OSError):
            if "api_key_path" in where:
                key_path.unlink(missing_ok=True)
            raise

    def api_key(self, rank_id: str) -> str:
        """The key of a rank that was spawned with private=True. Raises RankError where there is none."""
        try:
            return (Path(self.run_dir) / f"{Path(rank_id).name}.key").read_text()
        except OSError as error:
            raise RankError(f"The key of rank {rank_id} cannot be read on node {self.node_id}: {error.strerror}.") from error

    def destroy(self, handle: dict[str, Any], grace_s: float) -> dict[str, Any]:
        """Stop a rank, verify that every process is gone, and forget it: see workers.rank.lifecycle.stop."""
        ended = lifecycle.stop(handle, run_dir=self.run_dir, grace_s=grace_s)
        if ended["gone"]:
            lifecycle.forget(handle["rank_id"], self.run_dir)
            (Path(self.run_dir) / f"{handle['rank_id']}.key").unlink(missing_ok=True)
        return ended

    def _loader(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Where this node's loader tells how far it is, and keeps what it quantized."""
        settings = spec.get("loader_extra_config")
        if settings is None:
            return {}
        here = {"progress": str(report_path(self.run_dir, str(spec["rank_id"])))}
        if self._cache_dir and settings.get("cache_dir"):
            here["cache_dir"] = self._cache_dir
        return {"loader_extra_config": settings | here}

    def _kv_cache(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Where this node's worker tells what came of its sizing, and keeps what it learned."""
        settings = spec.get("kv_cache")
        if settings is None:
            return {}
        here = {"report": str(report_path(self.run_dir, str(spec["rank_id"])))}
        if self._kv_dir and settings.get("profiles"):
            here["profiles"] = self._kv_dir
        return {"kv_cache": settings | here}

    def _expose_plugin(self) -> str:
        """A folder that holds the plugin and nothing else, so that a foreign interpreter sees no other package of sparkd's environment."""
        folder = Path(self.run_dir) / "plugin"
        expose(folder)
        return str(folder)


def _make_key(path: Path) -> None:
    """A random one, for this user only. Raises OSError, and leaves none behind; one that is there stays."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(secrets.token_hex(32))
    except OSError:
        path.unlink(missing_ok=True)
        raise
