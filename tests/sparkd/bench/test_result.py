"""Results are kept, read back and removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.bench.result import BenchResult, BenchStore, BenchSubject, Cell, CellResult
from sparkd.errors import NotFound

CELL = Cell(depth=0, concurrency=2, prompt_tokens=8, output_tokens=4)
RATE = {"tg_throughput": {"mean": 1.0, "std": 0.0, "values": [1.0]}}
RESULT = BenchResult(
    id="20261101-120000-m", state="done", subject=BenchSubject(model="m", source="/m"), profile="quick", tool="t", started_s=1.0,
    cells=[CellResult(cell=CELL, state="done", rows=[RATE]), CellResult(cell=CELL)],
)  # fmt: skip


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    store = BenchStore(tmp_path)
    assert store.all() == []
    store.write(RESULT)
    assert store.read(RESULT.id) == RESULT and store.read(RESULT.id).done == 1
    store.write(RESULT.model_copy(update={"id": "20261102-120000-m"}))
    assert [result.id for result in store.all()] == ["20261102-120000-m", RESULT.id]
    store.remove(RESULT.id)
    with pytest.raises(NotFound):
        store.read(RESULT.id)
