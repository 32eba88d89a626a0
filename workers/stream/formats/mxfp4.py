"""MXFP4: E2M1 codes and a power-of-two scale (E8M0) for 32 columns. It never packs for a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.stream.formats import e2m1
from workers.stream.formats.nvfp4 import halve
from workers.stream.formats.quantizer import Parts, Quantizer, windows

GROUP = 32
CANDIDATES = (0, 1, -1)


class Mxfp4Quantizer(Quantizer):
    group_size = GROUP
    spelling = "mxfp4"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // GROUP))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        value = e2m1.decode(parts["weight_packed"])
        return value.unflatten(-1, (-1, GROUP)).mul_(power(parts["weight_scale"].int()).unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for index in range(weight.shape[0]):
            _quantize_matrix(weight[index], out["weight_packed"][index], out["weight_scale"][index])


def power(biased: Tensor) -> Tensor:
    """2**(biased - 127) as float32; biased: int32, 0 to 254. 2**-127 is a float32 subnormal."""
    return torch.where(biased > 0, biased << 23, 1 << 22).view(torch.float32)


def _quantize_matrix(weight: Tensor, packed: Tensor, scale: Tensor) -> None:
    words = packed.view(torch.int32)
    for rows, columns in windows(weight.shape[0], weight.shape[1], GROUP, weight.device):
        block = weight[rows, columns].reshape(-1, GROUP)
        value = torch.empty((GROUP, block.shape[0]), device=weight.device).copy_(block.t())
        biased = best_scale(value)
        codes = e2m1.encode(value.div_(power(biased)))
        group = slice(columns.start // GROUP, columns.stop // GROUP)
        shape = scale[rows, group].shape
        scale[rows, group] = biased.to(torch.uint8).view(shape)
        made = torch.empty((block.shape[0], GROUP // 8), dtype=torch.int32, device=weight.device)
        words[rows, slice(columns.start // 8, columns.stop // 8)] = e2m1.pack(codes, made).view(shape[0], -1)


def best_scale(value: Tensor) -> Tensor:
    """The biased exponent (int32 [B]) with the smallest squared error for float32 blocks [32, B]."""
    magnitude = value.abs()
    # floor(log2(amax)) - 2 puts the largest magnitude into [4, 8): the rule of OCP Microscaling Formats v1.0, section 6.3.
    base = magnitude.amax(0).view(torch.int32).bitwise_right_shift(23).sub_(2)
    best, smallest = base, torch.full_like(base, torch.inf, dtype=torch.float32)
    rounded, spare = torch.empty_like(value), torch.empty_like(value)
    for offset in CANDIDATES:
        biased = (base + offset).clamp_(0, 254)
        torch.div(magnitude, power(biased), out=rounded)
        spare.copy_(rounded)
        e2m1.round_(rounded.clamp_(max=e2m1.LARGEST), torch.empty_like(rounded))
        rounded.sub_(spare)
        # Errors are compared in units of the base scale: they neither overflow nor vanish.
        error = halve(torch.mul(rounded, rounded, out=spare)) * torch.exp2(2.0 * (biased - base))
        better = error < smallest
        best = torch.where(better, biased, best)
        smallest = torch.where(better, error, smallest)
    return best
