"""Why an engine failed during a bench, in one line out of the daemon's events."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from sparkd.bench import running_bench
from sparkd.bench.client import Client
from sparkd.bench.figures import MOST_ERROR_CHARS, one_line
from sparkd.bench.result import BenchResult, BenchSubject
from sparkd.bench.running_bench import RunningBench, loads_beside
from sparkd.gateway.rates import Sample
from tests.support.waiting import HUNG_S


class BenchedDaemon:
    """A daemon's events. alive: whether the engine gives counters. looks: how often it was asked."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.alive, self.looks = True, 0
        self.then: Callable[[], object] = lambda: None

    async def get(self, path: str, after: int = 0, limit: int = 1) -> dict[str, Any]:
        newer = [event for event in self.events if event["seq"] > after]
        return {"events": newer[:limit] if after else newer[-limit:]}

    async def models(self) -> dict[str, dict[str, Any]]:
        return {"m": {"name": "m", "state": "READY"}}

    async def counters(self, _: str) -> Sample | None:
        self.looks += 1
        if self.looks == 2:
            self.then()
        return Sample(0.0) if self.alive else None

    def fail(self, reason: str, model: str = "m") -> None:
        seq = len(self.events) + 1
        self.events.append({"seq": seq, "kind": "failed", "model": model, "message": f"{reason}: It\nended."})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_bench, "POLL_S", 0.0)
    monkeypatch.setattr(running_bench, "SEEN_S", HUNG_S)


@pytest.fixture
def daemon() -> BenchedDaemon:
    return BenchedDaemon()


@pytest.fixture
def bench(tmp_path: Path, daemon: BenchedDaemon) -> RunningBench:
    subject = BenchSubject(model="m", source="/m")
    result = BenchResult(id="20261126-101500-m", state="running", subject=subject, profile="quick", tool="llama-benchy 0.4.0", started_s=1)
    return RunningBench(cast(Client, daemon), tmp_path, result)


async def test_the_reason_of_the_newest_failure_since_then(bench: RunningBench, daemon: BenchedDaemon) -> None:
    daemon.fail("LoadFailed")
    since_seq = await bench.newest_event()
    assert await bench.engine_failure("m", since_seq) is None

    daemon.fail("RankLost")
    daemon.fail("EngineExited")
    daemon.fail("RankHangs", "other")
    line = await bench.engine_failure("m", since_seq)
    assert line is not None and "EngineExited" in line and line == one_line(line)


async def test_a_death_is_awaited_that_the_supervisor_has_not_seen(bench: RunningBench, daemon: BenchedDaemon) -> None:
    daemon.alive, daemon.then = False, lambda: daemon.fail("EngineExited")
    line = await bench.engine_failure("m", await bench.newest_event())
    assert line is not None and "EngineExited" in line and daemon.looks == 2


def test_a_load_beside_is_one_that_began_and_not_one_that_may_be_refused() -> None:
    states = {"ours": "LOADING", "refused": "PLANNED", "beside": "LOADING", "served": "READY"}
    assert loads_beside([{"name": name, "state": state} for name, state in states.items()], "ours", None) == ["beside"]


@pytest.mark.parametrize(("text", "length"), [("a\n b\t c", 5), ("x" * 5000, MOST_ERROR_CHARS)])
def test_an_error_is_one_short_line(text: str, length: int) -> None:
    line = one_line(text)
    assert len(line) == length and "\n" not in line
