"""The shared parts of the daemon that every acting part works with, and the tasks that run beside the loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.execution.boundary import Boundary


class Tasks:
    """`group` is set while the supervisor runs."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self.group: asyncio.TaskGroup | None = None

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """name: one word, the same for all models, and the model."""
        if self.group is None:
            work.close()
            raise RuntimeError("the supervisor does not run")
        return self._boundary.spawn(self.group, name, work)


@dataclass(frozen=True, slots=True)
class Means:
    """wake: ends the loop's pause. clock: monotonic seconds."""

    registry: Registry
    journal: Journal
    cluster: Cluster
    boundary: Boundary
    tasks: Tasks
    wake: asyncio.Event
    clock: Callable[[], float]
    rng: random.Random
