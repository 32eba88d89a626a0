"""The outcome of each tensor of a checkpoint under a recipe, from its headers alone. Imports no torch.

The loader makes it (workers/load/virtual.py); the plan, the list of layers and the mixes count by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.checkpoint import Checkpoint, TensorRef
from workers.quantization.formats import Format
from workers.quantization.packed import packed_of, packed_weights
from workers.quantization.packed_scale import packed_module_of

BF16 = Format("bf16")
# The last part of names beside an FP8 weight, which go with it into its new format.
_SCALES = ("weight_scale_inv", "weight_scale", "input_scale", "scale")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The weight that a tensor is, or is a scale of.

    module: the path of that weight.
    format: the format that it gets.
    is_scale: whether the tensor goes into that format with its weight.
    """

    module: str
    format: Format
    is_scale: bool


def outcome_of(name: str, formats: Mapping[str, Format], tensors: Mapping[str, TensorRef]) -> Outcome | None:
    """The outcome of one of `tensors` under an assignment; None for a tensor that is handed on as it is."""
    stem, _, last = name.rpartition(".")
    if name in formats or last in ("weight", *_SCALES):
        module = name if name in formats else stem
    else:
        module = (packed_module_of(name) if "scale" in last else None) or ""
    weight = tensors.get(f"{module}.weight") or tensors.get(module)
    if weight is None or ((is_scale := weight.name != name) and weight.dtype != "F8_E4M3"):
        return None
    form = formats.get(module)
    if form is None and formats and weight.dtype == "F8_E4M3" and len(weight.shape) == 2:
        form = BF16  # FP8 that keeps its precision beside quantized layers is handed to vLLM dequantized
    return None if form is None else Outcome(module, form, is_scale)


def shapes_of(tensor: TensorRef, checkpoint: Checkpoint) -> Mapping[tuple[int, int], int]:
    """[N, K] of each matrix that is quantized of a weight, as vLLM multiplies by it, and how many there are.

    Raises CheckpointError for packed experts that do not tell which way round they stand.
    """
    if len(tensor.shape) == 2:
        rows, columns = tensor.shape
        return {(rows, columns): 1}
    packed = packed_of(tensor.name)
    if packed is None:
        raise ValueError(f"{tensor.name} holds no experts that can be told apart.")  # `assign` gives it no format
    experts, rows, columns = tensor.shape
    shapes: Counter[tuple[int, int]] = Counter()
    for one in packed_weights(tensor._replace(shape=(1, rows, columns)), packed, checkpoint):
        shapes[one.row_count or (columns if one.transposed else rows), rows if one.transposed else columns] += experts
    return shapes
