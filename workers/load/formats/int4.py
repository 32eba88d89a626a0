"""INT4, symmetric: codes -8 to 7 and a bfloat16 scale for a group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import SMALLEST_SCALE, Parts
from workers.load.formats.groups import GroupQuantizer, searched_scale

# Scales tried: amax divided by these; the winner is then refined once by least squares. There is one code more below zero than above, so
# the sign of a scale is chosen to let the largest magnitude fall on the side of -8. On Gaussian weights in groups of 32 this leaves a
# relative error of .0814; the best of 80 scales of either sign .0810, of positive sign .0861 (test_error.py).
DIVISORS = (7.2, 7.6, 8.0, 8.5, 9.2)


class Int4Quantizer(GroupQuantizer):
    levels = tuple(float(value) for value in range(-8, 8))

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {
            "weight_packed": (torch.int32, (n, k // 8)),
            "weight_scale": (torch.bfloat16, (n, k // self.group_size)),
            "weight_shape": (torch.int64, (2,)),
        }

    def _scale(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight_scale"].float()

    def _fill_shared(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for column, size in enumerate(weight.shape[-2:]):
            out["weight_shape"][:, column].fill_(size)

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        kernels.int4(weight, out["weight_packed"], out["weight_scale"], self.group_size, DIVISORS, SMALLEST_SCALE)

    def _encode(self, groups: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        high, low = groups.amax(0), groups.amin(0)
        largest = torch.where(high > -low, -high, -low)
        scale = searched_scale(groups, (largest / divisor for divisor in DIVISORS), _nearest)
        return (_nearest(groups / scale) + 8).to(torch.uint8), scale.bfloat16()


def _nearest(scaled: Tensor) -> Tensor:
    return scaled.round().clamp_(-8, 7)
