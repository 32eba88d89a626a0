"""MXFP4: E2M1 codes and a power-of-two scale (E8M0) for 32 columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats import e2m1
from workers.load.formats.base import Parts
from workers.load.formats.groups import GroupQuantizer, best_scale

# Exponents tried, beside floor(log2(amax)) - 2, which puts the largest magnitude into [4, 8) (OCP Microscaling Formats v1.0, section 6.3).
# On a tie the first one stays.
NEIGHBOURS = (0, 1, -1)


class Mxfp4Quantizer(GroupQuantizer):
    levels = e2m1.VALUES

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))}

    def _scale(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight_scale"].view(torch.float8_e8m0fnu).float()

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        kernels.mxfp4(weight, out["weight_packed"].view(torch.int32), out["weight_scale"])

    def _encode(self, groups: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        exponent = (groups.abs().amax(0).view(torch.int32) >> 23) - 2
        # 2**-126 at least: below it a scale is a subnormal, which kernels that move the exponent into a bfloat16 take for zero.
        scales = (((exponent + step).clamp_(min=1) << 23).view(torch.float32) for step in NEIGHBOURS)
        scale = best_scale(groups, scales, e2m1.rounded)
        return e2m1.encode(groups / scale), (scale.view(torch.int32) >> 23).to(torch.uint8)
