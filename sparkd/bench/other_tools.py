"""Runs vLLM's own benchmark, GuideLLM or AIPerf for one cell, and makes llama-benchy's rows of the requests that it timed.

Each gets random prompts of depth + prompt tokens, without llama-benchy's phase of the context, so its prefix caching stays out.
Sources: `vllm bench serve` of vLLM 0.26 and 0.32, GuideLLM 0.8.1, AIPerf 0.13.0, as they are installed.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd.bench import tool_process
from sparkd.bench.benchy import BenchTarget, Measured, TimedRequest
from sparkd.bench.profile import Arguments
from sparkd.bench.result import Cell
from sparkd.errors import RankError

# AIPerf puts Unix sockets 54 characters below its temporary folder, and their paths may have 107 (unix(7)), so that of the daemon may be
# too long.
SHORT = Path("/tmp")


@dataclass(frozen=True)
class OtherTool:
    """package: on PyPI. start: writes what the tool reads into a folder, and returns its arguments behind the Python; read: the requests
    that it timed, from this folder. Raises OSError, ValueError, LookupError and TypeError. key_variable: by which it gets the key."""

    package: str
    start: Callable[[BenchTarget, Cell, int, Path], list[str]]
    read: Callable[[Path], Iterable[TimedRequest]]
    key_variable: str | None = None
    # AIPerf takes a tokenizer's folder for a name on the Hub where the Hub is off.
    offline: bool = True


async def measure(name: str, target: BenchTarget, cell: Cell, args: Arguments) -> tuple[Measured, list[TimedRequest]]:
    """One cell with the tool of this name. Cancelled, it ends the tool. Raises RankError with the reason."""
    tool = TOOLS[name]
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-", dir=SHORT) as temporary:
        folder = Path(temporary)
        arguments = tool.start(target, cell, args.runs * cell.concurrency, folder)
        keys = {tool.key_variable: target.key} if tool.key_variable and target.key else None
        env = tool_process.environment(target.home, folder, keys)
        if not tool.offline:
            env.pop("HF_HUB_OFFLINE")
        reason = await tool_process.run(name, [target.interpreter, *arguments], env, folder / "said")
        try:
            requests = await asyncio.to_thread(lambda: list(tool.read(folder)))
        except (OSError, ValueError, LookupError, TypeError):
            raise RankError(f"{name} wrote no result that sparkd knows: {reason}") from None
    if not requests:
        raise RankError(f"{name} measured nothing: {reason}")
    return Measured([row_of(cell, requests)], {}), requests


def row_of(cell: Cell, requests: Sequence[TimedRequest]) -> dict[str, Any]:
    """llama-benchy's row. tg_throughput of several requests at once: all tokens by the time from the first token to the last."""
    first_ms = [(request.first_s - request.begun_s) * 1000 for request in requests]
    rates = [rate for request in requests if (rate := request.rate) is not None]
    prompts = [request.prompt_tokens / (ms / 1000) for request, ms in zip(requests, first_ms, strict=True) if ms > 0]
    seconds = max(request.ended_s for request in requests) - min(request.first_s for request in requests)
    together = [sum(request.output_tokens for request in requests) / seconds] if seconds > 0 else []
    alone = cell.concurrency == 1
    return {
        "concurrency": cell.concurrency,
        "context_size": cell.depth,
        "prompt_size": cell.prompt_tokens,
        "response_size": cell.output_tokens,
        "is_context_prefill_phase": False,
        "pp_throughput": _metric(prompts) if alone else None,
        "pp_req_throughput": _metric(prompts),
        "tg_throughput": _metric(rates if alone else together),
        "tg_req_throughput": _metric(rates),
        "e2e_ttft": _metric(first_ms),
    }


def _metric(values: Sequence[float]) -> dict[str, Any] | None:
    """std: the population's, as llama-benchy's."""
    return {"mean": statistics.fmean(values), "std": statistics.pstdev(values), "values": list(values)} if values else None


def _vllm(target: BenchTarget, cell: Cell, requests: int, folder: Path) -> list[str]:
    flags: list[str | int] = ["--backend", "openai", "--base-url", target.base_url.removesuffix("/v1"), "--endpoint", "/v1/completions"]
    flags += ["--model", target.model, "--tokenizer", target.tokenizer, "--dataset-name", "random", "--ignore-eos", "--disable-tqdm"]
    flags += ["--random-input-len", cell.depth + cell.prompt_tokens, "--random-output-len", cell.output_tokens]
    flags += ["--max-concurrency", cell.concurrency, "--num-prompts", requests, "--save-result", "--save-detailed"]
    flags += ["--result-dir", str(folder), "--result-filename", "result.json"]
    return ["-I", "-m", "vllm.entrypoints.cli.main", "bench", "serve", *map(str, flags)]


def _of_vllm(folder: Path) -> Iterable[TimedRequest]:
    """Its times are those of time.perf_counter, the same clock in each process of Linux (CLOCK_MONOTONIC)."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    later_s = time.time() - time.perf_counter()
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    for begun, first, gaps, prompt, output, error in zip(*(result[column] for column in columns), strict=True):
        if error:
            raise ValueError(error)
        yield TimedRequest(begun + later_s, begun + first + later_s, begun + first + sum(gaps) + later_s, prompt, output)


def _guidellm(target: BenchTarget, cell: Cell, requests: int, folder: Path) -> list[str]:
    backend = {"kind": "openai_http", "target": target.base_url.removesuffix("/v1"), "model": target.model, "request_format": _COMPLETIONS}
    spec = {
        # In a file of this user alone: an argument would be in /proc for every user.
        "backend": {**backend, "api_key": target.key} if target.key else backend,
        "tokenizer": {"kind": "huggingface_auto", "model": target.tokenizer},
        "profile": {"kind": "concurrent", "streams": [cell.concurrency]},
        "constraints": [{"kind": "max_requests", "count": requests}],
        "data": [{"kind": "synthetic_text", "prompt_tokens": cell.depth + cell.prompt_tokens, "output_tokens": cell.output_tokens}],
        "outputs": [{"kind": "json", "path": str(folder / "result.json")}],
    }
    (folder / "bench.json").write_text(json.dumps({"spec": spec}), encoding="utf-8")
    return ["-I", "-m", "guidellm", "run", "-c", str(folder / "bench.json"), "--disable-console"]


def _of_guidellm(folder: Path) -> Iterable[TimedRequest]:
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (bench,) = result["benchmarks"]
    if bench["requests"]["errored"]:
        raise ValueError("requests failed")
    for request in bench["requests"]["successful"]:
        times = request["info"]["timings"]
        seconds = times["request_start"], times["first_token_iteration"], times["last_token_iteration"]
        yield TimedRequest(*seconds, request["prompt_tokens"], request["output_tokens"])


def _aiperf(target: BenchTarget, cell: Cell, requests: int, folder: Path) -> list[str]:
    endpoint = {"url": f"{target.base_url}/completions", "type": "completions", "streaming": True, "extra": {"ignore_eos": True}}
    tokens = {"isl": cell.depth + cell.prompt_tokens, "osl": cell.output_tokens}
    bench = {
        "model": target.model,
        "endpoint": {**endpoint, "api_key": target.key} if target.key else endpoint,
        "tokenizer": {"name": target.tokenizer},
        "dataset": {"type": "synthetic", "entries": requests, **{name: {"mean": mean, "stddev": 0} for name, mean in tokens.items()}},
        "profiling": {"type": "concurrency", "requests": requests, "concurrency": cell.concurrency},
        "artifacts": {"dir": str(folder / "out"), "summary": ["json"], "records": ["jsonl"]},
    }
    # JSON is YAML.
    config = {"schemaVersion": "2.0", "randomSeed": 42, "benchmark": bench}
    (folder / "bench.yaml").write_text(json.dumps(config), encoding="utf-8")
    return ["-I", "-m", "aiperf", "profile", "--config", str(folder / "bench.yaml"), "--ui-type", "none"]


def _of_aiperf(folder: Path) -> Iterable[TimedRequest]:
    (path,) = (folder / "out").glob("profile_export.jsonl")
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        about, metrics = record["metadata"], record["metrics"]
        if record.get("error"):
            raise ValueError(record["error"])
        begun_s = about["request_start_ns"] / 1e9
        first_s, tokens = begun_s + metrics["time_to_first_token"]["value"] / 1e3, metrics["usage_completion_tokens"]["value"]
        yield TimedRequest(begun_s, first_s, about["request_end_ns"] / 1e9, metrics["usage_prompt_tokens"]["value"], tokens)


_COMPLETIONS = "/v1/completions"
TOOLS = {
    "vllm": OtherTool("vllm", _vllm, _of_vllm, "OPENAI_API_KEY"),
    "guidellm": OtherTool("guidellm", _guidellm, _of_guidellm),
    "aiperf": OtherTool("aiperf", _aiperf, _of_aiperf, offline=False),
}
