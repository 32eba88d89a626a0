"""The groups of weights that a checkpoint stores apart and vLLM multiplies as one matrix.

The names are those of `packed_modules_mapping` in vllm/model_executor/models (llama, deepseek_v2, qwen3_5), and Mixtral's.
"""

from __future__ import annotations

import re

EXPERT = re.compile(r"\.experts\.(\d+)\.")

FUSED: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("wq", "wk", "wv"),
)
_SIBLINGS = {name: group for group in FUSED for name in group}


def group_of(module: str, kind: str) -> str:
    """A key, equal for modules that must have one format: the experts of a layer, the parts of one matrix. kind: its tensor_class."""
    if kind == "expert":
        before, mark, _ = module.partition(".experts.")
        return f"{before}.experts" if mark else module.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_SIBLINGS[leaf][0]}" if leaf in _SIBLINGS else module


def siblings_of(leaf: str) -> tuple[str, ...]:
    """The last components of the modules that vLLM stacks into one matrix with this one, from its first rows to its last."""
    return _SIBLINGS.get(leaf, (leaf,))
