"""`python -m tests.support.faulty_sparkd serve ..`: sparkd whose parts raise what nobody expects. The product knows nothing of it.

FAULTS_FILE names a file with the share of the calls of the cluster, of Ray's connection and of the store that raise an error; without it
there are none. Every part that the daemon runs, its gateway too, ends by an error when it begins for the first time.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparkd.__main__ import main
from sparkd.admin.jobs import Jobs
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.launcher import Launcher
from sparkd.cluster.model_files import ModelFiles
from sparkd.cluster.placer import Placer
from sparkd.cluster.ray_connection import RayConnection
from sparkd.control.supervisor import Supervisor
from sparkd.daemon.console import Console
from sparkd.daemon.daemon import Daemon
from sparkd.daemon.reload import Reloader
from sparkd.execution import boundary
from sparkd.gateway.scraper import Scraper
from sparkd.gateway.server import GatewayServer
from sparkd.state.store import History, StoredRanks, StoredWishes
from tests.support.lone_sparkd import alone

ERRORS: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    lambda: OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    lambda: KeyError("node"),
    lambda: TimeoutError(),
    lambda: asyncio.InvalidStateError("invalid state"),
    # Comes from a future that other code cancelled; the task itself is not cancelled.
    lambda: asyncio.CancelledError(),
    lambda: pickle.PicklingError("cannot pickle"),
)
# How the daemon begins and ends is no matter of its loop.
NOT_OF_THE_LOOP = ("run", "close", "disconnect", "expect", "prove", "reconfigure", "nodes", "damages")
PARTS = (
    (Supervisor, "run"), (Daemon, "_join_ray"), (Scraper, "run"), (Jobs, "run"), (Reloader, "run"),
    (Daemon, "_keep_watchdog_quiet"), (Console, "run"), (GatewayServer, "serve"),
)  # fmt: skip


def public(seam: type) -> list[str]:
    """The methods of a seam, as its users see it."""
    return sorted(name for name, value in vars(seam).items() if inspect.isfunction(value) and not name.startswith("_"))


def wrap(target: Any, name: str, check: Callable[[], None]) -> None:
    """Have `check` called before each call of a method of an object or a class; what it raises, the method raises."""
    method = getattr(target, name)

    @functools.wraps(method)
    async def later(*arguments: Any, **named: Any) -> Any:
        check()
        return await method(*arguments, **named)

    @functools.wraps(method)
    def now(*arguments: Any, **named: Any) -> Any:
        check()
        return method(*arguments, **named)

    setattr(target, name, later if inspect.iscoroutinefunction(method) else now)


def _at_random(file: Path) -> Callable[[], None]:
    rng = random.Random()

    def check() -> None:
        try:
            share = float(file.read_text())
        except (OSError, ValueError):
            return
        if rng.random() < share:
            raise rng.choice(ERRORS)()

    return check


def _once(errors: Iterator[Callable[[], BaseException]]) -> Callable[[], None]:
    left = [next(errors)]

    def check() -> None:
        if left:
            raise left.pop()()

    return check


if __name__ == "__main__":
    alone()
    boundary.PAUSE_S = 0.2
    random_fault = _at_random(Path(os.environ["FAULTS_FILE"]))
    for seam in (Cluster, Launcher, Placer, ModelFiles, RayConnection, StoredWishes, StoredRanks, History):
        for one in public(seam):
            if one not in NOT_OF_THE_LOOP:
                wrap(seam, one, random_fault)
    every = iter(ERRORS * 2)
    for part, one in PARTS:
        wrap(part, one, _once(every))
    sys.exit(main())
