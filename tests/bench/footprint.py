"""How far predictions are from what engines take: a line for each figure. Never asserts; it prints.

    python -m tests.bench.footprint [--preset cpu|h200] [--quantize FORMAT] [--only REGEX] [--json FILE] [--logs FOLDER] [--limit-s N]

Every architecture of tests/support/architectures.py as it is stored and in a 4-bit format, each through a real engine in a process of its
own, one at a time (footprint_case.py). Bars: weights within 1 %, bytes per token of cache exact, the most that the engine took under the
largest prefill within 5 % or 300 MiB. Exit status 1: a bar was missed. On a machine without vLLM in its environment: PYTHONPATH=SITE:$PWD.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparkd.capacity.footprint import Footprint, Terms, footprint
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError
from sparkd.hardware import H200, SPARK
from sparkd.models.shape import shape_of
from tests.bench import child, footprint_case
from tests.bench.arguments import Parser, amount, new, pattern
from tests.support import architectures, checkpoints
from tests.support.architecture_parts import Size
from workers.kv.settings import VARIABLE
from workers.quantization.recipe import QuantizationRecipe
from workers.stream.vllm.supported import refuse_unserved

MIB = 2**20
WEIGHTS_SHARE, TOTAL_SHARE, TOTAL_SLACK_MIB = 0.01, 0.05, 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """unit: what both numbers are in. passed: None without a bar. note: why, or what is not known."""

    case: str
    what: str
    predicted: float | None
    measured: float | None
    unit: str
    bar: str = ""
    passed: bool | None = None
    note: str = ""

    def __str__(self) -> str:
        if self.predicted is None or self.measured is None:
            return f"{self.case:36} {self.what}: {self.note}"
        error = f"{self.predicted / self.measured - 1:+8.2%}" if self.measured else ""
        verdict = "" if self.passed is None else f"{'held' if self.passed else 'MISSED'}, bar {self.bar}"
        return (
            f"{self.case:36} {self.what:20} {self.predicted:>12,.2f} {self.measured:>12,.2f} {self.unit:5} {error} {verdict}  {self.note}"
        )


@dataclass(frozen=True, slots=True)
class Preset:
    """tokens: of the largest prefill; requests: of `max_model_len` tokens at once, which is also the size of the cache."""

    platform: str
    size: Size
    max_model_len: int
    tokens: int
    requests: int
    quantize: str
    arguments: Mapping[str, Any]


PRESETS = {
    "cpu": Preset(
        "cpu",
        Size(hidden=512, vocab=32_000, heads=8, kv_heads=4, wide=1536, times=2),
        max_model_len=1024,
        tokens=1024,
        requests=4,
        quantize="int4-g32",
        arguments={"enforce_eager": True},
    ),
    "h200": Preset(
        "cuda",
        Size(hidden=4096, vocab=151_936, experts=32, heads=32, kv_heads=8, wide=12_288, inner=1536, times=2),
        max_model_len=4096,
        tokens=8192,
        requests=16,
        quantize="nvfp4",
        arguments={"enforce_eager": True, "attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.9},
    ),
}


def rows(preset: Preset, only: str, quantize: str | None, folder: Path, logs: Path, limit_s: float) -> Iterator[Row]:
    """Four for each architecture and format, or one with the reason why this vLLM does not serve it. only: searched in `NAME FORMAT`."""
    plugins = child.plugin_folder(folder)
    for name in architectures.ARCHITECTURES:
        forms = [form for form in ("bf16", quantize or preset.quantize) if re.search(only, f"{name} {form}")]
        if not forms:
            continue
        model = architectures.ARCHITECTURES[name](preset.size)
        device = preset.platform  # a GPU draws gigabytes of weights in seconds
        source = checkpoints.write_checkpoint(folder / name, model.config, model.entries, device=device)
        for form in forms:
            yield from _case(name, form, source, preset, plugins, folder, logs, limit_s)
        for file in source.iterdir():
            file.unlink()


def _case(name: str, form: str, source: Path, preset: Preset, plugins: Path, folder: Path, logs: Path, limit_s: float) -> Iterator[Row]:
    case, checkpoint = f"{name} {form}", read_checkpoint(source)
    recipe = QuantizationRecipe.parse(form)
    try:
        refuse_unserved(checkpoint, recipe.assign(checkpoint), 1)
    except CheckpointError as refused:
        yield Row(case, "not served here", None, None, "", note=refused.message)
        return
    predicted = _predicted(checkpoint, recipe, preset)
    report = folder / f"{name}-{form}.report"
    arguments = {
        **preset.arguments,
        "worker_cls": footprint_case.WORKERS[preset.platform],
        "max_model_len": preset.max_model_len,
        "max_num_seqs": preset.requests,
        "max_num_batched_tokens": preset.tokens,
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "seed": 0,
    }
    if preset.platform == "cuda" and "kv_lora_rank" in checkpoint.config:
        arguments["attention_backend"] = child.LATENT_ATTENTION
    if preset.platform == "cuda" and "linear_num_value_heads" in checkpoint.config:
        arguments["gdn_prefill_backend"] = "triton"  # the others are not everywhere
    if form != "bf16":
        arguments |= {"load_format": "spark_stream", "model_loader_extra_config": {"quantize": form, "cache_dir": None}}
    known = {"sequences": preset.requests, "margin_bytes": 0, "report": str(report)}
    env = child.environment(plugins, ours=True, more={VARIABLE: json.dumps(known), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    question = {"model": str(source), "arguments": arguments, "prompt_tokens": preset.max_model_len - 8, "prompts": preset.requests}
    try:
        found = child.ask("tests.bench.footprint_case", question, env, limit_s=limit_s, log=logs / f"{name}-{form}.log").value
    except child.ChildFailed as failed:
        yield Row(case, "not served here", None, None, "", note=str(failed))
        return
    yield from _compared(case, predicted, found)


def _compared(case: str, predicted: Footprint, found: Mapping[str, Any]) -> Iterator[Row]:
    parts, report = predicted.parts, found["report"]
    ours, theirs = float(parts["weights"]), float(found["weights"])
    grown = f"process or device grew by {found['weights_grown'] / MIB:.1f} MiB"
    yield Row(case, "weights", ours / MIB, theirs / MIB, "MiB", "1 %", abs(ours - theirs) <= WEIGHTS_SHARE * theirs, grown)
    each = report["bytes_per_token"]
    yield Row(case, "KV bytes per token", predicted.kv.per_token, each, "bytes", "exact", predicted.kv.per_token == each)
    peak = float(report["peak_bytes"])
    yield Row(case, "largest batch", parts["peak"] / MIB, peak / MIB, "MiB")
    total = float(parts["weights"] + parts["kv"] + parts["peak"] + parts["graphs"])
    taken = float(found["total_peak"])
    good = abs(total - taken) <= max(TOTAL_SHARE * taken, TOTAL_SLACK_MIB * MIB)
    before = f"{found['rehearsal_peak'] / MIB:.0f} before the cache was there"
    before += f", {found['allocated_peak'] / MIB:.0f} handed out at once" if found["allocated_peak"] else ""
    yield Row(case, "total peak", total / MIB, taken / MIB, "MiB", f"5 % or {TOTAL_SLACK_MIB:.0f} MiB", good, before)
    yield Row(case, "peak of the load", predicted.load_peak_bytes / MIB, found["load_peak"] / MIB, "MiB")


def _predicted(checkpoint: Checkpoint, recipe: QuantizationRecipe, preset: Preset) -> Footprint:
    shape = shape_of(checkpoint.config)
    serving = Serving(
        preset.max_model_len,
        preset.requests,
        preset.tokens,
        prefix_caching=False,
        platform=preset.platform,
        batches_in_flight=1,
    )
    machine = H200 if preset.platform == "cuda" else replace(SPARK, platform="cpu")
    eager = bool(preset.arguments["enforce_eager"])
    return footprint(inventory(checkpoint, shape).formatted(recipe), serving, machine, Terms(requests=preset.requests, eager=eager))


def main() -> int:
    parser = Parser("tests.bench.footprint", __doc__, only="^llama bf16$")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--quantize", help="the 4-bit format; the preset has its own")
    parser.add_argument("--only", type=pattern, default="", help="a regular expression: architecture and format")
    parser.add_argument("--json", type=new, help="file for all rows")
    parser.add_argument("--logs", type=new, help="folder for the engines' logs")
    parser.add_argument("--limit-s", type=amount, default=600.0, help="for one engine")
    given = parser.parse_args()
    preset = PRESETS[given.preset]
    forms = ("bf16", given.quantize or preset.quantize)
    parser.chosen([f"{name} {form}" for name in architectures.ARCHITECTURES for form in forms], given.only)
    child.end_with_children()
    found = []
    with tempfile.TemporaryDirectory(prefix="sparkd-bench-") as temporary:
        logs = given.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        print(f"{'':36} {'':20} {'predicted':>12} {'measured':>12}")
        for row in rows(preset, given.only, given.quantize, Path(temporary), logs, given.limit_s):
            print(row, flush=True)
            found.append(row)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1), encoding="utf-8")
    judged = [row for row in found if row.passed is not None]
    missed = sum(not row.passed for row in judged)
    print(f"{len(judged) - missed} of {len(judged)} bars held")
    return 1 if missed and not given.smallest else 0


if __name__ == "__main__":
    sys.exit(main())
