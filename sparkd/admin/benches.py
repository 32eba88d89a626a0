"""Owns the benches: one at a time, on request, cell after cell, and what came of each. Never starts one by itself, nor beside a load."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from sparkd import __version__
from sparkd.bench import benchy
from sparkd.bench.cell_figures import Moment, computed_prompt_tokens, engine_figures, machine_figures, power_points
from sparkd.bench.power import energy
from sparkd.bench.profile import Arguments, BenchProfile
from sparkd.bench.result import BenchResult, BenchSample, BenchStore, BenchSubject, Cell, CellResult, Published
from sparkd.control.journal import Ledger
from sparkd.engine.rates import Sample as Counters
from sparkd.errors import BadRequest, ClusterError, Conflict, RankError, SparkdError, UnknownModel
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import STARTING, ModelState, Operation, OperationState, Progress, Want
from sparkd.state.snapshot import ModelView, Snapshot

KIND = "bench"
SAMPLE_EVERY_S = 0.5
# A result keeps that many samples at most: two hours by the second.
MOST_SAMPLES = 7200
KEPT_EVERY_S = 1.0
IDLE_S = 10.0
READY_S = 3600.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Started:
    """bench: the id of its result."""

    operation: Operation
    bench: str


Counting = Callable[[str], Awaitable[Counters | None]]


@dataclass(frozen=True, slots=True)
class BenchedModel:
    """source: folder or hub id; folder: its files here; checkpoint: their identity; entry: as configured, secrets masked; vllm, driver:
    versions; published: figures of its recipe."""

    source: str
    folder: str | None = None
    checkpoint: str | None = None
    entry: Mapping[str, Any] = field(default_factory=dict)
    vllm: str | None = None
    driver: str | None = None
    published: tuple[Published, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The parts of the daemon that a bench needs.

    counters: an engine's, asked now; kv_use: the share of a model's KV cache that is used, as was seen last; key: of the daemon's own
    requests.
    """

    snapshot: Callable[[], Snapshot]
    want: Callable[[str, Want, str], Operation | None]
    counters: Counting
    kv_use: Callable[[str], float | None]
    model: Callable[[str], BenchedModel]
    base_url: str
    key: str


class Benches:
    """folder: of the results, and of the text."""

    def __init__(
        self, around: Surroundings, ledger: Ledger, folder: Path, wall: Callable[[], float] = time.time, boundary: Boundary | None = None
    ) -> None:
        self._boundary = boundary or Boundary(time.monotonic)
        self._around, self._ledger, self._wall = around, ledger, wall
        self._folder, self.store = folder, BenchStore(folder)
        self._tasks: asyncio.TaskGroup | None = None
        self._running: tuple[str, asyncio.Task[None]] | None = None
        # The result of the bench that runs, newer than its file.
        self._result: BenchResult | None = None

    async def run(self) -> None:
        """Until cancelled; then a bench that is under way ends, and its cells so far are kept."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    async def all(self) -> list[BenchResult]:
        """Newest first."""
        return [self._now(result) for result in await asyncio.to_thread(self.store.all)]

    async def find(self, bench_id: str) -> BenchResult:
        """Raises UnknownBench and StateError."""
        if self._result is not None and self._result.id == bench_id:
            return self._result
        return self._now(await asyncio.to_thread(self.store.read, bench_id))

    async def start(self, model: str, profile: BenchProfile, *, resume: str | None = None, force: bool = False) -> Started:
        """Measure a model's cells, or those that an earlier bench has not measured.

        Raises UnknownModel, BadRequest, and Conflict where another bench or a load is under way, or others use a model."""
        views = self._around.snapshot().models
        view = next((view for view in views.values() if model in (view.name, *view.aliases)), None)
        if view is None:
            raise UnknownModel(model, list(views))
        self._refuse_beside_others(view, views.values(), force=force)
        version = benchy.installed()
        if version is None:
            raise BadRequest(f"llama-benchy is not installed: run `{sys.executable} -m pip install 'llama-benchy>=0.4,<0.5'`.")
        result = await self._begun(view, profile, resume, f"llama-benchy {version}")
        self._refuse_a_second()
        if self._tasks is None:
            raise ClusterError("The daemon is still starting: try again in a moment.")
        operation = self._ledger.operations.open(KIND, view.name, "admin")
        self._result = result
        task = self._boundary.spawn(self._tasks, KIND, self._measure(operation.id, profile))
        self._running = operation.id, task
        task.add_done_callback(lambda _: self._done(operation.id))
        return Started(operation, result.id)

    async def remove(self, bench_id: str) -> BenchResult:
        """Raises UnknownBench, and Conflict for the bench that runs."""
        result = await self.find(bench_id)
        if self._running is not None and self._result is not None and self._result.id == bench_id:
            raise Conflict(f"{bench_id} is under way: `sparkd cancel {self._running[0]}` ends it.")
        await asyncio.to_thread(self.store.remove, bench_id)
        return result

    def cancel(self, operation_id: str) -> Operation | None:
        """None for what is no bench that is under way. Cells that were measured stay."""
        if self._running is None or self._running[0] != operation_id:
            return None
        self._ledger.operations.close(operation_id, OperationState.CANCELLED, "It was cancelled. The cells so far are kept.")
        self._running[1].cancel()
        return self._ledger.operations.find(operation_id)

    # --- own ------------------------------------------------------------------------------------------------------------

    def _refuse_a_second(self) -> None:
        if self._running is not None:
            raise Conflict(f"Another bench is under way: wait for it, or `sparkd cancel {self._running[0]}`.")

    def _refuse_beside_others(self, view: ModelView, views: Collection[ModelView], *, force: bool) -> None:
        self._refuse_a_second()
        if loading := [other.name for other in views if other.state in STARTING and other.name != view.name]:
            raise Conflict(f"{', '.join(loading)} is loading, which would distort the bench: try again when it has ended.")
        if not force and (used := [other.name for other in views if other.in_flight or other.queued]):
            raise Conflict(f"{', '.join(used)} has requests of others, which the bench would slow: wait, or measure anyway with --force.")

    async def _begun(self, view: ModelView, profile: BenchProfile, resume: str | None, tool: str) -> BenchResult:
        if resume is not None:
            earlier = await self.find(resume)
            cells = [cell if cell.state == "done" else CellResult(cell=cell.cell) for cell in earlier.cells]
            if earlier.subject.model != view.name or earlier.profile != profile.name:
                other = f"{earlier.subject.model} by {earlier.profile}"
                raise BadRequest(f"{resume} measured {other}: give the same model and profile to go on.")
            return earlier.model_copy(update={"state": "running", "error": None, "ended_s": None, "cells": cells})
        now_s = self._wall()
        bench_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{''.join(c if c.isalnum() else '-' for c in view.name)[:60]}"
        cells = [CellResult(cell=cell) for cell in profile.cells]
        predicted = None if view.memory_gib is None else round(view.memory_gib * (1 << 30))
        model = await asyncio.to_thread(self._around.model, view.name)
        return BenchResult(
            id=bench_id,
            state="running",
            subject=self._subject(view, model),
            profile=profile.name,
            tool=tool,
            latency_mode=profile.args.latency_mode,
            started_s=now_s,
            predicted_bytes=predicted,
            published=list(model.published),
            cells=cells,
        )

    def _subject(self, view: ModelView, model: BenchedModel) -> BenchSubject:
        everywhere = self._around.snapshot().nodes
        nodes = {rank.node_id for rank in view.ranks} or {node.node_id for node in everywhere}
        readings = [node.reading for node in everywhere if node.reading and node.node_id in nodes]
        gpus = sorted({reading.gpu_name for reading in readings if reading.gpu_name})
        quantize = view.quantize
        return BenchSubject(
            model=view.name,
            source=model.source,
            checkpoint=model.checkpoint,
            entry=dict(model.entry),
            format=str(quantize.get("format")) if isinstance(quantize, Mapping) else quantize,
            vllm=model.vllm,
            driver=model.driver,
            sparkd=__version__,
            gpu=", ".join(gpus) or None,
            nodes=sorted(nodes),
        )

    async def _measure(self, operation_id: str, profile: BenchProfile) -> None:
        state, messages = OperationState.FAILED, list[str]()
        end = "failed"
        try:
            with self._boundary.around(KIND, failed=messages.append):
                try:
                    messages.append(await self._each(operation_id, profile))
                    state, end = OperationState.SUCCEEDED, "done"
                except SparkdError as error:
                    messages.append(error.message)
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        finally:
            self._keep(state=end, error=messages[0] if messages and end == "failed" else None, ended_s=self._wall())
            with suppress(SparkdError):
                self._save()
        self._ledger.operations.close(operation_id, state, messages[0])

    async def _each(self, operation_id: str, profile: BenchProfile) -> str:
        """Measure the cells that are not measured yet. Returns a line about the whole."""
        result = self._current()
        await self._ready(result.subject.model, operation_id)
        await asyncio.to_thread(self._save)
        book_url, text = await asyncio.to_thread(benchy.text_file, self._folder)
        model = await asyncio.to_thread(self._around.model, result.subject.model)
        target = benchy.BenchTarget(
            f"{self._around.base_url}/v1",
            result.subject.model,
            model.folder or model.source,
            sys.executable,
            self._folder,
            self._around.key,
        )
        self._keep(subject=self._subject(self._view(result.subject.model), model))
        watch = _Watch(self._around, result.subject.model, self._wall)
        async with asyncio.TaskGroup() as tasks:
            watching = self._boundary.spawn(tasks, f"{KIND} samples", watch.run())
            try:
                if result.idle_w is None:
                    self._keep(idle_w=await watch.idle())
                for number, cell in enumerate(result.cells):
                    if cell.state == "done":
                        continue
                    await self._ready(result.subject.model, operation_id)
                    await self._cell(operation_id, number, target, profile.args, book_url, watch)
                    self._keep(samples=[*result.samples, *watch.samples(result.started_s)])
                    await asyncio.to_thread(self._save)
            finally:
                watching.cancel()
        result = self._current()
        failed = [cell.cell.name for cell in result.cells if cell.state == "failed"]
        line = f"{result.id}: {result.done} of {len(result.cells)} cells were measured, with {text} as text."
        return f"{line} Failed: {', '.join(failed)}." if failed else line

    async def _cell(
        self, operation_id: str, number: int, target: benchy.BenchTarget, args: Arguments, book_url: str, watch: _Watch
    ) -> None:
        result = self._current()
        cell, model = result.cells[number].cell, target.model
        requests, before = benchy.MeasuredRequests(), list[Counters | None]()

        async def heard(event: Mapping[str, Any]) -> None:
            if requests.take(event):
                # Before its first token the engine has counted nothing of it.
                before.append(await self._around.counters(model))
            self._tell(operation_id, number, cell, requests, args.runs)

        began_s, ranks = self._wall(), self._view(model).ranks
        self._put(number, CellResult(cell=cell, state="running", started_s=began_s))
        self._tell(operation_id, number, cell, requests, args.runs)
        watch.loads = []
        try:
            measured = await benchy.measure(target, cell, args, book_url, heard)
            if requests.errors:
                raise RankError(f"{len(requests.errors)} requests failed: {requests.errors[0]}")
            after = await self._around.counters(model)
            if after is None or self._view(model).ranks != ranks:
                raise RankError(f"The engine of {model} ended meanwhile: `sparkd logs {model}` says why. Resume the bench.")
            if watch.loads:
                raise RankError(f"{', '.join(watch.loads)} was loaded meanwhile, so its figures say nothing. Resume the bench.")
        except RankError as error:
            self._put(number, CellResult(cell=cell, state="failed", error=error.message, started_s=began_s, seconds=self._wall() - began_s))
            return
        span = requests.span() or (began_s, self._wall())
        moments = watch.between(*span)
        figures = engine_figures(before[0] if before else None, after, moments)
        # llama-benchy counts the tokens of the pieces that it sees, which may be 1 % fewer than the engine made.
        output_tokens = requests.output_tokens if figures.output_tokens is None else figures.output_tokens
        tokens = computed_prompt_tokens(requests.prompt_tokens, figures), output_tokens
        done = CellResult(
            cell=cell,
            state="done",
            started_s=span[0],
            seconds=span[1] - span[0],
            rows=measured.rows,
            prompt_tokens=requests.prompt_tokens,
            output_tokens=requests.output_tokens,
            energy=energy(power_points(watch.moments), span, requests.prompts(), requests.outputs(), tokens, result.idle_w),
            engine=figures,
            machine=machine_figures(moments),
        )
        self._put(number, done)

    async def _ready(self, model: str, operation_id: str) -> None:
        """Load the model where it is not. Raises RankError where it fails, or is not READY within READY_S."""
        if self._view(model).state != ModelState.READY:
            self._around.want(model, Want.RUNNING, KIND)
        try:
            async with asyncio.timeout(READY_S):
                # An engine that was killed a moment ago is READY until that is seen.
                while (view := self._view(model)).state != ModelState.READY or await self._around.counters(model) is None:
                    if view.state == ModelState.FAILED and view.retry_in_s is None:
                        raise RankError(f"{model} cannot be measured, because it does not load: {view.message}")
                    self._ledger.operations.tell(operation_id, f"{model} is loading", Progress(phase="loading"))
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            message = f"{model} cannot be measured, because it was not ready within {READY_S:,.0f} s: `sparkd ps` says what it waits for."
            raise RankError(message) from None

    def _view(self, model: str) -> ModelView:
        view = self._around.snapshot().models.get(model)
        if view is None:
            raise RankError(f"{model} is configured no more.")
        return view

    def _tell(self, operation_id: str, number: int, cell: Cell, requests: benchy.MeasuredRequests, runs: int) -> None:
        cells = len(self._current().cells)
        share = min(requests.run / (runs + 1), 1.0)
        which = f"cell {number + 1} of {cells}: {cell.name}" + (f", run {requests.run} of {runs}" if requests.run else "")
        self._ledger.operations.tell(operation_id, which, Progress(phase="measuring", fraction=(number + share) / cells))

    def _current(self) -> BenchResult:
        if self._result is None:
            raise RankError("No bench is under way.")
        return self._result

    def _keep(self, **fields: Any) -> None:
        self._result = self._current().model_copy(update=fields)

    def _put(self, number: int, cell: CellResult) -> None:
        cells = list(self._current().cells)
        cells[number] = cell
        self._keep(cells=cells)

    def _save(self) -> None:
        self.store.write(self._current())

    def _now(self, result: BenchResult) -> BenchResult:
        """A file that says `running` without a bench is of a daemon that was killed."""
        if self._result is not None and self._result.id == result.id:
            return self._result
        if result.state != "running":
            return result
        return result.model_copy(update={"state": "cancelled", "error": "The daemon ended. Resume it with --resume."})

    def _done(self, operation_id: str) -> None:
        """A callback and no `finally`: a task that is cancelled before its first step never enters its coroutine."""
        self._running = self._result = None
        self._ledger.operations.close(operation_id, OperationState.CANCELLED, "The daemon ended. The cells so far are kept.")


class _Watch:
    """Looks at the nodes and the engine of a model every SAMPLE_EVERY_S. loads: other models that began to load since it was emptied."""

    def __init__(self, around: Surroundings, model: str, wall: Callable[[], float]) -> None:
        self._around, self._model, self._wall = around, model, wall
        self.moments: list[Moment] = []
        self.loads: list[str] = []

    async def run(self) -> None:
        while True:
            self.moments.append(self._look())
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def idle(self) -> float | None:
        """The median power in watts over IDLE_S, as the first seconds may still be those of a request; None where no node tells."""
        if self._look().power_w is None:
            return None
        began_s = self._wall()
        await asyncio.sleep(IDLE_S)
        watts = [moment.power_w for moment in self.between(began_s, self._wall()) if moment.power_w is not None]
        return median(watts) if watts else None

    def between(self, begin_s: float, end_s: float) -> list[Moment]:
        return [moment for moment in self.moments if begin_s <= moment.at_s <= end_s]

    def samples(self, since_s: float) -> list[BenchSample]:
        """For a plot, one a second or fewer."""
        step = max(int(KEPT_EVERY_S / SAMPLE_EVERY_S), -(-len(self.moments) // MOST_SAMPLES))
        return [
            BenchSample(at_s=round(at.at_s - since_s, 1), power_w=at.power_w, memory_bytes=at.memory_bytes, celsius=at.celsius)
            for at in self.moments[::step]
        ]

    def _look(self) -> Moment:
        snapshot = self._around.snapshot()
        view = snapshot.models.get(self._model)
        self.loads += [
            other.name
            for other in snapshot.models.values()
            if other.state in STARTING and other.name != self._model and other.name not in self.loads
        ]
        nodes = {rank.node_id for rank in view.ranks} if view is not None else set()
        readings = [node.reading for node in snapshot.nodes if node.reading and node.node_id in nodes]
        engines = [engine for engine in snapshot.engines if engine.model == self._model]
        held = [(engine.host_bytes or 0) + (engine.device_bytes or 0) for engine in engines]
        return Moment(
            self._wall(),
            _whole([reading.gpu_power_w for reading in readings]),
            max((reading.gpu_celsius for reading in readings if reading.gpu_celsius is not None), default=None),
            tuple(sorted({reason for reading in readings for reason in reading.gpu_throttled or ()})),
            sum(held) if held else None,
            self._around.kv_use(self._model),
            readings[0].gpu_at_s if len(readings) == 1 else None,
        )


def _whole(values: Sequence[float | None]) -> float | None:
    """Their sum; None where one is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
