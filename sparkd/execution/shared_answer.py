"""Answers that are costly to make: one run makes each, and all callers share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

from sparkd.errors import SparkdError
from sparkd.execution.boundary import Boundary

T = TypeVar("T")


class SharedAnswer:
    """Callers with the same key wait for one run, whose answer is kept for kept_s. A caller who leaves ends no run."""

    def __init__(self, boundary: Boundary, kept_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._boundary = boundary
        self._kept_s = kept_s
        self._clock = clock
        self._runs: dict[Hashable, _Run] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises what the run raises, to all who wait for it; then the next call asks again."""
        now_s = self._clock()
        self._runs = {kept: run for kept, run in self._runs.items() if not run.task.done() or now_s < run.until_s}
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run()
            run.task = self._boundary.spawn(asyncio.get_running_loop(), "answer", self._make(run, ask))
        await asyncio.shield(run.task)
        if run.failure is not None:
            raise run.failure
        answer: T = run.answer
        return answer

    async def _make(self, run: _Run, ask: Callable[[], Awaitable[Any]]) -> None:
        try:
            run.answer = await ask()
        except SparkdError as error:
            run.failure = error  # for the callers; sparkd made none
        except BaseException as error:
            run.failure = error
            raise
        else:
            run.until_s = self._clock() + self._kept_s


class _Run:
    """until_s: how long its answer is kept, of the clock."""

    task: asyncio.Task[None]
    answer: Any
    failure: BaseException | None = None
    until_s = float("-inf")
