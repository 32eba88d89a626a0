"""Finds the part of a scale that belongs to one weight of a packed FP8 tensor. Imports no torch.

Checkpoints store three kinds of scales for `experts.gate_up_proj` [experts, ., .]:

* one value for all experts, or one for each: `_weight_scale` [] (ModelOpt's FP8 of Llama 4; vllm/model_executor/models/mllama4.py,
  `_rename_weight_for_modelopt_checkpoint`), `_scale_inv` [experts, 1, 1] (Mistral-Small-4-119B-2603);
* one for each row of the result: `_scale` [experts, 1, N] beside matrices [K, N] (transformers/integrations/fbgemm_fp8.py,
  FbgemmFp8Llama4TextExperts);
* one for each 128x128: `_scale_inv` [experts, rows/128, columns/128], rows and columns as the file has them
  (transformers/integrations/finegrained_fp8.py, FP8Experts).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sparkd.checkpoint import TensorRef
from sparkd.errors import CheckpointError
from workers.quantization.packed import PackedWeight, packed_of

BLOCK = 128
_WEIGHTS = ("_scale_inv", "_scale", "_weight_scale_inv", "_weight_scale", ".weight_scale_inv", ".weight_scale", ".scale")
_SCALE = re.compile(r"(.+?)[._](?:weight_|input_|activation_)?scale(?:_inv)?")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_CURE = "Leave out `quantize`, and vLLM serves them as they are"


@dataclass(frozen=True, slots=True)
class PackedScale:
    """The scale of one expert's matrix, or of the rows of one weight in it.

    ref: its bytes, two-dimensional, transposed where the matrix is.
    shape: [N, K] of the scaled matrix.
    first: the row of that matrix at which the weight begins.
    """

    ref: TensorRef
    shape: tuple[int, int]
    first: int = 0


def scale_of(packed: TensorRef, module: str, tensors: Mapping[str, TensorRef]) -> TensorRef:
    """The scale beside a packed FP8 tensor. Raises CheckpointError where there is none."""
    scale = next((tensors[name] for suffix in _WEIGHTS if (name := f"{module}{suffix}") in tensors), None)
    if scale is None:
        raise CheckpointError(
            f"packed experts in FP8 have no scale: {module}_scale_inv, _weight_scale or _scale is expected",
            file=packed.path,
            tensor=packed.name,
            cure=_CURE,
        )
    refuse_codes(scale)
    return scale


def refuse_codes(scale: TensorRef) -> None:
    """Raise CheckpointError for an FP8 weight's scale that is no floating-point number: E8M0 codes in bytes would be read as numbers."""
    if scale.dtype not in _SCALES:
        problem = f"an FP8 weight's scale holds {scale.dtype}, and {', '.join(_SCALES)} are known"
        raise CheckpointError(problem, file=scale.path, tensor=scale.name, cure=_CURE)


def packed_module_of(name: str) -> str | None:
    """The module of packed experts that a tensor of this name would be a scale of; None for any other name."""
    match = _SCALE.fullmatch(name)
    return match[1] if match is not None and packed_of(match[1]) is not None else None


def scale_of_weight(packed: TensorRef, weight: PackedWeight, scale: TensorRef) -> PackedScale:
    """The scale of one weight. Raises CheckpointError for a scale whose shape is none of the three kinds."""
    experts, rows, cols = packed.shape
    n, k = (cols, rows) if weight.transposed else (rows, cols)
    count = math.prod(scale.shape)
    each = scale.shape[1:] if scale.shape[:1] == (experts,) else None
    across = -(-cols // BLOCK)
    shape = (n if weight.row_count is None else weight.row_count, k)
    if count == 1 or (each is not None and math.prod(each) == 1):
        return PackedScale(_part(scale, weight.expert if count > 1 else 0, (1, 1)), shape)
    if each in ((n,), (n, 1), (1, n)):
        own = (1, shape[0]) if weight.transposed else (shape[0], 1)
        return PackedScale(_part(scale, weight.expert * n + weight.row_start, own), shape)
    if each == (-(-rows // BLOCK), across):
        first = weight.expert * math.prod(each)
        if not weight.transposed and weight.row_start % BLOCK == 0 and (shape[0] % BLOCK == 0 or weight.row_start + shape[0] == n):
            return PackedScale(_part(scale, first + weight.row_start // BLOCK * across, (-(-shape[0] // BLOCK), across)), shape)
        return PackedScale(_part(scale, first, each), (n, k), weight.row_start)
    raise CheckpointError(
        f"packed experts in FP8 of shape {list(packed.shape)} have a scale of shape {list(scale.shape)}, which is neither one value, nor "
        "one for each expert, row or 128x128 block",
        file=scale.path,
        tensor=scale.name,
        cure=_CURE,
    )


def _part(scale: TensorRef, first: int, shape: tuple[int, int]) -> TensorRef:
    """The elements from `first` on, as a tensor of this shape."""
    size = scale.nbytes // math.prod(scale.shape)
    return scale._replace(shape=shape, offset=scale.offset + first * size, nbytes=math.prod(shape) * size)
