"""The admin API's routes of benches: start, list, one, compare, remove, the profiles, and two for the bench's program."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field

from sparkd.admin.answers import Accepted, accepted
from sparkd.admin.benches import Benches
from sparkd.bench.compare import Comparison, compare
from sparkd.bench.figures import answer_metric, measured
from sparkd.bench.job import Work
from sparkd.bench.profile import DEFAULT, BenchProfile, named, parsed, shipped
from sparkd.bench.quality_bench import quality_bench
from sparkd.bench.result import BenchResult, BenchState, BenchSubject, Kind
from sparkd.errors import BadRequest

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
    kind: Literal["speed", "load", "quality"] = "speed"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStarted(Accepted):
    """bench: the id of its result."""

    bench: str


class Copying(BaseModel, extra="forbid"):
    """A model that a bench of quality loads in another format: one of vLLM's loader, `as stored`, or `entry` for that of its entry."""

    model: str = Field(max_length=256)
    format: str = Field(max_length=64)


class Copied(BaseModel):
    name: str


class BenchAbout(BaseModel):
    """folder: of the model's files on the daemon's node; null where they are not there."""

    subject: BenchSubject
    folder: str | None


class BenchRow(BaseModel):
    """A bench in short.

    cells, done: loads or formats where it measures these.
    tokens_per_s: the most of its cells.
    """

    id: str
    kind: Kind
    state: BenchState
    error: str | None
    model: str
    profile: str
    format: str | None
    started_s: float
    ended_s: float | None
    cells: int
    done: int
    tokens_per_s: float | None


class BenchRows(BaseModel):
    benches: list[BenchRow] = Field(description="Newest first")


class BenchProfiles(BaseModel):
    profiles: list[dict[str, Any]]


def register_benches(api: APIRouter, benches: Benches) -> None:
    async def work_of(what: Benching) -> Work:
        if what.kind == "load":
            if what.resume is not None:
                raise BadRequest("A bench of loads cannot go on with an earlier one: start it without `resume`.", param="resume")
            return benches.loads(what.model, what.times, what.other)
        if what.kind == "quality":
            await benches.check_lendable(what.model)
            return quality_bench(what.formats, what.text, what.text_name)
        profile = named(what.profile) if what.profile_text is None else await asyncio.to_thread(parsed, what.profile, what.profile_text)
        book = None if what.book is None else (what.book, what.book_name)
        return await benches.speed(profile, book)

    @api.post("/bench", status_code=202, summary="Measure a model by a profile; the operation tells how far it is")
    async def start_bench(what: Benching) -> BenchStarted:
        started = await benches.start(what.model, await work_of(what), resume=what.resume, force=what.force)
        return BenchStarted(**asdict(accepted(started.operation)), bench=started.bench)

    @api.get("/bench", summary="The benches whose results are kept, and the one that runs")
    async def list_benches() -> BenchRows:
        return BenchRows(benches=[row_of(result) for result in await benches.all()])

    @api.get("/bench/profiles", summary="The profiles that come with sparkd")
    async def bench_profiles() -> BenchProfiles:
        return BenchProfiles(profiles=[_profile(named(name)) for name in shipped()])

    @api.get("/bench/subject", summary="What a result says of a model: its entry, files, versions and nodes")
    async def bench_subject(model: str) -> BenchAbout:
        about = await benches.subject(model)
        return BenchAbout(subject=about.subject, folder=about.folder)

    @api.post("/bench/copy", summary="Add a model again in another format, until it is removed or the bench that runs ends")
    async def copy_model(what: Copying) -> Copied:
        return Copied(name=benches.lend(what.model, what.format))

    @api.get("/bench/compare", summary="Bench b against bench a, figure by figure, as `sparkd bench compare` does")
    async def compare_benches(a: str, b: str) -> Comparison:
        return compare(await benches.find(a), await benches.find(b))

    @api.get("/bench/{bench_id}", summary="The result of a bench; of the one that runs, so far")
    async def find_bench(bench_id: str) -> BenchResult:
        return await benches.find(bench_id)

    @api.delete("/bench/{bench_id}", summary="Remove the result of a bench")
    async def remove_bench(bench_id: str) -> BenchRow:
        return row_of(await benches.remove(bench_id))


def row_of(result: BenchResult) -> BenchRow:
    rates = [rate.mean for cell in measured(result) if (rate := answer_metric(cell, "tg_throughput")) is not None]
    return BenchRow(
        id=result.id,
        kind=result.kind,
        state=result.state,
        error=result.error,
        model=result.subject.model,
        profile=result.profile,
        format=result.subject.format,
        started_s=result.started_s,
        ended_s=result.ended_s,
        cells=len(result.cells) or len(result.loads) or len(result.quality),
        done=result.done or len(result.loads) or sum(row.measured for row in result.quality),
        tokens_per_s=max(rates, default=None),
    )


def _profile(profile: BenchProfile) -> dict[str, Any]:
    return {"name": profile.name, "description": profile.description, "cells": [cell.name for cell in profile.cells]}
