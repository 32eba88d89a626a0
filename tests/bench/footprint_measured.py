"""Owns the comparison with what real engines take: for each architecture one engine in a process of its own, as stored and in four bits.

It measures nothing itself (footprint_case.py does) and starts one engine at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
from tests.bench.footprint_table import Row, within
from tests.support import architectures, checkpoints
from tests.support.architecture_parts import Size
from workers.kv.settings import VARIABLE
from workers.quantization.recipe import QuantizationRecipe
from workers.stream.vllm.supported import refuse_unserved

MIB = 2**20
WEIGHTS_SHARE, TOTAL_SHARE, TOTAL_SLACK_MIB = 0.01, 0.05, 300.0


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
        yield Row("not served here", case, None, None, "", note=refused.message)
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
        yield Row("not served here", case, None, None, "", note=str(failed))
        return
    yield from _compared(case, predicted, found)
    print("\n".join(found.get("segments", ())), flush=True)


def _compared(case: str, predicted: Footprint, found: Mapping[str, Any]) -> Iterator[Row]:
    parts, report = predicted.parts, found["report"]
    ours, theirs = float(parts["weights"]), float(found["weights"])
    grown = f"process or device grew by {found['weights_grown'] / MIB:.1f} MiB"
    yield Row("weights", case, ours / MIB, theirs / MIB, "MiB", "1 %", within(ours, theirs, WEIGHTS_SHARE), grown)
    each = report["bytes_per_token"]
    yield Row("KV bytes per token", case, predicted.kv.per_token, each, "bytes", "exact", predicted.kv.per_token == each)
    peak = float(report["peak_bytes"])
    yield Row("largest batch", case, parts["peak"] / MIB, peak / MIB, "MiB")
    total = float(parts["weights"] + parts["kv"] + parts["peak"] + parts["graphs"])
    taken = float(found["total_peak"])
    good = within(total / MIB, taken / MIB, TOTAL_SHARE, TOTAL_SLACK_MIB)
    before = f"{found['rehearsal_peak'] / MIB:.0f} before the cache was there"
    before += f", {found['allocated_peak'] / MIB:.0f} handed out at once" if found["allocated_peak"] else ""
    yield Row("total peak", case, total / MIB, taken / MIB, "MiB", f"5 % or {TOTAL_SLACK_MIB:.0f} MiB", good, before)
    yield Row("peak of the load", case, predicted.load_peak_bytes / MIB, found["load_peak"] / MIB, "MiB")


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
