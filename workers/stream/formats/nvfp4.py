"""NVFP4: E2M1 codes, an E4M3 scale for 16 columns, one float32 divisor for the tensor. It never decides who shares the divisor."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.stream.formats import e2m1
from workers.stream.formats.quantizer import Parts, Quantizer, windows

GROUP = 16
# Marlin turns a block scale into S0E5M3 and takes everything below the smallest normal E4M3, 2**-6, for zero (vLLM marlin_utils_fp4.py).
_SMALLEST_CODE = 0x08
_LARGEST_CODE = 0x7E
CANDIDATES = (-2, -1, 0, 1, 2, 3, 4, 5)


def global_scale(amax: Tensor) -> Tensor:
    """The divisor (float32, shape of amax) for weights whose largest magnitude is amax: a power of two, so that scale products are exact.

    The largest with amax/4 <= 448/divisor: a block scale may lie above amax/6 where that gives the smaller error. amax 0 gives 1.
    """
    amax = amax.float()
    exponent = torch.frexp(448.0 * 4 / amax.clamp(min=2.0**-100)).exponent - 1
    return torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), exponent), torch.ones_like(amax))


class Nvfp4Quantizer(Quantizer):
    group_size = GROUP
    spelling = "nvfp4"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "weight_packed": (torch.uint8, (n, k // 2)),
            "weight_scale": (torch.float8_e4m3fn, (n, k // GROUP)),
            "weight_global_scale": (torch.float32, (1,)),
        }

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scale = parts["weight_scale"].float() / parts["weight_global_scale"].unsqueeze(-1)
        value = e2m1.decode(parts["weight_packed"])
        return value.unflatten(-1, (-1, GROUP)).mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        divisor = out["weight_global_scale"].view(-1)
        if global_scale is None:
            low, high = torch.aminmax(weight.flatten(1), dim=1)
            divisor.copy_(_divisor(torch.maximum(high, -low)))
        else:
            divisor.copy_(global_scale.reshape(-1).expand(divisor.shape))
        for index in range(weight.shape[0]):
            _quantize_matrix(weight[index], divisor[index], out["weight_packed"][index], out["weight_scale"][index])


_divisor = global_scale


def _quantize_matrix(weight: Tensor, divisor: Tensor, packed: Tensor, scale: Tensor) -> None:
    words = packed.view(torch.int32)
    for rows, columns in windows(weight.shape[0], weight.shape[1], GROUP, weight.device):
        block = weight[rows, columns].reshape(-1, GROUP)
        value = torch.empty((GROUP, block.shape[0]), device=weight.device).copy_(block.t()).mul_(divisor)
        code = best_scale(value)
        codes = e2m1.encode(value.div_(code.view(torch.float8_e4m3fn).float()))
        group = slice(columns.start // GROUP, columns.stop // GROUP)
        shape = scale[rows, group].shape
        scale[rows, group] = code.view(torch.float8_e4m3fn).view(shape)
        made = torch.empty((block.shape[0], GROUP // 8), dtype=torch.int32, device=weight.device)
        words[rows, slice(columns.start // 8, columns.stop // 8)] = e2m1.pack(codes, made).view(shape[0], -1)


def best_scale(value: Tensor) -> Tensor:
    """The E4M3 code (uint8 [B]) of the scale with the smallest squared error for float32 blocks [16, B], already times the divisor."""
    magnitude = value.abs()
    base = magnitude.amax(0).div_(e2m1.LARGEST).clamp_(max=448.0).to(torch.float8_e4m3fn).view(torch.uint8).int()
    best = torch.full_like(base, _LARGEST_CODE)
    smallest = torch.full_like(base, torch.inf, dtype=torch.float32)
    rounded, spare = torch.empty_like(value), torch.empty_like(value)
    for offset in CANDIDATES:
        code = (base + offset).clamp_(_SMALLEST_CODE, _LARGEST_CODE)
        scale = code.to(torch.uint8).view(torch.float8_e4m3fn).float()
        torch.mul(magnitude, scale.reciprocal(), out=rounded).clamp_(max=e2m1.LARGEST)
        e2m1.round_(rounded, spare)
        rounded.mul_(scale).sub_(magnitude)
        error = halve(torch.mul(rounded, rounded, out=spare))
        better = error < smallest
        best = torch.where(better, code, best)
        smallest = torch.where(better, error, smallest)
    return best.to(torch.uint8)


def halve(square: Tensor) -> Tensor:
    """Sum over dim 0 (a power of two) by adding neighbours: an order that every device can keep. Overwrites its argument."""
    while square.shape[0] > 1:
        square = square[0::2].add_(square[1::2])
    return square[0]
