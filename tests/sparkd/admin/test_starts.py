"""How a model's last start went, phase by phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.admin.page_answers import StartAnswer
from sparkd.admin.starts import Starts
from sparkd.state.nouns import ModelState, Progress
from sparkd.state.snapshot import Snapshot
from tests.sparkd.gateway.fakes import view

LOADING = Progress(phase="loading", read_bytes=0, source="checkpoint", format="nvfp4")
S = ModelState


class Seen:
    def __init__(self) -> None:
        self.starts = Starts()

    def look(self, at_s: float, state: ModelState, progress: Progress | None = None) -> None:
        shown = view("m", state=state, progress=progress)
        self.starts.look(Snapshot(at_s, True, False, 0.0, {"m": shown}, (), {}))

    @property
    def answer(self) -> dict[str, Any]:
        answer = self.starts.of("m")
        StartAnswer.model_validate(answer)
        return answer

    @property
    def phases(self) -> list[tuple[str, float, float | None]]:
        return [(phase["name"], phase["begin_s"], phase["seconds"]) for phase in self.answer["phases"]]


@pytest.fixture
def seen() -> Seen:
    return Seen()


def test_a_start_from_the_wish_to_the_first_answer(seen: Seen) -> None:
    assert (seen.answer["began_s"], seen.phases) == (None, [])
    seen.look(100.0, S.PLANNED)
    seen.look(103.0, S.LOADING)
    seen.look(105.0, S.LOADING, LOADING)
    seen.look(115.0, S.LOADING, replace(LOADING, read_bytes=60_000))
    seen.look(125.0, S.WARMING, Progress(phase="warming", read_bytes=60_000))
    seen.look(135.0, S.SIZING, Progress(phase="sizing", kv={"phase": "rehearsing"}))
    seen.look(140.0, S.SIZING, Progress(phase="sizing", kv={"phase": "sized"}))
    assert (seen.answer["ended"], seen.phases[-1]) == (None, ("graphs", 40.0, None))
    seen.look(145.0, S.SIZING, Progress(phase="serving", server_up=True))
    seen.look(147.0, S.READY, Progress(phase="serving", server_up=True))
    seen.look(900.0, S.READY)
    assert seen.phases == [
        *(("memory back", 0.0, 3.0), ("engine", 3.0, 2.0), ("quantize", 5.0, 20.0), ("compile", 25.0, 10.0)),
        *(("rehearse", 35.0, 5.0), ("graphs", 40.0, 5.0), ("first answer", 45.0, 2.0)),
    ]
    assert (seen.answer["began_s"], seen.answer["seconds"], seen.answer["ended"]) == (100.0, 47.0, "READY")
    quantize = seen.answer["phases"][2]
    assert (quantize["bytes"], quantize["bytes_per_s"]) == (60_000, 3000.0)


@pytest.mark.parametrize(
    ("progress", "name"),
    [
        (LOADING, "quantize"),
        (replace(LOADING, source="cache"), "read"),
        (replace(LOADING, format="bf16"), "read"),
        (Progress(phase="loading", shards_done=1), "read"),
    ],
    ids=["from the checkpoint", "from the cache", "as stored", "stock vLLM"],
)
def test_what_a_loader_does(seen: Seen, progress: Progress, name: str) -> None:
    seen.look(100.0, S.LOADING, progress)
    assert [phase[0] for phase in seen.phases] == [name]


def test_a_loader_that_quantizes_reads_meanwhile(seen: Seen) -> None:
    """Before: `read` with no bytes, until the loader had said its format, and then `quantize` with all."""
    seen.look(100.0, S.LOADING, Progress(phase="loading"))
    seen.look(101.0, S.LOADING, LOADING)
    seen.look(110.0, S.WARMING, Progress(phase="warming", read_bytes=50_000))
    assert seen.phases == [("quantize", 0.0, 10.0), ("compile", 10.0, None)]
    assert seen.answer["phases"][0]["bytes"] == 50_000


def test_the_rate_of_the_disk(seen: Seen) -> None:
    seen.look(100.0, S.LOADING, LOADING)
    seen.look(110.0, S.WARMING, Progress(phase="warming", read_bytes=50_000))
    assert [seen.starts.of("m", rate)["disk_bytes_per_s"] for rate in (None, 4e9)] == [5000.0, 4e9]


def test_a_phase_never_comes_back(seen: Seen) -> None:
    seen.look(100.0, S.SIZING, Progress(phase="sizing"))
    seen.look(101.0, S.SIZING, Progress(phase="warming"))
    assert seen.phases == [("graphs", 0.0, None)]


@pytest.mark.parametrize(("state", "ended"), [(S.FAILED, "FAILED"), (S.STOPPING, "STOPPED")])
def test_a_start_that_comes_to_nothing(seen: Seen, state: ModelState, ended: str) -> None:
    seen.look(100.0, S.LOADING)
    seen.look(110.0, state)
    assert (seen.answer["ended"], seen.answer["seconds"], seen.phases) == (ended, 10.0, [("engine", 0.0, 10.0)])
    seen.look(120.0, S.PLANNED)
    assert (seen.answer["began_s"], seen.phases) == (120.0, [("memory back", 0.0, None)])


def test_a_model_that_was_removed_is_forgotten(seen: Seen) -> None:
    seen.look(100.0, S.LOADING)
    seen.starts.look(Snapshot(101.0, True, False, 0.0, {}, (), {}))
    assert seen.answer["phases"] == []
