"""Owns what the weights of a checkpoint take on each rank, in any format and at any tensor-parallel size. Never reads a weight.

How vLLM splits a layer follows from its class (vllm/model_executor/layers/linear.py): column-parallel ones by rows, row-parallel ones by
columns, vocabularies by rows after padding, experts along their inner width, everything else is on every rank whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from sparkd.checkpoint import Checkpoint, TensorRef, tensor_class
from sparkd.model_shape import Shape
from workers.stream.format import Format
from workers.stream.recipe import Recipe


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# vllm/model_executor/layers/vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE.
VOCAB_PADDING = 64
_COLUMN = _words(
    """q_proj gate_proj up_proj gate_up_proj w1 w3 wi wi_0 wi_1 fc1 c_fc linear_fc1 linear_1 q_b_proj kv_b_proj qkv_proj qkv Wqkv
    query_key_value c_attn in_proj in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_a in_proj_b wq w13 dense_h_to_4h conv1d A_log D
    dt_bias sinks"""
)
_KEYS = _words("k_proj v_proj wk wv")
_ROW = _words("o_proj down_proj w2 out_proj fc2 c_proj wo linear_fc2 linear_2 dense_4h_to_h dense")
# Kept as they are stored; every other parameter is made in the model's own precision (its class gives no other).
_EXACT = _words("A_log D e_score_correction_bias expert_bias")
_STORED = _words(
    """weight bias weight_packed qweight weight_scale weight_scale_inv weight_scale_2 weight_global_scale input_scale qzeros scales g_idx
    weight_shape weight_zero_point input_global_scale"""
)
_FLOATS = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
# Stands beside an FP8 weight and goes with it into its new format.
_SOURCE_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "scale")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Part:
    """Alike tensors: `count` of them. split: column, row, keys, vocabulary or whole; kind: a tensor_class; active: whether every token
    uses it, for experts the share that it uses."""

    tensor: TensorRef
    kind: str
    count: int
    split: str
    active: float


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes on one rank: by tensor_class, and of those that one token reads. disk_bytes: what a quantized copy of the model takes on disk.

    changed: whether the recipe quantizes anything. notes: what it could not do, one sentence each.
    """

    by_kind: Mapping[str, int]
    active_bytes: int
    disk_bytes: int
    changed: bool
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


@dataclass(frozen=True, slots=True)
class Inventory:
    """A checkpoint, with one tensor for all experts of a layer that are alike. unloaded_bytes: of layers that vLLM leaves on the disk."""

    checkpoint: Checkpoint
    shape: Shape
    parts: tuple[Part, ...]
    unloaded_bytes: int

    def weights(self, recipe: Recipe, ranks: int = 1, stages: int = 1) -> Weights:
        """Of the fullest rank. Raises CheckpointError where a rule names a format that a weight cannot have."""
        assignment = recipe.assign(self.checkpoint)
        by_kind: dict[str, int] = {}
        active = disk = 0
        changed = False
        for part in self.parts:
            form, gone = _format(part.tensor, assignment)
            changed = changed or form is not None
            each = 0 if gone else _bytes(part, form, self.shape, ranks)
            share = stages if _LAYER.search(part.tensor.name) else 1
            by_kind[part.kind] = by_kind.get(part.kind, 0) + ceil(each * part.count / share)
            active += int(each * part.count * part.active / share)
            disk += 0 if gone else _whole(part, form) * part.count
        if self.shape.tied and "lm_head" not in by_kind:
            # One matrix in both roles: a token reads one of its rows as an embedding, and all of it as the head.
            active += by_kind.get("embedding", 0)
        return Weights(by_kind, active, disk, changed, assignment.adjustments)


def inventory(checkpoint: Checkpoint, shape: Shape) -> Inventory:
    """Layers beyond the model's own, which predict tokens ahead, are left out: vLLM loads them for speculative decoding only."""
    counts: dict[str, int] = {}
    kept: dict[str, TensorRef] = {}
    unloaded = 0
    for name, tensor in checkpoint.tensors.items():
        before, found, after = name.partition(".experts.")
        number, _, rest = after.partition(".")
        key = f"{before}.experts.0.{rest}" if found and number.isdigit() and rest else name
        first = kept.get(key)
        if first is None:
            kept[key] = tensor if key == name else replace(tensor, name=key)
            counts[key] = 1
        elif first.shape == tensor.shape and first.dtype == tensor.dtype:
            counts[key] += 1
        else:
            kept[name], counts[name] = tensor, 1
    parts = []
    for name, tensor in kept.items():
        kind = tensor_class(name, tensor.shape)
        if _ahead(name, shape) or (shape.tied and kind == "lm_head"):
            unloaded += tensor.nbytes * counts[name]
            continue
        parts.append(Part(tensor, kind, counts[name], _split(name, tensor, kind), _active(name, kind, shape)))
    loaded = {part.tensor.name: part.tensor for part in parts}
    return Inventory(replace(checkpoint, tensors=loaded), shape, tuple(parts), unloaded)


def _ahead(name: str, shape: Shape) -> bool:
    if name.startswith(("mtp.", "model.mtp.", "language_model.mtp.")) or ".mtp_layers." in name:
        return True
    if not shape.mtp_layers:
        return False
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= shape.layers


def _active(name: str, kind: str, shape: Shape) -> float:
    if kind == "embedding" or kind == "vision":
        return 0.0
    if ".experts." in name and shape.experts:
        return min(1.0, shape.active_experts / shape.experts)
    return 1.0


def _split(name: str, tensor: TensorRef, kind: str) -> str:
    parts = name.split(".")
    leaf = parts[-2] if parts[-1] in _STORED and len(parts) > 1 else parts[-1]
    if kind in ("embedding", "lm_head") and len(tensor.shape) == 2:
        return "vocabulary"
    if kind in ("router", "norm") or ".indexer." in name:
        return "whole"
    if ".experts." in name:
        # A row-parallel layer's bias is on every rank.
        return "whole" if leaf.endswith("down_proj_bias") else "column"
    if leaf in _KEYS:
        return "keys"
    if leaf in _COLUMN:
        return "column"
    if leaf in _ROW:
        return "whole" if parts[-1] == "bias" or len(tensor.shape) < 2 or tensor.shape[-1] == 1 else "row"
    return "whole"


def _format(tensor: TensorRef, assignment: Mapping[str, Format]) -> tuple[Format | None, bool]:
    """(its new format, whether it goes into another tensor's)."""
    stem, _, last = tensor.name.rpartition(".")
    if last in _SOURCE_SCALES and stem in assignment:
        return None, True
    return (assignment.get(stem) if last == "weight" else assignment.get(tensor.name)), False


def _bytes(part: Part, form: Format | None, shape: Shape, ranks: int) -> int:
    """Of one tensor on one rank."""
    tensor = part.tensor
    if part.split == "vocabulary":
        rows = ceil(ceil(tensor.shape[0] / VOCAB_PADDING) * VOCAB_PADDING / ranks)
        return form.nbytes(rows, tensor.shape[1]) if form is not None else rows * tensor.shape[1] * _width(tensor, shape)
    divisor = {"whole": 1, "keys": min(ranks, max(1, shape.kv_heads))}.get(part.split, ranks)
    if form is None:
        return ceil(_plain(tensor, shape) / divisor)
    rows, columns = tensor.shape[-2:]
    blocks = tensor.shape[0] if len(tensor.shape) == 3 else 1
    return ceil(blocks * form.nbytes(rows, columns) / divisor)


def _whole(part: Part, form: Format | None) -> int:
    tensor = part.tensor
    if form is None:
        return tensor.nbytes
    blocks = tensor.shape[0] if len(tensor.shape) == 3 else 1
    return blocks * form.nbytes(*tensor.shape[-2:])


def _plain(tensor: TensorRef, shape: Shape) -> int:
    if tensor.dtype not in _FLOATS:
        return tensor.nbytes
    return tensor.nbytes // _FLOATS[tensor.dtype] * _width(tensor, shape)


def _width(tensor: TensorRef, shape: Shape) -> int:
    """Bytes of an element in memory."""
    last = tensor.name.rpartition(".")[2]
    stored = _FLOATS.get(tensor.dtype)
    if stored is None or last in _EXACT or "scale" in last:
        return tensor.nbytes // max(1, _elements(tensor))
    return shape.dtype_bytes


def _elements(tensor: TensorRef) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count
