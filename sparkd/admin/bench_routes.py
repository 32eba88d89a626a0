"""The admin API's routes of benches: start, list, one, compare, remove, the profiles, and two for the bench's program."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fastapi import APIRouter
from pydantic import BaseModel, Field

from sparkd.admin.answers import Accepted, accepted
from sparkd.admin.bench_facts import Benched
from sparkd.admin.benches import Benches, Benching
from sparkd.bench.compare import Comparison, compare
from sparkd.bench.figures import answer_metric, measured
from sparkd.bench.profile import BenchProfile, named, shipped
from sparkd.bench.result import BenchResult, BenchState, Kind


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
    profiles: list[BenchProfile]


def register_benches(api: APIRouter, benches: Benches) -> None:
    @api.post("/bench", status_code=202, summary="Measure a model by a profile; the operation tells how far it is")
    async def start_bench(what: Benching) -> BenchStarted:
        operation, bench = await benches.start(what)
        return BenchStarted(**asdict(accepted(operation)), bench=bench)

    @api.get("/bench", summary="The benches whose results are kept, and the one that runs")
    async def list_benches() -> BenchRows:
        return BenchRows(benches=[row_of(result) for result in await benches.all()])

    @api.get("/bench/profiles", summary="The profiles that come with sparkd")
    async def bench_profiles() -> BenchProfiles:
        return BenchProfiles(profiles=[named(name) for name in shipped()])

    @api.get("/bench/subject", summary="What a result says of a model: its entry, files, versions and nodes")
    async def bench_subject(model: str) -> Benched:
        return await benches.subject(model)

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
