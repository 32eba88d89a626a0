"""Measures the cells of a profile with llama-benchy, one after another, and adds what the nodes and the engine show meanwhile."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from sparkd.admin.running_bench import KIND, RunningBench, Surroundings, loads_beside, subject_of
from sparkd.bench import benchy, other_tools
from sparkd.bench.cell_figures import Moment, computed_prompt_tokens, engine_figures, machine_figures, others_tokens, power_points
from sparkd.bench.figures import one_line
from sparkd.bench.power import energy
from sparkd.bench.profile import BenchProfile
from sparkd.bench.result import BenchSample, Cell, CellResult
from sparkd.bench.tool_process import version_in
from sparkd.errors import BadRequest, RankError
from sparkd.gateway.rates import Sample as Counters
from sparkd.vllm.installed import full_version_in

SAMPLE_EVERY_S = 0.5
# A result keeps that many samples at most: two hours by the second.
MOST_SAMPLES = 7200
KEPT_EVERY_S = 1.0
IDLE_S = 10.0
RANDOM_TOKENS = "random tokens"


@dataclass(frozen=True)
class SpeedBench:
    """runs: the name of the tool; tool: with its version; text: the name of the text; content: of the text, for llama-benchy alone."""

    chosen: BenchProfile
    runs: str
    tool: str
    interpreter: str
    text: str
    content: str = field(default="", repr=False)
    kind: Literal["speed"] = "speed"

    @property
    def profile(self) -> str:
        return self.chosen.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.chosen.cells

    async def run(self, bench: RunningBench) -> str:
        """Measure the cells that are not measured yet."""
        model, around = bench.result.subject.model, bench.around
        await bench.ready()
        book_url = await asyncio.to_thread(benchy.kept_text, bench.folder, self.content) if self.runs == benchy.NAME else ""
        benched = await asyncio.to_thread(around.model, model)
        target = benchy.BenchTarget(
            f"{around.base_url}/v1", model, benched.folder or benched.source, self.interpreter, bench.folder, around.key
        )
        bench.keep(subject=subject_of(bench.view(), benched, around.snapshot()), latency_mode=self.chosen.args.latency_mode)
        watch = _Watch(around, model, bench.wall)
        earlier = bench.result.samples
        async with asyncio.TaskGroup() as tasks:
            watching = bench.boundary.spawn(tasks, f"{KIND} samples", watch.run())
            try:
                if bench.result.idle_w is None:
                    bench.keep(idle_w=await watch.idle())
                for number, cell in enumerate(bench.result.cells):
                    if cell.state == "done":
                        continue
                    await bench.ready()
                    await self._cell(bench, number, target, book_url, watch)
                    bench.keep(samples=[*earlier, *watch.samples(bench.result.started_s)])
                    await bench.save()
            finally:
                watching.cancel()
        result = bench.result
        failed = [cell.cell.name for cell in result.cells if cell.state == "failed"]
        line = f"{result.id}: {result.done} of {len(result.cells)} cells were measured, with {self.text} as text."
        return f"{line} Failed: {', '.join(failed)}." if failed else line

    async def _cell(self, bench: RunningBench, number: int, target: benchy.BenchTarget, book_url: str, watch: _Watch) -> None:
        cell, model, args, around = bench.result.cells[number].cell, target.model, self.chosen.args, bench.around
        requests, before = benchy.MeasuredRequests(), list[Counters | None]()

        def put(result: CellResult) -> None:
            cells = list(bench.result.cells)
            cells[number] = result
            bench.keep(cells=cells)

        def tell() -> None:
            cells = len(bench.result.cells)
            share = min(requests.run / (args.runs + 1), 1.0)
            which = f"cell {number + 1} of {cells}: {cell.name}" + (f", run {requests.run} of {args.runs}" if requests.run else "")
            bench.tell(which, (number + share) / cells)

        async def heard(event: Mapping[str, Any]) -> None:
            if requests.take(event):
                # Before its first token the engine has counted nothing of it.
                before.append(await around.counters(model))
            tell()

        began_s, ranks, since_seq = bench.wall(), bench.view().ranks, bench.newest_event()
        put(CellResult(cell=cell, state="running", started_s=began_s))
        tell()
        watch.loads = []
        try:
            if self.runs == benchy.NAME:
                measured = await benchy.measure(target, cell, args, book_url, heard)
            else:
                before.append(await around.counters(model))
                measured, timed = await other_tools.measure(self.runs, target, cell, args)
                requests.take_timed(timed)
            if requests.errors:
                raise RankError(f"{len(requests.errors)} of {len(requests.began)} requests failed: {requests.errors[0]}")
            after = await around.counters(model)
            if after is None or bench.view().ranks != ranks:
                raise RankError(f"The engine of {model} was started again meanwhile: `sparkd events` says why.")
            if watch.loads:
                raise RankError(f"{', '.join(watch.loads)} was loaded meanwhile, so its figures say nothing.")
        except RankError as error:
            seconds = bench.wall() - began_s
            why = await bench.engine_failure(model, since_seq) or one_line(error.message)
            put(CellResult(cell=cell, state="failed", error=why, started_s=began_s, seconds=seconds))
            return
        span = requests.span() or (began_s, bench.wall())
        moments = watch.between(*span)
        figures = engine_figures(before[0] if before else None, after, moments)
        others = others_tokens(requests.prompt_tokens, requests.output_tokens, figures)
        output_tokens = requests.output_tokens if figures.output_tokens is None else figures.output_tokens
        tokens = computed_prompt_tokens(requests.prompt_tokens, figures), output_tokens
        put(
            CellResult(
                cell=cell,
                state="done",
                started_s=span[0],
                seconds=span[1] - span[0],
                rows=measured.rows,
                prompt_tokens=requests.prompt_tokens,
                output_tokens=requests.output_tokens,
                # The other tools' own warm-up is among their counts.
                others_tokens=others if self.runs == benchy.NAME else None,
                energy=energy(power_points(watch.moments), span, requests.prompts(), requests.outputs(), tokens, bench.result.idle_w),
                engine=figures,
                machine=machine_figures(moments),
            )
        )


def speed_bench(
    profile: BenchProfile, runs: str, folder: Path, engine_python: str, book: str | None = None, book_name: str | None = None
) -> SpeedBench:
    """runs: the name of a tool. folder: of the results. engine_python: of the model's vLLM. book: in place of llama-benchy's. Blocks.

    The tool is looked for in the environment of its own in `folder`, then in sparkd's. Raises BadRequest where it is in neither."""
    if book is not None and runs != benchy.NAME:
        raise BadRequest(f"A text is for {benchy.NAME} alone; {runs} sends random tokens.", param="book")
    own = folder / "tools" / runs
    places = [engine_python] if runs == "vllm" else [str(own / "bin" / "python"), sys.executable]
    package = f"{benchy.NAME}>=0.4,<0.5" if runs == benchy.NAME else runs
    found = next(((place, version) for place in places if (version := _version(place, runs)) is not None), None)
    if found is None and runs == "vllm":
        raise BadRequest(f"{engine_python} has no vLLM, so `vllm bench serve` cannot run there: choose another tool.", param="tool")
    if found is None:
        install = f"{sys.executable} -m venv {own} && {own}/bin/pip install '{package}'"
        raise BadRequest(f"{runs} is not installed: run `{install}` as the user of the daemon.", param="tool")
    content, text = benchy.chosen_text(book, book_name) if runs == benchy.NAME else ("", RANDOM_TOKENS)
    return SpeedBench(profile, runs, f"{runs} {found[1]}", found[0], text, content)


def _version(interpreter: str, tool: str) -> str | None:
    return full_version_in(Path(interpreter)) if tool == "vllm" else version_in(interpreter, tool)


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
        self.loads += [name for name in loads_beside(snapshot, self._model) if name not in self.loads]
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
