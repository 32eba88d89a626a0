"""The benches: one at a time, on request, each by a program of its own, and the results that are kept."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from sparkd.admin.bench_facts import Benched, benched, check_lendable, lend, rates_of
from sparkd.admin.jobs import Jobs, Tell, message_of
from sparkd.bench.job import Job, Work
from sparkd.bench.load_bench import LoadBench, load_bench
from sparkd.bench.profile import DEFAULT, named, parsed
from sparkd.bench.quality_bench import quality_bench
from sparkd.bench.result import FOLDER, BenchResult, BenchStore, CellResult, Kind
from sparkd.bench.speed_bench import speed_bench
from sparkd.capacity.plan_for_node import learn
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.errors import BadRequest, Conflict, RankError, SparkdError, UnknownModel
from sparkd.execution import tool_process
from sparkd.execution.boundary import is_end
from sparkd.state.model_state import STARTING
from sparkd.state.nouns import Operation, Progress, Want
from sparkd.state.snapshot import ModelView
from sparkd.units import GIB
from workers.host.interpreter import PACKAGE_DIR, module_command

KIND = "bench"
MOST_PROFILE_CHARS = 65_536


def _printable(value: str) -> str:
    """A name is printed on terminals later: it holds no escape sequence and no sign that turns the direction of writing."""
    if not value.isprintable():
        raise ValueError("a name is expected, without control characters and invisible ones")
    return value


_Shown = Annotated[str, Field(max_length=256), AfterValidator(_printable)]


class Benching(BaseModel, extra="forbid"):
    """A bench that is asked for.

    profile: of a bench of speed, one that comes with sparkd.
    profile_text: another one, in sparkrun's YAML.
    book, book_name: a text for llama-benchy; a bench that goes on needs the one that it began with.
    times, other: of a bench of loads, the loads of each way and the model of the swaps.
    formats, text, text_name: of a bench of quality.
    resume: the bench to go on with.
    force: measure although others use a model.
    """

    model: str = Field(max_length=256)
    kind: Kind = "speed"
    book: str | None = Field(default=None, min_length=1000)
    book_name: _Shown | None = None
    times: int = Field(default=3, ge=1, le=50)
    other: str | None = Field(default=None, max_length=256)
    formats: list[Annotated[str, Field(max_length=64)]] = Field(default=[], max_length=16)
    text: str | None = Field(default=None, max_length=MOST_PROFILE_CHARS)
    text_name: _Shown | None = None
    profile: Annotated[_Shown, Field(max_length=80)] = DEFAULT
    profile_text: str | None = Field(default=None, max_length=MOST_PROFILE_CHARS)
    resume: str | None = Field(default=None, max_length=128)
    force: bool = False


@dataclass(frozen=True, slots=True)
class _Running:
    """wanted: by model, whether it was to be loaded before the bench, and for whom."""

    bench: str
    model: str
    work: Work
    wanted: Mapping[str, tuple[Want, str]]


class Benches:
    """
    base_url: of the daemon's own gateway.
    keys: of the daemon's own, the one for its admin API and the one for models alone; empty where it is open.
    """

    def __init__(self, supervisor: Supervisor, registry: Registry, jobs: Jobs, base_url: str, keys: tuple[str, str]) -> None:
        self._supervisor, self._registry, self._jobs = supervisor, registry, jobs
        self._base_url, self._keys = base_url, keys
        self._state_dir = registry.config.state_dir
        self._folder = self._state_dir / FOLDER
        self.store = BenchStore(self._state_dir)
        self._last: _Running | None = None
        # The second of two that start at once finds the first.
        self._turn = asyncio.Lock()

    async def all(self) -> list[BenchResult]:
        """Newest first."""
        return [self._now(result) for result in await asyncio.to_thread(self.store.all)]

    async def find(self, bench_id: str) -> BenchResult:
        """Raises NotFound and StateError."""
        return self._now(await asyncio.to_thread(self.store.read, bench_id))

    async def start(self, what: Benching) -> tuple[Operation, str]:
        """Measure a model, or the cells that an earlier bench has not measured; the operation, and the id of the result.

        Raises UnknownModel, BadRequest, StateError, and Conflict where another bench or a load is under way, or others use a model.
        """
        work = await self._work(what)
        async with self._turn:
            await self._jobs.wait_for_cancelled(KIND)
            views = self._supervisor.snapshot().models
            view = next((view for view in views.values() if what.model in (view.name, *view.aliases)), None)
            if view is None:
                raise UnknownModel(what.model, list(views))
            self._refuse_beside_others(view, views.values(), work.kind, force=what.force)
            result = await self._begun(view, work, what.resume)
            await asyncio.to_thread(self.store.write, result)
            wanted = {name: (other.want, other.wanted_by) for name, other in views.items()}
            self._last = _Running(result.id, view.name, work, wanted)
            operation = self._jobs.start(KIND, view.name, partial(self._measure, self._last), remains="What was measured is kept.")
            return operation, result.id

    async def subject(self, model: str) -> Benched:
        """Raises UnknownModel."""
        return await asyncio.to_thread(benched, self._registry, self._supervisor.snapshot(), model)

    def lend(self, model: str, form: str) -> str:
        """See sparkd.admin.bench_facts.lend. Raises Conflict where no bench runs, which would take the model back."""
        if self._running is None:
            raise Conflict(
                "No bench is under way, and a copy of a model is for a bench of quality: start one with `sparkd bench --quality`."
            )
        return lend(self._registry, model, form)

    async def remove(self, bench_id: str) -> BenchResult:
        """Raises NotFound, and Conflict for the bench that runs."""
        await self._jobs.wait_for_cancelled(KIND)
        result = await self.find(bench_id)
        if self._running is not None and self._running.bench == bench_id:
            raise Conflict(f"{bench_id} is under way: `sparkd cancel {self._jobs.running(KIND)[0]}` ends it.")
        await asyncio.to_thread(self.store.remove, bench_id)
        return result

    @property
    def _running(self) -> _Running | None:
        """The bench that is under way. A cancelled one is until its figures are written."""
        return self._last if self._jobs.running(KIND) else None

    async def _work(self, what: Benching) -> Work:
        if what.kind == "load":
            if what.resume is not None:
                raise BadRequest("A bench of loads cannot go on with an earlier one: start it without `resume`.", param="resume")
            return load_bench(what.model, what.times, what.other, self._supervisor.snapshot().models.values())
        if what.kind == "quality":
            await asyncio.to_thread(check_lendable, self._registry, what.model)
            return quality_bench(what.formats, what.text, what.text_name)
        profile = named(what.profile) if what.profile_text is None else await asyncio.to_thread(parsed, what.profile, what.profile_text)
        book = None if what.book is None else (what.book, what.book_name)
        return await asyncio.to_thread(speed_bench, profile, self._folder, book)

    def _refuse_beside_others(self, view: ModelView, views: Collection[ModelView], kind: Kind, *, force: bool) -> None:
        self._jobs.refuse_second(KIND, "bench")
        if loading := [other.name for other in views if other.state in STARTING and (kind == "load" or other.name != view.name)]:
            raise Conflict(f"{', '.join(loading)} is loading, which would distort the bench: try again when it has ended.")
        if not force and (used := [other.name for other in views if other.in_flight or other.queued]):
            raise Conflict(f"{', '.join(used)} has requests of others, which the bench would slow: wait, or measure anyway with --force.")

    async def _begun(self, view: ModelView, work: Work, resume: str | None) -> BenchResult:
        if resume is not None:
            earlier = await self.find(resume)
            refuse_a_mixture(earlier, view.name, work)
            cells = [cell if cell.state == "done" else CellResult(cell=cell.cell) for cell in earlier.cells]
            return earlier.model_copy(update={"state": "running", "error": None, "ended_s": None, "cells": cells})
        now_s = time.time()
        bench_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_s))}-{''.join(c if c.isalnum() else '-' for c in view.name)[:60]}"
        about = await self.subject(view.name)
        return BenchResult(
            id=bench_id,
            kind=work.kind,
            state="running",
            subject=about.subject,
            profile=work.profile,
            tool=work.tool,
            text=work.text,
            started_s=now_s,
            predicted_bytes=None if view.memory_gib is None else round(view.memory_gib * GIB),
            published=list(about.published),
            cells=[CellResult(cell=cell) for cell in work.cells],
        )

    async def _measure(self, running: _Running, tell: Tell) -> str:
        end: dict[str, Any] = {"state": "done", "error": None}
        try:
            return await self._program_ended(running, tell)
        except BaseException as error:
            end = {"state": "cancelled", "error": None} if is_end(error) else {"state": "failed", "error": message_of(error)}
            raise
        finally:
            self._as_before(running)
            with suppress(SparkdError):
                await asyncio.to_thread(self._ended, running.bench, end | {"ended_s": time.time()})

    def _ended(self, bench_id: str, fields: Mapping[str, Any]) -> None:
        """Write the end of a result, and what it teaches the next plan. Raises StateError."""
        result = self.store.read(bench_id).model_copy(update=dict(fields))
        self.store.write(result)
        if result.state == "done":
            learn(self._registry.config.state_dir, rates_of(result))

    async def _program_ended(self, running: _Running, tell: Tell) -> str:
        """Run the program of a bench, and return its line about the whole. Cancelled, it ends the program. Raises RankError."""
        admin_key, key = self._keys
        work, url = running.work, self._base_url
        job = Job(state_dir=self._state_dir, bench=running.bench, base_url=url, admin_key=admin_key, key=key, work=work).model_dump_json()
        end: dict[str, str] = {}

        async def heard(line: bytes) -> None:
            event: dict[str, Any] = json.loads(line)
            if "message" in event:
                tell(event["message"], Progress(phase=event["phase"], fraction=event["fraction"]))
            else:
                end.update(event)

        with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as folder:
            command = module_command(sys.executable, "sparkd.bench")
            environment = tool_process.environment(self._folder, Path(folder)) | {"PYTHONPATH": PACKAGE_DIR}
            reason = await tool_process.run("The bench", command, environment, Path(folder, "said"), heard, f"{job}\n".encode())
        if "done" not in end:
            raise RankError(end.get("failed", f"The bench ended without a word: {reason}"))
        return end["done"]

    def _as_before(self, running: _Running) -> None:
        """Take lent models back. Load or unload each model of a bench of loads as it was, and load what a bench of quality evicted."""
        for lent in list(self._registry.lent):
            with suppress(UnknownModel):
                self._supervisor.want(lent, Want.STOPPED, "admin")
            self._registry.lend(lent, None)
        changed = (running.model, running.work.other) if isinstance(running.work, LoadBench) else ()
        views = self._supervisor.snapshot().models
        for name, (want, by) in running.wanted.items():
            view = views.get(name)
            if view is None or view.want is want:
                continue
            if name in changed:
                self._supervisor.want(name, want, KIND)
            elif running.work.kind == "quality" and want is Want.RUNNING and view.wanted_by == "swap":
                self._supervisor.want(name, want, by)

    def _now(self, result: BenchResult) -> BenchResult:
        """A row that says `running` without a bench is of a daemon that was killed."""
        if result.state != "running" or (self._running is not None and self._running.bench == result.id):
            return result
        return result.model_copy(update={"state": "cancelled", "error": "The daemon ended. Resume it with --resume."})


def refuse_a_mixture(earlier: BenchResult, model: str, work: Work) -> None:
    """Raises BadRequest where the rest of an earlier bench would be measured of another model, or with another text or profile.

    A text is the same where its hash is.
    """
    has_cells = [cell.cell for cell in earlier.cells] == [*work.cells]
    pairs = (
        ("model", earlier.subject.model, model),
        ("kind", earlier.kind, work.kind),
        ("text", earlier.text, earlier.text if _digest(earlier.text) == _digest(work.text) else work.text),
        ("profile", earlier.profile, work.profile if has_cells else f"{work.profile} with other cells"),
    )
    for what, was, is_now in pairs:
        if was != is_now:
            because = f"its {what} is {was or 'missing'}, not {is_now or 'missing'}, and a result has one {what}"
            raise BadRequest(f"{earlier.id} cannot go on: {because}. Give the same {what}.", param="resume")


def _digest(text: str | None) -> str:
    return (text or "").rpartition(" (")[2]
