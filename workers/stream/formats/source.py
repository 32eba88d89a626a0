"""Weights that a checkpoint stores in FP8, brought back to the precision they are quantized from. It never reads a file."""

from __future__ import annotations

import torch
from torch import Tensor

from sparkd.errors import CheckpointError
from workers.stream.formats.base import windows

BLOCK = 128


def dequantize_fp8(
    part: Tensor,
    scale: Tensor,
    shape: tuple[int, ...],
    origin: tuple[int, int] = (0, 0),
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """part times its scale, [n, k] in dtype, multiplied in float32 and rounded once.

    part: float8 [n, k], the rows and columns from origin on of a weight of this shape [N, K]. scale: that of the whole weight, one value,
    [N] or [N, 1] for its rows, or [ceil(N/128), ceil(K/128)] for its blocks; every name it goes by (weight_scale, weight_scale_inv, scale)
    is a factor. Raises CheckpointError for another shape. On a CPU temporaries are under 8 MiB.
    """
    n, k = part.shape
    made = torch.empty((n, k), dtype=dtype, device=part.device) if out is None else out
    scale, rows_each, columns_each = _normal(scale.to(part.device), *shape)
    rows_of = _index(origin[0], n, rows_each, part.device)
    columns_of = _index(origin[1], k, columns_each, part.device)
    for rows, columns in windows(n, k, 1, 1, part.device):
        factor = scale.index_select(0, rows_of[rows]) if rows_each else scale
        factor = factor.index_select(1, columns_of[columns]) if columns_each else factor
        made[rows, columns] = part[rows, columns].float().mul_(factor)
    return made


def _normal(scale: Tensor, n: int, k: int) -> tuple[Tensor, int, int]:
    """(scale float32 [rows, columns], rows of the weight that one of its rows stands for, columns likewise); 0: it stands for all."""
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    if scale.numel() == 1:
        return scale.float().view(1, 1), 0, 0
    if tuple(scale.shape) in ((n,), (n, 1)):
        return scale.float().view(n, 1), 1, 0
    if tuple(scale.shape) == blocks:
        return scale.float(), BLOCK, BLOCK
    raise CheckpointError(
        f"an FP8 weight {n}x{k} has a scale of shape {list(scale.shape)}, which is neither one value, nor [{n}, 1], nor {list(blocks)}",
        cure="Fetch the checkpoint again, or take its original precision",
    )


def _index(first: int, count: int, each: int, device: torch.device) -> Tensor:
    return torch.arange(first, first + count, device=device) // max(1, each)
