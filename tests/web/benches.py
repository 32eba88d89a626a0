"""Results of benches for the page, as the daemon keeps them; their figures are made up."""

from __future__ import annotations

from pathlib import Path

from sparkd.bench.result import BenchResult, BenchStore, BenchSubject, Cell, CellResult, Energy, LoadRow, Phase, Predicted

# The second is 10 % faster and takes 20 % more power. The last one's largest cell failed, and it has two loads besides.
BENCHES = ("20260301-070000-quick", "20260301-080000-quick", "20260301-090000-quick")
BEGAN_S = 1_772_348_400.0
HOUR_S = 3600.0
DEPTHS, CONCURRENCIES = (0, 4096), (1, 2, 4)
TOKENS_PER_S = {(depth, streams): 20.0 * streams * (1.0 if depth == 0 else 0.9) for depth in DEPTHS for streams in CONCURRENCIES}
LOADS = [
    LoadRow(way="first", model="quick", seconds=21.0, phases=[Phase(phase="read", seconds=9.0), Phase(phase="quantize", seconds=2.0)]),
    LoadRow(way="back", model="slow", seconds=8.0, phases=[Phase(phase="read", seconds=5.0)]),
]


def write_benches(state_dir: Path) -> None:
    store = BenchStore(state_dir)
    for number, (bench_id, faster, power) in enumerate(zip(BENCHES, (1.0, 1.1, 1.0), (1.0, 1.2, 1.0), strict=True)):
        store.write(_result(bench_id, BEGAN_S + number * HOUR_S, faster, power, fails=number == 2))


def _result(bench_id: str, began_s: float, faster: float, power: float, *, fails: bool) -> BenchResult:
    points = [Cell(depth=depth, concurrency=streams, prompt_tokens=2048, output_tokens=128) for depth, streams in TOKENS_PER_S]
    cells = [_cell(point, faster, power) for point in points]
    if fails:
        error = "quick failed: EngineExited. `sparkd events` says more."
        cells[-1] = CellResult(cell=cells[-1].cell, state="failed", error=error, started_s=began_s, seconds=12.0)
    return BenchResult(
        id=bench_id,
        state="done",
        subject=BenchSubject(model="quick", source="folder", format="nvfp4", vllm="0.32.0", gpu="NVIDIA GB10", nodes=["spark-1"]),
        profile="quick" if fails else "mine",
        tool="llama-benchy 0.4.0",
        started_s=began_s,
        ended_s=began_s + 600,
        idle_w=11.5,
        predicted_bytes=2 << 30,
        predicted=Predicted(first_load_s=12.0, next_load_s=4.0),
        cells=cells,
        loads=LOADS if fails else [],
    )


def _cell(cell: Cell, faster: float, power: float) -> CellResult:
    rate = TOKENS_PER_S[cell.depth, cell.concurrency] * faster
    figures = {"pp_throughput": 900.0 * faster, "tg_throughput": rate, "e2e_ttft": 2300.0 / faster}
    spreads = {"e2e_ttft": 40.0}
    row = {name: {"mean": mean, "std": spreads.get(name, 1.0), "values": [mean]} for name, mean in figures.items()}
    energy = Energy(
        mean_w=46.0 * power,
        peak_w=58.0 * power,
        joules=460.0 * power,
        joules_per_prompt_token=0.013 * power,
        joules_per_output_token=0.55 * power,
    )
    return CellResult(cell=cell, state="done", started_s=BEGAN_S, seconds=41.5, rows=[row], energy=energy)
