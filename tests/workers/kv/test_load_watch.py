"""What was learned of the largest batch, against what real batches take and what a compile run takes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.support.facts import facts
from tests.workers.kv.test_sizing import DEMAND, Machine, at_once, serve, start, told
from workers.kv.arithmetic import GIB, Demand
from workers.kv.load_watch import EVERY, LOOKS, UnderLoad
from workers.kv.profiles import MeasuredProfile, Profiles, key_of
from workers.kv.sizing import Sizing
from workers.vllm.kv.sized_worker import SizedWorker

__all__ = ["at_once"]  # a fixture
KEY = key_of({"model": "m"})


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM, where another test has imported it, keeps its loggers' lines to itself."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)


def ready(folder: Path, **settings: Any) -> tuple[Machine, Sizing]:
    machine = Machine(40 * GIB)
    sizing, size = start(machine, folder, **settings)
    serve(sizing, machine, size, GIB)
    return machine, sizing


def batch(sizing: Sizing, machine: Machine, tokens: int, taken: int) -> None:
    assert sizing.under_load is not None
    machine.batch = taken
    if sizing.under_load.looks_at(tokens):
        sizing.under_load.look()


def peak(folder: Path) -> int:
    known = Profiles(str(folder / "profiles")).find(KEY)
    assert known is not None
    return known.demand.peak


@pytest.mark.parametrize("learned", [False, True], ids=["rehearsed", "from a profile"])
def test_a_peak_that_a_load_exceeds_is_corrected_and_said(tmp_path, caplog, learned):
    if learned:
        Profiles(str(tmp_path / "profiles")).keep(KEY, MeasuredProfile(DEMAND, 1.0), {})
    machine, sizing = ready(tmp_path)
    batch(sizing, machine, 512, GIB)
    assert told(tmp_path)["load_peak_bytes"] == GIB
    batch(sizing, machine, 2048, 2 * GIB + GIB // 2)  # a quarter more than a dummy batch was planned for
    assert peak(tmp_path) == 2 * GIB
    assert "peak_why" not in told(tmp_path)
    batch(sizing, machine, 8192, 5 * GIB)
    assert peak(tmp_path) == 5 * GIB
    sentence = told(tmp_path)["peak_why"]
    assert facts(sentence) == "5.00 2.00"
    assert sentence in caplog.text

    second = Machine(40 * GIB)
    _, size = start(second, tmp_path)
    assert (second.did, told(tmp_path)["source"]) == (["warm"], "profile")
    assert size == 40 * GIB - GIB - int(5 * GIB * 1.25) - GIB


def test_a_small_load_makes_nothing_smaller(tmp_path):
    machine, sizing = ready(tmp_path)
    batch(sizing, machine, 8192, GIB // 4)
    assert peak(tmp_path) == 2 * GIB


def test_where_nothing_was_rehearsed_nothing_is_watched(tmp_path):
    _, sizing = ready(tmp_path, sequences=4)
    assert sizing.under_load is None


def test_a_look_is_rare_where_batches_are_small():
    machine = Machine(GIB)
    load = UnderLoad(machine, GIB, lambda _taken: None, lambda _taken: None)
    assert sum(load.looks_at(16) for _ in range(LOOKS)) == LOOKS
    assert sum(load.looks_at(16) for _ in range(10 * EVERY)) == 10
    assert load.looks_at(17)
    assert not load.looks_at(16)


def test_a_worker_looks_at_what_its_steps_take():
    class Worker:
        ran: ClassVar[list[int]] = []

        def execute_model(self, scheduled: Any) -> str:
            self.ran.append(scheduled.total_num_scheduled_tokens)
            machine.batch = scheduled.total_num_scheduled_tokens * GIB
            return "made"

    class Ours(SizedWorker, Worker): ...

    machine, seen = Machine(GIB), list[int]()
    worker = Ours()
    worker._sizing = SimpleNamespace(under_load=None)  # type: ignore[assignment]
    assert worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=9)) == "made"
    worker._sizing.under_load = UnderLoad(machine, GIB, seen.append, seen.append)
    assert [worker.execute_model(SimpleNamespace(total_num_scheduled_tokens=tokens)) for tokens in (1, 4, 2)] == ["made"] * 3
    assert (Worker.ran, seen) == ([9, 1, 4, 2], [GIB, 4 * GIB, 4 * GIB])


@pytest.mark.parametrize(
    ("stored", "batch_bytes", "rehearses"),
    [
        (0, 0, False),  # a CPU's compile run says nothing
        (0, 4 * GIB, True),
        (GIB, 2 * GIB, True),
        (2 * GIB, GIB, True),  # smaller than it was: then the largest batch is, too
    ],
)
def test_a_profile_whose_batch_is_another_one_now_is_rehearsed_again(tmp_path, caplog, stored, batch_bytes, rehearses):
    caplog.set_level(logging.INFO, "vllm.sparkd.kv")
    Profiles(str(tmp_path / "profiles")).keep(KEY, MeasuredProfile(Demand(peak=2 * GIB), 1.0, warm=stored), {})
    machine = Machine(40 * GIB, Demand(peak=3 * GIB))
    machine.batch = batch_bytes
    sizing, size = start(machine, tmp_path)
    assert machine.did == ["warm", "rehearse 1.0"][: 1 + rehearses]
    sized = f"{batch_bytes / GIB:.2f} {(stored or 2.5 * GIB) / GIB:.2f}"
    assert any(facts(one.message).startswith(sized) for one in caplog.records) == rehearses
    assert facts(told(tmp_path)["source_why"] or "") == (sized if rehearses else "")
    serve(sizing, machine, size, 0)
    raw = json.loads((tmp_path / "profiles" / f"{KEY}.json").read_text())
    assert raw["demand"]["peak"] == (3 if rehearses else 2) * GIB
    assert raw["warm"] == (batch_bytes or stored) if rehearses or not stored else True

    again = Machine(40 * GIB)
    again.batch = batch_bytes
    start(again, tmp_path)
    assert again.did == ["warm"], "once"
