"""NVFP4: E2M1 codes, an E4M3 scale for 16 columns, one float32 divisor for the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats import e2m1
from workers.load.formats.base import Parts, amax_each
from workers.load.formats.groups import GroupQuantizer, best_scale

# Codes of positive E4M3 numbers count upwards; 0x7E is 448. Marlin flushes what lies below 2**-6, the subnormals, to zero
# (nvfp4_marlin_process_scales in vLLM's marlin_utils_fp4.py), so scales keep to the values that every kernel reads alike.
SMALLEST_SCALE = 0x08
LARGEST_SCALE = 0x7E
# float32 bits of an E4M3 code: (code + 960) << 20; the exponent biases differ by 120, the mantissas by 20 bits.
SCALE_BIAS = 960
# The scales tried: the first above amax/7, below which the largest magnitude would round past 6, and those up to amax/3.5, an octave.
# All 119 leave 0.01 % less of an error, over weights of five distributions (tests/workers/load/formats/test_error.py).
SCALES = 8
INPUT_SCALE = "input_global_scale"


def global_scale(amax: Tensor) -> Tensor:
    """The divisor (float32, shape of amax) for weights whose largest magnitude is amax (float32, on any device).

    NVIDIA's choice is 448*6/amax. This is the largest power of two that leaves room for a block scale of amax/4, so that one above amax/6
    can be taken where it is better; scaled weights, scale products and dequantized bfloat16 are all exact. An amax of 0 gives 1.
    """
    bits = amax.float().view(torch.int32)
    # 448*4/amax = 1.75 / m * 2**(10-e): the exponent rounds up where the mantissa m is above 1.75. At most 2**100: its inverse is normal.
    exponent = 264 - (bits + 0x1FFFFF).bitwise_right_shift_(23)
    return torch.where(bits == 0, 127, exponent.clamp_(max=227)).bitwise_left_shift_(23).view(torch.float32)


_global_scale = global_scale


def rounded_activations(x: Tensor, divisor: Tensor) -> Tensor:
    """x [..., K] as a layer with 4-bit activations sees it, in x's dtype: E2M1 values, an E4M3 scale for 16 columns of a row.

    divisor: float32, one element, the layer's `input_global_scale`. The arithmetic is that of vLLM's scaled_fp4_quant: the scale is
    divisor * largest / 6, at most 448, so that larger activations saturate; where it rounds to 0, the 16 become 0.
    """
    groups = x.float().unflatten(-1, (-1, 16))
    largest = groups.abs().amax(-1, keepdim=True)
    scale = largest.mul_(1 / e2m1.LARGEST).mul_(divisor).clamp_(max=448.0).to(torch.float8_e4m3fn).float()
    inverse = torch.where(scale == 0, 0.0, divisor / scale)
    return e2m1.rounded(groups * inverse).mul_(scale / divisor).flatten(-2).to(x.dtype)


class Nvfp4Quantizer(GroupQuantizer):
    levels = e2m1.VALUES

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "weight_packed": (torch.uint8, (n, k // 2)),
            "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
            "weight_global_scale": (torch.float32, (1,)),
        }

    def _scale(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight_scale"].float().div_(parts["weight_global_scale"].unsqueeze(-1))

    def _fill_shared(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        divisor = _global_scale(amax_each(weight)) if global_scale is None else global_scale
        out["weight_global_scale"].view(-1).copy_(divisor.view(-1))

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        words, scale = out["weight_packed"].view(torch.int32), out["weight_scale"].view(torch.uint8)
        divisor = out["weight_global_scale"].view(-1)
        kernels.nvfp4(weight, words, scale, divisor, range(SMALLEST_SCALE, LARGEST_SCALE + 1), SCALE_BIAS, SCALES)

    def _encode(self, groups: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        groups = groups * parts["weight_global_scale"]
        first = ((groups.abs().amax(0) / 7).view(torch.int32) >> 20) - (SCALE_BIAS - 1)
        codes = (first.clamp_(SMALLEST_SCALE, LARGEST_SCALE) + step for step in range(SCALES))
        scales = (((code.clamp_(max=LARGEST_SCALE) + SCALE_BIAS) << 20).view(torch.float32) for code in codes)
        scale = best_scale(groups, scales, e2m1.rounded)
        return e2m1.encode(groups / scale), scale.to(torch.float8_e4m3fn)


class Nvfp4A4Quantizer(Nvfp4Quantizer):
    """The same weights for a layer with 4-bit activations, which also needs the divisor of its input; 1 until the input is measured."""

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {**super().parts(n, k), INPUT_SCALE: (torch.float32, (1,))}

    def _fill_shared(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        super()._fill_shared(weight, out, global_scale)
        out[INPUT_SCALE].fill_(1.0)
