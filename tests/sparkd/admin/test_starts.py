"""How a model's last start went, phase by phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkd.admin.starts import ModelStart, Starts
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress
from sparkd.state.snapshot import Snapshot
from tests.sparkd.control.test_decision import HANDLE
from tests.sparkd.gateway.fakes import view

RANK = replace(HANDLE, started_at_s=103.0)
BEGAN = {"loading": 104.5, "checkpoint": 105.0, "warming": 125.0, "rehearsing": 135.0, "sizing": 136.0, "sized": 140.0, "serving": 145.0}
STARTED = Progress(phase="serving", server_up=True, read_bytes=60_000, source="checkpoint", format="nvfp4", began_s=BEGAN)
S = ModelState


class Seen:
    def __init__(self) -> None:
        self.starts = Starts()

    def look(self, at_s: float, state: ModelState, progress: Progress | None = None, since_s: float | None = None) -> None:
        ranks = () if state is S.PLANNED else (RANK,)
        shown = view("m", state=state, progress=progress, ranks=ranks, since_s=at_s if since_s is None else since_s)
        self.starts.look(Snapshot(at_s, True, False, 0.0, {"m": shown}, (), {}))

    @property
    def answer(self) -> ModelStart:
        return self.starts.of("m")

    @property
    def phases(self) -> list[tuple[str, float, float | None]]:
        return [(phase.name, phase.begin_s, phase.seconds) for phase in self.answer.phases]


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_start_from_the_wish_to_the_first_answer_however_seldom_it_is_looked_at(seen: Seen) -> None:
    assert (seen.answer.began_s, seen.phases) == (None, [])
    seen.look(100.0, S.PLANNED)
    seen.look(104.0, S.LOADING)
    assert seen.phases == [("memory back", 0.0, 3.0), ("engine", 3.0, None)]
    seen.look(147.0, S.READY, STARTED)
    seen.look(900.0, S.READY)
    assert seen.phases == [
        *(("memory back", 0.0, 3.0), ("engine", 3.0, 2.0), ("quantize", 5.0, 20.0), ("compile", 25.0, 10.0)),
        *(("rehearse", 35.0, 5.0), ("warm-up", 40.0, 5.0), ("first answer", 45.0, 2.0)),
    ]
    assert (seen.answer.began_s, seen.answer.seconds, seen.answer.ended) == (100.0, 47.0, "READY")
    quantize = seen.answer.phases[2]
    assert (quantize.bytes, quantize.bytes_per_s) == (60_000, 3000.0)
    assert seen.starts.of("m", 4e9).disk_bytes_per_s == 4e9


@pytest.mark.parametrize(
    ("progress", "names"),
    [
        (
            Progress(source="checkpoint", format="nvfp4", began_s={"calibration": 104.0, "checkpoint": 105.0}),
            ["measuring inputs", "quantize"],
        ),
        (Progress(source="cache", format="nvfp4", began_s={"cache": 105.0}), ["read"]),
        (Progress(source="checkpoint", format="bf16", began_s={"checkpoint": 105.0}), ["read"]),
        (Progress(began_s={"loading": 105.0, "sizing": 106.0}), ["read", "warm-up"]),
    ],
    ids=["measured first", "from the cache", "as stored", "stock vLLM"],
)
def test_what_a_loader_does(seen: Seen, progress: Progress, names: list[str]) -> None:
    seen.look(104.0, S.LOADING)
    seen.look(110.0, S.LOADING, progress)
    assert [phase[0] for phase in seen.phases] == ["engine", *names]


def test_a_loader_that_quantizes_reads_meanwhile(seen: Seen) -> None:
    seen.look(105.0, S.LOADING, Progress(began_s={"loading": 104.0}))
    seen.look(106.0, S.LOADING, replace(STARTED, began_s={"loading": 104.0, "checkpoint": 105.0}))
    assert [phase[0] for phase in seen.phases] == ["engine", "quantize"]


def test_a_start_that_a_new_daemon_takes_over_began_with_its_engine(seen: Seen) -> None:
    seen.look(120.0, S.LOADING, replace(STARTED, began_s={"checkpoint": 105.0}))
    assert (seen.answer.began_s, seen.phases) == (103.0, [("engine", 0.0, 2.0), ("quantize", 2.0, None)])


def test_a_start_that_an_earlier_daemon_saw_end_ended_then(seen: Seen) -> None:
    seen.look(1400.0, S.LOADING, STARTED)
    seen.look(1401.0, S.READY, STARTED, since_s=147.0)
    assert (seen.answer.began_s, seen.answer.seconds, seen.phases[-1]) == (103.0, 44.0, ("first answer", 42.0, 2.0))


@pytest.mark.parametrize(("state", "ended"), [(S.FAILED, "FAILED"), (S.STOPPING, "STOPPED")])
def test_a_start_that_comes_to_nothing(seen: Seen, state: ModelState, ended: str) -> None:
    seen.look(103.0, S.LOADING)
    seen.look(113.0, state)
    assert (seen.answer.ended, seen.answer.seconds, seen.phases) == (ended, 10.0, [("engine", 0.0, 10.0)])
    seen.look(120.0, S.PLANNED)
    assert (seen.answer.began_s, seen.phases) == (120.0, [("memory back", 0.0, None)])


def test_a_model_that_was_removed_is_forgotten(seen: Seen) -> None:
    seen.look(103.0, S.LOADING)
    seen.starts.look(Snapshot(104.0, True, False, 0.0, {}, (), {}))
    assert seen.phases == []
