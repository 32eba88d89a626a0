"""Builds the daemon's parts, and starts, reloads and stops them in order."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import math
import os
import resource
import secrets
import signal
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from sparkd import metrics
from sparkd.admin.bandwidth import Bandwidth
from sparkd.admin.benches import Benches
from sparkd.admin.jobs import Jobs
from sparkd.admin.live import Live
from sparkd.admin.pulls import Pulls
from sparkd.capacity.entry_faults import refuse_faulty
from sparkd.cluster import membership
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.machine_lock import machine_lock
from sparkd.cluster.node_paths import remove_empty
from sparkd.config.api_keys import load_keys
from sparkd.config.config import Config, check_bind, load_config
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry, replaced
from sparkd.control.supervisor import Supervisor
from sparkd.daemon.console import Console
from sparkd.daemon.gateway_client import GatewayClient
from sparkd.daemon.output import unblocked
from sparkd.daemon.reload import Reloader
from sparkd.errors import ConfigError, StateError
from sparkd.execution.boundary import Boundary
from sparkd.execution.shared_answer import SharedAnswer
from sparkd.fabric.rates import RateBook
from sparkd.gateway.client_connection import client_connection
from sparkd.gateway.edge import Edge, EdgeSettings
from sparkd.gateway.keys import KeyDigests, digest
from sparkd.gateway.limits import ClientLimits, descriptor_limit, most_connections, most_requests
from sparkd.gateway.request_log import RequestLog
from sparkd.gateway.scraper import Scraper
from sparkd.gateway.server import bind, gateway_server
from sparkd.gateway.upstream import Upstream
from sparkd.state.model_state import SERVING
from sparkd.state.nouns import Want
from sparkd.state.request_store import RequestStore
from sparkd.state.series import Series
from sparkd.state.store import FILE, Store
from sparkd.systemd import Systemd
from sparkd.web.files import page_files
from workers.host import memlock, processes
from workers.host.private_files import private_file

log = logging.getLogger("sparkd")

LOOP_DEAD_S = 30.0
FIRST_LOOK_S = 5.0
PLACING_S = 10.0
LOCK_BYTES = 20
# The daemon's own key, with which it asks a model its first question.
OWN_NAME = "sparkd"


@dataclass(frozen=True, slots=True)
class Options:
    """How `sparkd serve` was called.

    leave_engines: a SIGTERM leaves engines and Ray running for the next daemon to adopt.
    models: names to load now, even where an operator unloaded them before the last end.
    """

    config_path: Path | None = None
    flags: Mapping[str, Any] | None = None
    ask: str | None = None
    leave_engines: bool = False
    models: tuple[str, ...] = ()


def serve(config: Config, options: Options) -> None:
    """Run until a signal ends it. Raises ConfigError or StateError for what is wrong before anything was started."""
    if not processes.hide():
        log.warning("other processes of this user can read the daemon's keys in its memory: the kernel refused PR_SET_DUMPABLE")
    _allow_many_files(config.limits.max_connections)
    if unlocked := memlock.lock():
        log.warning("the daemon's memory may be swapped out: %s", unlocked)
    with unblocked(), asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(_serve(config, options))


async def _serve(config: Config, options: Options) -> None:
    environ = dict(os.environ)
    systemd = Systemd.take()
    check_bind(config, environ)
    if (head := membership.read(config)) is not None:
        problem = f"This node has joined {head.address}, whose daemon serves the cluster."
        raise ConfigError(f"{problem} Use that daemon, or run `sparkd leave` first.")
    with _lock(config.state_dir):
        _private_folder(config.runtime_path)
        try:
            await _serve_locked(config, options, systemd, environ)
        finally:
            # A start that failed leaves none either.
            remove_empty(config.runtime_path)


async def _serve_locked(config: Config, options: Options, systemd: Systemd, environ: Mapping[str, str]) -> None:
    # Before the port, which another sparkd of this machine has most often too.
    with machine_lock():
        listening = list(systemd.listeners) or [bind(config.host, config.port)]
        for inherited in systemd.listeners:
            _check_inherited(config, inherited, environ)
        store = Store(config.state_dir / FILE)
        try:
            await Daemon(config, options, systemd, store, listening, environ).run()
        finally:
            store.close()
            for each in listening:
                each.close()


class Daemon:
    """The parts and their order. Start: sockets, supervisor, Ray. Stop: no new leases, open requests, engines, Ray."""

    def __init__(
        self,
        config: Config,
        options: Options,
        systemd: Systemd,
        store: Store,
        listening: list[socket.socket],
        environ: Mapping[str, str],
    ) -> None:
        self._options = options
        self._systemd = systemd
        self._listening = listening
        self._environ = environ
        self._own_key, self._bench_key = secrets.token_hex(32), secrets.token_hex(32)
        probe_token = secrets.token_hex(32)
        self.base_url = _base_url(listening[0])
        self._own_client = GatewayClient(self.base_url, self._own_key, probe_token)
        self._boundary = Boundary(time.monotonic)
        rates = RateBook(config.state_dir)
        self._cluster = Cluster(config, environ, self._boundary, rates.proved)
        self._registry = Registry(config, store, time.monotonic, time.time, options.models)
        self._journal = Journal(store, time.time, self._boundary)
        protocol = client_connection(_limits(config))
        self._supervisor = Supervisor(
            self._registry,
            self._journal,
            self._cluster,
            ask=self._own_client.warm,
            boundary=self._boundary,
            outside=protocol.condition,
        )
        for name in options.models:
            self._supervisor.want(name, Want.RUNNING, "config")
        self._jobs = Jobs(self._journal, self._boundary)
        self._pulls = Pulls(self._cluster, self._journal, self._jobs, self._present)
        self._measures = Bandwidth(self._cluster, self._journal, self._jobs, self._present, self._supervisor.snapshot, rates)
        self._admin = SharedAnswer(self._boundary, math.inf)
        self._scraper = Scraper(self._engines, time.monotonic, self._boundary)
        self._requests = RequestLog(RequestStore(config.state_dir / FILE), keeps=config.request_log)
        self._live_page = Live(
            self._supervisor,
            self._registry,
            self._journal,
            self._cluster,
            self._scraper,
            rates.all,
            series=Series(config.state_dir / FILE),
            boundary=self._boundary,
        )
        # llama-benchy, which others wrote, gets the key that opens models alone.
        self._benches = Benches(self._supervisor, self._registry, self._jobs, self.base_url, (self._bench_key, self._own_key))
        self._edge = Edge(
            self._supervisor,
            admin=self._answer_admin,
            live=self._live,
            ready=self._ready,
            metrics_text=lambda: metrics.text(self._scraper.text()),
            settings=self._edge_settings(config),
            probe_token=probe_token,
            requests=self._requests,
        )
        self._server = gateway_server(self._edge, protocol, drain_s=config.unload_timeout_s, boundary=self._boundary)
        self._reloader = Reloader(
            config,
            systemd,
            load=self._load,
            judge=self._judge,
            take=self._take,
            refused=self._supervisor.note_refused,
        )
        self._ending, self._at_once = asyncio.Event(), asyncio.Event()
        self._stop_engines, self._ended = True, False
        needs_key = not self._edge.settings.keys.open
        lan_url = _lan_url(listening[0])
        self._console = Console(
            self.base_url,
            self._supervisor,
            self._own_client,
            needs_key=needs_key,
            has_page=config.web,
            lan_url=lan_url,
            models=options.models,
        )

    async def run(self) -> None:
        """Until a signal. A part that breaks ends the daemon in the same order; a supervised one lets go of the engines then."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._boundary.heard)
        self._catch_signals(loop)
        try:
            await self._serve_until_told(loop)
        except BaseException:
            if not self._ended:
                await self._stop_parts(stop_engines=not (self._options.leave_engines or self._systemd.supervised))
            raise

    async def _serve_until_told(self, loop: asyncio.AbstractEventLoop) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = self._boundary.spawn(tasks, "gateway", self._server.run_until_told(self._listening))
            parts: dict[str, Callable[[], Awaitable[None]]] = {
                "supervisor": self._supervisor.run,
                "cluster": partial(self._join_ray, loop),
                "scraper": self._scraper.run,
                "live": self._live_page.run,
                "jobs": self._jobs.run,
                "reloader": self._reloader.run,
                "requests": self._requests.run,
                "watchdog": self._keep_watchdog_quiet,
                "console": partial(self._console.run, self._options.ask),
            }
            background = [tasks.create_task(self._boundary.keep(name, work), name=name) for name, work in parts.items()]
            await self._ending.wait()
            await self._end(serving, background)

    async def _join_ray(self, loop: asyncio.AbstractEventLoop) -> None:
        """After what runs already was adopted: importing Ray and FastAPI takes two seconds of CPU that waiting requests would lose."""
        await self._supervisor.first_look(FIRST_LOOK_S)
        await self._admin_app()
        await self._cluster.run(lambda: self._joined(loop))

    def _joined(self, loop: asyncio.AbstractEventLoop) -> None:
        self._catch_signals(loop)
        if not gc.get_freeze_count():
            # The objects that stay are there now: 130,000 objects that would put off the collector's last pass until it has megabytes to
            # find.
            gc.collect()
            gc.freeze()

    async def _answer_admin(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._admin_app())(scope, receive, send)

    async def _admin_app(self) -> ASGIApp:
        """The admin API, built on a thread: at the latest when the first request for it comes."""
        return await self._admin.get("app", partial(asyncio.to_thread, self._build_admin))

    def _build_admin(self) -> ASGIApp:
        from sparkd.admin.app import Parts, admin_app

        if self._registry.config.web:
            page_files()  # reads and compresses them here, on a thread
        parts = Parts(
            pulls=self._pulls,
            reload=self._reloader.now,
            bandwidth=self._measures,
            requests=self._requests,
            live=self._live_page,
            benches=self._benches,
            jobs=self._jobs,
        )
        return admin_app(self._supervisor, self._registry, self._journal, self._cluster, parts)

    def _catch_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        """Again after Ray was joined: it puts handlers of its own in place."""
        loop.add_signal_handler(signal.SIGINT, self._end_soon, True)
        loop.add_signal_handler(signal.SIGTERM, self._end_soon, not (self._options.leave_engines or self._systemd.supervised))
        # A terminal that is closed sends it, too: clients and engines do not depend on who looks on.
        loop.add_signal_handler(signal.SIGHUP, self._reloader.ask)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            # Other daemons reopen their logs for them. Their default is the end of the process.
            loop.add_signal_handler(number, log.info, "%s means nothing to sparkd", number.name)

    def _end_soon(self, stop_engines: bool) -> None:
        """Once more means at once."""
        if self._ending.is_set():
            self._at_once.set()
            return
        self._stop_engines = stop_engines
        self._ending.set()

    async def _end(self, serving: asyncio.Task[None], background: Iterable[asyncio.Task[None]]) -> None:
        self._systemd.stopping("open requests may finish")
        self._console.say_ending(self._stop_engines, self._running(), self._registry.config.unload_timeout_s)
        # A client that has a connection already may ask a READY model: its engine stays.
        self._supervisor.drain(wholly=self._stop_engines)
        await self._server.finish(serving, self._at_once, self._running if self._stop_engines else None)
        await self._supervisor.finish_placing(PLACING_S)
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await self._stop_parts(stop_engines=self._stop_engines)
        self._console.say_ended(self._stop_engines)

    async def _stop_parts(self, *, stop_engines: bool) -> None:
        self._ended = True
        if stop_engines:
            with self._boundary.around("engines"):
                await self._end_engines()
        with self._boundary.around("requests"):
            await self._requests.close()
        with self._boundary.around("client"):
            await self._own_client.close()
        with self._boundary.around("cluster"):
            await self._cluster.close(stop_ray=stop_engines)

    async def _end_engines(self) -> None:
        """A second signal takes away the time that they have for it (engine.stop_timeout_s)."""
        loop = asyncio.get_running_loop()
        ends = self._boundary.spawn(loop, "engines", self._supervisor.stop_everything(at_once=self._at_once.is_set()))
        if not self._at_once.is_set():
            hurry = self._boundary.spawn(loop, "engines", self._at_once.wait())
            await asyncio.wait((ends, hurry), return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not ends.done():
                await self._supervisor.stop_everything(at_once=True)
        await ends

    def _running(self) -> int:
        return sum(model.in_flight for model in self._supervisor.snapshot().models.values())

    def _load(self) -> Config:
        path = self._options.config_path
        config = load_config(path, flags=self._options.flags, environ=self._environ)
        # An editor or a full disk has left nothing of it.
        ours = any(record.origin == "file" and record.spec for record in self._registry.records.values())
        if path is not None and ours and not config.models and not path.read_bytes().strip():
            raise ConfigError(f"{path} is empty, which would remove every model. Restore it; to remove them all, write `models: {{}}`.")
        # A file that has lost its keys must not open an address that others can reach.
        for listening in self._listening:
            _check_inherited(config, listening, self._environ)
        self._keys(config)
        return config

    async def _judge(self, config: Config) -> None:
        if specs := replaced(self._registry, config):
            await asyncio.to_thread(refuse_faulty, specs, config)

    def _take(self, config: Config) -> dict[str, list[str]]:
        self._edge.settings = self._edge_settings(config)
        self._requests.keeps = config.request_log
        self._server.set_limits(_limits(config))
        self._server.config.timeout_graceful_shutdown = config.unload_timeout_s
        logging.getLogger().setLevel(config.log_level.upper())
        self._cluster.reconfigure(config)
        return self._supervisor.reconfigure(config)

    async def _keep_watchdog_quiet(self) -> None:
        """Tell systemd READY once the supervisor has settled, then ping only while the loops of supervisor and gateway really turn: a
        gateway that cannot come back here may in a new process."""
        is_ready = False
        while True:
            if not is_ready and self._supervisor.snapshot().settled:
                self._systemd.ready("serving")
                is_ready = True
            is_live, _ = self._live()
            if is_live:
                self._systemd.watchdog()
            await asyncio.sleep(min(5.0 if is_ready else 1.0, self._systemd.ping_interval_s or 5.0))

    def _live(self) -> tuple[bool, dict[str, Any]]:
        ages = {"tick_age_s": self._supervisor.snapshot().tick_age_s, "gateway_tick_age_s": self._server.tick_age_s}
        return max(ages.values()) < LOOP_DEAD_S, {name: round(age_s, 3) for name, age_s in ages.items()}

    def _ready(self) -> tuple[bool, dict[str, Any]]:
        """Ready is: can serve or queue."""
        snapshot = self._supervisor.snapshot()
        facts = {
            "settled": snapshot.settled,
            "draining": snapshot.draining,
            "conditions": [str(condition) for condition in snapshot.conditions],
        }
        return snapshot.settled and not snapshot.draining, facts

    def _present(self) -> Config:
        return self._registry.config

    def _engines(self) -> list[tuple[str, str, Upstream]]:
        """(model, node, upstream) of every engine that serves."""
        ready = [record for record in self._registry.records.values() if record.state in SERVING]
        return [(record.name, record.attempt.node_id or "", record.upstream) for record in ready if record.upstream]

    def _edge_settings(self, config: Config) -> EdgeSettings:
        return EdgeSettings(
            keys=self._keys(config),
            metrics_need_key=config.metrics_need_key,
            include_aliases_in_list=config.include_aliases_in_list,
            page_origins=frozenset(origin.encode() for origin in config.cors.origins),
            web=config.web,
        )

    def _keys(self, config: Config) -> KeyDigests:
        ring = load_keys(config.keys, self._environ)
        for warning in ring.warnings:
            log.warning("%s", warning)
        if not ring.inference and not ring.admin:
            return KeyDigests()
        own, bench = digest(self._own_key), digest(self._bench_key)
        names = {**ring.inference, **ring.admin, own: OWN_NAME, bench: OWN_NAME}
        return KeyDigests((*ring.inference, own), (*ring.admin, bench), names)


def _limits(config: Config) -> ClientLimits:
    ours = config.limits
    connections = most_connections(ours.max_connections, descriptor_limit())
    requests, any_requests = most_requests(connections)
    return replace(
        ClientLimits(),
        header_bytes=ours.max_header_bytes,
        header_s=ours.header_timeout_s,
        body_bytes=ours.max_body_bytes,
        body_grace_s=ours.body_timeout_s,
        keep_alive_s=ours.keep_alive_s,
        client_write_s=ours.client_write_timeout_s,
        connections=connections,
        requests=requests,
        any_requests=any_requests,
        heartbeat_s=config.loading_heartbeat_s,
    )


def _allow_many_files(max_connections: int) -> None:
    """A request takes two descriptors, client and engine: the usual soft limit of 1024 would end near 500 streams."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = most_connections(max_connections, descriptor_limit())
    if most < max_connections:
        log.warning(
            "at most %d clients may be connected at one time, not max_connections: %d: this process may have %d open files. "
            "Raise its limit (LimitNOFILE=, ulimit -n).",
            *(most, max_connections, descriptor_limit()),
        )


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


@contextmanager
def _lock(state_dir: Path) -> Iterator[None]:
    """One daemon for each state directory. Raises StateError naming the process that holds it."""
    path, descriptor = state_dir / "lock", -1
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_file(path)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        _take(descriptor, state_dir)
    except OSError as error:
        raise StateError(
            f"The state directory {state_dir} cannot be used: {path}: {error.strerror}. Create it for this user, with free space on its "
            "disk, or give --state-dir."
        ) from None
    else:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _take(lock: int, state_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, LOCK_BYTES, 0).decode(errors="replace").strip() or "unknown"
        problem = f"Another sparkd (process {holder}) runs with the state directory {state_dir}"
        raise StateError(f"{problem}: stop it (`kill -INT {holder}`, as Ctrl-C does), or give --state-dir.") from None
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())


def _private_folder(path: Path) -> None:
    """The runtime folder, ours alone. It may lie in /tmp, where anybody could have put a folder of that name before."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        reason = f"The runtime directory {path} cannot be made: {error.strerror}."
        raise StateError(f"{reason} Set runtime_dir to a folder of this user.") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise StateError(f"The runtime directory {path} belongs to another user, or others can write to it: remove it, or set runtime_dir.")


def _check_inherited(config: Config, listening: socket.socket, environ: Mapping[str, str]) -> None:
    """The socket unit, not the configuration, says where systemd listens: the same rule about keys holds there."""
    check_bind(config.model_copy(update={"listen": _authority(*_numeric(listening.getsockname()))}), environ)


def _base_url(listening: socket.socket) -> str:
    """How this machine reaches its own gateway: a wildcard address is reached on loopback."""
    host, port = _numeric(listening.getsockname())
    return "http://" + _authority({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _lan_url(listening: socket.socket) -> str | None:
    """How other machines reach a gateway on a wildcard address: by the address of the default route. None where there is none."""
    host, port = _numeric(listening.getsockname())
    if host not in ("0.0.0.0", "::"):
        return None
    with socket.socket(listening.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if host == "::" else "192.0.2.1", 9))  # of documentation; a datagram socket sends nothing for it
        except OSError:
            return None
        return "http://" + _authority(_numeric(probe.getsockname())[0], port)


def _numeric(address: Any) -> tuple[str, str]:
    """Host and port, with the interface of a link-local address."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)


def _authority(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
