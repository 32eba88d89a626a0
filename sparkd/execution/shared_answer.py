"""Answers that are costly to make: each is made by one run, which all callers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Generic, TypeVar

from sparkd.errors import SparkdError
from sparkd.execution.boundary import Boundary

T = TypeVar("T")


class Recent(Generic[T]):
    """`ask` makes an answer for an argument. A caller who leaves ends no run: the next one waits for it instead of starting another."""

    def __init__(
        self, ask: Callable[[str], Awaitable[T]], kept_s: float, boundary: Boundary, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._kept_s = kept_s
        self._boundary = boundary
        self._clock = clock
        self._run: _Run[T] | None = None

    async def get(self, argument: str) -> T:
        """Raises what the run raises, to all who wait for it; then the next call asks again."""
        while self._run is not None and not self._run.task.done() and self._run.argument != argument:
            await asyncio.wait((self._run.task,))
        if self._run is None or self._is_over(self._run, argument):
            self._run = _Run(argument, self._ask, self._clock, self._boundary)
        run = self._run
        await asyncio.shield(run.task)
        return run.result()

    def _is_over(self, run: _Run[T], argument: str) -> bool:
        if not run.task.done():
            return False
        return run.answered_at_s is None or run.argument != argument or self._clock() - run.answered_at_s >= self._kept_s


class Shared:
    """Callers with the same key wait for one run. Nothing is kept: a caller who comes when it has ended starts the next."""

    def __init__(self, boundary: Boundary) -> None:
        self._boundary = boundary
        self._runs: dict[Hashable, _Run[Any]] = {}

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises what the run raises, to all who wait for it."""
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = _Run("", lambda _: ask(), time.monotonic, self._boundary)
            run.task.add_done_callback(lambda _: self._runs.pop(key, None))
        await asyncio.shield(run.task)
        return run.result()


class _Run(Generic[T]):
    """answered_at_s: None while there is no answer, and for ever where the run failed."""

    _answer: T

    def __init__(self, argument: str, ask: Callable[[str], Awaitable[T]], clock: Callable[[], float], boundary: Boundary) -> None:
        self.argument = argument
        self.answered_at_s: float | None = None
        self._ask, self._clock = ask, clock
        self._failure: BaseException | None = None
        self.task = boundary.spawn(asyncio.get_running_loop(), "answer", self._make())

    def result(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._answer

    async def _make(self) -> None:
        try:
            self._answer = await self._ask(self.argument)
        except SparkdError as error:
            self._failure = error  # for the callers; sparkd made none
        except BaseException as error:
            self._failure = error
            raise
        else:
            self.answered_at_s = self._clock()
