"""Threads for one kind of slow work: they are few, and the event loop's own stay free for the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from sparkd.errors import Unavailable

T = TypeVar("T")


class Threads:
    """`count` threads that begin when they are first needed. most: calls that run or wait for a thread; None for any number of them.

    A caller who leaves ends no work that has begun: it keeps its thread until it is done.
    """

    def __init__(self, name: str, count: int, most: int | None = None) -> None:
        self._name = name
        self._most = most
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._calls: set[Future[Any]] = set()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Raises Unavailable where `most` calls run or wait already."""
        if self._most is not None and len(self._calls) >= self._most:
            raise Unavailable(
                f"{len(self._calls)} requests of this kind ({self._name}) run or wait already; try again later.", retry_after_s=10
            )
        call = self._pool.submit(function, *arguments)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)
