"""Results are files: written whole or not at all, read back, and refused where they are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkd.bench.result import BenchResult, BenchStore, BenchSubject, Cell, CellResult
from sparkd.errors import NotFound, StateError

CELL = Cell(depth=0, concurrency=2, prompt_tokens=8, output_tokens=4)
RATE = {"tg_throughput": {"mean": 1.0, "std": 0.0, "values": [1.0]}}
RESULT = BenchResult(
    id="20261101-120000-m", state="done", subject=BenchSubject(model="m", source="/m"), profile="quick", tool="t", started_s=1.0,
    cells=[CellResult(cell=CELL, state="done", rows=[RATE]), CellResult(cell=CELL)],
)  # fmt: skip


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    store = BenchStore(tmp_path / "bench")
    assert store.all() == []
    store.write(RESULT)
    assert store.read(RESULT.id) == RESULT and store.read(RESULT.id).done == 1
    store.write(RESULT.model_copy(update={"id": "20261102-120000-m"}))
    assert [result.id for result in store.all()] == ["20261102-120000-m", RESULT.id]
    store.remove(RESULT.id)
    with pytest.raises(NotFound):
        store.read(RESULT.id)


@pytest.mark.parametrize("bench_id", ["../secret", ""])
def test_an_id_is_no_path(tmp_path: Path, bench_id: str) -> None:
    with pytest.raises(NotFound):
        BenchStore(tmp_path).read(bench_id)


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BenchStore(tmp_path)
    store.write(RESULT)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        store.write(RESULT.model_copy(update={"state": "failed"}))
    assert store.read(RESULT.id) == RESULT
    assert [path.name for path in tmp_path.iterdir()] == [f"{RESULT.id}.json"]
