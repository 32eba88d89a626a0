"""How a test waits for a state: as long as it takes, up to a limit that means that something hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# A state that takes this long on any machine does not come any more. A test sets no other limit: durations are measured by benches.
HUNG_S = 300.0


def until(look: Callable[[], T], what: str = "it", every_s: float = 0.05, *, limit_s: float = HUNG_S) -> T:
    """The first true value that `look` returns, asked every `every_s` seconds.

    limit_s: only benches, which measure, set it.
    Raises AssertionError with `what` and the last value after `limit_s` seconds.
    """
    deadline = time.monotonic() + limit_s
    while True:
        if seen := look():
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit_s:.0f} s: {what}; last seen: {seen!r}")
        time.sleep(every_s)


async def eventually(look: Callable[[], Awaitable[T] | T], what: str = "it", every_s: float = 0.01) -> T:
    """`until` on the event loop, which goes on meanwhile; what `look` returns is awaited where it can be."""
    deadline = time.monotonic() + HUNG_S
    while True:
        seen = look()
        if isinstance(seen, Awaitable):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {HUNG_S:.0f} s: {what}; last seen: {seen!r}")
        await asyncio.sleep(every_s)
