"""The status file of a rank: its handle, and what its shim last saw. Never asks a process.

One file per rank in the run directory, `<rank_id>.json`, mode 0600, always replaced whole.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.host import processes
from workers.host.processes import LACKS, Identity
from workers.rank.command import ipc_dir
from workers.rank.spec import RANK_ID

MAX_PID = 1 << 22  # proc_sys_kernel(5), pid_max


def status_path(run_dir: str, rank_id: str) -> Path:
    return Path(run_dir, f"{rank_id}.json")


def rank_ids(run_dir: str) -> list[str]:
    """The ids of all ranks with a status file in the run directory, sorted. Raises OSError if this process may open no more files, which
    Path.glob of Python 3.12 does not."""
    try:
        names = os.listdir(run_dir)
    except OSError as error:
        if error.errno in LACKS:
            raise
        return []
    return sorted(stem for stem, end in map(os.path.splitext, names) if end == ".json" and RANK_ID.fullmatch(stem))


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Replaces the file in one step, mode 0600: a reader sees the old one or the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(status, file)
        os.replace(fresh, path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def read_status(path: Path) -> dict[str, Any]:
    """Read a rank's status file; `state` is `unreadable` if the file cannot be used.

    Raises OSError if this process may open no more files: a rank whose file could not be opened is not gone.
    """
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno in LACKS:
            raise
        return {"state": "unreadable", "error": f"{path} cannot be read: {error}"}
    if not isinstance(status, dict) or not isinstance(status.get("handle"), dict):
        return {"state": "unreadable", "error": f"{path} cannot be read: it is not a rank's status."}
    return status


def worker_path(run_dir: str, rank_id: str) -> Path:
    """Where the Ray worker of a rank says which process it is: it is no child of the rank's shim (workers.vllm.ray.worker)."""
    return Path(run_dir, f"{rank_id}.worker")


def worker_of(run_dir: str, rank_id: str) -> Identity | None:
    """A rank's Ray worker, as it named itself, dead or alive; None where there is none."""
    try:
        return identity_of(json.loads(worker_path(run_dir, rank_id).read_text(encoding="utf-8")), "pid", "start_ticks")
    except (OSError, ValueError):
        return None


def living_workers(run_dir: str) -> set[int]:
    """Pids of the Ray workers of this node's ranks."""
    workers = (worker_of(run_dir, rank_id) for rank_id in rank_ids(run_dir))
    return {worker.pid for worker in workers if worker and processes.is_alive(worker)}


def identity_of(raw: object, pid: str, start_ticks: str) -> Identity | None:
    """From a handle or a status that may be of another boot, incomplete or damaged."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("handle", {}), Mapping | None):
        return None
    boot = raw.get("boot_id") or (raw.get("handle") or {}).get("boot_id")
    if not (isinstance(raw.get(pid), int) and isinstance(raw.get(start_ticks), int) and isinstance(boot, str)):
        return None
    if not 0 < raw[pid] <= MAX_PID:
        return None
    return Identity(raw[pid], raw[start_ticks], boot)


def remove_sockets(run_dir: str, rank_id: str, socket_path: str | None) -> None:
    """A socket in the run directory itself, whatever path a status file names, and the folder of those between the engine's processes.
    Raises OSError."""
    if isinstance(socket_path, str) and os.path.dirname(socket_path) == run_dir:
        try:
            folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            name = os.path.basename(socket_path)
            if stat.S_ISSOCK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            pass
        finally:
            os.close(folder)
    if ipc := ipc_dir(run_dir, rank_id):
        shutil.rmtree(ipc, ignore_errors=True)
