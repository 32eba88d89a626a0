"""NF4: a table of 16 levels and a bfloat16 scale for a group of columns. It never packs for a kernel.

The levels are those of QLoRA (arXiv 2305.14314, appendix E): quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
In a byte the even column has the high nibble, as bitsandbytes stores it. Scales are bfloat16: float32 scales leave the same error to
four digits and cost 2 bytes a group more.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import Parts
from workers.load.formats.groups import SWAPPED, GroupChunk, GroupQuantizer
from workers.load.formats.sums import columns, least, squared_distance

# float32 each; the code of a level is its place.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# The middles between neighbours, exact in float32: a value above one has a higher code, and one on it the lower.
BOUNDARIES = tuple(((torch.tensor(LEVELS)[1:] + torch.tensor(LEVELS)[:-1]) / 2).tolist())
# Scales tried: amax times these. Each is tried with both signs, because the levels are no mirror image of themselves; the winner is then
# refined once by least squares. On Gaussian weights in groups of 64 this leaves a relative error of .0842; amax alone .0920, one sign
# .0860, sixteen scales .0836.
FACTORS = (1.0, 0.91, 0.82, 0.73)
SMALLEST_SCALE = 2.0**-126


class Nf4Quantizer(GroupQuantizer):
    order = SWAPPED

    def __init__(self, group_size: int = 64) -> None:
        self.group_size = group_size
        self.spelling = f"nf4-g{group_size}"

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.bfloat16, (n, k // self.group_size))}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed = parts["weight_packed"]
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)
        scale = parts["weight_scale"].float()
        value = torch.nn.functional.embedding(codes.int(), levels(packed.device).unsqueeze(1)).view(*scale.shape, -1)
        return value.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        for index, matrix in enumerate(weight):
            self._fill_matrix(matrix, out["weight_packed"][index].view(torch.int32), out["weight_scale"][index])

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts, global_scale: Tensor | None) -> None:
        words = out["weight_packed"].view(torch.int32)
        kernels.nf4(weight, words, out["weight_scale"], self.group_size, LEVELS, FACTORS, SMALLEST_SCALE)

    def _encode(self, groups: GroupChunk) -> tuple[Tensor, Tensor]:
        value, scaled, *_ = groups
        amax = torch.abs(value, out=scaled).amax(0).clamp_(min=SMALLEST_SCALE)
        scale_of = [(amax * factor).clamp_(min=SMALLEST_SCALE).bfloat16().float() for factor in FACTORS]
        tried = torch.stack([scale * sign for scale in scale_of for sign in (1.0, -1.0)])
        errors = torch.stack([self._error(groups, scale, amax) for scale in tried])
        best = least(errors.clone()).long().unsqueeze(0)
        scale, error = tried.gather(0, best)[0], errors.gather(0, best)[0]
        refined = self._least_squares(groups, scale)
        chosen = torch.where(self._error(groups, refined, amax) < error, refined, scale)
        return _codes(torch.div(value, chosen, out=scaled), groups.c, groups.d).to(torch.int32), chosen.bfloat16()

    @staticmethod
    def _round(groups: GroupChunk, scale: Tensor) -> None:
        """value / scale in a, its nearest levels in b."""
        torch.mul(groups.value, scale.reciprocal(), out=groups.a)
        codes = _codes(groups.a, groups.c, groups.d)
        # On all threads, unlike index_select; a few rows at a time, because an index has eight bytes.
        for row, level in zip(codes.split(8), groups.b.split(8), strict=True):
            torch.gather(levels(scale.device).expand(row.shape[0], len(LEVELS)), 1, row.to(torch.int64), out=level)

    def _error(self, groups: GroupChunk, scale: Tensor, amax: Tensor) -> Tensor:
        """Squared errors of the groups under these scales, in units of amax, where they neither overflow nor vanish."""
        self._round(groups, scale)
        return squared_distance(groups.b, groups.a) * (scale / amax).square_()

    def _least_squares(self, groups: GroupChunk, scale: Tensor) -> Tensor:
        """The bfloat16 scale that fits the codes of this scale best: sum(w q) / sum(q q); the given one where that is none or subnormal."""
        self._round(groups, scale)
        above, below = columns(groups.a.mul_(groups.b)), columns(groups.b.square_())
        refined = (scale * (above / below)).bfloat16().float()
        return torch.where((above > 0) & (refined.abs() >= SMALLEST_SCALE), refined, scale)


def _codes(scaled: Tensor, count: Tensor, above: Tensor) -> Tensor:
    """Codes (float32, 0 to 15) of the levels nearest to these values, in `count`; overwrites `above`.

    A comparison that writes float32, and an addition, are vectorised; torch.bucketize takes six times as long.
    """
    count.zero_()
    for boundary in BOUNDARIES:
        count.add_(torch.gt(scaled, boundary, out=above))
    return count


@functools.cache
def levels(device: torch.device) -> Tensor:
    """The table, float32 [16]."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)
