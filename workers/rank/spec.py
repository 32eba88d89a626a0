"""Defines the values that one rank is started from, and refuses those that cannot be.

It crosses from the control plane to a node as plain JSON, so that both sides may run in different Python environments.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from sparkd.errors import RankError

SOCKET_PATH_BYTES = 107  # sun_path less its final NUL, unix(7)

RANK_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything that one rank is started from; plain JSON both ways.

    rank_id is new for every start. model is a folder or a hub id; runtime and the paths are absolute. The rank listens on socket_path, or
    on host and port with the key in api_key_path (mode 0600); a headless rank does not listen.

    stop_timeout_s: seconds between SIGTERM and SIGKILL.
    kv_cache: the settings of sparkd's worker class (workers.kv.settings).
    world: number of the model's ranks.
    attempt: the rank_id of rank 0 of this start; flags tell the engine how its ranks connect (workers.rank.command.parallel_flags).
    ray: under vLLM's Ray executor, {"address", "group"}: Ray's address and the placement group whose bundles the workers take, in the order
        of the ranks.
    memory_gib: the rank's reservation on its node.
    parsers: the fields of a sparkd.vllm.parsers.Parsers, equal to the engine's flags.
    trusted_code: the commits whose code it may run (workers.host.trusted_code.Commits); None: it runs no code of a hub.
    """

    rank_id: str
    model_name: str
    served_names: tuple[str, ...]
    model: str
    generation: int
    node_id: str
    rank: int
    runtime: str
    entrypoint: str
    run_dir: str
    log_path: str
    config_hash: str
    platform: str
    flags: tuple[str, ...] = ()
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    socket_path: str | None = None
    host: str | None = None
    port: int | None = None
    api_key_path: str | None = None
    pythonpath: tuple[str, ...] = ()
    worker_cls: str | None = None
    load_format: str | None = None
    loader_extra_config: Mapping[str, Any] | None = None
    kv_cache: Mapping[str, Any] | None = None
    log_max_bytes: int = 64 * 2**20
    log_backups: int = 3
    stop_timeout_s: float = 20.0
    world: int = 1
    attempt: str = ""
    ray: Mapping[str, str] | None = None
    memory_gib: int = 0
    parsers: Mapping[str, str | None] | None = None
    trusted_code: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return dict(json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> RankSpec:
        """Raises RankError, naming the field, where one is missing, unknown or unusable."""
        names = {each.name for each in fields(cls)}
        if unknown := sorted(raw.keys() - names):
            raise RankError(f"A rank's specification has no field {unknown[0]!r}: caller and node must run the same version of sparkd.")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
        try:
            spec = cls(**values)
        except TypeError as error:
            raise RankError(f"A rank's specification is incomplete ({error}): caller and node must run the same sparkd.") from error
        spec.check()
        return spec

    def check(self) -> None:
        """Raises RankError for what could not be started safely."""
        checked_rank_id(self.rank_id)
        for name in ("runtime", "run_dir", "log_path", "socket_path", "api_key_path"):
            value = getattr(self, name)
            if value is not None and not os.path.isabs(value):
                raise RankError(f"{name} {value!r} of the rank {self.rank_id} is not an absolute path: a rank runs in the folder /.")
        for name, values in (("model", [self.model]), ("entrypoint", [self.entrypoint]), ("served_names", self.served_names)):
            for value in values:
                if not value or value.startswith("-"):
                    raise RankError(f"{name} {value!r} of the rank {self.rank_id} is empty or begins with '-': vLLM reads that as a flag.")
        for value in [*self.flags, *self.extra_args, *self.served_names, self.model, *self.env.values()]:
            if "\0" in value:
                raise RankError(f"An argument of the rank {self.rank_id} holds a NUL character: remove it.")
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise RankError(f"{name!r} in env of the rank {self.rank_id} is not the name of a variable: use letters, digits and '_'.")
        if self.socket_path and len(os.fsencode(self.socket_path)) > SOCKET_PATH_BYTES:
            size = f"is longer than {SOCKET_PATH_BYTES} bytes (unix(7))"
            raise RankError(f"The socket {self.socket_path} {size}: set runtime_dir to a shorter folder.")
        if self.host and (self.socket_path or not self.port or not self.api_key_path):
            raise RankError(f"The rank {self.rank_id} on the address {self.host} needs a port and an api_key_path, and no socket_path.")


def checked_rank_id(rank_id: object) -> str:
    """The id, fit to be part of a file name; RankError otherwise."""
    if not isinstance(rank_id, str) or not RANK_ID.fullmatch(rank_id):
        raise RankError(
            f"{str(rank_id)[:128]!r} is not a rank id: use 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first."
        )
    return rank_id
