"""`python -m tests.support.orphan_driver FOLDER`: a cluster of one as a service manager has it, with process 1 for its parent.

Ray ends a driver whose raylet has ended where the driver's parent is process 1. A line for its process id, and one for each time that it
joined Ray: the process ids of Ray's head. Where another process takes in orphans (prctl(2), PR_SET_CHILD_SUBREAPER), it ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from sparkd.cluster import cluster, ray_connection
from sparkd.cluster.ray_head import RayHead
from sparkd.config.config import load_config


def say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


async def main(folder: Path) -> None:
    flags = {"state_dir": str(folder), "runtime_dir": str(folder / "run"), "memory": {"guard": "off"}}
    made = cluster.Cluster(load_config(None, flags=flags, environ={}), {})
    assert isinstance(made._head, RayHead)
    try:
        await made.run(partial(lambda head: say(head.essential()), made._head))
    finally:
        await made.close(stop_ray=True)


if __name__ == "__main__":
    # Ray does not leave a head that stands still.
    ray_connection.DISCONNECT_TIMEOUT_S = 2.0
    if os.fork() == 0:
        os.setsid()
        starter = os.getpid()
        if os.fork() == 0:
            while os.getppid() == starter:
                os.sched_yield()
            say({"driver": os.getpid(), "parent": os.getppid()})
            if os.getppid() != 1:
                os._exit(0)
            try:
                asyncio.run(main(Path(sys.argv[1])))
            except KeyboardInterrupt:
                os._exit(0)
        os._exit(0)
    os.wait()
