"""Made-up results of a bench with the shape of real ones: no figure here was measured."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from sparkd.bench.result import (
    BenchResult,
    BenchSample,
    BenchSubject,
    Cell,
    CellResult,
    Energy,
    EngineFigures,
    LoadRow,
    MachineFigures,
    Phase,
    Published,
    QualityRow,
)

STARTED_S = 1_795_000_000.0
DEPTHS = (0, 4096, 8192, 16384, 32768, 65535, 100000)
CONCURRENCIES = (1, 2, 5, 10)
GIB = 1 << 30
_PROMPT, _OUTPUT, _RUNS, _IDLE_W, _CELL_S = 2048, 128, 3, 31.4, 120.0


def metric_of(values: Sequence[float]) -> dict[str, Any]:
    """As llama-benchy stores one."""
    return {"mean": statistics.fmean(values), "std": statistics.pstdev(values), "values": list(values)}


def row(cell: Cell, prefill: float, decode: float, seed: int, *, context: bool = False) -> dict[str, Any]:
    """A row of llama-benchy. prefill, decode: tokens a second of all requests together."""
    noise = random.Random(seed)

    def around(mean: float, count: int, spread: float = 0.015) -> list[float]:
        return [mean * (1 + noise.gauss(0, spread)) for _ in range(count)]

    requests = _RUNS * cell.concurrency
    size = cell.depth if context else cell.prompt_tokens
    slowest_ms = size * cell.concurrency / prefill * 1000
    waits = [slowest_ms * (0.35 + 0.65 * (index % cell.concurrency + 1) / cell.concurrency) for index in range(requests)]
    first = [wait * (1 + noise.gauss(0, 0.02)) for wait in waits]
    per_request = decode / cell.concurrency * 1.05
    one = cell.concurrency == 1
    prompt, output = around(prefill, _RUNS), around(decode, _RUNS)
    return {
        "concurrency": cell.concurrency,
        "context_size": cell.depth,
        "prompt_size": cell.prompt_tokens,
        "response_size": cell.output_tokens,
        "is_context_prefill_phase": context,
        "pp_throughput": metric_of(prompt),
        "pp_req_throughput": metric_of(prompt if one else around(prefill / cell.concurrency * 1.3, requests, 0.2)),
        "tg_throughput": metric_of(output),
        "tg_req_throughput": metric_of(output if one else around(per_request, requests, 0.03)),
        "peak_throughput": metric_of(around(decode * 1.08, _RUNS)),
        "peak_req_throughput": metric_of(around(per_request * 1.06, requests, 0.03)),
        "ttfr": metric_of([value + 1.7 for value in first]),
        "est_ppt": metric_of(first),
        "e2e_ttft": metric_of([value + 3.1 for value in first]),
        "throughput_over_time": None,
        "requests_throughput_over_time": None,
    }


def measured_cell(cell: Cell, started_s: float, speed: float, seed: int) -> CellResult:
    """A cell of a small MoE on one Spark; speed: 1.0 is NVFP4."""
    batch = cell.concurrency**0.62
    decode = 61 * speed * batch / (1 + cell.depth / 90_000 * batch**0.5)
    prefill = 3900 * (0.7 + 0.3 * speed) * min(1, 0.8 + cell.concurrency / 12) / (1 + cell.depth / 70_000)
    rows = [row(cell, prefill, decode, seed)]
    if cell.depth:
        rows.insert(0, row(cell, prefill * 1.05, decode * 1.02, seed + 1, context=True))
    return CellResult(
        cell=cell,
        state="done",
        started_s=started_s,
        seconds=_CELL_S,
        rows=rows,
        energy=Energy(
            mean_w=61.0,
            peak_w=72.6,
            joules=61.0 * _CELL_S,
            joules_per_prompt_token=0.01,
            joules_per_output_token=0.5 / speed,
        ),
        engine=EngineFigures(
            prompt_tokens=8192,
            output_tokens=1024,
            kv_use_peak=0.4,
            prefix_hit_share=0.48 if cell.depth else 0.0,
            preemptions=3 if cell.depth == DEPTHS[-1] else 0,
            drafted_tokens=1024,
            accepted_share_by_position=[0.81, 0.58, 0.37],
        ),
        machine=MachineFigures(
            celsius_peak=62.0,
            throttled=["sw_power_cap"] if (cell.depth, cell.concurrency) == (32768, 10) else [],
            memory_peak_bytes=39 * GIB,
        ),
    )


def example(
    name: str = "nvfp4",
    speed: float = 1.0,
    *,
    depths: Sequence[int] = DEPTHS,
    concurrencies: Sequence[int] = CONCURRENCIES,
    failed: Sequence[tuple[int, int]] = ((100000, 10),),
) -> BenchResult:
    """A speed result; failed: depth and concurrency of cells without rows."""
    cells, at_s, seed = [], STARTED_S + 60, 7
    for depth in depths:
        for concurrency in concurrencies:
            cell = Cell(depth=depth, concurrency=concurrency, prompt_tokens=_PROMPT, output_tokens=_OUTPUT)
            seed += 2
            if (depth, concurrency) in failed:
                error = "the engine was killed by the memory guard at 3.9 GiB free"
                cells.append(CellResult(cell=cell, state="failed", error=error, started_s=at_s, seconds=41.0))
                at_s += 50
                continue
            cells.append(measured_cell(cell, at_s, speed, seed))
            at_s += _CELL_S + 3
    return BenchResult(
        id=f"20261118-101500-qwen3.5-35b-a3b-{name}",
        state="done",
        subject=BenchSubject(
            model="qwen3.5-35b-a3b",
            source="Qwen/Qwen3.5-35B-A3B",
            checkpoint="sha256:9d1c66e4a0b2",
            entry={"model": "Qwen/Qwen3.5-35B-A3B", "quantize": name, "max_model_len": 131072, "env": {"HF_TOKEN": "***"}},
            format=name,
            vllm="0.32.0",
            sparkd="0.9.0",
            driver="580.95.05",
            gpu="NVIDIA GB10",
            nodes=["spark-1"],
        ),
        profile="spark-arena-v2",
        tool="llama-benchy 0.4.0",
        started_s=STARTED_S,
        ended_s=at_s,
        idle_w=_IDLE_W,
        predicted_bytes=int(40.1 * GIB),
        published=[
            Published(what="decode_tokens_per_s", value=64.37, unit="tokens/s", when="one stream", source="https://forums.example.com/t/1"),
            Published(
                what="total_decode_tokens_per_s",
                value=208.31,
                to=212.0,
                unit="tokens/s",
                when="10 streams",
                source="https://forums.example.com/t/1",
            ),
        ],
        cells=cells,
        loads=_loads(),
        quality=_quality(),
        samples=_samples(at_s),
    )


def _loads() -> list[LoadRow]:
    return [_load("first", 15.0), _load("first", 15.4), _load("cached"), _load("swap", unload_s=3.2), _load("swap", unload_s=3.9)]


def _load(way: Any, quantize_s: float = 0.0, unload_s: float = 0.0) -> LoadRow:
    phases = {"unload": unload_s, "start": 4.1, "read": 6.2, "quantize": quantize_s, "compile": 7.7, "first answer": 0.6}
    kept = [
        Phase(phase=phase, seconds=seconds, bytes=66 * GIB if phase == "read" else None) for phase, seconds in phases.items() if seconds
    ]
    total = sum(phases.values())
    return LoadRow(way=way, seconds=total + 0.8, first_answer_s=total + 0.9, phases=kept, bytes_per_s=1.1e10, disk_bytes_per_s=3.4e9)


def _quality() -> list[QualityRow]:
    figures = (("bf16", 7.412, 0.0, 1.0), ("fp8", 7.425, 0.0041, 0.984), ("nvfp4", 7.588, 0.0287, 0.938))
    return [QualityRow(format=name, perplexity=perplexity, kl=kl, agreement=agreement) for name, perplexity, kl, agreement in figures]


def _samples(ended_s: float) -> list[BenchSample]:
    """Every two seconds, without those in which the node did not answer."""
    lasted = range(0, int(ended_s - STARTED_S), 2)
    return [
        BenchSample(at_s=at_s)
        if 300 <= at_s < 312
        else BenchSample(at_s=at_s, power_w=60 + at_s % 7, memory_bytes=38 * GIB + (at_s % 5 << 20), celsius=62 + at_s % 3)
        for at_s in lasted
    ]
