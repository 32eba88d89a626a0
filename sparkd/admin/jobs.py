"""The jobs of the admin API: pulls, measurements, benches, verifications and removals, which clients follow and cancel as operations."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from sparkd.control.journal import Journal
from sparkd.errors import ClusterError, Conflict, SparkdError
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import Operation, OperationState, Progress
from sparkd.unexpected import unexpected

Tell = Callable[[str, Progress], None]
Work = Callable[[Tell], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Job:
    operation: Operation
    task: asyncio.Task[None]
    remains: str


class Jobs:
    """Runs each job as a task and closes its operation once, however the job ends.

    journal: keeps the operations.
    """

    def __init__(self, journal: Journal, boundary: Boundary) -> None:
        self._journal, self._boundary = journal, boundary
        self._tasks: asyncio.TaskGroup | None = None
        self._jobs: dict[str, _Job] = {}

    async def run(self) -> None:
        """Run jobs until cancelled, then end those that are under way."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    def start(self, kind: str, model: str, work: Work, *, remains: str = "") -> Operation:
        """Begin a job. Raises ClusterError before `run`.

        kind: one word.
        model: the model, or what else the job is about.
        work: gets a function that shows progress, and returns the operation's last message. A SparkdError fails the operation.
        remains: a sentence about what a cancelled job leaves.
        """
        if self._tasks is None:
            raise ClusterError("The daemon is still starting: try again in a moment.")
        operation = self._journal.operations.open(kind, model, "admin")
        task = self._boundary.spawn(self._tasks, f"{kind} {model}".strip(), self._run(operation, work))
        self._jobs[operation.id] = _Job(operation, task, remains)
        # A callback and no `finally`: a task that is cancelled before its first step never enters its coroutine.
        task.add_done_callback(lambda _: self._end(operation.id, OperationState.CANCELLED, f"The daemon ended. {remains}"))
        return operation

    def cancel(self, operation_id: str) -> Operation | None:
        """Cancel a job. Returns its operation, None if no such job is under way."""
        job = self._jobs.get(operation_id)
        if job is None:
            return None
        # A second cancellation would interrupt the job's own cleanup.
        if not job.task.cancelling():
            self._close(operation_id, OperationState.CANCELLED, f"It was cancelled. {job.remains}")
            job.task.cancel()
        return self._journal.operations.find(operation_id)

    def running(self, kind: str, model: str | None = None) -> list[str]:
        """The operations of the jobs of this kind (about this model), also of cancelled ones that are still ending."""
        return [job.operation.id for job in self._find(kind, model)]

    def refuse_second(self, kind: str, noun: str) -> None:
        """Raises Conflict while a job of this kind is under way."""
        if running := self.running(kind):
            raise Conflict(f"Another {noun} is under way: wait for it, or `sparkd cancel {running[0]}`.")

    async def wait_for_cancelled(self, kind: str, model: str | None = None) -> None:
        """Wait until the cancelled jobs of this kind (about this model) have ended."""
        while ending := [job.task for job in self._find(kind, model) if job.task.cancelling()]:
            await asyncio.wait(ending)

    def _find(self, kind: str, model: str | None) -> list[_Job]:
        return [job for job in self._jobs.values() if job.operation.kind == kind and model in (None, job.operation.model)]

    async def _run(self, operation: Operation, work: Work) -> None:
        def tell(message: str, progress: Progress) -> None:
            self._journal.operations.tell(operation.id, message, progress)

        def fail(error: SparkdError) -> None:
            self._end(operation.id, OperationState.FAILED, error.message)

        with self._boundary.around(operation.kind, operation.model, failed=fail):
            try:
                message = await work(tell)
            except SparkdError as error:
                fail(error)
            else:
                self._end(operation.id, OperationState.SUCCEEDED, message)

    def _end(self, operation_id: str, state: OperationState, message: str) -> None:
        self._jobs.pop(operation_id, None)
        self._close(operation_id, state, message)

    def _close(self, operation_id: str, state: OperationState, message: str) -> None:
        """Does nothing to an operation that is closed already."""
        self._journal.operations.close(operation_id, state, message.strip())


def message_of(error: BaseException) -> str:
    """The message that the operation of a job gets when this error ends it."""
    return error.message if isinstance(error, SparkdError) else unexpected(error).message
