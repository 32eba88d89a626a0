"""Every table of the command line on narrow and wide terminals. Names are as long as real ones."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from sparkd.bench.compare import Comparison, compare
from sparkd.cli import bench, incidents
from sparkd.render import fabric, models, plan, recipes, requests
from tests.support.bench_example import example

WIDTHS = (60, 80, 100, 120, 170)
GIB = 1 << 30
SMALL, LARGE = "smollm2-135m-instruct", "qwen3-coder-next-80b-a3b-instruct-nvfp4"
SOURCE = "Qwen/Qwen3-Coder-Next-80B-A3B-Instruct"


def text(_folder: Path) -> str:
    return "".join(_of(verb, draw) for verb, draw in _tables())


def _of(verb: str, draw: Callable[[Console], object]) -> str:
    """Each text once, under all widths that show it."""
    shown: dict[str, list[int]] = {}
    for width in WIDTHS:
        output = io.StringIO()
        draw(Console(file=output, width=width))
        shown.setdefault(output.getvalue(), []).append(width)
    return "".join(f"$ {verb}  # {', '.join(map(str, widths))} columns\n{drawn}\n" for drawn, widths in shown.items())


def _tables() -> Iterator[tuple[str, Callable[[Console], object]]]:
    rows = _models()
    yield "sparkd ps", lambda console: models.resident(rows, console, now_s=4000.0)
    yield "sparkd ps --wide", lambda console: models.resident(rows, console, now_s=4000.0, wide=True)
    yield "sparkd ls", lambda console: models.known(rows, console)
    yield "sparkd ls --cached", lambda console: models.cached(_cached(), console, now_s=4000.0)
    yield "sparkd ls --layers", lambda console: models.layers(_layers(), console)
    yield "sparkd requests", lambda console: requests.listed(_requests(), console)
    yield "sparkd nodes", lambda console: fabric.nodes(_nodes(), console)
    yield "sparkd status", lambda console: models.overview(_status(), "http://127.0.0.1:4000", console)
    yield "sparkd doctor", lambda console: fabric.findings(_findings(), console)
    yield "sparkd recipes ls", lambda console: recipes.listed(_recipes(), console)
    yield "sparkd recipes ls --registry", lambda console: recipes.registries(_registries(), console)
    yield "sparkd plan", _options
    yield "sparkd bench ls", lambda console: bench._listed(_benches(), console)
    yield "sparkd bench show", lambda console: bench._drawn(_result(), console)
    yield "sparkd bench compare", lambda console: bench._compared(_comparison(), console)
    yield "sparkd incidents ls", lambda console: incidents._listed(_incidents(), console)


def _models() -> list[dict[str, Any]]:
    rest = {"want": "RUNNING", "since_s": 0.0, "queued": 0, "message": None, "reason": None, "retry_in_s": None, "turn": None,
            "doubt": None, "source": SOURCE, "max_model_len": 262144, "load_s": 61.0, "in_flight": 12}  # fmt: skip
    kv = {"phase": "ready", "pool_bytes": 8 * GIB, "sequences": 8.5, "bytes_per_token": 131072.0, "margin_bytes": GIB,
          "slack_bytes": GIB // 2, "source": "profile"}  # fmt: skip
    ranks = [{"node": "192.168.100.11", "pid": 1234567}, {"node": "192.168.100.12", "pid": 7654321}]
    ready = {"state": "READY", "memory_gib": 52.5, "node": "192.168.100.11", "ranks": ranks, "aliases": ["gpt-4o", "claude-sonnet-4-5"],
             "progress": {"phase": "serving", "kv_tokens": 1048576, "kv": kv}, "parsers": {"tool": "qwen3_coder"}}  # fmt: skip
    loading = {"state": "LOADING", "memory_gib": 4.0, "node": "spark-2", "ranks": ranks[1:], "aliases": [], "queued": 3,
               "progress": {"phase": "loading", "fraction": 0.5}}  # fmt: skip
    return [{"name": LARGE, **rest, **ready}, {"name": SMALL, **rest, **loading}]


def _cached() -> dict[str, Any]:
    row = {"node": "192.168.100.10", "size_bytes": 44 * GIB, "used_s": 1000.0, "valid": True, "fault": None}
    rows = [
        {**row, "id": f"{LARGE}-nvfp4-9f86d081884c7d65", "used_by": []},
        {
            **row,
            "id": f"{SMALL}-mxfp4-mixed-0f86d081884c7d65",
            "used_by": ["chat", "code"],
            "valid": False,
            "fault": "/models/m has changed",
        },
    ]
    folder = {"path": "/var/lib/sparkd/quantized", "node": "192.168.100.10", "size_bytes": 88 * GIB, "limit_bytes": 100 * GIB}
    return {"entries": rows, "folders": [folder]}


def _layers() -> dict[str, Any]:
    row = {"class": "experts", "count": 24576, "shape": [768, 2048], "dtype": "BF16", "bytes": 72 * GIB, "refused": None}
    name = "model.layers.*.mlp.experts.*.gate_proj.weight"
    rows = [{**row, "name": name, "format": "nvfp4", "result_bytes": 21 * GIB}]
    return {"layers": rows, "count": 24576, "bytes": 72 * GIB, "result_bytes": 21 * GIB, "quantization": None, "held": None, "notes": []}


def _requests() -> dict[str, Any]:
    row = {"model": LARGE, "key": "alice", "route": "/v1/chat/completions", "started_s": 0.0, "seconds": 12.34, "queued_s": 0.01,
           "ttft_s": 0.5, "bytes_out": 123456, "prompt_tokens": 1025, "cached_tokens": 1024, "completion_tokens": 200,
           "tokens_per_s": 45.6, "failed": False}  # fmt: skip
    flying = {**row, "request_id": "req-5f3a9c-1a2b3c", "phase": "streaming", "status": 200, "code": None}
    refused = {"model": SMALL, "status": 400, "code": "context_length_exceeded", "failed": True}
    return {"in_flight": [flying], "finished": [{**row, "status": 200, "code": None}, {**row, **refused}]}


def _nodes() -> dict[str, Any]:
    reading = {"mem_total_bytes": 119 * GIB, "mem_available_bytes": 60 * GIB, "mem_free_bytes": 50 * GIB}
    node = {"address": "192.168.100.11", "local": True, "agent": True, "unified_memory_gib": 112.0, "reserved_gib": 52.5}
    others = {"address": "192.168.100.12", "local": False, "agent": False}
    return {"nodes": [{**node, **each, "reading": reading} for each in ({}, others)], "offered": [], "head": None}


def _status() -> dict[str, Any]:
    ray = [{"name": "gcs_server", "anonymous_bytes": 40 << 20}, {"name": "raylet", "anonymous_bytes": 60 << 20}]
    listeners = ["127.0.0.1:6379 gcs_server"]
    costs = {"daemon": {"anonymous_bytes": 100 << 20}, "ray": ray, "ray_listeners": listeners}
    return {"draining": False, "settled": True, "version": "1.0", "conditions": ["Node 192.168.100.12 does not answer."], "costs": costs,
            "nodes": _nodes()["nodes"], "models": {LARGE: "READY"}, "cluster": {"connected": True, "own_head": True}}  # fmt: skip


def _findings() -> list[dict[str, Any]]:
    row = {"node": "spark-1", "about": "spark-1", "check": "swappiness"}
    evidence, cure = "vm.swappiness is 60, so the kernel swaps before it frees the page cache", "Set vm.swappiness to 1 in /etc/sysctl.d."
    return [{**row, "verdict": "warn", "evidence": evidence, "cure": cure}, {**row, "verdict": "ok", "check": "driver", "cure": ""}]


def _recipes() -> list[dict[str, Any]]:
    row = {"model": SOURCE, "nodes": 1, "decode_tokens_per_s": 45.6, "methods": ["mtp", "off"], "speculative": "dflash"}
    return [{**row, "name": LARGE, "variants": ["long-context"]}, {**row, "name": SMALL, "variants": []}]


def _registries() -> list[dict[str, Any]]:
    row = {"recipes": 42, "commit": "0123456789abcdef", "committed": "2026-11-01T12:00"}
    return [{**row, "name": "community", "url": "https://github.com/example/spark-recipes.git"}]


def _options(console: Console) -> None:
    parts = {"sureness": "known", "weights": 44 * GIB, "kv": 20 * GIB, "upper_kv": 2 * GIB, "peak": GIB, "graphs": GIB, "context": GIB,
             "processes": GIB, "free": 30 * GIB, "decode_tokens_s": 45.6, "first_load_s": 500.0, "next_load_s": 61.0}  # fmt: skip
    rest = {"fits": True, "nodes": 2, "tensor_parallel": 2, "pipeline_parallel": 1, "max_model_len": 262144, "model": SOURCE}
    formats = ("int4-g32", "int4-g64", "int4-g128", "experts=mxfp4, attention=fp8-block, rest=bf16")
    rows = [{**rest, "prequantized": None, "format": name, "footprint": parts} for name in formats]
    vllm = {"runtime": "python", "version": None, "answered": False}
    plan._options({"hardware": {"learned": []}, "vllm": vllm, "options": rows}, console, every=False)


def _benches() -> list[dict[str, Any]]:
    row = {"state": "done", "cells": 28, "done": 28, "tokens_per_s": 1234.5, "format": "nvfp4", "profile": "spark-arena-v2"}
    return [{**row, "id": f"20261128-123042-{LARGE}", "model": LARGE}, {**row, "id": f"20261128-113042-{SMALL}", "model": SMALL}]


def _result(speed: float = 1.0) -> Any:
    result = example(depths=(0,), concurrencies=(1, 10), failed=(), speed=speed)
    subject = result.subject.model_copy(update={"model": LARGE if speed == 1.0 else SMALL})
    rows = {"cells": result.cells[1:], "loads": result.loads[:1], "quality": result.quality[-1:]}
    return result.model_copy(update={"subject": subject, **rows})


def _comparison() -> Comparison:
    """Two rows: one within the spread, and the widest."""
    whole = compare(_result(), _result(0.9))
    return replace(whole, changes=(whole.changes[3], whole.changes[-2]))


def _incidents() -> list[Mapping[str, Any]]:
    why = "2.1 GiB are available, less than the floor of 2.5 GiB, and 1.9 GiB/s go"
    return [{"id": "20261128-123042-spark-1", "model": LARGE, "node": "spark-1", "phase": "serving", "why": why}]
