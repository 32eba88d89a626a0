"""Measures a model's loads, each by a client's request and until its first token: cold, from the quantized cache, and swaps with another
model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from sparkd import __version__
from sparkd.admin.running_bench import KIND, RunningBench, loads_beside
from sparkd.bench.figures import WAYS, one_line
from sparkd.bench.result import Cell, LoadRow, LoadWay, Phase
from sparkd.errors import BadRequest, Conflict, RankError
from sparkd.state.nouns import STARTING, ModelState, Want
from sparkd.state.snapshot import ModelView

PROFILE = "loads"
POLL_S = 0.2
# The cache may be written for some time after the model is READY.
CACHE_WRITTEN_S = 300.0
STOPPED_S = 300.0
# The looks of the supervisor, by which a start's end is known, come each second.
SEEN_S = 10.0
QUESTION = {"prompt": "Count to three: one,", "max_tokens": 4, "temperature": 0, "stream": True}


@dataclass(frozen=True)
class LoadBench:
    """times: loads of each way. other: the model of the swaps, if there is one."""

    times: int = 3
    other: str | None = None
    tool: str = f"sparkd {__version__}"
    profile: str = PROFILE
    text: str | None = None
    kind: Literal["load"] = "load"
    cells: tuple[Cell, ...] = ()

    async def run(self, bench: RunningBench) -> str:
        around, model = bench.around, bench.result.subject.model
        views = around.snapshot().models
        wanted = {name: view.want for name, view in views.items()}
        other = self.other
        disk_bytes_per_s = await asyncio.to_thread(around.disk_rate, model)
        ways = self._ways(quantizes=views[model].quantize is not None, swaps=other is not None)
        headers = {"authorization": f"Bearer {around.key}"} if around.key else {}
        try:
            async with httpx.AsyncClient(base_url=around.base_url, headers=headers, trust_env=False, timeout=None) as client:
                loads = _Loads(bench, client, model, other, disk_bytes_per_s)
                for number, way in enumerate(ways):
                    bench.tell(f"load {number + 1} of {len(ways)}: {way}", number / len(ways))
                    row = await loads.measure(way)
                    bench.keep(loads=[*bench.result.loads, row])
                    await bench.save()
        finally:
            for name, want in wanted.items():
                if name in (model, other) and (view := around.snapshot().models.get(name)) is not None and view.want is not want:
                    around.want(name, want, KIND)
        swaps = f"swaps were with {other}" if other is not None else "no other model is READY, so no swap was measured"
        return f"{bench.result.id}: {len(bench.result.loads)} loads were measured; {swaps}."

    def _ways(self, *, quantizes: bool, swaps: bool) -> list[LoadWay]:
        first: list[LoadWay] = ["first"]
        cached: list[LoadWay] = ["cached"] if quantizes else []
        swap: list[LoadWay] = ["swap", "back"] if swaps else []
        return first * self.times + cached * self.times + swap * self.times


def load_bench(model: str, times: int, other: str | None, views: Collection[ModelView]) -> LoadBench:
    """other: None for the only other model that is READY. Raises BadRequest for one that is not known or not another, Conflict beside a
    model that is loaded: the first loads remove quantized weights, which it may read."""

    def named(name: str) -> ModelView | None:
        return next((view for view in views if name in (view.name, *view.aliases)), None)

    subject, chosen = named(model), None if other is None else named(other)
    if other is not None and (chosen is None or chosen is subject):
        why = "no known model" if chosen is None else "the model itself"
        raise BadRequest(f"--from {other} is {why}: name another one of `sparkd ls`.", param="other")
    at_rest = (ModelState.STOPPED, ModelState.FAILED)
    up = [view for view in views if view.state not in at_rest and view is not subject]
    if chosen is None and len(up) == 1 and up[0].state is ModelState.READY:
        chosen = up[0]
    if beside := [view.name for view in up if view is not chosen]:
        raise Conflict(f"{', '.join(beside)} would be loaded beside the bench: unload it first, or swap with it by --from.")
    return LoadBench(times, None if chosen is None else chosen.name)


class _Loads:
    """disk_bytes_per_s: of the disk alone, None where the model's files are not on this node."""

    def __init__(
        self, bench: RunningBench, client: httpx.AsyncClient, model: str, other: str | None, disk_bytes_per_s: float | None
    ) -> None:
        self._bench, self._client, self._model, self._other, self._disk = bench, client, model, other, disk_bytes_per_s

    async def measure(self, way: LoadWay) -> LoadRow:
        """Raises RankError with a line that says why, where the model or the other one does not load."""
        bench, since_seq = self._bench, self._bench.newest_event()
        try:
            return await self._measured(way)
        except RankError as error:
            failures = [await bench.engine_failure(name, since_seq) for name in (self._model, self._other) if name is not None]
            raise RankError(f"The {WAYS[way]} failed: {next(filter(None, failures), one_line(error.message))}") from None

    async def _measured(self, way: LoadWay) -> LoadRow:
        model, other, around = self._model, self._other, self._bench.around
        if way == "swap" and other is not None:
            if self._bench.view(other).state is not ModelState.READY:
                await self._stop(model)
                await self._bench.ready(other)
            return await self._swapped(other, model, "swap")
        if way == "back" and other is not None:
            return await self._swapped(model, other, "back")
        for name in filter(None, (other, model)):
            await self._stop(name)
        if way == "first":
            await around.forget(model)
        else:
            await self._cached()
        return await self._loaded(model, way, self._bench.wall())

    async def _swapped(self, leaving: str, coming: str, way: LoadWay) -> LoadRow:
        began_s = self._bench.wall()
        await self._stop(leaving)
        return await self._loaded(coming, way, began_s)

    async def _loaded(self, model: str, way: LoadWay, began_s: float) -> LoadRow:
        bench = self._bench
        self._refuse_beside_a_load()
        answered_s = await self._first_token(model)
        self._refuse_beside_a_load()
        start = await self._start(model, began_s)
        phases = [Phase(phase=each["name"], seconds=each["seconds"], bytes=each["bytes"]) for each in start["phases"] if each["seconds"]]
        waited_s = start["began_s"] - began_s
        if way in ("swap", "back"):
            phases = [Phase(phase="unload", seconds=max(waited_s, 0.0)), *phases]
        progress = bench.view(model).progress
        if way == "cached" and (progress is None or progress.source != "cache"):
            raise RankError(f"{model} was not loaded from its quantized cache: `sparkd logs {model}` says why.")
        return LoadRow(
            way=way,
            model=model,
            seconds=round(waited_s + start["seconds"], 3),
            first_answer_s=round(answered_s - began_s, 3),
            phases=phases,
            bytes_per_s=max((each["bytes_per_s"] for each in start["phases"] if each["bytes_per_s"]), default=None),
            disk_bytes_per_s=self._disk,
        )

    async def _first_token(self, model: str) -> float:
        """When the answer to a client's request began, by the wall clock. The request has the model loaded, and is put again where it
        waited too long."""
        while True:
            failure = await self._asked(model)
            if failure is None:
                return self._bench.wall()
            view = self._bench.view(model)
            if view.state not in STARTING:
                raise RankError(f"{model} gave no answer: {view.message or failure}")
            await asyncio.sleep(POLL_S)

    async def _asked(self, model: str) -> str | None:
        """None as soon as the first token is here, else why none came."""
        try:
            async with self._client.stream("POST", "/v1/completions", json={"model": model, **QUESTION}) as response:
                if response.status_code != 200:
                    return f"/v1/completions answered with status {response.status_code}."
                async for line in response.aiter_lines():
                    if _has_token(line):
                        return None
        except httpx.HTTPError as error:
            return f"its answer ended early ({type(error).__name__})."
        return "its answer had no token."

    async def _start(self, model: str, since_s: float) -> dict[str, Any]:
        """The start that ended with this answer, phase by phase."""

        async def seen() -> bool:
            start = self._bench.around.start_of(model)
            return start["ended"] == "READY" and bool(start["began_s"] >= since_s)

        await _until(seen, SEEN_S, f"The start of {model} was not seen to its end, so its engine was started again: repeat the bench.")
        return self._bench.around.start_of(model)

    async def _stop(self, model: str) -> None:
        async def stopped() -> bool:
            return self._bench.view(model).state is ModelState.STOPPED

        self._bench.around.want(model, Want.STOPPED, KIND)
        await _until(stopped, STOPPED_S, f"{model} was not unloaded within {STOPPED_S:,.0f} s: `sparkd ps` says what it waits for.")

    async def _cached(self) -> None:
        """Return once the model's quantized weights are kept, and it is unloaded; where none are, load it for them."""
        around, model = self._bench.around, self._model

        async def kept() -> bool:
            return await around.is_kept(model)

        if not await kept():
            await self._bench.ready(model)
            await _until(kept, CACHE_WRITTEN_S, f"{model} has no quantized cache: `sparkd logs {model}` says why it was not written.")
            await self._stop(model)

    def _refuse_beside_a_load(self) -> None:
        if beside := loads_beside(self._bench.around.snapshot(), self._model, self._other):
            raise RankError(f"{', '.join(beside)} was loaded meanwhile, which distorts the bench: run it again.")


async def _until(seen: Callable[[], Awaitable[bool]], seconds: float, message: str) -> None:
    """Raises RankError with this message at the end of the time."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                if await seen():
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise RankError(message) from None


def _has_token(line: str) -> bool:
    if not line.startswith("data: {"):
        return False
    try:
        choices = json.loads(line.removeprefix("data: ")).get("choices") or []
    except ValueError:
        return False
    return any(choice.get("text") for choice in choices)
