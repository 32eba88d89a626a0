"""The last boundary: what it lets through, what it takes note of, and for how long it tells of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from sparkd.boundary import KEPT_S, LOG_EVERY_S, Boundary
from sparkd.metrics import INTERNAL_ERRORS
from tests.fakes import FakeClock
from tests.faulty_sparkd import ERRORS


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def boundary(clock: FakeClock) -> Boundary:
    return Boundary(clock)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.boundary.PAUSE_S", 0.0)


def counted(where: str) -> float:
    return float(INTERNAL_ERRORS.labels(where)._value.get())


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: repr(make()))
async def test_an_error_goes_no_further_and_is_counted_and_told(boundary: Boundary, make: Callable[[], BaseException]) -> None:
    before, heard = counted("place"), list[str]()
    with boundary.around("place", "m", heard.append):
        raise make()

    assert counted("place") == before + 1
    assert len(heard) == 1 and type(make()).__name__ in heard[0]
    condition = boundary.condition
    assert condition is not None and condition.startswith("InternalError: ")
    assert "place of m" in condition and type(make()).__name__ in condition


def test_an_errors_own_text_is_told_to_the_log_alone(boundary: Boundary) -> None:
    heard: list[str] = []
    with boundary.around("place", "m", heard.append):
        raise KeyError("secret")

    assert "secret" not in f"{boundary.condition}{heard}"


def test_what_fails_the_model_may_fail_too(boundary: Boundary) -> None:
    def fail(sentence: str) -> None:
        raise ValueError(sentence)

    with boundary.around("place", "m", fail):
        raise KeyError("x")

    assert "KeyError" in str(boundary.condition) and "ValueError" in str(boundary.condition)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_end_of_the_process_is_no_error(boundary: Boundary, end: type[BaseException]) -> None:
    with pytest.raises(end), boundary.around("place"):
        raise end

    assert boundary.condition is None


async def test_a_task_that_is_cancelled_ends(boundary: Boundary) -> None:
    tasks = [
        asyncio.create_task(boundary.guarded("pulse", asyncio.sleep(60.0))),
        asyncio.create_task(boundary.keep("pulls", lambda: asyncio.sleep(60.0))),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert [task.cancelled() for task in tasks] == [True, True]
    assert boundary.condition is None


async def test_a_time_limit_is_what_it_is_everywhere(boundary: Boundary) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            with boundary.around("observe"):
                await asyncio.sleep(60.0)

    assert boundary.condition is None


async def test_a_part_begins_again_until_it_returns(boundary: Boundary) -> None:
    errors, begun = list(ERRORS), 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if errors:
            raise errors.pop()()

    await boundary.keep("scraper", work)

    assert begun == len(ERRORS) + 1


def test_a_condition_goes_away_after_a_time_without_another(boundary: Boundary, clock: FakeClock) -> None:
    for _ in range(3):
        with boundary.around("observe"):
            raise KeyError("x")
    assert "3 times" in str(boundary.condition)
    clock.now_s += KEPT_S
    with boundary.around("plan"):
        raise ValueError("x")
    clock.now_s += 1.0

    assert "observe" not in str(boundary.condition) and "plan" in str(boundary.condition)
    clock.now_s += KEPT_S
    assert boundary.condition is None
    with boundary.around("observe"):
        raise KeyError("x")
    assert "times" not in str(boundary.condition), "it counts anew"


def test_a_lasting_fault_does_not_fill_the_log(boundary: Boundary, clock: FakeClock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="sparkd.boundary")
    for second in range(int(2 * LOG_EVERY_S)):
        clock.now_s = 1000.0 + second
        with boundary.around("observe"):
            raise KeyError("x")
        if second == 0:
            with boundary.around("observe"):
                raise ValueError("another")

    assert len(caplog.records) == 3
    assert all(record.exc_info for record in caplog.records)
