"""An answer that is costly to make: made by one run at a time, and given again for a few seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """`ask` makes an answer for an argument. A caller who leaves ends no run: the next one waits for it instead of starting another."""

    def __init__(self, ask: Callable[[str], Awaitable[T]], kept_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._kept_s = kept_s
        self._clock = clock
        self._run: asyncio.Task[T] | None = None
        self._argument = ""
        self._answered_at_s = 0.0

    async def get(self, argument: str) -> T:
        """Raises what the run raises, to all who wait for it; then the next call asks again."""
        while self._run is not None and not self._run.done() and self._argument != argument:
            await asyncio.wait((self._run,))
        if self._run is None or self._is_over(self._run, argument):
            self._argument = argument
            self._run = asyncio.create_task(self._answer(argument))
        return await asyncio.shield(self._run)

    def _is_over(self, run: asyncio.Task[T], argument: str) -> bool:
        if not run.done():
            return False
        failed = run.cancelled() or run.exception() is not None
        return failed or self._argument != argument or self._clock() - self._answered_at_s >= self._kept_s

    async def _answer(self, argument: str) -> T:
        answer = await self._ask(argument)
        self._answered_at_s = self._clock()
        return answer
