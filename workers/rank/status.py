"""The status file of a rank: its handle, and what its shim last saw. Never asks a process.

One file per rank in the run directory, `<rank_id>.json`, mode 0600, always replaced whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.host import processes
from workers.host.private_files import write_private
from workers.host.processes import Identity
from workers.rank.command import ipc_dir
from workers.rank.spec import RANK_ID


def status_path(run_dir: str, rank_id: str) -> Path:
    return Path(run_dir, f"{rank_id}.json")


def rank_ids(run_dir: str) -> list[str]:
    """The ids of all ranks with a status file in the run directory, sorted. Raises OSError, which Path.glob of Python 3.12 does not where
    this process may open no more files."""
    try:
        names = os.listdir(run_dir)
    except FileNotFoundError:
        return []
    return sorted(stem for stem, end in map(os.path.splitext, names) if end == ".json" and RANK_ID.fullmatch(stem))


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replace the file. Raises OSError."""
    write_private(path, json.dumps(status), sync=False)


def read_status(path: Path) -> dict[str, Any]:
    """Read a rank's status file; empty without one, and `state` is `unreadable` if the file is no JSON.

    Raises OSError: a rank whose file could not be opened is not gone.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        return {"state": "unreadable", "error": f"{path} cannot be read: {error}"}


def worker_path(run_dir: str, rank_id: str) -> Path:
    """Where the Ray worker of a rank says which process it is: it is no child of the rank's shim (workers.vllm.ray.worker)."""
    return Path(run_dir, f"{rank_id}.worker")


def worker_of(run_dir: str, rank_id: str) -> Identity | None:
    """A rank's Ray worker, as it named itself, dead or alive; None where there is none."""
    try:
        return Identity(**json.loads(worker_path(run_dir, rank_id).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def living_workers(run_dir: str) -> set[int]:
    """Pids of the Ray workers of this node's ranks."""
    workers = (worker_of(run_dir, rank_id) for rank_id in rank_ids(run_dir))
    return {worker.pid for worker in workers if worker and processes.is_alive(worker)}


def shim_of(handle: Mapping[str, Any]) -> Identity | None:
    """The shim that a handle names, dead or alive; None for one that names only its rank."""
    return Identity(handle["pid"], handle["start_ticks"], handle["boot_id"]) if "pid" in handle else None


def engine_of(status: Mapping[str, Any]) -> Identity | None:
    """The engine that a status names, dead or alive; None before it was started."""
    pid = status.get("engine_pid")
    return None if pid is None else Identity(pid, status["engine_start_ticks"], status["handle"]["boot_id"])


def remove_sockets(run_dir: str, rank_id: str, socket_path: str | None) -> None:
    """The engine's socket, and the folder of those between its processes. Raises OSError."""
    if socket_path:
        Path(socket_path).unlink(missing_ok=True)
    if ipc := ipc_dir(run_dir, rank_id):
        shutil.rmtree(ipc, ignore_errors=True)
