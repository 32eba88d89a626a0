"""A bench of speed: what it says while it measures, and what it sees of the machine."""

from __future__ import annotations

from typing import Any, cast

from sparkd.bench.cell_figures import Moment
from sparkd.bench.result import Cell, CellResult
from sparkd.bench.speed_bench import _Watch, told

CELL = Cell(depth=0, concurrency=2, prompt_tokens=8, output_tokens=4)


def test_a_bench_says_while_it_goes_on_how_many_cells_have_failed() -> None:
    cells = [CellResult(cell=CELL, state="done"), CellResult(cell=CELL, state="running")]
    assert "failed" not in told(cells, 1, 0, 3)
    cells[0] = CellResult(cell=CELL, state="failed", error="other was loaded meanwhile")
    assert "1 failed" in told(cells, 1, 2, 3)


def node(watts: float | None, *engines: tuple[str, int, int | None]) -> dict[str, Any]:
    reading = {"gpu_power_w": watts, "gpu_celsius": 61.0, "gpu_throttled": ["SW Power Cap"], "gpu_at_s": 8.5}
    return {
        "reading": reading,
        "engines": [{"model": model, "host_bytes": host, "device_bytes": device} for model, host, device in engines],
    }


def test_what_is_seen_of_a_model_is_of_its_nodes_and_its_engine_on_all_of_them() -> None:
    models = {
        "m": {"name": "m", "state": "READY", "ranks": [{"node": "a"}, {"node": "b"}], "rates": {"kv_usage": 0.5}},
        "other": {"name": "other", "state": "LOADING", "ranks": [], "rates": None},
    }
    nodes = {"a": node(30.0, ("m", 1, 2), ("other", 7, 7)), "b": node(12.0, ("m", 4, None)), "c": node(None)}
    watch = _Watch(cast(Any, None), "m")
    watch.take({"at_s": 9.0, "models": models, "nodes": nodes})
    models["m"]["ranks"] = [{"node": "a"}]
    watch.take({"at_s": 10.0, "models": models, "nodes": nodes})
    watch.take({"at_s": 11.0, "models": {}, "nodes": {}})
    assert watch.moments == [
        Moment(9.0, 42.0, 61.0, ("SW Power Cap",), 7, 0.5, None),
        Moment(10.0, 30.0, 61.0, ("SW Power Cap",), 7, 0.5, 8.5),
        Moment(11.0),
    ]
    assert watch.loads == ["other"]
