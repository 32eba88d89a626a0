"""`python -m workers.vllm.ray.worker ATTEMPT ARGUMENTS`: what Ray starts instead of a Python for the workers of an engine. Never
returns.

It becomes the engine's own interpreter, with the environment of its node's rank (interfaces, folders, mark) and that rank's log, so that
what is true of a native rank is true of it. Its number goes into a file beside the status file, because Ray is its parent, not the shim.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from workers.door import KEY_FILE
from workers.host import processes
from workers.rank.status import rank_ids, read_status, status_path, worker_path, write_status

RUN_DIR = "SPARKD_RAY_RUN_DIR"


def main(argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Exits with a sentence where this node has no rank of that attempt: it was ended meanwhile."""
    attempt, *rest = argv
    run_dir = environ.get(RUN_DIR, "")
    found = rank_of(attempt, run_dir)
    if found is None:
        raise SystemExit(f"No rank of {attempt} lives in {run_dir or 'this node'}: its start was given up.")
    rank_id, engine_pid, order_path = found
    order = json.loads(order_path.read_text())
    runtime, own = order["runtime"], order["environment"]
    own.pop(KEY_FILE, None)  # it opens the engine's door, which is not here
    ray = {name: value for name, value in environ.items() if name.startswith("RAY_")}
    # A session of its own, as an engine has: what it holds is counted by it, and Ray's other processes are none of it. Ray makes it the
    # leader of a process group, which may not begin one (setsid(2)).
    os.setpgid(0, os.getpgid(os.getppid()))
    os.setsid()
    me = processes.identity(os.getpid())
    if me is not None:
        write_status(worker_path(run_dir, rank_id), asdict(me))
    # Both ends of the shim's pipe can be opened by this user, and end with it.
    log = os.open(f"/proc/{engine_pid}/fd/1", os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # By default Ray redirects both into files of its session (ray/_private/node.py, should_redirect_logs).
    os.execve(runtime, [runtime, "-P", *rest], own | ray | {"RAY_LOG_TO_STDERR": "1", "RAY_BACKEND_LOG_LEVEL": "error"})


def rank_of(attempt: str, run_dir: str) -> tuple[str, int, Path] | None:
    """(rank id, pid of its engine, the order that its shim holds) of the rank of that attempt here; None where there is none."""
    for rank_id in rank_ids(run_dir) if run_dir else ():
        status = read_status(status_path(run_dir, rank_id))
        handle, order = status.get("handle") or {}, status.get("order_fd")
        if handle.get("attempt") == attempt and isinstance(status.get("engine_pid"), int) and isinstance(order, int):
            return rank_id, status["engine_pid"], Path(f"/proc/{handle['pid']}/fd/{order}")
    return None


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(json.dumps({"error": "ATTEMPT is missing"}))
    main(sys.argv[1:], os.environ)
