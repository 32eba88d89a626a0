"""A rank other than 0 under vLLM's Ray executor, as its node sees it: lives as long as the rank's Ray worker does. Never computes, never
ends the worker: that is the shim's, which ends with this.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Mapping

from workers.host import processes
from workers.host.processes import RANK_ID_VARIABLE, RUN_DIR_VARIABLE, Identity
from workers.rank.status import worker_of

LOOK_S = 0.2


def main(environ: Mapping[str, str]) -> int:
    """The exit code, 1: a worker that ends by itself is a rank that is lost. A signal ends this before it."""
    run_dir, rank_id = environ[RUN_DIR_VARIABLE], environ[RANK_ID_VARIABLE]
    _say(f"Waiting for the Ray worker of rank {rank_id}")
    while (worker := worker_of(run_dir, rank_id)) is None:
        time.sleep(LOOK_S)
    _say(f"The Ray worker of rank {rank_id} is process {worker.pid}")
    _wait(worker)
    _say(f"ERROR The Ray worker of rank {rank_id}, process {worker.pid}, has ended")
    return 1


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _wait(who: Identity) -> None:
    try:
        handle = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return
    try:
        if processes.is_alive(who):
            select.select([handle], [], [])
    finally:
        os.close(handle)


if __name__ == "__main__":
    raise SystemExit(main(os.environ))
