"""The Ray actor of a node: readings, page cache, and the ranks that live there. Never decides what should run."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.errors import NodeRefused, RankError, refused_by
from workers.agent.inquiry import Inquiries
from workers.agent.jobs import Jobs
from workers.agent.other_engines import foreign
from workers.agent.rating import Rating
from workers.agent.version import VERSION
from workers.guard import incidents
from workers.guard.guard import Sentry
from workers.host import inspection, meminfo, memlock, network
from workers.host.hub_cache import cache_places
from workers.host.identity import identity
from workers.host.link_peers import knock
from workers.host.node_variables import NODE_CACHE_DIR, NODE_KV_DIR, NODE_LINKS, NODE_LOG_DIR, NODE_RUN_DIR
from workers.host.plugin_folder import expose
from workers.host.private_files import private_folder
from workers.host.runtime import GUARDED, probe
from workers.rank import lifecycle
from workers.rank.kv_report import kv_path
from workers.rank.load_report import load_path
from workers.transfer.manifest import ModelManifest, lacking, manifest_of

log = logging.getLogger("sparkd.agent")

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
DROP_SOCKET = Path("/run/sparkd-dropcache.sock")


class Agent:
    """One node's eyes and hands. Every method returns facts and blocks; Ray runs them on threads of their own.

    run_dir holds the ranks' status files and sockets, log_dir their logs; both are made if missing, for this user only. elsewhere: they
    are those of another node, the daemon's, and count only where this one has not said its own; so do the folders of quantized weights
    and of what the KV cache's workers learned. guard: see workers.guard.guard.Sentry, None looks only. actor: Ray runs it in a process of
    its own, which stays in memory. Nobody hears what an actor's constructor raises, so this one raises nothing: see `open`. Otherwise
    raises NodeRefused.
    """

    def __init__(
        self, node_id: str, run_dir: str, log_dir: str, sample_s: float = 0.5, proc: str = "/proc", elsewhere: bool = False,
        guard: Mapping[str, Any] | None = None, actor: bool = False,
    ) -> None:  # fmt: skip
        # A rank's are computed when it starts, and what stood here would look like the operator's own.
        for name in os.environ.pop(NODE_LINKS, "").split(","):
            os.environ.pop(name, None)
        self.node_id = node_id
        self.run_dir = run_dir = os.environ.get(NODE_RUN_DIR, run_dir) if elsewhere else run_dir
        self.log_dir = log_dir = os.environ.get(NODE_LOG_DIR, log_dir) if elsewhere else log_dir
        self._cache_dir = os.environ.get(NODE_CACHE_DIR) if elsewhere else None
        self._kv_dir = os.environ.get(NODE_KV_DIR) if elsewhere else None
        self._copies, self._rating, self._inquiries = Jobs(), Rating(), Inquiries()
        self._proc = Path(proc)
        self.unlocked = memlock.lock() if actor else None
        if self.unlocked:
            log.warning("this agent's memory may be paged out: %s", self.unlocked)
        self.sentry = Sentry(node_id, run_dir, log_dir, self._proc, sample_s, guard or {}, self.drop_page_cache)
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
                self.sentry.start()
            except OSError as error:
                raise self._refused(error) from error
            self._plugin_dir = plugin_dir

    def _refused(self, error: OSError) -> NodeRefused:
        if error.errno not in (errno.EPERM, errno.EACCES):
            return refused_by(error, f"Node {self.node_id}")
        why = f"Node {self.node_id} cannot use {error.filename}: {error.strerror}"
        cure = f"`chown -R {os.geteuid()} {self.run_dir} {self.log_dir}`"
        return NodeRefused(f"{why}. sparkd runs there as user {os.geteuid()}: run {cure} there, or start sparkd as their owner.")

    def version(self) -> str:
        return VERSION

    def pid(self) -> int:
        return os.getpid()

    def observe(self, told: Mapping[str, Mapping[str, Any]] | None = None, guard: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Reading and ranks at this moment. Times are this node's wall clock; now_s lets the caller work out ages.

        told: by model, what the daemon knows that the guard's choice depends on (workers.guard.guard.Sentry). guard: the
        daemon's settings, which an agent that an earlier one started has not heard.
        """
        self.open()
        if told is not None:
            self.sentry.hear(told)
        if guard is not None:
            self.sentry.set(guard)
        held = {one.rank_id: one for one in self.sentry.holders.ranks}
        ranks = lifecycle.scan(self.run_dir)
        for fact in ranks:
            known = held.get(fact["rank_id"]) if fact["alive"] else None
            fact["host_bytes"], fact["device_bytes"] = (known.host_bytes, known.device_bytes) if known else (None, None)
            fact["killed"] = None if fact["alive"] else self.sentry.killed(fact["rank_id"])
        return {"node_id": self.node_id, "now_s": time.time(), "reading": self.sentry.reading, "ranks": ranks}

    def incidents(self) -> list[dict[str, Any]]:
        """The guard's deeds here, oldest first: see workers.guard.incidents.SUMMARY."""
        return incidents.summaries(self.sentry.folder)

    def incident(self, incident_id: str) -> dict[str, Any] | None:
        """The whole bundle; None where this node has none of that id."""
        return incidents.read(self.sentry.folder, incident_id)

    def fabric(self) -> dict[str, Any]:
        """This node's network now: see workers.host.network.sample, and `answers`, what workers.host.link_peers.knock says.

        Takes as long as `ip` does, at most some seconds.
        """
        answers = knock()
        return network.sample() | {"answers": answers}

    def host(self, runtime: str | None) -> dict[str, Any]:
        """How this node was prepared: see workers.host.inspection.sample. Takes at most two of its time-outs."""
        return inspection.sample(runtime=runtime)

    def strays(self) -> dict[str, list[int]]:
        """rank_id -> processes of engines that have no status file. Reads the environment of every process: not for every look."""
        return lifecycle.strays(self.run_dir)

    def foreign(self, device: bool) -> list[dict[str, Any]]:
        """Engines that sparkd did not start: see workers.agent.other_engines."""
        return foreign(self._proc, ask_device=device)

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
            port = _free_port(self.node_id)
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

    def free_port(self) -> int:
        """One of this node's address that nothing listens on now."""
        return _free_port(self.node_id)

    def api_key(self, rank_id: str) -> str:
        """The key of a rank that was spawned with private=True. Raises RankError where there is none."""
        try:
            return (Path(self.run_dir) / f"{Path(rank_id).name}.key").read_text()
        except OSError as error:
            raise RankError(f"The key of rank {rank_id} cannot be read on node {self.node_id}: {error.strerror}.") from error

    def runtime(self, interpreter: str) -> dict[str, Any]:
        """{"platform", "vllm", "entrypoint", "packages"} of a Python interpreter of this node, and its "mem_total_bytes". Raises
        RankError."""
        return {**probe(interpreter).to_dict(), "mem_total_bytes": int(meminfo.sample(self._proc)["mem_total_bytes"])}

    def identity(self, interpreter: str, model: str, revision: str | None, environ: dict[str, str]) -> dict[str, Any]:
        """The identity of what this node would serve the model with: see workers.host.identity. environ: the model's own, over this node's.
        Raises RankError."""
        return identity(interpreter, model, revision, {**os.environ, **environ})

    def staged(self, model: str, revision: str | None, environ: dict[str, str]) -> dict[str, Any] | None:
        """This node's files of a model: workers.transfer.manifest.ModelManifest, None where it has none. Raises RankError."""
        found = manifest_of(model, revision, {**os.environ, **environ})
        return found.to_dict() if found else None

    def lacking(self, manifest: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        """See workers.transfer.manifest.lacking. Raises RankError."""
        return lacking(ModelManifest.from_dict(manifest), {**os.environ, **environ})

    def copy(self, program: str, order: dict[str, Any], environ: dict[str, str]) -> dict[str, Any]:
        """Start to serve a model's files, `source`, or to fetch them, `sink`: see workers.transfer. {"job", ..}. Raises RankError."""
        return self._copies.start(program, order | {"environ": cache_places({**os.environ, **environ})})

    def copying(self, job: str) -> dict[str, Any]:
        """A copy's last words. Raises RankError for one that is not known."""
        return self._copies.state(job)

    def end_copy(self, job: str) -> None:
        self._copies.end(job)

    def rate(self, interpreter: str, order: dict[str, Any], environ: dict[str, str]) -> str:
        """Start this node's part of a measurement between nodes: see workers.agent.nccl_rate; the job's name. Raises RankError."""
        return self._rating.start(interpreter, order, environ)

    def rating(self, job: str) -> dict[str, Any]:
        """Its last words. Raises RankError for one that is not known."""
        return self._rating.state(job)

    def end_rate(self, job: str) -> None:
        self._rating.end(job)

    def inquire(self, interpreter: str, request: str) -> str:
        """Ask this node's vLLM about models: see workers.agent.inquiry.Inquiries.start. Raises RankError."""
        return self._inquiries.start(interpreter, request)

    def inquiry(self, name: str, first: int) -> dict[str, Any]:
        """Its words from that number on. Raises RankError for one that is not known."""
        return self._inquiries.read(name, first)

    def end_inquiry(self, name: str) -> None:
        self._inquiries.end(name)

    def destroy(self, handle: dict[str, Any], grace_s: float) -> dict[str, Any]:
        """Stop a rank, verify that every process is gone, and forget it: see workers.rank.lifecycle.stop."""
        ended = lifecycle.stop(handle, run_dir=self.run_dir, grace_s=grace_s)
        if ended["gone"]:
            lifecycle.forget(handle["rank_id"], self.run_dir)
            (Path(self.run_dir) / f"{handle['rank_id']}.key").unlink(missing_ok=True)
        return ended

    def read_log(self, path: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        """Only files in this node's log folder."""
        if Path(path).resolve().parent != Path(self.log_dir).resolve():
            return {"text": "", "cursor": cursor or ""}
        return lifecycle.read_log(path, cursor, max_bytes=max_bytes)

    def nccl_lines(self, path: str) -> list[str]:
        """NCCL's own lines of one rank since it started; only of files in this node's log folder."""
        return lifecycle.nccl_lines(path) if Path(path).resolve().parent == Path(self.log_dir).resolve() else []

    def drop_page_cache(self) -> dict[str, Any]:
        """Free clean page cache. The kernel checks for uid 0, so an ordinary user asks the root helper on its socket.

        Answers {"dropped": bool, "how": str, "freed_bytes": int}; a refusal is an answer, not an error.
        """
        before = meminfo.sample(self._proc)["mem_free_bytes"]
        how = self._drop()
        freed = meminfo.sample(self._proc)["mem_free_bytes"] - before
        return {"dropped": how in ("directly", "helper"), "how": how, "freed_bytes": max(0, int(freed))}

    def _drop(self) -> str:
        if os.geteuid() == 0:
            os.sync()
            try:
                DROP_CACHES.write_text("1\n")
            except OSError as error:
                return f"the kernel refused: {error.strerror}"
            return "directly"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as helper:
                helper.settimeout(30.0)
                helper.connect(str(DROP_SOCKET))
                answer = helper.recv(200).decode("ascii", "replace").strip()
        except OSError as error:
            return f"no root helper on {DROP_SOCKET}: {error.strerror or error}"
        # `limited`: it was dropped a moment ago, on somebody else's call.
        return "helper" if answer.startswith(("ok", "limited")) else f"the helper said: {answer[:100]}"

    def _loader(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Where this node's loader tells how far it is, and keeps what it quantized."""
        given = spec.get("loader_extra_config")
        if given is None:
            return {}
        here = {"progress": str(load_path(self.run_dir, str(spec["rank_id"])))}
        if self._cache_dir and given.get("cache_dir"):
            here["cache_dir"] = self._cache_dir
        return {"loader_extra_config": given | here}

    def _kv_cache(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Where this node's worker tells what came of its sizing, and keeps what it learned."""
        given = spec.get("kv_cache")
        if given is None:
            return {}
        here = {"report": str(kv_path(self.run_dir, str(spec["rank_id"])))}
        if self._kv_dir and given.get("profiles"):
            here["profiles"] = self._kv_dir
        return {"kv_cache": given | here}

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


def _free_port(host: str) -> int:
    """One that nothing listens on now. Ray and vLLM take theirs at random too: a collision ends the engine, which is retried."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
