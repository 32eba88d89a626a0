"""An answer that is kept: one run at a time, whoever asks and leaves."""

from __future__ import annotations

import asyncio

import pytest

from sparkd.errors import AgentLost
from sparkd.execution.boundary import Boundary
from sparkd.execution.shared_answer import Recent
from tests.support.fakes import FakeClock
from tests.support.waiting import eventually


class Asked:
    """Answers with the number of the run, once it may."""

    def __init__(self) -> None:
        self.runs: list[str] = []
        self.at_once = self.most_at_once = 0
        self.may = asyncio.Event()
        self.may.set()

    async def __call__(self, argument: str) -> int:
        self.runs.append(argument)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await self.may.wait()
        finally:
            self.at_once -= 1
        if argument == "fails":
            raise OSError(argument)
        return len(self.runs)


async def test_it_is_kept_for_a_while() -> None:
    asked, clock = Asked(), FakeClock()
    recent = Recent(asked, 5.0, Boundary(clock), clock)
    assert [await recent.get("a"), await recent.get("a")] == [1, 1]
    clock.now_s += 4.9
    assert await recent.get("a") == 1
    clock.now_s += 0.1
    assert await recent.get("a") == 2
    assert await recent.get("b") == 3


async def test_one_run_at_a_time_and_callers_who_leave_start_no_other() -> None:
    asked = Asked()
    recent = Recent(asked, 5.0, Boundary(FakeClock()), FakeClock())
    asked.may.clear()
    leaving = [asyncio.create_task(recent.get("a")) for _ in range(10)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    staying = [asyncio.create_task(recent.get(argument)) for argument in ("a", "a", "b", "b")]
    await asyncio.sleep(0)
    asked.may.set()
    assert await asyncio.gather(*staying) == [1, 1, 2, 2]
    assert asked.runs == ["a", "b"]
    assert asked.most_at_once == 1


async def test_a_failure_is_told_and_not_kept() -> None:
    asked = Asked()
    recent = Recent(asked, 5.0, Boundary(FakeClock()), FakeClock())
    for _ in range(2):
        with pytest.raises(OSError, match="fails"):
            await recent.get("fails")
    assert asked.runs == ["fails", "fails"]


async def test_a_failure_of_which_every_caller_has_left_is_noted() -> None:
    asked, boundary = Asked(), Boundary(FakeClock())
    recent = Recent(asked, 5.0, boundary)
    asked.may.clear()
    leaving = asyncio.create_task(recent.get("fails"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    asked.may.set()
    await eventually(lambda: "answer (OSError)" in str(boundary.condition))

    with pytest.raises(OSError, match="fails"):
        await recent.get("fails")


async def test_a_node_that_does_not_answer_is_no_error_of_sparkd() -> None:
    async def ask(_: str) -> int:
        raise AgentLost("The agent of node n does not answer.")

    boundary = Boundary(FakeClock())
    with pytest.raises(AgentLost):
        await Recent(ask, 5.0, boundary).get("a")
    assert boundary.condition is None
