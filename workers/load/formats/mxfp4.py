"""MXFP4: E2M1 codes and a power-of-two scale (E8M0) for 32 columns. It never packs for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats import e2m1
from workers.load.formats.base import Parts
from workers.load.formats.groups import GroupChunk, GroupQuantizer
from workers.load.formats.sums import least

# Exponents tried, beside floor(log2(amax)) - 2, which puts the largest magnitude into [4, 8) (OCP Microscaling Formats v1.0, section 6.3).
# On a tie the first one stays.
NEIGHBOURS = (0, 1, -1)


class Mxfp4Quantizer(GroupQuantizer):
    group_size = 32
    spelling = "mxfp4"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        value = e2m1.decode(parts["weight_packed"]).unflatten(-1, (-1, 32))
        return value.mul_(power(parts["weight_scale"].int()).unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for index, matrix in enumerate(weight):
            self._fill_matrix(matrix, out["weight_packed"][index].view(torch.int32), out["weight_scale"][index])

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        kernels.mxfp4(weight, out["weight_packed"].view(torch.int32), out["weight_scale"])

    def _encode(self, groups: GroupChunk) -> tuple[Tensor, Tensor]:
        value, magnitude, scaled, a, b = groups
        torch.abs(value, out=magnitude)
        base = magnitude.amax(0).view(torch.int32).bitwise_right_shift(23).sub_(2)
        # 2**-126 at least: below it a scale is a subnormal, which kernels that move the exponent into a bfloat16 take for zero.
        tried = torch.stack([(base + step).clamp_(min=1) for step in NEIGHBOURS])
        errors = torch.empty_like(tried, dtype=torch.float32)
        for error, inverse, step in zip(errors, power(254 - tried), NEIGHBOURS, strict=True):
            torch.mul(magnitude, inverse, out=scaled)
            error.copy_(e2m1.squared_error(scaled, a, b, saturate=step < 1))
        # Errors are compared in units of the base scale, where they neither overflow nor vanish.
        best = least(errors.mul_(power(127 + 2 * (tried - base).clamp_(max=1))))
        chosen = tried.gather(0, best.long().unsqueeze(0))[0]
        return e2m1.encode(value.mul_(power(254 - chosen)), a, b), chosen.to(torch.uint8)


def power(biased: Tensor) -> Tensor:
    """2**(biased - 127) as float32; biased: int32, 0 to 254. 0 gives a subnormal."""
    return torch.where(biased > 0, biased << 23, 1 << 22).view(torch.float32)
