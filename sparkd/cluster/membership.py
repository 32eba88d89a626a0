"""Owns what a node remembers of the head that it joined: the address, its own address, the token. Never talks to the head, starts nothing.

Both files lie in the state folder, so that `sparkd ray-node` joins again after a restart, whatever its configuration file says of a head.
"""

from __future__ import annotations

import ipaddress
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from sparkd.config.config import Config
from sparkd.errors import ConfigError, StateError
from workers.host.private_files import write_private

RECORD = "join.json"
TOKEN = "join.token"


@dataclass(frozen=True, slots=True)
class Joined:
    """address: the head's, host:port. node_ip: this node's address in the cluster. unit: whether the systemd unit keeps Ray here; enabled
    and active: what the unit was before. pid, start_ticks, boot_id: the `sparkd join` that keeps it otherwise, as in
    workers.host.processes.Identity."""

    address: str
    node_ip: str
    unit: bool = False
    enabled: bool = False
    active: bool = False
    pid: int = 0
    start_ticks: int = 0
    boot_id: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError for a node_ip that is no address: the ranks' folder is named after it."""
        texts, numbers = (self.address, self.node_ip, self.boot_id), (self.pid, self.start_ticks)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int) for number in numbers):
            raise ValueError("a text or a number is expected")
        ipaddress.ip_address(self.node_ip)


def read(config: Config) -> Joined | None:
    """The record of the head that this node has joined, None where it has joined none. Raises StateError for an unreadable record."""
    path = config.state_dir / RECORD
    try:
        return Joined(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        if isinstance(error, OSError):
            raise StateError(f"{path} cannot be read: {error.strerror}. Run it as root (sudo sparkd ...).") from None
        raise StateError(f"{path} is damaged. Remove it, then run `sparkd join HEAD` again.") from None


def applied(config: Config) -> Config:
    """The configuration of a node that has joined: the head, this node's address and the token are those of `sparkd join`."""
    joined = read(config)
    if joined is None:
        return config
    configured = config.cluster.address
    if configured is not None and configured != joined.address:
        raise ConfigError(
            f"cluster.address is {configured} and this node has joined {joined.address}: run `sparkd leave`, or remove the key."
        )
    changes = {"address": joined.address, "node_ip": joined.node_ip, "token_file": token_path(config)}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def token_path(config: Config) -> Path:
    """The head's token; a file of its own, so that this node's own one is there again after `sparkd leave`."""
    return config.state_dir / TOKEN


def keep_token(config: Config, token: str) -> None:
    _write(token_path(config), token)


def keep(config: Config, joined: Joined) -> None:
    _write(config.state_dir / RECORD, json.dumps(asdict(joined)) + "\n")


def forget(config: Config) -> None:
    for name in (RECORD, TOKEN):
        with suppress(FileNotFoundError):
            (config.state_dir / name).unlink()


def _write(path: Path, text: str) -> None:
    """For this user alone. Raises StateError."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, text)
    except OSError as error:
        problem = (
            f"{path} cannot be written: {error.strerror}. Run it as root (sudo sparkd ...), or give a folder of this user by --state-dir."
        )
        raise StateError(problem) from None
