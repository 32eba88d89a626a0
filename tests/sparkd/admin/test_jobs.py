"""Jobs: their operations, refusals, cancellation, and their end with the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sparkd.admin.jobs import Jobs, Tell
from sparkd.control.journal import Journal
from sparkd.errors import ClusterError, Conflict, RankError
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import Operation, OperationState, Progress
from sparkd.state.store import Store
from tests.support.waiting import eventually


class Scene:
    """Jobs, and one job of the test whose end the test makes."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "state.db")
        self.journal = Journal(self.store, lambda: 5.0)
        self.jobs = Jobs(self.journal, Boundary(lambda: 0.0))
        self.error: BaseException | None = None
        self.began, self.may_end, self.cleans, self.may_clean = (asyncio.Event() for _ in range(4))
        self.cleaned = 0

    async def work(self, tell: Tell) -> str:
        tell("half way", Progress(phase="working", fraction=0.5))
        self.began.set()
        try:
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
            return "It is done."
        finally:
            self.cleans.set()
            await self.may_clean.wait()
            self.cleaned += 1

    def find(self, operation: Operation) -> Operation:
        return self.journal.operations.find(operation.id)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path)
    running = asyncio.create_task(made.jobs.run())
    await asyncio.sleep(0)
    yield made
    made.may_clean.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    made.store.close()


async def never(tell: Tell) -> str:
    await asyncio.Event().wait()
    return ""


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (None, OperationState.SUCCEEDED, "It is done."),
        (RankError("The cable is out."), OperationState.FAILED, "The cable is out."),
        (ValueError("a secret"), OperationState.FAILED, "ValueError"),
        (asyncio.CancelledError("a secret"), OperationState.FAILED, "CancelledError"),
    ],
)
async def test_a_job_shows_its_progress_and_how_it_ended(
    error: BaseException | None, state: OperationState, message: str, scene: Scene
) -> None:
    scene.error = error
    scene.may_clean.set()
    operation = scene.jobs.start("pull", "m", scene.work)
    await scene.began.wait()
    shown = scene.find(operation)
    assert (shown.kind, shown.model, shown.state, shown.message) == ("pull", "m", OperationState.RUNNING, "half way")
    assert shown.progress is not None and shown.progress.fraction == 0.5

    scene.may_end.set()
    await eventually(lambda: scene.find(operation).state is not OperationState.RUNNING, "its end", 0)
    ended = scene.find(operation)
    assert (ended.state, message in ended.message, "secret" in ended.message) == (state, True, False)
    assert scene.jobs.running("pull") == [] and scene.jobs.cancel(operation.id) is None


async def test_a_cancelled_job_runs_until_it_has_cleaned_up_and_is_not_cancelled_twice(scene: Scene) -> None:
    operation = scene.jobs.start("bench", "m", scene.work, remains="The figures are kept.")
    await scene.began.wait()
    cancelled = scene.jobs.cancel(operation.id)
    await scene.cleans.wait()
    assert cancelled is not None and cancelled.state is OperationState.CANCELLED
    assert cancelled.message.endswith("The figures are kept.")
    assert scene.jobs.running("bench") == [operation.id]
    with pytest.raises(Conflict, match=f"bench .*`sparkd cancel {operation.id}`"):
        scene.jobs.refuse_second("bench", "bench")

    assert scene.jobs.cancel(operation.id) == cancelled
    waiting = asyncio.create_task(scene.jobs.wait_for_cancelled("bench"))
    await scene.jobs.wait_for_cancelled("bench", "another model")
    await scene.jobs.wait_for_cancelled("pull")
    await asyncio.sleep(0)
    assert (waiting.done(), scene.cleaned) == (False, 0)

    scene.may_clean.set()
    await waiting
    assert (scene.cleaned, scene.jobs.running("bench")) == (1, [])
    scene.jobs.refuse_second("bench", "bench")
    assert scene.find(operation) == cancelled


async def test_a_job_that_is_cancelled_before_its_first_step_ends(scene: Scene) -> None:
    operation = scene.jobs.start("bench", "m", never)
    scene.jobs.cancel(operation.id)
    await scene.jobs.wait_for_cancelled("bench")

    assert scene.find(operation).state is OperationState.CANCELLED
    assert scene.jobs.running("bench") == []


async def test_jobs_begin_after_the_daemon_and_end_with_it(tmp_path: Path) -> None:
    made = Scene(tmp_path)
    with pytest.raises(ClusterError):
        made.jobs.start("pull", "m", never)
    assert made.journal.operations.all({}) == {}

    running = asyncio.create_task(made.jobs.run())
    await asyncio.sleep(0)
    made.may_clean.set()
    operations = [made.jobs.start("pull", "m", made.work), made.jobs.start("verify", "", never, remains="Nothing changed.")]
    await made.began.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    assert [made.find(operation).state for operation in operations] == [OperationState.CANCELLED] * 2
    assert made.find(operations[1]).message.endswith("Nothing changed.")
    assert made.cleaned == 1
    made.store.close()
