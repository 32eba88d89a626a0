"""Checkpoints that are names, dtypes and shapes only: what a plan reads, in memory or as files with holes. Never draws a value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sparkd.capacity.weights import Inventory, inventory
from sparkd.checkpoint import Checkpoint, TensorRef
from sparkd.checkpoint.header import DTYPE_BITS
from sparkd.checkpoint.quantization import source_quantization
from sparkd.models.shape import Shape, shape_of

CONFIGS = Path(__file__).parents[1] / "fixtures" / "configs"
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
    """One of tests/support/architectures.py."""
    from tests.support.architectures import ARCHITECTURES  # imports torch

    model = ARCHITECTURES[name]()
    return known(model.config, ((entry.name, entry.shape, entry.dtype) for entry in model.entries))


def write(folder: Path, config: Mapping[str, Any], tensors: Iterable[Tensor]) -> Path:
    """A folder with config.json and one file: its header is real, its data a hole, whatever its size."""
    header: dict[str, Any] = {}
    at = 0
    for name, sides, dtype in tensors:
        end = at + prod(sides) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(sides), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder


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


def models() -> st.SearchStrategy[Inventory]:
    """Small ones that two and four ranks can share."""

    def made(layers: int, heads: int, keys: int, head: int, inner: int, experts: int, tied: bool, packed: bool) -> Inventory:
        plain = {"num_hidden_layers": layers, "num_attention_heads": 4 * heads, "num_key_value_heads": keys, "head_dim": head}
        plain |= {"hidden_size": 256, "tie_word_embeddings": tied, "intermediate_size": 128 * inner, "vocab_size": 100 * inner}
        config = mixture(**plain, num_experts=4 * experts, moe_intermediate_size=128 * inner) if experts else dense(**plain)
        return known(config, tensors_of(config, packed=packed and experts > 0))

    counts = st.integers(1, 3)
    return st.builds(
        made,
        counts,
        counts,
        st.sampled_from([1, 2, 4]),
        st.sampled_from([64, 128]),
        counts,
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    )
