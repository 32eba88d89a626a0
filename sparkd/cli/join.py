"""The verbs `join`, `leave` and `token`: how a second Spark comes to a head and goes again."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkd.cli.config_file import config_path
from sparkd.cli.folder_owner import refuse_another_users
from sparkd.cli.options import StateDir, argument, option
from sparkd.cli.serve import ConfigFile
from sparkd.cli.session import Session, verb
from sparkd.errors import ConfigError, Conflict, RayUnavailable, StateError
from sparkd.render.page import say_json
from workers.host import processes

if TYPE_CHECKING:
    from sparkd.cluster.membership import Membership
    from sparkd.config.config import Config
    from sparkd.fabric.interfaces import Fabric

SYSTEM_TOKEN = Path("/etc/sparkd/ray.token")
SYSTEMD = Path("/run/systemd/system")
# By these systemd keeps a node in its cluster, and lets it go.
STAY = "sudo systemctl enable sparkd-ray && sudo systemctl restart sparkd-ray"
GO = "sudo systemctl disable --now sparkd-ray"
AGAIN_S = 2.0
LEAVE_TIMEOUT_S = 30.0
MAX_TOKEN_CHARS = 512


def register(app: typer.Typer) -> None:
    for function in (join, leave, token):
        app.command(function.__name__)(verb(function, daemon=False))


def join(
    session: Session,
    head: Annotated[str, argument(metavar="HEAD", help="Host or host:port of the head; default port 6379.")],
    token: Annotated[str | None, option("--token", metavar="-|FILE", help="The head's token; - reads stdin.")] = None,
    node_ip: Annotated[
        str | None, option("--node-ip", metavar="IP", help="Address of this node; default: the one that reaches HEAD.")
    ] = None,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    foreground: Annotated[bool, option("--foreground", help="Run until Ctrl-C even if the systemd unit is installed.")] = False,
) -> None:
    """Join this node to the head of a cluster.

    The node then runs Ray and its agent, and nothing else. As the user of sparkd's systemd units (`sudo -u sparkd`), it notes the head for
    the unit sparkd-ray, and prints how to start that, which keeps the node joined after a reboot too. Otherwise the node stays joined until
    Ctrl-C. `sparkd token` on the head prints the command; `sparkd leave` undoes it. Without --token, asks for the token unless this node
    had joined that head before.
    """
    from sparkd.cluster import membership
    from sparkd.cluster.head_probe import ask_head, find_head
    from sparkd.cluster.join_route import route_to
    from sparkd.cluster.machine_lock import machine_lock
    from sparkd.config.config import STATE_DIR

    loaded, err = _loaded(config, state_dir), session.err
    refuse_another_users(loaded.state_dir)
    target = find_head(head)
    if loaded.cluster.address not in (None, target.address):
        raise ConfigError(f"cluster.address is {loaded.cluster.address}: take it out of the file, or join that head.")
    if daemon := _daemon(loaded):
        raise Conflict(
            f"This node runs its own daemon (process {daemon}). Run `sparkd unload --all`, then end it; a service by `systemctl "
            "disable --now sparkd.socket sparkd.service`."
        )
    before = membership.read(loaded)
    if before is not None and before.keeper is not None:
        raise Conflict(f"Process {before.pid} keeps this node in the cluster of {before.address}: end it by `sparkd leave` first.")
    secret = _token(token, membership.token_path(loaded) if before is not None and before.address == target.address else None)
    route = route_to(target.host, target.routed, _fabric(), node_ip)
    with tempfile.TemporaryDirectory(prefix="sparkd-join-") as folder:
        trial = Path(folder) / "token"
        trial.touch(mode=0o600)
        trial.write_text(secret)
        ask_head(target, trial, route.node_ip)
    warnings = [] if route.warning is None else [route.warning]
    err.print(route.why, markup=False)
    for warning in warnings:
        err.print(f"warn: {warning}", style="yellow", markup=False)
    by_unit = not foreground and loaded.state_dir == STATE_DIR and SYSTEMD.is_dir()
    if not by_unit:
        # Another sparkd of this machine would be ended by the end of this one.
        with machine_lock():
            pass
    me = None if by_unit else processes.identity(os.getpid())
    keeper = me or processes.Identity(0, 0, "")
    record = membership.Membership(target.address, route.node_ip, keeper.pid, keeper.start_ticks, keeper.boot_id)
    membership.keep(loaded, record, secret)
    how = f"once this runs: {STAY}" if by_unit else "until Ctrl-C."
    err.print(f"This node joins {target.address} as {route.node_ip}, {how}", markup=False)
    if session.json:
        say_json(
            {"address": target.address, "node": route.node_ip, "why": route.why, "warnings": warnings, "next": STAY if by_unit else None}
        )
    if not by_unit:
        _stay(loaded, route.node_ip)


def leave(session: Session, config: ConfigFile = None, state_dir: StateDir = None) -> None:
    """Take this node out of its cluster.

    Ends Ray and the ranks of models on this node. The head loads those models elsewhere if they fit. Where the systemd unit sparkd-ray
    keeps the node joined, stop the unit first: `sudo systemctl disable --now sparkd-ray`.
    """
    from sparkd.cluster import membership
    from sparkd.cluster.machine_lock import machine_lock

    loaded = _loaded(config, state_dir)
    refuse_another_users(loaded.state_dir)
    joined = membership.read(loaded)
    if joined is None:
        raise ConfigError(f"This node has joined no cluster: there is no {loaded.state_dir / membership.RECORD}.")
    _interrupt(joined)
    try:
        with machine_lock():
            _end(loaded, joined.node_ip)
    except StateError as error:
        raise Conflict(f"This node still runs Ray for {joined.address}: `{GO}`, then run `sparkd leave` again. {error.message}") from None
    session.answer({"address": joined.address, "node": joined.node_ip}, f"This node has left {joined.address}.")


def token(
    session: Session,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    quiet: Annotated[bool, option("-q", "--quiet", help="Print the token only.")] = False,
) -> None:
    """Print the token and the command to join this head.

    `sparkd token -q | ssh NODE sudo -u sparkd sparkd join HEAD --token -` brings the token to NODE. Anyone who has the token can run
    programs on every node.
    """
    loaded = _loaded(config, state_dir)
    path = _token_file(loaded)
    refuse_another_users(path.parent)
    address = _offered_address(loaded, config_path(config, os.environ, alone=state_dir is None))
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"The token cannot be read: {error.strerror}. Start sparkd once, then run this as root or its user.") from None
    command = f"sparkd join {address} --token -"
    text = (
        f"On the other node run this, and paste the token:\n\n  sudo -u sparkd {command}\n\n{secret}\n\n"
        f"Or from here:  sparkd token -q | ssh NODE sudo -u sparkd {command}"
    )
    # Not folded, so that it can be copied as it stands.
    session.answer({"address": address, "command": command, "token": secret}, lambda: sys.stdout.write(f"{secret if quiet else text}\n"))


def _loaded(config: Path | None, state_dir: Path | None) -> Config:
    from sparkd.config.config import load_config

    return load_config(config_path(config, os.environ, alone=state_dir is None), flags={"state_dir": state_dir}, environ=os.environ)


def _token(token: str | None, token_file: Path | None) -> str:
    """From stdin, a file, what an earlier join left, or a question. Raises ConfigError, never with it."""
    file = Path(token) if token is not None else token_file
    if token == "-":
        text = sys.stdin.readline(MAX_TOKEN_CHARS + 1)
    elif file is not None:
        try:
            with file.open() as lines:
                text = lines.readline(MAX_TOKEN_CHARS + 1)
        except (OSError, ValueError):
            raise ConfigError(
                "--token names a file that cannot be read: give - (stdin) or a file; every user can read a command line."
            ) from None
    elif sys.stdin.isatty():
        text = str(typer.prompt("Token of the head (`sparkd token` there)", hide_input=True, err=True))
    else:
        raise ConfigError(
            "The head's token is missing. Run `sparkd token` on the head, and give the token by --token - (stdin) or --token FILE."
        )
    token = text.strip()
    if not (16 <= len(token) <= MAX_TOKEN_CHARS and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("The input is not a token: `sparkd token` on the head prints one, a line of 64 hexadecimal digits.")
    return token


def _fabric() -> Fabric | None:
    from sparkd.fabric.interfaces import fabric_of
    from workers.host.network import sample

    try:
        raw = sample()
    except OSError:
        return None
    return None if raw["trouble"] else fabric_of(str(raw["host"]), raw)


def _stay(config: Config, node_ip: str) -> None:
    """Until Ctrl-C; then nothing of it is left."""
    from sparkd.cluster.ray_node import run_node
    from sparkd.daemon import logs

    logs.set_up(config.log_level, None)
    logging.getLogger("sparkd").setLevel(config.log_level.upper())
    try:
        run_node(config, os.environ, again_s=AGAIN_S)
    finally:
        _end(config, node_ip)


def _end(config: Config, node_ip: str) -> None:
    """Remove what is left once Ray has ended: ranks, which no agent would watch any more, and the files."""
    from sparkd.cluster import membership
    from sparkd.cluster.node_paths import rank_folders
    from sparkd.cluster.ray_node import end_ranks, forget_folder, node_of

    run_dir = rank_folders(config, node_ip)[0]
    with suppress(ConfigError):
        ray = node_of(membership.applied(config), os.environ)
        ray.stop()
        ray.forget()
    left = end_ranks(run_dir, float(config.engine.stop_timeout_s))
    membership.forget(config)
    if not left:
        forget_folder(run_dir)
    else:
        raise RayUnavailable(f"Processes of {', '.join(left)} do not end even after SIGKILL: if they stay, this node must be rebooted.")


def _offered_address(config: Config, path: Path | None) -> str:
    """host:port under which others reach this head. Raises ConfigError with what to write where there is none yet."""
    from sparkd.cluster import membership
    from sparkd.config.config import is_loopback

    if (joined := membership.read(config)) is not None:
        raise ConfigError(f"This node has joined {joined.address}: run `sparkd token` there.")
    if config.cluster.address is not None:
        from sparkd.cluster.ray_head import is_here

        if not is_here(config.cluster.address.rpartition(":")[0].strip("[]")):
            raise ConfigError(f"This node joins {config.cluster.address}: run `sparkd token` there.")
        return config.cluster.address
    node_ip, port = config.cluster.node_ip, config.cluster.port
    if node_ip is not None and not is_loopback(node_ip) and port:
        return f"{node_ip}:{port}"
    if running := _running_address(config):
        return running
    from sparkd.cluster.head_probe import PORT

    rail = _own_rail() if node_ip is None or is_loopback(node_ip) else (node_ip, "")
    settings = f"cluster: {{node_ip: {rail[0] if rail else 'THIS NODE ON THE CABLE'}, port: {port or PORT}}}"
    from_where = f" {rail[0]} is {rail[1]}'s." if rail and rail[1] else ""
    raise ConfigError(
        f"No node can join yet, because Ray listens on {'a port of its own choice' if rail and not rail[1] else 'loopback only'}: put "
        f"`{settings}` into {path or 'sparkd.yaml'}, then restart Ray and the daemon (systemctl restart sparkd-ray sparkd).{from_where}"
    )


def _running_address(config: Config) -> str | None:
    """Where the Ray that runs here listens for others: its daemon may have another configuration file than was named here."""
    from sparkd.cluster.ray_head import living_head
    from sparkd.config.config import is_loopback

    address = living_head(config.runtime_path)
    return None if address is None or is_loopback(address.rpartition(":")[0].strip("[]")) else address


def _own_rail() -> tuple[str, str] | None:
    fabric = _fabric()
    twins = [twin for twin in (fabric.twins if fabric else ()) if twin.linked and twin.addresses]
    return (str(twins[0].addresses[0].ip), twins[0].name) if twins else None


def _token_file(config: Config) -> Path:
    """The file with the token, as for the units, to which systemd passes the system's file as a credential."""
    from sparkd.config.config import STATE_DIR

    if config.cluster.token_file is None and config.state_dir == STATE_DIR:
        with suppress(FileNotFoundError):
            if SYSTEM_TOKEN.stat().st_size > 1:
                return SYSTEM_TOKEN
    return config.token_path(os.environ)


def _daemon(config: Config) -> str:
    """The process id of the daemon whose state folder this is; empty where none runs."""
    try:
        with open(config.state_dir / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (config.state_dir / "lock").read_text().strip() or "unknown"
    except OSError:
        pass
    return ""


def _interrupt(joined: Membership) -> None:
    """End the `sparkd join` that keeps this node, if it lives. Raises RayUnavailable where it does not end."""
    keeper = joined.keeper
    if keeper is None:
        return
    # Another user's process is not signalled, and not waited for.
    if not processes.wait_gone([keeper], timeout_s=LEAVE_TIMEOUT_S if processes.send(keeper, signal.SIGINT) else 0.0):
        raise RayUnavailable(f"The `sparkd join` of this node, process {joined.pid}, does not end: kill it, then run `sparkd leave` again.")
