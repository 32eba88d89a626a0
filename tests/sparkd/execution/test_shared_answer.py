"""An answer that is kept: one run for each key, whoever asks and leaves."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from sparkd.errors import AgentLost
from sparkd.execution.boundary import Boundary
from sparkd.execution.shared_answer import SharedAnswer
from tests.support.fakes import FakeClock
from tests.support.waiting import eventually


class Asked:
    """Answers with the number of the run, once it may."""

    def __init__(self, kept_s: float = 5.0) -> None:
        self.clock = FakeClock()
        self.boundary = Boundary(self.clock)
        self.shared = SharedAnswer(self.boundary, kept_s, self.clock)
        self.runs: list[str] = []
        self.may = asyncio.Event()
        self.may.set()

    async def get(self, argument: str) -> int:
        return await self.shared.get(argument, partial(self._run, argument))

    async def _run(self, argument: str) -> int:
        self.runs.append(argument)
        await self.may.wait()
        if argument == "fails":
            raise OSError(argument)
        return len(self.runs)


async def test_it_is_kept_for_a_while() -> None:
    asked = Asked()
    assert [await asked.get("a"), await asked.get("a")] == [1, 1]
    asked.clock.now_s += 4.9
    assert [await asked.get("a"), await asked.get("b")] == [1, 2]
    asked.clock.now_s += 0.1
    assert [await asked.get("a"), await asked.get("b")] == [3, 2]


async def test_it_is_not_kept_where_nothing_says_for_how_long() -> None:
    asked = Asked(kept_s=0.0)
    assert [await asked.get("a"), await asked.get("a")] == [1, 2]


@pytest.mark.parametrize("kept_s", [0.0, 5.0])
async def test_one_run_for_each_key_and_callers_who_leave_start_no_other(kept_s: float) -> None:
    asked = Asked(kept_s)
    asked.may.clear()
    leaving = [asyncio.create_task(asked.get("a")) for _ in range(10)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    staying = [asyncio.create_task(asked.get(argument)) for argument in ("a", "a", "b", "b")]
    await asyncio.sleep(0)
    asked.may.set()
    assert await asyncio.gather(*staying) == [2, 2, 2, 2]
    assert asked.runs == ["a", "b"]


async def test_a_failure_is_told_and_not_kept() -> None:
    asked = Asked()
    for _ in range(2):
        with pytest.raises(OSError, match="fails"):
            await asked.get("fails")
    assert asked.runs == ["fails", "fails"]


async def test_a_failure_of_which_every_caller_has_left_is_noted() -> None:
    asked = Asked()
    asked.may.clear()
    leaving = asyncio.create_task(asked.get("fails"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    asked.may.set()
    await eventually(lambda: "answer (OSError)" in str(asked.boundary.condition))

    with pytest.raises(OSError, match="fails"):
        await asked.get("fails")


async def test_a_node_that_does_not_answer_is_no_error_of_sparkd() -> None:
    async def ask() -> int:
        raise AgentLost("The agent of node n does not answer.")

    boundary = Boundary(FakeClock())
    with pytest.raises(AgentLost):
        await SharedAnswer(boundary).get("a", ask)
    assert boundary.condition is None
