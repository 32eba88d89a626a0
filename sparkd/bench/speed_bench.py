"""Measures the cells of a profile with llama-benchy, one after another, and adds what the nodes and the engine show meanwhile."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field

from sparkd.bench import benchy
from sparkd.bench.cell_figures import Moment, computed_prompt_tokens, engine_figures, machine_figures, others_tokens, power_points
from sparkd.bench.client import Client
from sparkd.bench.figures import one_line
from sparkd.bench.power import energy
from sparkd.bench.profile import BenchProfile
from sparkd.bench.result import BenchSample, BenchSubject, Cell, CellResult, text_label
from sparkd.bench.running_bench import RunningBench, loads_beside
from sparkd.errors import BadRequest, RankError
from sparkd.gateway.rates import Sample as Counters

# The page's document comes each second. Until a stream that broke is opened again.
NEXT_S, AGAIN_S = 5.0, 1.0
# A result keeps that many samples at most: two hours by the second.
MOST_SAMPLES = 7200
IDLE_S = 10.0


class SpeedBench(BaseModel):
    """
    tool: llama-benchy with its version.
    interpreter: a Python that has it.
    text: the name of the text that prompts come from.
    content: of the text.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["speed"] = "speed"
    chosen: BenchProfile
    tool: str
    interpreter: str
    text: str
    content: str = Field(repr=False)

    @property
    def profile(self) -> str:
        return self.chosen.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.chosen.cells

    async def run(self, bench: RunningBench) -> str:
        """Measure the cells that are not measured yet."""
        await bench.ready()
        about = await bench.client.get("/bench/subject", model=bench.model)
        subject = BenchSubject.model_validate(about["subject"])
        tokenizer = about["folder"] or subject.source
        target = benchy.BenchTarget(f"{bench.base_url}/v1", bench.model, tokenizer, self.interpreter, bench.key)
        await bench.keep(subject=subject, latency_mode=self.chosen.args.latency_mode)
        watch = _Watch(bench.client, bench.model)
        earlier = bench.result.samples
        watching = asyncio.create_task(watch.run())
        try:
            await watch.next()
            if bench.result.idle_w is None:
                await bench.keep(idle_w=await watch.idle())
            for number, cell in enumerate(bench.result.cells):
                if cell.state != "done":
                    await self._cell(bench, number, target, watch)
                    await bench.keep(samples=[*earlier, *watch.samples(bench.result.started_s)])
        finally:
            watching.cancel()
        result = bench.result
        failed = [cell.cell.name for cell in result.cells if cell.state == "failed"]
        line = f"{result.id}: {result.done} of {len(result.cells)} cells were measured, with {self.text} as text."
        return f"{line} Failed: {', '.join(failed)}." if failed else line

    async def _cell(self, bench: RunningBench, number: int, target: benchy.BenchTarget, watch: _Watch) -> None:
        cell, model, args, client = bench.result.cells[number].cell, target.model, self.chosen.args, bench.client
        requests, before = benchy.MeasuredRequests(), list[Counters | None]()

        async def put(result: CellResult) -> None:
            cells = list(bench.result.cells)
            cells[number] = result
            await bench.keep(cells=cells)

        def tell() -> None:
            share = min(requests.run / (args.runs + 1), 1.0)
            words = told(bench.result.cells, number, requests.run, args.runs)
            bench.tell(words, (number + share) / len(bench.result.cells))

        async def heard(event: Mapping[str, Any]) -> None:
            if requests.take(event):
                # Before its first token the engine has counted nothing of it.
                before.append(await client.counters(model))
            tell()

        ranks = (await bench.ready())["ranks"]
        began_s, since_seq = time.time(), await bench.newest_event()
        await put(CellResult(cell=cell, state="running", started_s=began_s))
        tell()
        watch.loads = []
        try:
            rows = await benchy.measure(target, cell, args, self.content, heard)
            if requests.errors:
                raise RankError(f"{len(requests.errors)} of {len(requests.began)} requests failed: {requests.errors[0]}")
            after = await client.counters(model)
            if after is None or (await client.model(model))["ranks"] != ranks:
                raise RankError(f"The engine of {model} was started again meanwhile: `sparkd events` says why.")
            await watch.next()
            if watch.loads:
                raise RankError(f"{', '.join(watch.loads)} was loaded meanwhile, so its figures say nothing.")
        except RankError as error:
            seconds = time.time() - began_s
            why = await bench.engine_failure(model, since_seq) or one_line(error.message)
            await put(CellResult(cell=cell, state="failed", error=why, started_s=began_s, seconds=seconds))
            return
        span = requests.span() or (began_s, time.time())
        moments = watch.between(*span)
        figures = engine_figures(before[0] if before else None, after, moments)
        output_tokens = requests.output_tokens if figures.output_tokens is None else figures.output_tokens
        tokens = computed_prompt_tokens(requests.prompt_tokens, figures), output_tokens
        await put(
            CellResult(
                cell=cell,
                state="done",
                started_s=span[0],
                seconds=span[1] - span[0],
                rows=rows,
                prompt_tokens=requests.prompt_tokens,
                output_tokens=requests.output_tokens,
                others_tokens=others_tokens(len(requests.began), requests.prompt_tokens, requests.output_tokens, figures),
                energy=energy(power_points(watch.moments), span, requests.prompts(), requests.running(), tokens, bench.result.idle_w),
                engine=figures,
                machine=machine_figures(moments),
            )
        )


def told(cells: Sequence[CellResult], number: int, run: int, runs: int) -> str:
    """The words about the cell that is measured: `cell 2 of 4: NAME, run 1 of 3 (1 failed)`."""
    failed = sum(each.state == "failed" for each in cells)
    which = f"cell {number + 1} of {len(cells)}: {cells[number].cell.name}" + (f", run {run} of {runs}" if run else "")
    return f"{which} ({failed} failed)" if failed else which


def speed_bench(profile: BenchProfile, folder: Path, book: tuple[str, str | None] | None = None) -> SpeedBench:
    """A bench with the llama-benchy of its own environment in `folder`, else of sparkd's. Blocks.

    folder: of the results.
    book: a text and its name, in place of words that mean nothing.

    Raises BadRequest where llama-benchy is in neither environment.
    """
    own = folder / "tools" / benchy.NAME
    places = (str(own / "bin" / "python"), sys.executable)
    found = next(((place, version) for place in places if (version := _version_in(place, benchy.NAME)) is not None), None)
    if found is None:
        install = f"{sys.executable} -m venv {own} && {own}/bin/pip install '{benchy.NAME}>=0.4,<0.5'"
        raise BadRequest(f"{benchy.NAME} is not installed: run `{install}` as the user of the daemon.")
    content, name = (benchy.made_up(), benchy.MADE_UP) if book is None else (book[0], book[1] or benchy.OWN)
    text, tool = text_label(name, content), f"{benchy.NAME} {found[1]}"
    return SpeedBench(chosen=profile, tool=tool, interpreter=found[0], text=text, content=content)


class _Watch:
    """Follows what the page shows of the nodes and the engine of a model, once a second.

    loads: other models that began to load since it was emptied.
    """

    def __init__(self, client: Client, model: str) -> None:
        self._client, self._model = client, model
        self._news = asyncio.Event()
        self.moments: list[Moment] = []
        self.loads: list[str] = []

    async def run(self) -> None:
        """Until cancelled. A stream that breaks leaves a gap."""
        while True:
            with suppress(httpx.HTTPError):
                async for document in self._client.live():
                    self.take(document)
            await asyncio.sleep(AGAIN_S)

    async def next(self) -> None:
        """Wait for the next document. A daemon that sends none for NEXT_S leaves a gap."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(NEXT_S):
                await self._news.wait()

    def take(self, document: Mapping[str, Any]) -> None:
        models, nodes = document["models"], document["nodes"]
        model = models.get(self._model, {"ranks": [], "rates": None})
        self.loads += [name for name in loads_beside(models.values(), self._model) if name not in self.loads]
        ours = [
            nodes[node]["reading"] for node in sorted({rank["node"] for rank in model["ranks"]} & nodes.keys()) if nodes[node]["reading"]
        ]
        held = [engine for node in nodes.values() for engine in node["engines"] if engine["model"] == self._model]
        self.moments.append(
            Moment(
                document["at_s"],
                _whole([reading["gpu_power_w"] for reading in ours]),
                max((reading["gpu_celsius"] for reading in ours if reading["gpu_celsius"] is not None), default=None),
                tuple(sorted({reason for reading in ours for reason in reading["gpu_throttled"] or ()})),
                sum((engine["host_bytes"] or 0) + (engine["device_bytes"] or 0) for engine in held) if held else None,
                model["rates"] and model["rates"]["kv_usage"],
                ours[0]["gpu_at_s"] if len(ours) == 1 else None,
            )
        )
        self._news.set()

    async def idle(self) -> float | None:
        """The median power in watts over IDLE_S, as the first seconds may still be those of a request; None where no node tells."""
        if not self.moments or self.moments[-1].power_w is None:
            return None
        began_s = time.time()
        await asyncio.sleep(IDLE_S)
        watts = [moment.power_w for moment in self.between(began_s, time.time()) if moment.power_w is not None]
        return median(watts) if watts else None

    def between(self, begin_s: float, end_s: float) -> list[Moment]:
        return [moment for moment in self.moments if begin_s <= moment.at_s <= end_s]

    def samples(self, since_s: float) -> list[BenchSample]:
        """For a plot."""
        step = max(1, -(-len(self.moments) // MOST_SAMPLES))
        return [
            BenchSample(at_s=round(at.at_s - since_s, 1), power_w=at.power_w, memory_bytes=at.memory_bytes, celsius=at.celsius)
            for at in self.moments[::step]
        ]


def _whole(values: Sequence[float | None]) -> float | None:
    """Their sum; None where one is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _version_in(interpreter: str, package: str) -> str | None:
    """The version of a package in the environment of a Python; None without it. Reads files only. Blocks."""
    own = interpreter == sys.executable
    places = sys.path if own else [str(path) for path in Path(interpreter).parent.parent.glob("lib/python*/site-packages")]
    return next((found.version for found in distributions(name=package, path=places)), None)
