"""Owns the groups of weights that a checkpoint stores apart and vLLM multiplies as one matrix. Never looks at a checkpoint.

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
_LEADER = {name: group[0] for group in FUSED for name in group}
_SIBLINGS = {name: group for group in FUSED for name in group}
# vLLM's name of the fused matrix. Some checkpoints store it fused under this name (Phi-3's qkv_proj, Qwen3-Next's in_proj_qkvz).
_WHOLE = {
    "qkv_proj": FUSED[0],
    "gate_up_proj": FUSED[1],
    "fused_qkv_a_proj": FUSED[3],
    "in_proj_qkvz": FUSED[4],
    "in_proj_ba": FUSED[5],
}
_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS_OF_MIXTRAL = ("w1", "w2", "w3")


def group_of(module: str, kind: str) -> str:
    """A key, equal for modules that must have one format: the experts of a layer, the parts of one matrix. kind: its tensor_class."""
    if kind == "expert":
        before, mark, _ = module.partition(".experts.")
        return f"{before}.experts" if mark else module.rpartition(".")[0]
    parent, _, leaf = module.rpartition(".")
    return f"{parent}.{_LEADER[leaf]}" if leaf in _LEADER else module


def siblings_of(leaf: str) -> tuple[str, ...]:
    """The last components of the modules that vLLM stacks into one matrix with this one, from its first rows to its last."""
    return _SIBLINGS.get(leaf, (leaf,))


def members_of(module: str, kind: str) -> tuple[str, ...]:
    """The modules whose choices decide the format of this one, by name: the module itself, its fused siblings, and its parts."""
    parent, _, leaf = module.rpartition(".")
    if kind == "expert" or leaf == "experts":
        before, mark, _ = module.partition(".experts")
        own = () if leaf == "experts" else (leaf,)
        names = _EXPERTS_OF_MIXTRAL if leaf in _EXPERTS_OF_MIXTRAL else _EXPERTS
        stem = f"{before}.experts.0" if mark else parent
        return tuple(f"{stem}.{name}" for name in dict.fromkeys((*own, *names)))
    siblings = (*siblings_of(leaf), *_WHOLE.get(leaf, ()))
    return tuple(f"{parent}.{name}" if parent else name for name in siblings)
