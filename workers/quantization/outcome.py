"""The outcome of each tensor of a checkpoint under a recipe, from its headers alone. Imports no torch.

The loader makes its weights by it (workers/load/virtual.py), and the plan, the list of layers and the mixes count by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.checkpoint import Checkpoint, TensorRef
from sparkd.errors import CheckpointError
from workers.quantization.formats import Format
from workers.quantization.packed import packed_of, packed_weights
from workers.quantization.packed_scale import packed_module_of

BF16 = Format("bf16")
LEAVE_OUT = "Leave out `quantize`, and vLLM serves the checkpoint as it is"
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


def outcome_of(name: str, formats: Mapping[str, Format], checkpoint: Checkpoint) -> Outcome | None:
    """The outcome of one of its tensors under an assignment; None for a tensor that is handed on as it is."""
    stem, _, last = name.rpartition(".")
    if name in formats or last in ("weight", *_SCALES):
        module = name if name in formats else stem
    else:
        module = (packed_module_of(name) if "scale" in last else None) or ""
    weight = checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors.get(module)
    if weight is None or ((is_scale := weight.name != name) and weight.dtype != "F8_E4M3"):
        return None
    form = formats.get(module, BF16)
    if form.keeps and not (formats and _is_dequantized(weight, checkpoint)):
        return None
    return Outcome(module, form, is_scale)


def _is_dequantized(weight: TensorRef, checkpoint: Checkpoint) -> bool:
    """Whether vLLM gets a weight in BF16 beside quantized layers: it is FP8 that the new configuration does not describe."""
    source = checkpoint.quantization
    is_packed = len(weight.shape) == 3 and packed_of(weight.name) is not None
    return weight.dtype == "F8_E4M3" and not is_packed and source is not None and source.requantizable


def shapes_of(tensor: TensorRef, checkpoint: Checkpoint) -> Mapping[tuple[int, int], int]:
    """[N, K] of each matrix that is quantized of a weight, as vLLM multiplies by it, and how many there are.

    Raises CheckpointError for packed experts that do not tell which way round they stand, and for FP8 that is no matrix.
    """
    if len(tensor.shape) == 2:
        rows, columns = tensor.shape
        return {(rows, columns): 1}
    packed = packed_of(tensor.name)
    if packed is None or len(tensor.shape) != 3:
        problem = f"a {tensor.dtype} tensor of shape {list(tensor.shape)} cannot be dequantized here"
        raise CheckpointError(problem, file=tensor.path, tensor=tensor.name, cure=LEAVE_OUT)
    experts, rows, columns = tensor.shape
    shapes: Counter[tuple[int, int]] = Counter()
    for one in packed_weights(tensor._replace(shape=(1, rows, columns)), packed, checkpoint):
        shapes[one.row_count or (columns if one.transposed else rows), rows if one.transposed else columns] += experts
    return shapes
