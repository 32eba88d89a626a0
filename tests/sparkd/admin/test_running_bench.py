"""Why an engine failed during a bench, in one line: out of the events, and of the memory guard's incidents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from sparkd.admin import running_bench
from sparkd.admin.running_bench import RunningBench, Surroundings, loads_beside
from sparkd.bench.figures import MOST_ERROR_CHARS, one_line
from sparkd.bench.result import BenchResult, BenchSubject
from sparkd.control.journal import Ledger
from sparkd.execution.boundary import Boundary
from sparkd.gateway.rates import Sample
from sparkd.state.nouns import ModelState
from sparkd.state.snapshot import Snapshot
from tests.sparkd.control.test_supervisor import make_ready
from tests.sparkd.gateway.fakes import view
from tests.support.fakes import Scene, stage
from tests.support.waiting import HUNG_S

START = "m-1-0a1b2c3d"
INCIDENT = f"20261126-101500-{START}"


class BenchedEngine:
    """The parts of the daemon that say whether an engine lives. looks: how often its counters were asked."""

    def __init__(self, scene: Scene) -> None:
        self.snapshot, self.store = scene.supervisor.snapshot, scene.store
        self.alive, self.looks = True, 0
        self.then: Callable[[], object] = lambda: None
        # The guard writes the second time that it is asked.
        self.incidents: list[str | None] = [None, INCIDENT]
        self.asked: list[str] = []

    async def counters(self, _: str) -> Sample | None:
        self.looks += 1
        if self.looks == 2:
            self.then()
        return Sample(0.0) if self.alive else None

    async def incident(self, start: str) -> str | None:
        self.asked.append(start)
        return self.incidents.pop(0)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with stage(tmp_path, models={"m": {"model": "/m"}}) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_bench, "POLL_S", 0.0)
    monkeypatch.setattr(running_bench, "SEEN_S", HUNG_S)


def bench_of(folder: Path, engine: BenchedEngine) -> tuple[RunningBench, Ledger]:
    ledger = Ledger(engine.store, lambda: 5.0)
    subject = BenchSubject(model="m", source="/m")
    result = BenchResult(id="20261126-101500-m", state="running", subject=subject, profile="quick", tool="llama-benchy 0.4.0", started_s=1)
    around = cast(Surroundings, engine)
    return RunningBench(around, ledger, folder, lambda: 5.0, Boundary(lambda: 5.0), result), ledger


def fail(ledger: Ledger, reason: str, model: str = "m") -> None:
    ledger.say("failed", model, f"{reason}: {'It ended. ' * 99}", reason=reason, failures=1, start=START)


async def test_the_reason_of_the_newest_failure_since_then(tmp_path: Path, scene: Scene) -> None:
    bench, ledger = bench_of(tmp_path, BenchedEngine(scene))
    fail(ledger, "LoadFailed")
    since_seq = bench.newest_event()
    assert await bench.engine_failure("m", since_seq) is None

    fail(ledger, "RankLost")
    fail(ledger, "EngineExited")
    fail(ledger, "RankHangs", "other")
    line = await bench.engine_failure("m", since_seq)
    assert line is not None and "EngineExited" in line and line == one_line(line)


async def test_an_incident_is_awaited_and_named(tmp_path: Path, scene: Scene) -> None:
    engine = BenchedEngine(scene)
    bench, ledger = bench_of(tmp_path, engine)
    fail(ledger, "MemoryGuard")
    line = await bench.engine_failure("m", 0)
    assert line is not None and INCIDENT in line and engine.asked == [START, START]


async def test_a_death_is_awaited_that_the_supervisor_has_not_seen(tmp_path: Path, scene: Scene) -> None:
    engine = BenchedEngine(scene)
    bench, ledger = bench_of(tmp_path, engine)
    await make_ready(scene)
    engine.alive, engine.then = False, lambda: fail(ledger, "EngineExited")
    line = await bench.engine_failure("m", bench.newest_event())
    assert line is not None and "EngineExited" in line and engine.looks == 2


def test_a_load_beside_is_one_that_began_and_not_one_that_may_be_refused() -> None:
    states = {"ours": "LOADING", "refused": "PLANNED", "beside": "LOADING", "served": "READY"}
    snapshot = SimpleNamespace(models={name: view(name, state=ModelState(state)) for name, state in states.items()})

    assert loads_beside(cast(Snapshot, snapshot), "ours", None) == ["beside"]


@pytest.mark.parametrize(("text", "length"), [("a\n b\t c", 5), ("x" * 5000, MOST_ERROR_CHARS)])
def test_an_error_is_one_short_line(text: str, length: int) -> None:
    line = one_line(text)
    assert len(line) == length and "\n" not in line
