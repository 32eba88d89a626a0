"""Threads for one kind of work: few of them, and nobody waits behind too many."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sparkd.errors import Unavailable
from sparkd.execution.threads import Threads
from tests.support.waiting import eventually


class Work:
    """Functions that run until they may end."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.running = 0

    def __call__(self, answer: int) -> int:
        self.running += 1
        self.may_end.wait()
        return answer


async def test_so_many_run_so_many_wait_and_the_others_are_refused() -> None:
    threads, work = Threads("work", 2, 3), Work()
    try:
        calls = [asyncio.create_task(threads.run(work, number)) for number in range(3)]
        await eventually(lambda: work.running == 2)

        with pytest.raises(Unavailable) as caught:
            await threads.run(work, 3)

        assert caught.value.headers()["retry-after"] == "10"
        assert work.running == 2
    finally:
        work.may_end.set()
    assert await asyncio.gather(*calls) == [0, 1, 2]
    assert await threads.run(work, 4) == 4


async def test_a_caller_who_leaves_frees_no_thread_but_its_place_in_the_queue() -> None:
    threads, work = Threads("work", 1, 2), Work()
    try:
        calls = [asyncio.create_task(threads.run(work, number)) for number in range(2)]
        await eventually(lambda: work.running == 1)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

        queued = asyncio.create_task(threads.run(work, 2))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable):
            await threads.run(work, 3)
        assert work.running == 1
    finally:
        work.may_end.set()
    assert await queued == 2


async def test_an_error_of_the_work_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        await Threads("work", 1).run(lambda: 1 // 0)
