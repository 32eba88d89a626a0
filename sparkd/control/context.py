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
    """group: set while the supervisor runs."""

    group: asyncio.TaskGroup

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """name: one word, the same for all models, and the model."""
        return self._boundary.spawn(self.group, name, work)


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of every acting part.

    wake: ends the loop's pause.
    clock: monotonic seconds.
    """

    registry: Registry
    journal: Journal
    cluster: Cluster
    boundary: Boundary
    tasks: Tasks
    wake: asyncio.Event
    clock: Callable[[], float]
    rng: random.Random
