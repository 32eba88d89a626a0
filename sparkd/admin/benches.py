"""Owns the benches: one at a time, on request, and what came of each. Never starts one by itself, nor beside a load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from sparkd.admin.load_bench import LoadBench, load_bench
from sparkd.admin.running_bench import KIND, BenchWork, RunningBench, Surroundings, subject_of
from sparkd.admin.speed_bench import SpeedBench, speed_bench
from sparkd.bench import benchy
from sparkd.bench.profile import BenchProfile
from sparkd.bench.result import BenchResult, BenchStore, CellResult, Kind
from sparkd.control.journal import Ledger
from sparkd.errors import BadRequest, ClusterError, Conflict, SparkdError, UnknownModel
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import STARTING, Operation, OperationState
from sparkd.state.snapshot import ModelView


@dataclass(frozen=True, slots=True)
class Started:
    """bench: the id of its result."""

    operation: Operation
    bench: str


class Benches:
    """folder: of the results, and of the text."""

    def __init__(
        self, around: Surroundings, ledger: Ledger, folder: Path, wall: Callable[[], float] = time.time, boundary: Boundary | None = None
    ) -> None:
        self._boundary = boundary or Boundary(time.monotonic)
        self._around, self._ledger, self._wall = around, ledger, wall
        self._folder, self.store = folder, BenchStore(folder)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: RunningBench | None = None
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until cancelled; then a bench that is under way ends, and its figures so far are kept."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    async def all(self) -> list[BenchResult]:
        """Newest first."""
        return [self._now(result) for result in await asyncio.to_thread(self.store.all)]

    async def find(self, bench_id: str) -> BenchResult:
        """Raises UnknownBench and StateError."""
        if self._running is not None and self._running.result.id == bench_id:
            return self._running.result
        return self._now(await asyncio.to_thread(self.store.read, bench_id))

    async def start(self, model: str, work: BenchWork, *, resume: str | None = None, force: bool = False) -> Started:
        """Measure a model, or the cells that an earlier bench has not measured.

        Raises UnknownModel, BadRequest, and Conflict where another bench or a load is under way, or others use a model."""
        views = self._around.snapshot().models
        view = next((view for view in views.values() if model in (view.name, *view.aliases)), None)
        if view is None:
            raise UnknownModel(model, list(views))
        await self._cancelled()
        self._refuse_beside_others(view, views.values(), work.kind, force=force)
        result = await self._begun(view, work, resume)
        self._refuse_a_second()
        if self._tasks is None:
            raise ClusterError("The daemon is still starting: try again in a moment.")
        running = self._running = RunningBench(self._around, self._ledger, self._folder, self._wall, self._boundary, result)
        self._task = self._boundary.spawn(self._tasks, KIND, self._measure(running, work))
        self._task.add_done_callback(lambda _: self._done(running))
        return Started(running.operation, result.id)

    async def speed(
        self, model: str, profile: BenchProfile, tool: str, book: tuple[str, str | None] | None, resume: str | None
    ) -> SpeedBench:
        """A bench of speed with a tool. book: a text and its name; without it a bench that goes on has the text of its first part.

        Raises UnknownModel, UnknownBench, and BadRequest where the tool is not installed."""
        if resume is not None and book is None and (label := (await self.find(resume)).text) is not None:
            book = await asyncio.to_thread(benchy.text_of_earlier, self._folder, label)
        interpreter = (await asyncio.to_thread(self._around.model, model)).interpreter
        return await asyncio.to_thread(speed_bench, profile, tool, self._folder, interpreter, *(book or (None, None)))

    def loads(self, model: str, times: int, other: str | None) -> LoadBench:
        """A bench of loads. Raises BadRequest and Conflict."""
        return load_bench(model, times, other, self._around.snapshot().models.values())

    async def check_lendable(self, model: str) -> None:
        """Raises UnknownModel, and BadRequest for a model that has no unquantized form to compare with."""
        await asyncio.to_thread(self._around.check_lendable, model)

    async def remove(self, bench_id: str) -> BenchResult:
        """Raises UnknownBench, and Conflict for the bench that runs."""
        await self._cancelled()
        result = await self.find(bench_id)
        if self._running is not None and self._running.result.id == bench_id:
            raise Conflict(f"{bench_id} is under way: `sparkd cancel {self._running.operation.id}` ends it.")
        await asyncio.to_thread(self._forget, bench_id)
        return result

    def cancel(self, operation_id: str) -> Operation | None:
        """None for what is no bench that is under way. Figures that were measured stay."""
        if self._running is None or self._task is None or self._running.operation.id != operation_id:
            return None
        self._ledger.operations.close(operation_id, OperationState.CANCELLED, "It was cancelled. The figures so far are kept.")
        self._task.cancel()
        return self._ledger.operations.find(operation_id)

    # --- own ------------------------------------------------------------------------------------------------------------

    def _forget(self, bench_id: str) -> None:
        """With its text, unless another result names that."""
        self.store.remove(bench_id)
        benchy.forget_texts(self._folder, [kept.text for kept in self.store.all()])

    async def _cancelled(self) -> None:
        """Wait until a bench that was cancelled has written its figures: until then it is the one that runs."""
        if self._task is not None and self._task.cancelling():
            await asyncio.wait([self._task])

    def _refuse_a_second(self) -> None:
        if self._running is not None:
            raise Conflict(f"Another bench is under way: wait for it, or `sparkd cancel {self._running.operation.id}`.")

    def _refuse_beside_others(self, view: ModelView, views: Collection[ModelView], kind: Kind, *, force: bool) -> None:
        self._refuse_a_second()
        if loading := [other.name for other in views if other.state in STARTING and (kind == "load" or other.name != view.name)]:
            raise Conflict(f"{', '.join(loading)} is loading, which would distort the bench: try again when it has ended.")
        if not force and (used := [other.name for other in views if other.in_flight or other.queued]):
            raise Conflict(f"{', '.join(used)} has requests of others, which the bench would slow: wait, or measure anyway with --force.")

    async def _begun(self, view: ModelView, work: BenchWork, resume: str | None) -> BenchResult:
        if resume is not None:
            earlier = await self.find(resume)
            refuse_a_mixture(earlier, view.name, work)
            cells = [cell if cell.state == "done" else CellResult(cell=cell.cell) for cell in earlier.cells]
            return earlier.model_copy(update={"state": "running", "error": None, "ended_s": None, "cells": cells})
        now_s = self._wall()
        bench_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{''.join(c if c.isalnum() else '-' for c in view.name)[:60]}"
        model = await asyncio.to_thread(self._around.model, view.name)
        return BenchResult(
            id=bench_id,
            kind=work.kind,
            state="running",
            subject=subject_of(view, model, self._around.snapshot()),
            profile=work.profile,
            tool=work.tool,
            text=work.text,
            started_s=now_s,
            predicted_bytes=None if view.memory_gib is None else round(view.memory_gib * (1 << 30)),
            published=list(model.published),
            cells=[CellResult(cell=cell) for cell in work.cells],
        )

    async def _measure(self, running: RunningBench, work: BenchWork) -> None:
        state, messages = OperationState.FAILED, list[str]()
        end = "failed"
        try:
            with self._boundary.around(KIND, failed=lambda error: messages.append(error.message)):
                try:
                    await running.save()
                    await self._predict(running)
                    messages.append(await work.run(running))
                    state, end = OperationState.SUCCEEDED, "done"
                    await asyncio.to_thread(self._around.learn, running.result)
                except SparkdError as error:
                    messages.append(error.message)
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        finally:
            running.keep(state=end, error=messages[0] if messages and end == "failed" else None, ended_s=self._wall())
            with suppress(SparkdError):
                await running.save()
        self._ledger.operations.close(running.operation.id, state, messages[0])

    async def _predict(self, running: RunningBench) -> None:
        """A model that cannot be planned is measured all the same."""
        if running.result.predicted is None:
            with suppress(SparkdError):
                running.keep(predicted=await self._around.predict(running.result.subject.model))

    def _now(self, result: BenchResult) -> BenchResult:
        """A file that says `running` without a bench is of a daemon that was killed."""
        if self._running is not None and self._running.result.id == result.id:
            return self._running.result
        if result.state != "running":
            return result
        return result.model_copy(update={"state": "cancelled", "error": "The daemon ended. Resume it with --resume."})

    def _done(self, running: RunningBench) -> None:
        """A callback and no `finally`: a task that is cancelled before its first step never enters its coroutine."""
        self._running = self._task = None
        self._ledger.operations.close(running.operation.id, OperationState.CANCELLED, "The daemon ended. The figures so far are kept.")


def refuse_a_mixture(earlier: BenchResult, model: str, work: BenchWork) -> None:
    """Raises BadRequest where the rest of an earlier bench would be measured of another model, or by another tool, text or profile.

    A text is the same where its hash is. A result of an earlier release does not name its text, so that one is not compared.
    """
    tools = (earlier.tool.partition(" ")[0], work.tool.partition(" ")[0])
    pairs: list[tuple[str, str | None, str | None]] = [
        ("model", earlier.subject.model, model),
        ("kind", earlier.kind, work.kind),
        ("tool", *tools),
        ("profile", earlier.profile, work.profile),
    ]
    if earlier.text is not None and work.text is not None and _digest(earlier.text) != _digest(work.text):
        pairs.insert(3, ("text", earlier.text, work.text))
    theirs, ours = (cell.cell.name for cell in earlier.cells), (cell.name for cell in work.cells)
    pairs += [(f"cell {number}", *names) for number, names in enumerate(zip_longest(theirs, ours), 1)]
    for what, was, is_now in pairs:
        if was != is_now:
            noun = "profile" if what.startswith("cell ") else what
            because = f"its {what} is {was or 'missing'}, not {is_now or 'missing'}, and a result has one {noun}"
            raise BadRequest(f"{earlier.id} cannot go on: {because}. Give the same {noun}.", param="resume")


def _digest(text: str) -> str:
    return text.rpartition(" (")[2]
