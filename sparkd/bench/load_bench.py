"""Measures a model's loads until the first token of a client's request: cold, from the quantized cache, and swaps with another model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict

from sparkd import __version__
from sparkd.bench.client import has_token
from sparkd.bench.figures import WAYS, one_line
from sparkd.bench.result import Cell, LoadRow, LoadWay, Phase
from sparkd.bench.running_bench import RunningBench, loads_beside
from sparkd.errors import BadRequest, Conflict, RankError
from sparkd.gateway.routes import model_path
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.snapshot import ModelView
from workers.host.disk_rate import largest, rate
from workers.quantization.best_wish import BEST

PROFILE = "loads"
POLL_S = 0.2
# The cache may be written for some time after the model is READY.
CACHE_WRITTEN_S = 300.0
STOPPED_S = 300.0
# The looks of the supervisor, by which a start's end is known, come each second.
SEEN_S = 10.0
QUESTION = {"prompt": "Count to three: one,", "max_tokens": 4, "temperature": 0, "stream": True}


class LoadBench(BaseModel):
    """
    times: loads of each way.
    other: the model of the swaps, if there is one.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["load"] = "load"
    times: int = 3
    other: str | None = None
    tool: str = f"sparkd {__version__}"
    profile: str = PROFILE
    text: str | None = None
    cells: tuple[Cell, ...] = ()

    async def run(self, bench: RunningBench) -> str:
        folder = (await bench.client.get("/bench/subject", model=bench.model))["folder"]
        disk_bytes_per_s = await asyncio.to_thread(disk_rate, folder)
        quantize = (await bench.client.model(bench.model))["quantize"]
        ways = self._ways(quantizes=quantize is not None, swaps=self.other is not None)
        loads = _Loads(bench, self.other, quantize, disk_bytes_per_s)
        for number, way in enumerate(ways):
            bench.tell(f"load {number + 1} of {len(ways)}: {way}", number / len(ways))
            row = await loads.measure(way)
            await bench.keep(loads=[*bench.result.loads, row])
        swaps = f"swaps were with {self.other}" if self.other is not None else "no other model is READY, so no swap was measured"
        return f"{bench.result.id}: {len(bench.result.loads)} loads were measured; {swaps}."

    def _ways(self, *, quantizes: bool, swaps: bool) -> list[LoadWay]:
        first: list[LoadWay] = ["first"]
        cached: list[LoadWay] = ["cached"] if quantizes else []
        swap: list[LoadWay] = ["swap", "back"] if swaps else []
        return first * self.times + cached * self.times + swap * self.times


def load_bench(model: str, times: int, other: str | None, views: Collection[ModelView]) -> LoadBench:
    """A bench of loads of a model.

    other: the model of the swaps; None for the only other one that is READY.

    Raises BadRequest for one that is not known or not another, Conflict beside a model that is loaded: the first loads remove quantized
    weights, which it may read.
    """

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
    return LoadBench(times=times, other=None if chosen is None else chosen.name)


class _Loads:
    """
    quantize: of the model's entry.
    disk_bytes_per_s: of the disk alone; None where the model's files are not on this node.
    """

    def __init__(self, bench: RunningBench, other: str | None, quantize: object, disk_bytes_per_s: float | None) -> None:
        self._bench, self._client, self._model = bench, bench.client, bench.model
        self._other, self._quantize, self._disk = other, quantize, disk_bytes_per_s

    async def measure(self, way: LoadWay) -> LoadRow:
        """Raises RankError with a line that says why, where the model or the other one does not load."""
        bench, since_seq = self._bench, await self._bench.newest_event()
        try:
            return await self._measured(way)
        except RankError as error:
            failures = [await bench.engine_failure(name, since_seq) for name in (self._model, self._other) if name is not None]
            raise RankError(f"The {WAYS[way]} failed: {next(filter(None, failures), one_line(error.message))}") from None

    async def _measured(self, way: LoadWay) -> LoadRow:
        model, other = self._model, self._other
        if way == "swap" and other is not None:
            if (await self._client.model(other))["state"] != ModelState.READY:
                await self._stop(model)
                await self._bench.ready(other)
            return await self._swapped(other, model, "swap")
        if way == "back" and other is not None:
            return await self._swapped(model, other, "back")
        for name in filter(None, (other, model)):
            await self._stop(name)
        if way == "first":
            await self._forget_quantized()
        else:
            await self._cached()
        return await self._loaded(model, way, time.time())

    async def _swapped(self, leaving: str, coming: str, way: LoadWay) -> LoadRow:
        began_s = time.time()
        await self._stop(leaving)
        return await self._loaded(coming, way, began_s)

    async def _loaded(self, model: str, way: LoadWay, began_s: float) -> LoadRow:
        await self._refuse_beside_a_load()
        answered_s = await self._first_token(model)
        await self._refuse_beside_a_load()
        start = await self._start(model, began_s)
        phases = [Phase(phase=each["name"], seconds=each["seconds"], bytes=each["bytes"]) for each in start["phases"] if each["seconds"]]
        waited_s = start["began_s"] - began_s
        if way in ("swap", "back"):
            phases = [Phase(phase="unload", seconds=max(waited_s, 0.0)), *phases]
        progress = (await self._client.model(model))["progress"]
        if way == "cached" and (progress is None or progress["source"] != "cache"):
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
                return time.time()
            view = await self._client.model(model)
            if view["state"] not in STARTING:
                raise RankError(f"{model} gave no answer: {view['message'] or failure}")
            await asyncio.sleep(POLL_S)

    async def _asked(self, model: str) -> str | None:
        """None as soon as the first token is here, else why none came."""
        try:
            async with self._client.completion({"model": model, **QUESTION}) as response:
                if response.status_code != 200:
                    return f"/v1/completions answered with status {response.status_code}."
                async for line in response.aiter_lines():
                    if has_token(line):
                        return None
        except httpx.HTTPError as error:
            return f"its answer ended early ({type(error).__name__})."
        return "its answer had no token."

    async def _start(self, model: str, since_s: float) -> dict[str, Any]:
        """The start that ended with this answer, phase by phase."""

        start: dict[str, Any] = {}

        async def seen() -> bool:
            start.update(await self._client.get(f"{model_path(model)}/start"))
            return start["ended"] == "READY" and bool(start["began_s"] >= since_s)

        await _until(seen, SEEN_S, f"The start of {model} was not seen to its end, so its engine was started again: repeat the bench.")
        return start

    async def _stop(self, model: str) -> None:
        async def stopped() -> bool:
            return bool((await self._client.model(model))["state"] == ModelState.STOPPED)

        await self._client.post(f"{model_path(model)}/unload")
        await _until(stopped, STOPPED_S, f"{model} was not unloaded within {STOPPED_S:,.0f} s: `sparkd ps` says what it waits for.")

    async def _cached(self) -> None:
        """Return once the model's quantized weights are kept, and it is unloaded; where none are, load it for them."""
        model = self._model

        async def kept() -> bool:
            return any(entry["valid"] for entry in await self._quantized())

        if not await kept():
            await self._bench.ready(model)
            await _until(kept, CACHE_WRITTEN_S, f"{model} has no quantized cache: `sparkd logs {model}` says why it was not written.")
            await self._stop(model)

    async def _forget_quantized(self) -> None:
        """Remove what is kept of the model's weights in its format, on every node. Raises RankError while a model is loaded."""
        for entry in await self._quantized():
            await self._client.finished(await self._client.delete(f"/disk/quantized/{quote(entry['id'], safe='')}", node=entry["node"]))

    async def _quantized(self) -> list[dict[str, Any]]:
        return quantized_of(self._model, self._quantize, (await self._client.get("/disk"))["entries"])

    async def _refuse_beside_a_load(self) -> None:
        if beside := loads_beside((await self._client.models()).values(), self._model, self._other):
            raise RankError(f"{', '.join(beside)} was loaded meanwhile, which distorts the bench: run it again.")


def quantized_of(model: str, quantize: object, entries: Collection[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries of the model's checkpoint in its format, by their names `<model>-<format>-<key>`; of `auto` and `best` those in every
    format."""
    recipe = quantize if isinstance(quantize, Mapping) and quantize["format"] != BEST else {}
    name = f"{recipe['format']}-mixed" if recipe.get("layers") else recipe.get("format", "")
    ending = f"-{name}" if name else ""
    ours = [entry for entry in entries if entry["kind"] == "quantized" and model in entry["used_by"]]
    return [entry for entry in ours if entry["id"].rpartition("-")[0].endswith(ending)]


def disk_rate(folder: str | None) -> float | None:
    """Bytes a second of one reader of the largest file, past the page cache; None where no large file is here. Blocks for seconds."""
    file = largest([Path(folder)]) if folder is not None else None
    if file is None:
        return None
    try:
        done, seconds, _ = rate(file)
    except OSError:
        return None
    return done / seconds if seconds else None


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
