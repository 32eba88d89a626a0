"""Weights that a checkpoint stores in FP8: dequantized to the precision that another format is quantized from, or rearranged into a layout
that keeps their codes and scales."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from sparkd.errors import CheckpointError
from workers.load.formats.base import Parts, Quantizer, row_slices
from workers.quantization.formats import Format

BLOCK = 128
# Rows and columns that share a scale in the formats that FP8 is kept in; 0: all.
_STEPS = {"fp8": (1, 0), "fp8_block": (BLOCK, BLOCK)}


class Dequantized(Quantizer):
    """The format of a weight that was dequantized and is not quantized again: bfloat16, under its own name."""

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight": (torch.bfloat16, (n, k))}

    def quantize(self, weight: Tensor, *, global_scale: Tensor | None = None, out: Mapping[str, Tensor] | None = None) -> Parts:
        """The weight itself where it is bfloat16 already and `out` is None."""
        if out is None:
            return {"weight": weight.to(torch.bfloat16)}
        return super().quantize(weight, out=out)

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].to(dtype)

    def _fill(self, weight: Tensor, out: Parts) -> None:
        out["weight"].copy_(weight)

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        out["weight"].copy_(weight)


def dequantize_fp8(
    part: Tensor,
    scale: Tensor,
    shape: tuple[int, ...],
    origin: tuple[int, int] = (0, 0),
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """part times its scale, [..., n, k] in dtype, multiplied in float32 and rounded once.

    part: float8 [..., n, k], the rows and columns from origin on of each weight of this shape [N, K].
    scale: [..., *], the scale of the whole weight: one value, [N] or [N, 1] for its rows, or [ceil(N/128), ceil(K/128)] for its blocks;
        under each of its names (weight_scale, weight_scale_inv, scale) it is a factor.

    Raises CheckpointError for another shape. On a CPU temporaries are under 8 MiB.
    """
    *lead, n, k = part.shape
    result = torch.empty(part.shape, dtype=dtype, device=part.device) if out is None else out
    scale, rows_each, columns_each = _normal(scale.to(part.device), len(lead), *shape)
    # All matrices as the rows of one.
    matrices, height, _ = scale.shape
    codes, flat, scale = part.flatten(0, -2), result.flatten(0, -2), scale.flatten(0, 1)
    first = torch.arange(matrices, device=part.device).unsqueeze(1) * height
    rows_of = (first + _index(origin[0], n, rows_each, part.device)).view(-1)
    columns_of = _index(origin[1], k, columns_each, part.device)
    for rows in row_slices(codes):
        factor = scale.index_select(0, rows_of[rows])
        factor = factor.index_select(1, columns_of) if columns_each else factor
        flat[rows] = codes[rows].float().mul_(factor)
    return result


def holds_codes(form: Format, scale: tuple[int, ...], shape: tuple[int, int], first: int = 0) -> bool:
    """Whether an FP8 weight can keep its codes in this format: all elements of each new scale share one stored scale.

    scale: the shape of the stored scales, as in `refuse_scale`, of a weight of this shape [N, K].
    first: the row of that weight at which the part with the new format begins.
    """
    if form.name not in _STEPS:
        return False
    (rows, columns), (down, across) = _STEPS[form.name], _cells(scale, *shape)
    fits_down = not down or rows <= 1 or (rows == down and first % down == 0)
    return fits_down and (not across or columns == across)


def restated_fp8(part: Tensor, scale: Tensor, shape: tuple[int, ...], form: Format, origin: tuple[int, int] = (0, 0)) -> Parts:
    """The parts of `form` that hold an FP8 weight's own codes and scales, where `holds_codes`: the weight is not rounded a second time.

    part, scale, shape, origin: as for `dequantize_fp8`; a block of `form` begins at origin. The result is contiguous and in new memory.
    """
    *lead, n, k = part.shape
    matrices, rows_each, columns_each = _normal(scale.to(part.device), len(lead), *shape)
    rows, columns = _STEPS[form.name]
    down = _index(origin[0], n, rows_each, part.device)[::rows]
    across = _index(origin[1], k, columns_each, part.device)[:: columns or k]
    scales = matrices.index_select(1, down).index_select(2, across)
    return {
        "weight": part.clone(memory_format=torch.contiguous_format),
        "weight_scale": scales.reshape(*lead, *scales.shape[1:]),
    }


def refuse_scale(scale: tuple[int, ...], n: int, k: int, *, file: str | None = None, tensor: str | None = None) -> None:
    """Raises CheckpointError where a scale of this shape cannot be that of an FP8 weight [n, k], the tensor of this name."""
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    if math.prod(scale) != 1 and scale not in ((n,), (n, 1), blocks):
        raise CheckpointError(
            f"an FP8 weight {n}x{k} has a scale of shape {list(scale)}, which is neither one value, nor [{n}, 1], nor {list(blocks)}",
            file=file,
            tensor=tensor,
            cure="Fetch the checkpoint again, or take its original precision",
        )


def _normal(scale: Tensor, leading: int, n: int, k: int) -> tuple[Tensor, int, int]:
    """(scale as float32 [matrices, rows, columns], rows of the weight for each row of it, columns for each column of it); 0: all."""
    own = tuple(scale.shape[leading:])
    refuse_scale(own, n, k)
    down, across = _cells(own, n, k)
    return scale.float().reshape(-1, own[0] if down else 1, own[1] if across else 1), down, across


def _cells(scale: tuple[int, ...], n: int, k: int) -> tuple[int, int]:
    """Rows and columns of a weight [n, k] that share one of its scales; 0: all."""
    if math.prod(scale) == 1:
        return 0, 0
    if scale in ((n,), (n, 1)):
        return 1, 0
    return BLOCK if n > BLOCK else 0, BLOCK if k > BLOCK else 0


def _index(first: int, count: int, each: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, device=device) // each if each else torch.zeros(count, dtype=torch.int64, device=device)
