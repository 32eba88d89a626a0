"""The record of a node that joined a head: the head's address, its own address, the token.

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
from workers.host import processes
from workers.host.private_files import write_private
from workers.host.processes import Identity

RECORD = "join.json"
TOKEN = "join.token"


@dataclass(frozen=True, slots=True)
class Membership:
    """A node's place in a cluster.

    address: the head's, host:port
    node_ip: this node's address in the cluster
    pid, start_ticks, boot_id: the `sparkd join` that keeps it, as in workers.host.processes.Identity; zero where a systemd unit does
    """

    address: str
    node_ip: str
    pid: int = 0
    start_ticks: int = 0
    boot_id: str = ""

    @property
    def keeper(self) -> Identity | None:
        """The recorded `sparkd join`, if it lives."""
        keeper = Identity(self.pid, self.start_ticks, self.boot_id)
        return keeper if processes.is_alive(keeper) else None


def read(config: Config) -> Membership | None:
    """The head that this node has joined, None where it has joined none. Raises StateError for an unreadable record."""
    path = config.state_dir / RECORD
    try:
        raw = json.loads(path.read_text())
        # Earlier releases wrote more.
        membership = Membership(**{name: raw[name] for name in Membership.__slots__ if name in raw})
        # The ranks' folder is named after it.
        ipaddress.ip_address(membership.node_ip)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}. Run it as the user of that folder (sudo -u USER sparkd ..).") from None
    except (TypeError, ValueError):
        raise StateError(f"{path} is damaged. Remove it, then run `sparkd join HEAD` again.") from None
    return membership


def applied(config: Config) -> Config:
    """The configuration of a node that has joined: the head, this node's address and the token are those of `sparkd join`."""
    membership = read(config)
    if membership is None:
        return config
    configured = config.cluster.address
    if configured is not None and configured != membership.address:
        raise ConfigError(
            f"cluster.address is {configured} and this node has joined {membership.address}: run `sparkd leave`, or remove the key."
        )
    changes = {"address": membership.address, "node_ip": membership.node_ip, "token_file": token_path(config)}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def token_path(config: Config) -> Path:
    """The head's token; a file of its own, so that this node's own one is there again after `sparkd leave`."""
    return config.state_dir / TOKEN


def keep(config: Config, membership: Membership, token: str) -> None:
    """Write both files, for this user alone. Raises StateError."""
    try:
        config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(token_path(config), token)
        write_private(config.state_dir / RECORD, json.dumps(asdict(membership)) + "\n")
    except OSError as error:
        problem = f"{config.state_dir} cannot be written: {error.strerror}."
        raise StateError(f"{problem} Run it as the user of that folder (sudo -u USER sparkd ..), or name another by --state-dir.") from None


def forget(config: Config) -> None:
    for name in (RECORD, TOKEN):
        with suppress(FileNotFoundError):
            (config.state_dir / name).unlink()
