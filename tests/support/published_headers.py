"""Published models as checkpoints without files: tensors, dtypes and shapes as their safetensors headers have them. Never touches a disk
but for the configurations in tests/fixtures/configs, and needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.quantization import source_quantization
from tests.support import checkpoints
from tests.support.published_stored import FP8_BLOCK, stored
from tests.support.published_tensors import tensors_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
_LEFT_OUT_KEYS: Mapping[str, Mapping[str, Any]] = {"mistral-small-24b-instruct-2501": {"model_type": "mistral"}}


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
    """way: `as published`, as its configuration says that it is quantized, or `fp8_block`, as Qwen's FP8 builds are."""
    config = config_of(fixture)
    separate = CONFIGS / f"{fixture}.hf_quant_config.json"
    modelopt = _read(separate.name) if separate.exists() and way == "as published" else None
    tensors = tensors_of(config)
    if way == "fp8_block":
        config["quantization_config"] = dict(FP8_BLOCK)
    quantization: Mapping[str, Any] | None = modelopt["quantization"] if modelopt else config.get("quantization_config")
    if quantization:
        tensors = stored(tensors, quantization)
    found = checkpoints.checkpoint_of(tensors, config)
    return replace(found, folder=fixture, quantization=source_quantization(config, modelopt, found.tensors))


def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return loaded
