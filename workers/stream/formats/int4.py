"""INT4, symmetric: codes -8 to 7 and a bfloat16 scale for a group of columns. It never packs for a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.stream.formats.e2m1 import pack
from workers.stream.formats.nvfp4 import halve
from workers.stream.formats.quantizer import Parts, Quantizer, windows

# amax is put at these codes; the winner is the one with the smallest squared error.
CANDIDATES = (7.5, 7.0, 8.0, 8.7, 9.5, 10.5, 12.0)
_SMALLEST = 2.0**-126


class Int4Quantizer(Quantizer):
    group_size: int

    def __init__(self, group_size: int = 128) -> None:
        self.group_size = group_size
        self.spelling = f"int4-g{group_size}"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "weight_packed": (torch.int32, (n, k // 8)),
            "weight_scale": (torch.bfloat16, (n, k // self.group_size)),
            "weight_shape": (torch.int64, (2,)),
        }

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=parts["weight_packed"].device)
        code = parts["weight_packed"].unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(0xF).sub_(8).flatten(-2)
        value = code.float().unflatten(-1, (-1, self.group_size))
        return value.mul_(parts["weight_scale"].float().unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        out["weight_shape"].copy_(torch.tensor(weight.shape[-2:]))
        for index in range(weight.shape[0]):
            self._quantize_matrix(weight[index], out["weight_packed"][index], out["weight_scale"][index])

    def _quantize_matrix(self, weight: Tensor, words: Tensor, scale: Tensor) -> None:
        size = self.group_size
        for rows, columns in windows(weight.shape[0], weight.shape[1], size, weight.device):
            block = weight[rows, columns].reshape(-1, size)
            value = torch.empty((size, block.shape[0]), device=weight.device).copy_(block.t())
            best = best_scale(value)
            codes = value.div_(best.float()).round_().clamp_(-8, 7).add_(8).int()
            group = slice(columns.start // size, columns.stop // size)
            shape = scale[rows, group].shape
            scale[rows, group] = best.view(shape)
            made = torch.empty((block.shape[0], size // 8), dtype=torch.int32, device=weight.device)
            words[rows, slice(columns.start // 8, columns.stop // 8)] = pack(codes, made).view(shape[0], -1)


def best_scale(value: Tensor) -> Tensor:
    """The scale (bfloat16 [B]) with the smallest squared error for float32 groups [G, B]."""
    amax = torch.maximum(value.amax(0), -value.amin(0))
    best, smallest = torch.empty_like(amax, dtype=torch.bfloat16), torch.full_like(amax, torch.inf)
    rounded = torch.empty_like(value)
    for top in CANDIDATES:
        stored = (amax / top).clamp_(min=_SMALLEST).to(torch.bfloat16)
        scale = stored.float()
        torch.mul(value, scale.reciprocal(), out=rounded).round_().clamp_(-8, 7).mul_(scale).sub_(value)
        error = halve(rounded.mul_(rounded))
        better = error < smallest
        best = torch.where(better, stored, best)
        smallest = torch.where(better, error, smallest)
    return best
