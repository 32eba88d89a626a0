"""The last boundary: what it lets through, what it takes note of, and for how long it tells of it."""

from __future__ import annotations

import ast
import asyncio
import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from sparkd.errors import NodeRefused, SparkdError
from sparkd.execution.boundary import KEPT_S, LOG_EVERY_S, Boundary
from sparkd.gateway import routes
from sparkd.gateway.server import GatewayServer
from sparkd.metrics import INTERNAL_ERRORS
from sparkd.unexpected import lack_of_machine
from tests.sparkd.gateway.fakes import RawEngine, serving
from tests.support.fakes import FakeClock
from tests.support.faulty_sparkd import ERRORS
from tests.support.waiting import eventually

SPARKD = Path(__file__).parents[3] / "sparkd"
STARTS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "Task"}
WITHIN = {"guarded", "keep"}


def started(path: Path) -> Iterator[tuple[str, bool]]:
    """module:function of every task that the module starts, and whether it runs within the boundary."""
    tree = ast.parse(path.read_text())
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and name_of(call.func) in STARTS:
                work = call.args[0] if call.args else None
                yield f"{path.stem}:{function.name}", isinstance(work, ast.Call) and name_of(work.func) in WITHIN


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def test_every_task_runs_within_the_boundary() -> None:
    # A bench is a program of its own, which an error may end.
    found = [one for path in sorted(SPARKD.rglob("*.py")) if path.parent.name != "bench" for one in started(path)]

    assert ("boundary:spawn", True) in found and ("daemon:_serve_until_told", True) in found
    assert [place for place, within in found if not within] == []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def boundary(clock: FakeClock) -> Boundary:
    return Boundary(clock)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.execution.boundary.PAUSE_S", 0.0)


def counted(where: str) -> float:
    return float(INTERNAL_ERRORS.labels(where)._value.get())


@pytest.mark.parametrize("make", ERRORS, ids=lambda make: repr(make()))
async def test_an_error_goes_no_further_and_is_counted_and_told(boundary: Boundary, make: Callable[[], BaseException]) -> None:
    before, heard = counted("place"), list[SparkdError]()
    with boundary.around("place", "m", heard.append):
        raise make()

    # What the machine refuses is told as that, and any other error as one of sparkd's own.
    kind, reason = lack_of_machine(make()) or type(make()).__name__, "NodeRefused" if lack_of_machine(make()) else "InternalError"
    assert counted("place") == before + 1
    assert len(heard) == 1 and kind in heard[0].message and isinstance(heard[0], NodeRefused) is (reason == "NodeRefused")
    condition = boundary.condition
    assert condition is not None and condition.reason == reason
    assert "place of m" in condition.message and kind in condition.message


def test_an_error_of_its_own_is_told_before_what_the_machine_refuses(boundary: Boundary) -> None:
    for error in (OSError(errno.ENOSPC, "full"), KeyError("x")):
        with boundary.around("place"):
            raise error

    assert boundary.condition is not None and boundary.condition.reason == "InternalError"
    assert "No space" not in boundary.condition.message


def test_an_errors_own_text_is_told_to_the_log_alone(boundary: Boundary) -> None:
    heard: list[SparkdError] = []
    with boundary.around("place", "m", heard.append):
        raise KeyError("secret")

    assert heard and "secret" not in f"{boundary.condition}{heard}"


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_end_of_the_process_is_no_error(boundary: Boundary, end: type[BaseException]) -> None:
    with pytest.raises(end), boundary.around("place"):
        raise end

    assert boundary.condition is None


async def test_a_task_that_is_cancelled_ends(boundary: Boundary) -> None:
    tasks = [
        asyncio.create_task(boundary.guarded("pulse", asyncio.Event().wait())),
        asyncio.create_task(boundary.keep("pulls", asyncio.Event().wait)),
    ]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert [task.cancelled() for task in tasks] == [True, True]
    assert boundary.condition is None


async def test_no_error_of_a_task_ends_its_group(boundary: Boundary) -> None:
    ended = []

    async def fail(make: Callable[[], BaseException]) -> None:
        raise make()

    async def work() -> None:
        await asyncio.sleep(0)
        ended.append("work")

    async with asyncio.TaskGroup() as tasks:
        for make in ERRORS:
            boundary.spawn(tasks, "pull m", fail(make))
        boundary.spawn(tasks, "pull other", work())

    assert ended == ["work"]
    ours = [make() for make in ERRORS if lack_of_machine(make()) is None]
    assert all(f"pull of m ({type(error).__name__}" in str(boundary.condition) for error in ours)


async def test_a_task_that_is_cancelled_before_its_first_step_leaves_nothing(boundary: Boundary) -> None:
    """A coroutine that nobody awaited would be a warning, and that an error."""
    task = boundary.spawn(asyncio.get_running_loop(), "pull m", asyncio.Event().wait())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert task.cancelled() and boundary.condition is None


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest, boundary: Boundary) -> Iterator[asyncio.AbstractEventLoop]:
    made: asyncio.AbstractEventLoop = request.param()
    made.set_exception_handler(boundary.heard)
    yield made
    made.close()


def turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(asyncio.sleep(0))


def test_an_error_of_our_callback_is_noted_with_the_words_of_the_loop(
    boundary: Boundary, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.call_soon(routes.find, "secret", None)
    turn(loop)

    assert "loop (AttributeError)" in str(boundary.condition)
    (record,) = caplog.records
    assert "Exception in callback" in record.getMessage() and "secret" not in record.getMessage()


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


async def test_a_gateway_that_ends_by_an_error_begins_again_until_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, main_loop = list(ERRORS), GatewayServer.main_loop

    async def breaks(self: GatewayServer) -> None:
        if errors:
            raise errors.pop()()
        await main_loop(self)

    monkeypatch.setattr(GatewayServer, "main_loop", breaks)
    async with serving(RawEngine(tmp_path / "engine.sock")) as running:
        await eventually(lambda: not errors)
        assert (await running.get("/livez")).status == 200
