"""Says which weights vLLM cannot load in blocks of 128x128, by their shapes alone.

The rules are those of vllm/model_executor/layers/quantization/utils/fp8_utils.py (validate_fp8_block_shape, validate_fp8_block_shape_moe)
on one rank; a larger tensor-parallel size divides the rows further, and is checked where the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkd.checkpoint import TensorRef, text_config
from workers.quantization.fusion import siblings_of

BLOCK = 128
_GATE_UP = "gate_up_proj"
_QKV = frozenset({"qkv_proj", "Wqkv", "query_key_value"})
_UP = frozenset({"gate_proj", "up_proj", "w1", "w3"})


def misfit(module: str, kind: str, tensor: TensorRef, config: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot load this weight in blocks, as a clause that follows its name; None where it can.

    kind: its tensor_class.
    config: the checkpoint's config.json, for the heads of a q/k/v matrix that is stored as one.
    """
    if kind == "lm_head":
        return "is an output head, and vLLM cannot load the scales of 128x128 blocks for one"
    leaf = module.rpartition(".")[2]
    rows = tensor.shape[-2]
    if kind == "expert":
        rows = _expert_rows(leaf, tensor.shape, config)
        return f"has {rows} rows an expert, no multiple of the {BLOCK} that share a scale" if rows % BLOCK else None
    siblings = siblings_of(leaf)
    if len(siblings) > 1:
        odd = leaf != siblings[-1] and rows % BLOCK
        return f"has {rows} rows, no multiple of the {BLOCK} that share a scale, and vLLM puts others below them" if odd else None
    part = next((size for size in _parts(leaf, rows, config) if size % BLOCK), None)
    return f"has a part of {part} rows, no multiple of the {BLOCK} that share a scale" if part else None


def _expert_rows(leaf: str, shape: tuple[int, ...], config: Mapping[str, Any]) -> int:
    """Rows of one expert's gate matrix, equal to those of its up matrix; 0 for a weight that is neither."""
    if len(shape) == 2:
        return shape[0] if leaf in _UP else 0
    if leaf != _GATE_UP:
        return 0
    # A packed tensor may be transposed: the side that is not the hidden size holds gate and up.
    rows, columns = shape[-2:]
    return (rows if columns == _number(config, "hidden_size") else columns) // 2


def _parts(leaf: str, rows: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Rows of the parts of a matrix that a checkpoint stores as one, without the last, which may end inside a block."""
    if leaf == _GATE_UP:
        return (rows // 2,)
    if leaf not in _QKV or not (heads := _number(config, "num_attention_heads")):
        return ()
    queries = heads * (_number(config, "head_dim") or _number(config, "hidden_size") // heads)
    return (queries, (rows - queries) // 2)


def _number(config: Mapping[str, Any], key: str) -> int:
    """A number of the language model's configuration; 0 where config.json lacks it."""
    value = text_config(config).get(key)
    return value if isinstance(value, int) else 0
