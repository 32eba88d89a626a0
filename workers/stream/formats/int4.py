"""INT4, symmetric: codes -8 to 7 and a bfloat16 scale for a group of columns. It never packs for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.stream.formats.base import Parts
from workers.stream.formats.groups import GroupQuantizer, Groups
from workers.stream.formats.sums import columns, squared_distance

# Scales tried: amax divided by these; the winner is then refined once by least squares. There is one code more below zero than above, so
# the sign of a scale is chosen to let the largest magnitude fall on the side of -8. On Gaussian weights in groups of 32 this leaves a
# relative error of .0814; the best of 80 scales of either sign .0811, of positive sign .0862 (tests/bench/formats.py).
DIVISORS = (7.2, 7.6, 8.0, 8.5, 9.2)
SMALLEST_SCALE = 2.0**-126


class Int4Quantizer(GroupQuantizer):
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
        self._fill_shape(weight, out)
        for index, matrix in enumerate(weight):
            self._fill_matrix(matrix, out["weight_packed"][index], out["weight_scale"][index])

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        self._fill_shape(weight, out)
        kernels.int4(weight, out["weight_packed"], out["weight_scale"], self.group_size)

    @staticmethod
    def _fill_shape(weight: Tensor, out: Parts) -> None:
        for column, size in enumerate(weight.shape[-2:]):
            out["weight_shape"][:, column].fill_(size)

    def _encode(self, groups: Groups) -> tuple[Tensor, Tensor]:
        value, scaled, rounded, _, _ = groups
        high, low = value.amax(0), value.amin(0).neg_()
        amax = torch.maximum(high, low).clamp_(min=SMALLEST_SCALE)
        sign = torch.where(high > low, -1.0, 1.0)

        def error(stored: Tensor) -> Tensor:
            """Squared error in units of amax, where it neither overflows nor vanishes; leaves value / scale in scaled."""
            scale = stored.float()
            torch.mul(value, scale.reciprocal(), out=scaled)
            torch.round(scaled, out=rounded).clamp_(-8, 7)
            return squared_distance(rounded, scaled) * (scale / amax).square_()

        best, smallest = torch.empty_like(amax, dtype=torch.bfloat16), torch.full_like(amax, torch.inf)
        for divisor in DIVISORS:
            stored = (amax * (1 / divisor)).clamp_(min=SMALLEST_SCALE).mul_(sign).to(torch.bfloat16)
            found = error(stored)
            best = torch.where(found < smallest, stored, best)
            smallest = torch.minimum(found, smallest)
        refined = self._least_squares(groups, best)
        best = torch.where(error(refined) < smallest, refined, best)
        return torch.div(value, best.float(), out=scaled).round_().clamp_(-8, 7).add_(8).to(torch.int32), best

    @staticmethod
    def _least_squares(groups: Groups, stored: Tensor) -> Tensor:
        """The scale that fits the codes of this one best: sum(w q) / sum(q q); this one where all codes are 0."""
        value, scaled, rounded, _, _ = groups
        scale = stored.float()
        torch.mul(value, scale.reciprocal(), out=scaled)
        torch.round(scaled, out=rounded).clamp_(-8, 7)
        above, below = columns(scaled.mul_(rounded)), columns(rounded.square_())
        return torch.where(above > 0, scale * (above / below), scale).to(torch.bfloat16)
