"""A bench of speed: what it says while it measures."""

from __future__ import annotations

from sparkd.bench.result import Cell, CellResult
from sparkd.bench.speed_bench import told

CELL = Cell(depth=0, concurrency=2, prompt_tokens=8, output_tokens=4)


def test_a_bench_says_while_it_goes_on_how_many_cells_have_failed() -> None:
    cells = [CellResult(cell=CELL, state="done"), CellResult(cell=CELL, state="running")]
    assert "failed" not in told(cells, 1, 0, 3)
    cells[0] = CellResult(cell=CELL, state="failed", error="other was loaded meanwhile")
    assert "1 failed" in told(cells, 1, 2, 3)
