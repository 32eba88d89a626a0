"""The model with an encoder of the KV cache bench (Qwen2-VL's), and the largest prompts that one admits. Never writes a weight."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support import checkpoints

NAME = "images"
MARKS = {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>"}
PATCH, MERGE = 14, 2
# Where the encoder's own tokens begin: behind those of tests/support/checkpoints.py.
FIRST_MARK = 258


# Of the h200 preset: 1.9 GB, of which the encoder is a third; its largest batch takes more than the text's.
CONFIG: Mapping[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 16,
        "embed_dim": 1280,
        "hidden_size": 2048,
        "num_heads": 16,
        "mlp_ratio": 4,
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "hidden_act": "quick_gelu",
    },
}
# Tokens of the largest image along each of its sides.
SIDE = 45
LIMITS = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "mm_processor_cache_gb": 0}


def ids() -> dict[str, int]:
    """For config.json: the token of each mark."""
    return {f"{name}_token_id": FIRST_MARK + number for number, name in enumerate(MARKS)}


def prompt(length: int, text: list[int], noise: int) -> dict[str, Any]:
    """Of `length` tokens: the largest image, and as much of `text` as there is room for. noise: other images for other numbers."""
    from PIL import Image

    pixels = SIDE * PATCH * MERGE
    image = Image.frombytes("RGB", (pixels, pixels), random.Random(noise).randbytes(3 * pixels * pixels))
    marks = ids()
    tokens = [marks[f"{name}_token_id"] for name in ("vision_start", "image", "vision_end")]
    return {"prompt_token_ids": [*tokens, *text[: length - SIDE * SIDE - 2]], "multi_modal_data": {"image": image}}


def write(folder: Path) -> None:
    """config.json, a tokenizer, and the image processor's file."""
    _write(folder / "config.json", {**CONFIG, **ids()})
    checkpoints.write_tokenizer(folder, CONFIG["vocab_size"])
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    for number, mark in enumerate(MARKS.values(), FIRST_MARK):
        del tokenizer["model"]["vocab"][f"<unused{number - FIRST_MARK}>"]
        tokenizer["model"]["vocab"][mark] = number
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": number, "content": mark})
    _write(path, tokenizer)
    largest = (SIDE * PATCH * MERGE) ** 2
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE, "min_pixels": 3136, "max_pixels": largest}
    kinds = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    means = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    _write(folder / "preprocessor_config.json", {**kinds, **sizes, **means})


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
