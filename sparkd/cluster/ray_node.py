"""`sparkd ray-node`: keeps this node's part of Ray in the foreground, for a service manager."""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from sparkd.capacity.requirement import offered_gib
from sparkd.cluster import membership
from sparkd.cluster.machine_lock import machine_lock
from sparkd.cluster.node_paths import rank_folders, remove_empty
from sparkd.cluster.ray_head import LOOPBACK, RayHead, RayOptions, is_here
from sparkd.config.config import Config
from sparkd.errors import ConfigError, RayUnavailable, StateError
from sparkd.systemd import Systemd
from workers.rank import lifecycle

LAST_WORDS = 5

log = logging.getLogger("sparkd.raynode")


def run_node(config: Config, environ: Mapping[str, str], *, again_s: float | None = None) -> None:
    """Start Ray and wait. Returns after SIGTERM or SIGINT, once Ray has ended.

    again_s: start it again so long after it ended by itself, where no service manager does. Raises ConfigError for an address that cannot
    be used, StateError for a runtime folder that cannot be made or a machine that another sparkd lends, RayUnavailable where Ray does
    not start, or ends by itself and again_s is None.
    """
    environ = dict(environ)
    systemd = Systemd.take()
    ray = node_of(membership.applied(config), environ)
    runtime = config.runtime_path
    try:
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"The runtime directory {runtime} cannot be made: {error.strerror}."
        raise StateError(f"{problem} Set runtime_dir to a folder of this user, on a disk with free space.") from None
    try:
        # The head's daemon books a joined node's memory; on the head's own node the daemon itself holds the machine.
        with machine_lock() if ray.options.join else nullcontext():
            _run(ray, systemd, again_s)
    finally:
        remove_empty(runtime)


def _run(ray: RayHead, systemd: Systemd, again_s: float | None) -> None:
    with _ending() as ended:
        dead = _live(ray, ended, systemd)
        while dead and again_s is not None:
            log.warning("Ray's %s ended by itself; it is started again", dead)
            if select.select([ended], [], [], again_s)[0]:
                break
            try:
                dead = _live(ray, ended, systemd)
            except RayUnavailable as error:
                log.warning("%s", error.message)
    if dead and again_s is None:
        raise RayUnavailable(f"Ray's {dead} ended by itself; the service manager starts it again.")
    log.info("Ray has ended")


def end_ranks(run_dir: Path, grace_s: float) -> list[str]:
    """End every rank of a node that leaves the cluster. Returns the model names of the ranks that did not end."""
    left = []
    for fact in lifecycle.scan(str(run_dir)):
        if lifecycle.stop({"rank_id": fact["rank_id"]}, run_dir=str(run_dir), grace_s=grace_s)["gone"]:
            lifecycle.forget(fact["rank_id"], str(run_dir))
            (run_dir / f"{fact['rank_id']}.key").unlink(missing_ok=True)
        else:
            left.append(str((fact["handle"] or {}).get("model", fact["rank_id"])))
    return left


def forget_folder(run_dir: Path) -> None:
    """Remove what the node's agent keeps there beside its ranks, and the folder itself where nothing else is in it: once all of it has
    ended."""
    shutil.rmtree(run_dir / "plugin", ignore_errors=True)
    with suppress(OSError):
        (run_dir / "guard.lock").unlink(missing_ok=True)
        run_dir.rmdir()


def node_of(config: Config, environ: Mapping[str, str]) -> RayHead:
    """The head where cluster.address is null or names this machine, else a node that joins the head there."""
    cluster, join, node_ip, port = config.cluster, None, config.cluster.node_ip or LOOPBACK, config.cluster.port
    if cluster.address is not None:
        host, _, number = cluster.address.rpartition(":")
        host = host.strip("[]")
        if is_here(host):
            node_ip, port = cluster.node_ip or host, int(number)
        elif cluster.node_ip is None:
            raise ConfigError(
                "cluster.node_ip is missing: a node that joins another needs its own address on the cable between them. "
                "`sparkd join HEAD` finds it."
            )
        else:
            join = cluster.address
    token_path = config.token_path(environ)
    if join and not token_path.is_file():
        raise ConfigError(
            f"Ray's token {token_path} is missing: run `sparkd join HEAD`, or copy the head's file there, or name it by cluster.token_file."
        )
    return RayHead(
        RayOptions(
            config.runtime_path,
            token_path,
            node_ip=node_ip,
            port=port,
            memory_gib=offered_gib(config),
            object_store_mib=cluster.object_store_memory_mib,
            join=join,
            keeper=True,
            rank_folders=rank_folders(config, node_ip),
        )
    )


def _live(ray: RayHead, ended: int, systemd: Systemd) -> str | None:
    """From Ray's start to its end: None where a signal ended it, else the name of what ended by itself."""
    try:
        address = ray.ensure()
        log.info("Ray runs at %s", address)
        systemd.ready(f"Ray at {address}")
        dead = _wait(ray, ended)
        if dead:
            _log_last_words(ray, dead)
    finally:
        systemd.stopping("Ray ends; engines stay")
        ray.stop()
        if not systemd.supervised:
            ray.forget()
    return dead


def _log_last_words(ray: RayHead, name: str) -> None:
    """Ray's own files go with its folder, so what they end with goes into our log."""
    for suffix in ("err", "out"):
        try:
            text = (ray.folder / "session_latest" / "logs" / f"{name}.{suffix}").read_text(errors="replace")
        except OSError:
            continue
        for line in [line for line in text.splitlines() if line.strip()][-LAST_WORDS:]:
            log.error("%s wrote: %s", name, line[:500])


@contextmanager
def _ending() -> Iterator[int]:
    """A descriptor that becomes readable with SIGTERM or SIGINT. A second one does not hurry: Ray must be gone at the end."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def note(number: int, frame: FrameType | None) -> None:
        os.write(writable, b"x")

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield readable
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(readable)
        os.close(writable)


def _wait(ray: RayHead, ended: int) -> str | None:
    """Sleep until a signal comes (None) or one of Ray's essential processes dies (its name). No polling: an idle node stays idle."""
    poll, names = select.poll(), {}
    poll.register(ended, select.POLLIN)
    try:
        for name, pid in ray.essential().items():
            try:
                watched = os.pidfd_open(pid)
            except ProcessLookupError:
                return name
            names[watched] = name
            poll.register(watched, select.POLLIN)
        if ray.living_address() is None:
            return "raylet"
        fired = {descriptor for descriptor, _ in poll.poll()}
        return None if ended in fired else names[min(fired)]
    finally:
        for watched in names:
            os.close(watched)
