"""Checkpoints that are names, dtypes and shapes only: what a plan reads, without a file. Never draws a value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from sparkd.checkpoint import Checkpoint, TensorRef
from sparkd.model_shape import Shape, shape_of
from sparkd.safetensors import DTYPE_BITS
from sparkd.source_quantization import source_quantization
from sparkd.weight_cost import Inventory, inventory

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
Tensor = tuple[str, tuple[int, ...], str]


def published(name: str) -> dict[str, Any]:
    """config.json of a published model."""
    loaded: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return loaded


def shape(name: str) -> Shape:
    return shape_of(published(name))


def checkpoint(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> Checkpoint:
    """tensors: name, shape, safetensors dtype."""
    found = {
        name: TensorRef(name, dtype, sides, "/m/model.safetensors", 0, prod(sides) * DTYPE_BITS[dtype] // 8)
        for name, sides, dtype in tensors
    }
    return Checkpoint("/m", config, (), found, source_quantization(config, None, found))


def known(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> Inventory:
    return inventory(checkpoint(config, tensors), shape_of(config))


def architecture(name: str) -> Inventory:
    """One of tests/architectures.py."""
    from tests.architectures import ARCHITECTURES  # imports torch

    model = ARCHITECTURES[name]()
    return known(model.config, ((entry.name, entry.shape, entry.dtype) for entry in model.entries))


def dense(**more: Any) -> dict[str, Any]:
    """A configuration of Llama's kind; keys are replaced or added, and left out where they are None."""
    plain: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in {**plain, **more}.items() if value is not None}


def mixture(**more: Any) -> dict[str, Any]:
    """A configuration of Qwen3-MoE's kind."""
    own = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2}
    return dense(**{**own, "moe_intermediate_size": 256, **more})


def tensors_of(config: Mapping[str, Any], *, dtype: str = "BF16", packed: bool = False) -> list[Tensor]:
    """Of `dense` and `mixture`. packed: all experts of a layer in two tensors."""
    hidden, vocab, heads, keys = (config[key] for key in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads"))
    head = config.get("head_dim", hidden // heads)
    found: list[Tensor] = [("model.embed_tokens.weight", (vocab, hidden), dtype), ("model.norm.weight", (hidden,), dtype)]
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", (vocab, hidden), dtype))
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        sides = {"q": (heads * head, hidden), "k": (keys * head, hidden), "v": (keys * head, hidden), "o": (hidden, heads * head)}
        found += [(f"{base}.self_attn.{name}_proj.weight", side, dtype) for name, side in sides.items()]
        found += [(f"{base}.{name}.weight", (hidden,), dtype) for name in ("input_layernorm", "post_attention_layernorm")]
        experts, inner = config.get("num_experts", 0), config.get("moe_intermediate_size", config["intermediate_size"])
        if experts:
            found.append((f"{base}.mlp.gate.weight", (experts, hidden), dtype))
        if packed:
            found.append((f"{base}.mlp.experts.gate_up_proj", (experts, 2 * inner, hidden), dtype))
            found.append((f"{base}.mlp.experts.down_proj", (experts, hidden, inner), dtype))
            continue
        for module in [f"{base}.mlp.experts.{number}" for number in range(experts)] or [f"{base}.mlp"]:
            found += [(f"{module}.{name}_proj.weight", (inner, hidden), dtype) for name in ("gate", "up")]
            found.append((f"{module}.down_proj.weight", (hidden, inner), dtype))
    return found
