"""Published models as checkpoints without files: tensors, dtypes and shapes as their safetensors headers have them. Never touches a disk
but for the configurations in tests/fixtures/configs, and needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.header import TensorRef
from sparkd.checkpoint.quantization import source_quantization
from tests.support import checkpoints
from tests.support.published_stored import FP8_BLOCK, MXFP4_THROUGHOUT, elements, stored
from tests.support.published_tensors import tensors_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
WAYS = {"as published": None, "bf16": None, "fp8_block": FP8_BLOCK, "mxfp4 throughout": MXFP4_THROUGHOUT}
_CORRECTIONS = "e_score_correction_bias"
_LEFT_OUT_KEYS: Mapping[str, Mapping[str, Any]] = {"mistral-small-24b-instruct-2501": {"model_type": "mistral"}}
# By what the source of a total says that it counts: what it leaves out.
_LEFT_OUT: Mapping[str, Callable[[TensorRef], bool]] = {
    "two values per packed byte, no scales": lambda one: one.name.endswith("_scales"),
    "2944 float32 router corrections": lambda one: one.name.endswith(_CORRECTIONS),
    "20992 float32 router corrections": lambda one: one.name.endswith(_CORRECTIONS),
    "block scales": lambda one: "scale" in one.name,
    "stored elements: 4-bit values packed by two, block scales and router corrections, no per-tensor scales": lambda one: not one.shape,
    "stored elements: 4-bit values packed by two, without block scales and router corrections": lambda one: (
        "scale" in one.name or one.name.endswith(_CORRECTIONS)
    ),
}


def config_of(fixture: str) -> dict[str, Any]:
    """config.json of a fixture, with the vision tower of a sibling, or the type, where its source left that out."""
    config = _read(f"{fixture}.json")
    if fixture.startswith("qwen3.8-27b"):
        config = {**_read("qwen3.5-27b.json"), **config}
        config["vision_config"] = _read("qwen3.5-27b.json")["vision_config"]
    if fixture == "gemma-4-26b-a4b-it-nvfp4a16":
        config["vision_config"] = _read("gemma-4-26b-a4b.json")["vision_config"]
    return {**_LEFT_OUT_KEYS.get(fixture, {}), **config}


def checkpoint_of(fixture: str, way: str = "as published") -> Checkpoint:
    """way: `as published`: as its configuration says it is quantized; bf16; fp8_block: as Qwen's FP8 builds are;
    mxfp4 throughout: gpt-oss with every linear layer in four bits. Raises ValueError."""
    if way not in WAYS:
        raise ValueError(f"{way} is no way to store a model; {', '.join(WAYS)} are.")
    config = config_of(fixture)
    separate = CONFIGS / f"{fixture}.hf_quant_config.json"
    modelopt = _read(separate.name) if separate.exists() and way == "as published" else None
    tensors = tensors_of(config)
    if way != "as published":
        config.pop("quantization_config", None)
    if (other := WAYS[way]) is not None:
        config["quantization_config"] = dict(other)
    quantization: Mapping[str, Any] | None = modelopt["quantization"] if modelopt else config.get("quantization_config")
    if quantization:
        tensors = stored(tensors, quantization)
    found = checkpoints.checkpoint_of(tensors, config)
    return replace(found, folder=fixture, quantization=source_quantization(config, modelopt, found.tensors))


def count_of(total: Mapping[str, Any]) -> int:
    """What our tensors come to, counted as the source of an entry of tests/fixtures/totals.yaml counts: elements or bytes."""
    checkpoint = checkpoint_of(total["fixture"], _way_of(total["model"], total["fixture"]))
    if total["what"] == "checkpoint_bytes":
        return checkpoint.total_bytes
    gone = [_LEFT_OUT[str(said)] for said in total["conditions"].values() if str(said) in _LEFT_OUT]
    return sum(elements(one) for one in checkpoint.tensors.values() if not any(left_out(one) for left_out in gone))


def _way_of(model: str, fixture: str) -> str:
    """The fixture may be that of another build of the model."""
    if model == "Qwen3-Coder-Next-FP8":
        return "fp8_block"
    other = ("FP8" in fixture.upper() and "FP8" not in model) or ("NVFP4" in fixture.upper() and "NVFP4" not in model)
    return "bf16" if other else "as published"


def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return loaded
