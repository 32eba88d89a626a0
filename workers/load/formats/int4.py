"""INT4, symmetric: codes -8 to 7 and a bfloat16 scale for a group of columns. It never packs for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import Parts
from workers.load.formats.groups import GroupChunk, GroupQuantizer
from workers.load.formats.sums import columns, least, squared_distance

# Scales tried: amax divided by these; the winner is then refined once by least squares. There is one code more below zero than above, so
# the sign of a scale is chosen to let the largest magnitude fall on the side of -8. On Gaussian weights in groups of 32 this leaves a
# relative error of .0814; the best of 80 scales of either sign .0810, of positive sign .0861 (test_error.py).
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
        scale = parts["weight_scale"].float()
        value = code.float().unflatten(-1, (scale.shape[-1], -1))
        return value.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        self._fill_shape(weight, out)
        for index, matrix in enumerate(weight):
            self._fill_matrix(matrix, out["weight_packed"][index], out["weight_scale"][index])

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        self._fill_shape(weight, out)
        kernels.int4(weight, out["weight_packed"], out["weight_scale"], self.group_size, DIVISORS, SMALLEST_SCALE)

    @staticmethod
    def _fill_shape(weight: Tensor, out: Parts) -> None:
        for column, size in enumerate(weight.shape[-2:]):
            out["weight_shape"][:, column].fill_(size)

    def _encode(self, groups: GroupChunk) -> tuple[Tensor, Tensor]:
        value, scaled, rounded, _, _ = groups
        high, low = value.amax(0), value.amin(0).neg_()
        amax = torch.maximum(high, low).clamp_(min=SMALLEST_SCALE)
        sign = torch.where(high > low, -1.0, 1.0)
        inverses = torch.tensor([1 / divisor for divisor in DIVISORS], dtype=torch.float32, device=value.device).unsqueeze(1)
        tried = torch.empty((len(DIVISORS) + 1, amax.shape[0]), dtype=torch.float32, device=value.device)
        tried[:-1] = (amax * inverses).clamp_(min=SMALLEST_SCALE).mul_(sign).bfloat16()
        errors = torch.empty_like(tried)
        # In units of amax the squares of scales neither overflow nor vanish.
        for scale, error in zip(tried[:-1], errors, strict=False):
            self._round(groups, scale)
            torch.mul(squared_distance(rounded, scaled), (scale / amax).square_(), out=error)
        best = least(errors[:-1].clone())
        tried[-1] = self._least_squares(groups, tried.gather(0, best.long().unsqueeze(0))[0])
        self._round(groups, tried[-1])
        torch.mul(squared_distance(rounded, scaled), (tried[-1] / amax).square_(), out=errors[-1])
        chosen = tried.gather(0, least(errors).long().unsqueeze(0))[0]
        return torch.div(value, chosen, out=scaled).round_().clamp_(-8, 7).add_(8).to(torch.int32), chosen.bfloat16()

    @staticmethod
    def _round(groups: GroupChunk, scale: Tensor) -> None:
        """value / scale in a, its codes (-8 to 7) in b."""
        torch.mul(groups.value, scale.reciprocal(), out=groups.a)
        torch.round(groups.a, out=groups.b).clamp_(-8, 7)

    def _least_squares(self, groups: GroupChunk, scale: Tensor) -> Tensor:
        """The bfloat16 scale that fits the codes of this scale best: sum(w q) / sum(q q); the given scale where all codes are 0."""
        self._round(groups, scale)
        above, below = columns(groups.a.mul_(groups.b)), columns(groups.b.square_())
        return torch.where(above > 0, scale * (above / below), scale).bfloat16()
