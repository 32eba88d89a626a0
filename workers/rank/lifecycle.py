"""Spawns, scans, stops and forgets the ranks of this node.

A rank is a shim (workers.rank.shim), which leaves the caller's process tree and owns the log and the status file, and the engine below it,
which dies with the shim. A process that knows only the run directory can call every function here. All of them block: call them from a
thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkd.errors import RankError
from workers.host import processes
from workers.host.interpreter import PACKAGE_DIR, module_command
from workers.host.processes import Identity
from workers.rank import shared_memory
from workers.rank.command import build_command, build_environment, ipc_dir
from workers.rank.log import NON_DEFAULT, STARTED, lines_since, read_log
from workers.rank.log_parser import Parser
from workers.rank.report import began_of, cache_of, load_of, progress_of, remove_reports, report_path
from workers.rank.spec import RankSpec, checked_rank_id
from workers.rank.status import (
    engine_of,
    rank_ids,
    read_status,
    remove_sockets,
    shim_of,
    status_path,
    worker_of,
    worker_path,
    write_status,
)

__all__ = [
    "PACKAGE_DIR", "RankSpec", "build_command", "build_environment", "forget", "nccl_lines", "read_log", "scan", "setting_lines",
    "spawn", "stop", "verify_gone",
]  # fmt: skip

SHIM = "workers.rank.shim"
SPAWN_TIMEOUT_S = 30.0
SHIM_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 10.0


def spawn(spec: RankSpec) -> dict[str, Any]:
    """Start a rank. Returns its handle (the fields of sparkd.state.nouns.RankHandle) once that is on disk and the engine was exec'ed.

    Raises RankError, and leaves nothing behind, if the rank id is in use or the runtime cannot be executed. The shim leaves the caller's
    process tree, session and open files, and outlives the caller.
    """
    spec.check()
    if os.path.lexists(status_path(spec.run_dir, spec.rank_id)) or verify_gone(spec.rank_id, spec.run_dir):
        raise RankError(f"The rank {spec.rank_id} exists in {spec.run_dir}: stop and forget it first, or start it under another id.")
    order = {
        "spec": spec.to_dict(),
        "command": build_command(spec),
        "environment": build_environment(spec, os.environ),
    }
    _prepare_folders(spec)
    try:
        return _start_shim(spec, order)
    except (RankError, OSError):
        with suppress(RankError, OSError):  # the error that stopped the start is the one to raise
            stop({"rank_id": spec.rank_id}, run_dir=spec.run_dir, grace_s=0)
            forget(spec.rank_id, spec.run_dir)
        raise


def scan(run_dir: str) -> list[dict[str, Any]]:
    """The state of each rank with a status file, sorted by rank id. Reads /proc and the files, and changes nothing.

    alive: the shim lives, and has noted no exit code of its engine. processes: the number of living processes of the rank without the
    shim; if it is above 0 while alive is False, something has to be stopped. halted: a signal has stopped one of them. deaf: the server
    is up and its socket's file is gone. cpu_s: CPU seconds of all. If a file cannot be read, handle is None and error has the reason.
    progress joins the reports of the log, the loader and the KV sizing; diagnosis explains a known line of the log. cause_age_s: see
    _cause_age_s.
    """
    statuses = {rank_id: read_status(status_path(run_dir, rank_id)) for rank_id in rank_ids(run_dir)}
    if not statuses:
        return []
    stats, boot = processes.table(), processes.boot_id()
    facts = []
    for rank_id, status in statuses.items():
        shim, engine = shim_of(status.get("handle") or {}), engine_of(status)
        pids = processes.belonging(stats, boot, worker_of(run_dir, rank_id), shim=shim, engine=engine)
        progress = _progress(run_dir, rank_id, status.get("progress"))
        fact = _fact(rank_id, status, progress, shim, len(pids))
        fact["cause_age_s"] = _cause_age_s(status.get("epoch_s"), progress)
        socket_path = (status.get("handle") or {}).get("socket_path")
        fact["deaf"] = bool(progress.get("server_up") and socket_path and not os.path.lexists(socket_path))
        fact["halted"] = any(stats[pid].state == "T" for pid in pids if pid in stats)
        fact["cpu_s"] = sum(stats[pid].cpu_ticks for pid in pids if pid in stats) / os.sysconf("SC_CLK_TCK")
        facts.append(fact)
    return facts


def nccl_lines(path: str) -> list[str]:
    """The lines of NCCL in a rank's log since its engine started, with NCCL_DEBUG=INFO."""
    # An error of ibv_modify_qp continues in lines with its device and GIDs, which do not always name NCCL.
    return lines_since(path, STARTED, ("NCCL", "NET/", "ibv_", "GID", "dev "))


def setting_lines(path: str) -> list[str]:
    """The line with the command of a rank's engine, and those in which vLLM names the arguments that are not its defaults."""
    return lines_since(path, STARTED, (NON_DEFAULT,), most=8, with_mark=True)


def stop(handle: Mapping[str, Any], *, run_dir: str, grace_s: float) -> dict[str, Any]:
    """End a rank: SIGTERM, wait at most grace_s or the rank's stop_timeout_s, SIGKILL, and check that no process is left.

    handle: the fields of a handle, or rank_id alone. Works with a dead or stuck shim too. Does nothing to a rank that is gone, that is of
    an earlier boot, or whose pid belongs to another process now. Returns gone, survivors (pids in an uninterruptible wait: report them and
    call again), exit_code and stop_ordered from the status file, and left: the sockets and shared memory that it left, as
    workers.rank.shared_memory.clear returns them.
    """
    rank_id = checked_rank_id(handle.get("rank_id"))
    path = status_path(run_dir, rank_id)
    status = read_status(path)
    shim = shim_of(handle) or shim_of(status.get("handle") or {})
    if shim and processes.send(shim, processes.STOP) and not processes.wait_gone([shim], timeout_s=grace_s):
        processes.send(shim, processes.STOP_NOW)
        processes.wait_gone([shim], timeout_s=SHIM_TIMEOUT_S)
    status = read_status(path)
    ordered_here = bool(shim and processes.is_alive(shim))
    survivors = _kill_from_outside(rank_id, run_dir, shim, engine_of(status))
    if ordered_here and status.get("handle") and status.get("state") != "exited":
        status |= {"state": "exited", "stop_ordered": True}
        with suppress(OSError):  # a full disk: the rank has ended and will be forgotten
            write_status(path, status)
    left = _clear_sockets(run_dir, rank_id, handle.get("socket_path") or (status.get("handle") or {}).get("socket_path"))
    return {
        "gone": not survivors,
        "survivors": survivors,
        "exit_code": status.get("exit_code"),
        "stop_ordered": bool(status.get("stop_ordered")),
        "left": left if survivors else [*left, *shared_memory.clear(run_dir, rank_id)],
    }


def verify_gone(rank_id: str, run_dir: str) -> list[int]:
    """The pids of the rank's living processes, including its shim; empty when it is gone."""
    status = read_status(status_path(run_dir, checked_rank_id(rank_id)))
    shim = shim_of(status.get("handle") or {})
    pids = set(processes.members(shim=shim, engine=engine_of(status), worker=worker_of(run_dir, rank_id)))
    if shim and processes.is_alive(shim):
        pids.add(shim.pid)
    return sorted(pids)


def forget(rank_id: str, run_dir: str) -> None:
    """Remove the status file, the engine's reports and the sockets of a rank. Raises RankError while a process of it lives."""
    if living := verify_gone(rank_id, run_dir):
        raise RankError(f"The rank {rank_id} cannot be forgotten: its processes {living} live. Stop it first.")
    remove_sockets(run_dir, rank_id, None)
    remove_reports(run_dir, rank_id)
    files = (worker_path(run_dir, rank_id), shared_memory.note_path(run_dir, rank_id), status_path(run_dir, rank_id))
    for path in (*files, *Path(run_dir).glob(f".{rank_id}.json.*"), *Path(run_dir).glob(f".{rank_id}.shm.*")):
        path.unlink(missing_ok=True)


def _progress(run_dir: str, rank_id: str, log: Any) -> dict[str, Any]:
    """The progress from the rank's log, its loader and its worker. log: from the shim's file; None before it has written one."""
    path = report_path(run_dir, rank_id)
    log = log or Parser().progress
    return {**progress_of(log, load_of(path, time.time()), cache_of(path)), "began_s": began_of(log, path)}


def _cause_age_s(epoch_s: float | None, progress: Mapping[str, Any]) -> float | None:
    """Seconds since the rank's loader failed, else since its log named an error, by this node's clocks; None for neither.

    epoch_s: of the shim's clock, by which the log's lines are dated and which does not jump; None of another release's.
    """
    failure_at_s, error_at_s = progress.get("failure_at_s"), progress.get("error_at_s")
    if failure_at_s is not None:
        return float(time.time() - failure_at_s)
    if error_at_s is None:
        return None
    return float((time.time() if epoch_s is None else epoch_s + time.monotonic()) - error_at_s)


def _fact(rank_id: str, status: Mapping[str, Any], progress: Mapping[str, Any], shim: Identity | None, living: int) -> dict[str, Any]:
    return {
        "rank_id": rank_id,
        "handle": status.get("handle"),
        # A shim notes the exit code as soon as it has reaped the engine. Until then a look cannot tell how the engine ended.
        "alive": bool(shim and processes.is_alive(shim)) and status.get("exit_code") is None,
        "processes": living,
        "exit_code": status.get("exit_code"),
        "stop_ordered": bool(status.get("stop_ordered")),
        "progress": dict(progress),
        "state": status.get("state", "unreadable"),
        "engine_pid": status.get("engine_pid"),
        "error": status.get("error"),
        "diagnosis": status.get("diagnosis"),
    }


def _start_shim(spec: RankSpec, order: Mapping[str, Any]) -> dict[str, Any]:
    """Start the shim with its order. A pipe carries the order, so that no secret is on disk, in an argv or in the environment."""
    shim = subprocess.Popen(
        module_command(sys.executable, SHIM, spec.rank_id),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", umask=0o077, start_new_session=True,
        env={"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": PACKAGE_DIR, "LANG": "C.UTF-8"},
    )  # fmt: skip
    try:
        answer, _ = shim.communicate(json.dumps(order).encode(), timeout=SPAWN_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        shim.kill()
        shim.communicate()
        raise RankError(
            f"The rank {spec.rank_id} did not start within {SPAWN_TIMEOUT_S:.0f} s: this node is overloaded or its disk hangs: try again."
        ) from error
    lines = answer.decode("utf-8", "replace").strip().splitlines()
    try:
        reply = json.loads(lines[-1])
        if "handle" in reply:
            return dict(reply["handle"])
        reason = str(reply["error"])
    except (IndexError, ValueError, KeyError, TypeError):
        output = lines[-1] if lines else "it wrote nothing"
        reason = f"The shim of the rank {spec.rank_id} failed: {output}. Check the installation of sparkd on this node."
    raise RankError(reason)


def _kill_from_outside(rank_id: str, run_dir: str, shim: Identity | None, engine: Identity | None) -> list[int]:
    """Do what a healthy shim does itself. The members die first, while the shim's session still identifies them."""

    def find() -> dict[int, Identity]:
        return processes.members(shim=shim, engine=engine, worker=worker_of(run_dir, rank_id))

    processes.kill_all(find, timeout_s=KILL_TIMEOUT_S)
    if shim:
        processes.send(shim, processes.KILL)
        processes.wait_gone([shim], timeout_s=KILL_TIMEOUT_S)
    survivors = processes.kill_all(find, timeout_s=KILL_TIMEOUT_S)
    return sorted({*survivors, shim.pid}) if shim and processes.is_alive(shim) else survivors


def _clear_sockets(run_dir: str, rank_id: str, socket_path: str | None) -> list[dict[str, Any]]:
    """Remove the rank's sockets. Returns the one that stays instead of raising, because the rank is gone all the same."""
    try:
        remove_sockets(run_dir, rank_id, socket_path)
    except OSError as error:
        return [{"path": socket_path, "bytes": 0, "removed": False, "why": error.strerror or str(error)}]
    return []


def _prepare_folders(spec: RankSpec) -> None:
    try:
        for folder in (spec.run_dir, ipc_dir(spec.run_dir, spec.rank_id), spec.socket_path and os.path.dirname(spec.socket_path)):
            if folder:
                os.makedirs(folder, mode=0o700, exist_ok=True)
        shared_memory.begin(spec.run_dir, spec.rank_id)
    except OSError as error:
        raise RankError(f"The rank {spec.rank_id} has no place to run: {error}. Give this user write access to {spec.run_dir}.") from error
