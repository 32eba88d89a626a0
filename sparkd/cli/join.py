"""The verbs `join`, `leave` and `token`: how a second Spark comes to a head and goes again. Never starts an engine, needs no daemon."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkd.cli.options import CommonOptions, Json, argument, option
from sparkd.cli.serve import ConfigFile, config_path
from sparkd.errors import ConfigError, Conflict, RayUnavailable, StateError
from sparkd.execution.as_owner import as_owner, refuse_another_users
from sparkd.render.page import say_json
from workers.host import processes
from workers.host.interpreter import inherited_environment
from workers.host.processes import Identity

if TYPE_CHECKING:
    from sparkd.cluster.membership import Joined
    from sparkd.config.config import Config
    from sparkd.fabric.interfaces import Fabric

UNIT = "sparkd-ray.service"
SYSTEM_TOKEN = Path("/etc/sparkd/ray.token")
SYSTEMCTL_TIMEOUT_S = 180.0
AGAIN_S = 2.0
LEAVE_TIMEOUT_S = 30.0
MAX_TOKEN_CHARS = 512

StateDir = Annotated[Path | None, option("--state-dir", metavar="DIR", help="Folder for state that survives a reboot.")]


def register(app: typer.Typer) -> None:
    app.command("join")(join)
    app.command("leave")(leave)
    app.command("token")(token)


def join(
    ctx: typer.Context,
    head: Annotated[str, argument(metavar="HEAD", help="Host or host:port of the head; default port 6379.")],
    token: Annotated[
        str | None, option("--token", metavar="-|FILE|TOKEN", help="- reads stdin. Every user can read a token typed here.")
    ] = None,
    node_ip: Annotated[
        str | None, option("--node-ip", metavar="IP", help="Address of this node; default: the one that reaches HEAD.")
    ] = None,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    foreground: Annotated[bool, option("--foreground", help="Run until Ctrl-C even if the systemd unit is installed.")] = False,
    json: Json = False,
) -> None:
    """Join this node to the head of a cluster.

    The node then runs Ray and its agent, and nothing else. As root, with sparkd's systemd units installed, the unit sparkd-ray keeps it
    joined, also after a reboot. Otherwise it stays joined until Ctrl-C. `sparkd token` on the head prints the command; `sparkd leave`
    undoes it. Without --token, asks for the token unless this node had joined that head before.
    """
    from sparkd.cluster import membership
    from sparkd.cluster.head_probe import ask_head, clock_doubt, find_head
    from sparkd.cluster.join_route import way_to
    from sparkd.render import models as show

    loaded, err = _loaded(config, state_dir), show.terminal(stderr=True)
    target = find_head(head)
    if loaded.cluster.address not in (None, target.address):
        raise ConfigError(f"cluster.address is {loaded.cluster.address}: take it out of the file, or join that head.")
    if daemon := as_owner(loaded.state_dir, lambda: _daemon(loaded)):
        raise Conflict(
            f"This node runs its own daemon (process {daemon}). Run `sparkd unload --all`, then end it; a service by `systemctl "
            "disable --now sparkd.socket sparkd.service`."
        )
    before = _joined(loaded)
    if before is not None and _keeper(before) is not None:
        raise Conflict(f"Process {before.pid} keeps this node in the cluster of {before.address}: end it by `sparkd leave` first.")
    units = not foreground and _has_units(loaded)
    if not units:
        refuse_another_users(loaded.state_dir)
    token_file = membership.token_path(loaded) if before is not None and before.address == target.address else None
    secret = _token(token, token_file)
    way = way_to(target.host, target.routed, _fabric(), node_ip)
    with tempfile.TemporaryDirectory(prefix="sparkd-join-") as folder:
        trial = Path(folder) / "token"
        trial.touch(mode=0o600)
        trial.write_text(secret)
        clocks = clock_doubt(ask_head(target, trial, way.node_ip))
    as_json = json or (ctx.find_root().obj or CommonOptions()).json
    answer = {"address": target.address, "node": way.node_ip, "why": way.why, "warnings": [*way.doubts, *filter(None, [clocks])]}
    err.print(way.why, markup=False)
    for doubt in (*way.doubts, *filter(None, [clocks])):
        err.print(f"warn: {doubt}", style="yellow", markup=False)
    as_owner(loaded.state_dir, lambda: membership.keep_token(loaded, secret))
    if units:
        earlier = before if before is not None and before.unit else None
        enabled = earlier.enabled if earlier else _systemctl("is-enabled", UNIT)
        active = earlier.active if earlier else _systemctl("is-active", UNIT)
        record = membership.Joined(target.address, way.node_ip, True, enabled, active)
        as_owner(loaded.state_dir, lambda: membership.keep(loaded, record))
        if not (_systemctl("enable", UNIT) and _systemctl("restart", UNIT)):
            raise RayUnavailable(f"The unit {UNIT} did not start and is tried again; `journalctl -u {UNIT}` shows the reason.")
        how = f"{UNIT} keeps it joined. `sparkd leave` undoes it."
        err.print(f"This node has joined {target.address} as {way.node_ip}; {how}", markup=False)
        if as_json:
            say_json({**answer, "unit": UNIT})
        return
    record = membership.Joined(target.address, way.node_ip)
    if me := processes.identity(os.getpid()):
        record = replace(record, pid=me.pid, start_ticks=me.start_ticks, boot_id=me.boot_id)
    membership.keep(loaded, record)
    err.print(f"This node joins {target.address} as {way.node_ip}, until Ctrl-C.", markup=False)
    if as_json:
        say_json({**answer, "unit": None})
    _stay(loaded, way.node_ip)


def leave(ctx: typer.Context, config: ConfigFile = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Take this node out of its cluster.

    Ends Ray and the ranks of models on this node. The head loads those models elsewhere if they fit. The systemd unit returns to its state
    before `sparkd join`.
    """
    # Imported before the work is another user's.
    from sparkd.cluster import membership
    from sparkd.render import models as show

    loaded, out = _loaded(config, state_dir), show.terminal()
    joined = _joined(loaded)
    if joined is None:
        raise ConfigError(f"This node has joined no cluster: there is no {loaded.state_dir / membership.RECORD}.")
    as_owner(loaded.state_dir, lambda: _interrupt(joined))
    # The record is the word of who can write there: only that of the system's folder speaks of the system's unit.
    unit = joined.unit and _has_units(loaded)
    if unit:
        _systemctl("stop", UNIT)
    as_owner(loaded.state_dir, lambda: _end(loaded, joined.node_ip))
    if unit:
        if not joined.enabled:
            _systemctl("disable", UNIT)
        if joined.active:
            _systemctl("start", UNIT)
    if json or (ctx.find_root().obj or CommonOptions()).json:
        say_json({"address": joined.address, "node": joined.node_ip})
    else:
        out.print(f"This node has left {joined.address}.", markup=False)


def token(
    ctx: typer.Context,
    config: ConfigFile = None,
    state_dir: StateDir = None,
    quiet: Annotated[bool, option("-q", "--quiet", help="Print the token only.")] = False,
    json: Json = False,
) -> None:
    """Print the token and the command to join this head.

    `sparkd token -q | ssh NODE sudo sparkd join HEAD --token -` joins NODE in one go. Anyone who has the token can run programs on every
    node.
    """
    loaded = _loaded(config, state_dir)
    address = _offered_address(loaded, config_path(config, os.environ, alone=state_dir is None))
    path = _token_file(loaded)
    try:
        secret = as_owner(path.parent, path.read_text).strip()
    except StateError as error:
        raise ConfigError(f"The token cannot be read: {error.clause}. Start sparkd once, then run this as root.") from None
    command = f"sparkd join {address} --token -"
    if json or (ctx.find_root().obj or CommonOptions()).json:
        say_json({"address": address, "command": command, "token": secret})
    elif quiet:
        sys.stdout.write(f"{secret}\n")
    else:
        sys.stdout.write(f"On the other node run this, and paste the token:\n\n  sudo {command}\n\n{secret}\n\n")
        sys.stdout.write(f"Or from here:  sparkd token -q | ssh NODE sudo {command}\n")


def _loaded(config: Path | None, state_dir: Path | None) -> Config:
    from sparkd.config.config import load_config

    return load_config(config_path(config, os.environ, alone=state_dir is None), flags={"state_dir": state_dir}, environ=os.environ)


def _token(token: str | None, token_file: Path | None) -> str:
    """From stdin, a file, the command line, what an earlier join left, or a question. Raises ConfigError, never with it."""
    if token == "-":
        text = sys.stdin.readline(MAX_TOKEN_CHARS + 1)
    elif token is not None and _is_file(token):
        with Path(token).open() as file:
            text = file.readline(MAX_TOKEN_CHARS + 1)
    elif token is not None:
        if "/" in token:
            raise ConfigError("--token names a file that is not there.")
        from sparkd.render import models as show

        show.terminal(stderr=True).print(
            "warn: every user of this node can read command lines: use --token - or a file instead.", style="yellow"
        )
        text = token
    elif token_file is not None and token_file.is_file():
        text = token_file.read_text()
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


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False  # longer than a path may be


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
    from sparkd.config.config import is_loopback

    if (joined := _joined(config)) is not None:
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
        with suppress(OSError):
            if SYSTEM_TOKEN.read_bytes().strip():
                return SYSTEM_TOKEN
    return config.token_path(os.environ)


def _has_units(config: Config) -> bool:
    """Whether root is to hand this node over to the systemd unit."""
    from sparkd.config.config import STATE_DIR

    return os.geteuid() == 0 and config.state_dir == STATE_DIR and Path("/run/systemd/system").is_dir() and _systemctl("cat", UNIT)


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


def _systemctl(*words: Any) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["systemctl", "--quiet", *words]
        null, environ = subprocess.DEVNULL, inherited_environment(os.environ)
        done = subprocess.run(command, stdin=null, capture_output=True, timeout=SYSTEMCTL_TIMEOUT_S, env=environ, check=False)
        return done.returncode == 0
    return False


def _joined(config: Config) -> Joined | None:
    from sparkd.cluster import membership

    return as_owner(config.state_dir, lambda: membership.read(config))


def _interrupt(joined: Joined) -> None:
    """End the `sparkd join` that keeps this node, if it lives. Raises RayUnavailable where it does not end."""
    keeper = _keeper(joined)
    if keeper is None:
        return
    # Another user's process is not signalled, and not waited for.
    if not processes.wait_gone([keeper], timeout_s=LEAVE_TIMEOUT_S if processes.send(keeper, signal.SIGINT) else 0.0):
        raise RayUnavailable(f"The `sparkd join` of this node, process {joined.pid}, does not end: kill it, then run `sparkd leave` again.")


def _keeper(joined: Joined) -> Identity | None:
    """The recorded process, if it lives."""
    keeper = Identity(joined.pid, joined.start_ticks, joined.boot_id)
    return keeper if processes.is_alive(keeper) else None
