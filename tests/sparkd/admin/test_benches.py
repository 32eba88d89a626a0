"""A bench goes on only with the model, text, profile and cells of its first part."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from sparkd.admin.benches import Benches, Benching, refuse_a_mixture
from sparkd.admin.jobs import Jobs
from sparkd.bench.profile import Arguments, BenchProfile
from sparkd.bench.quality_bench import quality_bench
from sparkd.bench.result import BenchResult, BenchStore, BenchSubject, Cell, CellResult, text_label
from sparkd.bench.speed_bench import SpeedBench
from sparkd.errors import BadRequest
from tests.sparkd.gateway.fakes import view
from tests.support.fakes import stage
from tests.support.waiting import HUNG_S, eventually

CELLS = tuple(Cell(depth=depth, concurrency=1, prompt_tokens=8, output_tokens=4) for depth in (0, 16))
TEXT = text_label("moby.txt", "Call me Ishmael.")
EARLIER = BenchResult(
    id="20261101-120000-m",
    state="cancelled",
    subject=BenchSubject(model="m", source="/m"),
    profile="quick",
    tool="llama-benchy 0.4.0",
    text=TEXT,
    started_s=1.0,
    cells=[CellResult(cell=cell) for cell in CELLS],
)


AGAIN = Benching(model="m", resume=EARLIER.id)


def planned(text: str = TEXT, profile: str = "quick", cells: tuple[Cell, ...] = CELLS) -> SpeedBench:
    chosen = BenchProfile(name=profile, description="", args=Arguments(), cells=cells)
    return SpeedBench(chosen=chosen, tool="llama-benchy 0.4.1", interpreter=sys.executable, text=text, content="Call me Ishmael.")


async def work(*_: object) -> SpeedBench:
    return planned()


@pytest.mark.parametrize("removes", [False, True])
async def test_a_cancelled_bench_is_waited_for_while_its_figures_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    writes, may_end, begun = threading.Event(), threading.Event(), asyncio.Event()
    write = BenchStore.write

    def held(self: BenchStore, result: BenchResult) -> None:
        if result.state == "cancelled":
            writes.set()
            may_end.wait(HUNG_S)
        write(self, result)

    async def endless(*_: object) -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    async with stage(tmp_path, models={}) as scene, asyncio.TaskGroup() as tasks:
        registry = SimpleNamespace(config=SimpleNamespace(state_dir=tmp_path), lent=())
        jobs = Jobs(scene.supervisor.journal, scene.supervisor.boundary)
        benches = Benches(scene.supervisor, cast(Any, registry), jobs, "http://x", ("", ""))
        benches.store.write(EARLIER)
        monkeypatch.setattr(Benches, "_work", work)
        monkeypatch.setattr(BenchStore, "write", held)
        monkeypatch.setattr(Benches, "_program_ended", endless)
        monkeypatch.setattr(scene.supervisor, "snapshot", lambda: SimpleNamespace(models={"m": view("m")}))
        running = tasks.create_task(jobs.run())
        await asyncio.sleep(0)
        operation, _ = await benches.start(AGAIN)
        await begun.wait()
        jobs.cancel(operation.id)
        await asyncio.to_thread(writes.wait, HUNG_S)
        after = tasks.create_task(cast(Any, benches.remove(EARLIER.id) if removes else benches.start(AGAIN)))
        await asyncio.sleep(0)
        may_end.set()
        await after
        assert [result.state for result in await benches.all()] == ([] if removes else ["running"])
        running.cancel()


async def test_the_program_reads_its_job_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path, models={}) as scene:
        registry = SimpleNamespace(config=SimpleNamespace(state_dir=tmp_path), lent=())
        jobs = Jobs(scene.supervisor.journal, scene.supervisor.boundary)
        benches = Benches(scene.supervisor, cast(Any, registry), jobs, "http://127.0.0.1:9", ("", ""))
        monkeypatch.setattr(scene.supervisor, "snapshot", lambda: SimpleNamespace(models={"m": view("m")}))
        benches.store.write(EARLIER)
        monkeypatch.setattr(Benches, "_work", work)
        running = asyncio.create_task(jobs.run())
        await asyncio.sleep(0)
        await benches.start(AGAIN)

        async def ended() -> BenchResult | None:
            (result,) = await benches.all()
            return None if result.state == "running" else result

        assert "The daemon did not answer" in ((await eventually(ended)).error or "")
        running.cancel()


@pytest.mark.parametrize("same", [{}, {"text": text_label("copy.txt", "Call me Ishmael.")}])
def test_the_same_text_and_profile_go_on(same: dict[str, Any]) -> None:
    refuse_a_mixture(EARLIER, "m", planned(**same))


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"text": text_label("moby.txt", "Call me Ahab.")}, ("text", TEXT)),
        ({"profile": "mine"}, ("profile", "quick", "mine")),
        ({"cells": CELLS[::-1]}, ("profile", "quick with other cells")),
    ],
)
def test_the_refusal_names_the_part_that_differs(other: dict[str, Any], parts: tuple[str, ...]) -> None:
    with pytest.raises(BadRequest) as refusal:
        refuse_a_mixture(EARLIER, "m", planned(**other))
    assert all(part in refusal.value.message for part in (EARLIER.id, *parts))


def test_another_model_is_refused() -> None:
    with pytest.raises(BadRequest) as refusal:
        refuse_a_mixture(EARLIER, "n", planned())
    assert {"m", "n"} <= set(refusal.value.message.replace(",", " ").split())


def test_another_kind_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"speed.*quality"):
        refuse_a_mixture(EARLIER, "m", quality_bench([], None, None))


@pytest.mark.parametrize("key", ["profile", "book_name", "text_name"])
def test_a_name_that_changes_a_terminal_is_refused_where_it_enters(key: str) -> None:
    assert Benching.model_validate({"model": "m", key: "my Büch (2).txt"})
    for name in ("\x1b[2J", "a\u202eb"):
        with pytest.raises(ValidationError, match="without control characters"):
            Benching.model_validate({"model": "m", key: name})
