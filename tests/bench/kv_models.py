"""The models of the KV cache bench, and what its engines are started with. Never writes a weight: vLLM's dummy loader makes those up.

What a cache may take does not depend on the weights' values, so a configuration is enough, and no minute of a lent device goes into files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Preset:
    """models: changes to the configurations of tests/support/architectures.py. engine: what limits the largest batch. leave_gib: what the
    ballast leaves to the engine, weights included; margin_gib: what ours is asked to leave of it; reserve_gib: what it may take
    in the step `reserved`."""

    models: Mapping[str, tuple[str, Mapping[str, Any]]]
    engine: Mapping[str, Any]
    leave_gib: float
    margin_gib: float
    reserve_gib: float


_CPU = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 1024, "vocab_size": 32768}
_CPU |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
_CPU_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
PRESETS: Mapping[str, Preset] = {
    # 128 KiB of cache a token, in float32, which is several times as fast as bfloat16 on a CPU without AMX.
    "cpu": Preset(
        {
            "dense": ("llama", _CPU),
            "moe": ("qwen3_moe", {**_CPU, **_CPU_EXPERTS}),
        },
        {"max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "dtype": "float32", "block_size": 32},
        leave_gib=12.0,
        margin_gib=3.5,
        reserve_gib=5.0,
    ),
    # The cost of a load is not looked at: two layers, and prompts of a few blocks.
    "smallest": Preset(
        {"dense": ("llama", {**_CPU, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 2048})},
        {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 256, "dtype": "float32", "block_size": 32},
        leave_gib=12.0,
        margin_gib=3.5,
        reserve_gib=3.0,
    ),
    # Eight layers of Llama-3.1-8B (5.6 GB, 32 KiB a token) and of Qwen3-30B-A3B (11 GB, 16 KiB a token), vocabularies whole.
    "h200": Preset(
        {
            "dense": (
                "llama",
                {
                    "num_hidden_layers": 8,
                    "hidden_size": 4096,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "head_dim": 128,
                    "intermediate_size": 14336,
                    "vocab_size": 128256,
                    "max_position_embeddings": 131072,
                },
            ),
            "moe": (
                "qwen3_moe",
                {
                    "num_hidden_layers": 8,
                    "hidden_size": 2048,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 4,
                    "head_dim": 128,
                    "intermediate_size": 6144,
                    "moe_intermediate_size": 768,
                    "num_experts": 128,
                    "num_experts_per_tok": 8,
                    "vocab_size": 151936,
                    "max_position_embeddings": 40960,
                },
            ),
        },
        {"max_model_len": 4096, "max_num_seqs": 16, "max_num_batched_tokens": 8192, "dtype": "bfloat16"},
        leave_gib=100.0,  # about what a Spark has for an engine
        margin_gib=0.5,
        reserve_gib=40.0,
    ),
}


def write_model(folder: Path, preset: str, name: str) -> Path:
    """A folder with a config.json."""
    from tests.support import architectures

    architecture, changes = PRESETS[preset].models[name]
    path = folder / f"{preset}-{name}"
    path.mkdir(parents=True, exist_ok=True)
    config = {**architectures.ARCHITECTURES[architecture]().config, **changes}
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path


def arguments(preset: str, *, cuda: bool, eager: bool, dummy: bool, attention: str) -> dict[str, Any]:
    """Of the engine, but for what the cache's size comes from. attention: a backend's name, or `auto`."""
    given: dict[str, Any] = {**PRESETS[preset].engine, "enforce_eager": eager, "seed": 0}
    if dummy:
        given["load_format"] = "dummy"
    if cuda and attention != "auto":
        given["attention_backend"] = attention
    return given
