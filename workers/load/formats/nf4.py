"""NF4: a table of 16 levels and a bfloat16 scale for a group of columns.

The levels are those of QLoRA (arXiv 2305.14314, appendix E): quantiles of a normal distribution, scaled to [-1, 1], with an exact zero.
In a byte the even column has the high nibble, as bitsandbytes stores it. Scales are bfloat16: float32 scales leave the same error to
four digits and cost 2 bytes a group more.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from workers.load.formats.base import SMALLEST_SCALE, Parts
from workers.load.formats.groups import GroupQuantizer, searched_scale

# float32 each; the code of a level is its place.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
_TABLE = torch.tensor(LEVELS, dtype=torch.float32)
# Between neighbours; exact in float32, in which Triton computes them too.
MIDDLES = tuple(((_TABLE[1:] + _TABLE[:-1]) / 2).tolist())
# Scales tried: amax times these. Each is tried with both signs, because the levels are no mirror image of themselves; the winner is then
# refined once by least squares. On Gaussian weights in groups of 64 this leaves a relative error of .0842; amax alone .0920, one sign
# .0860, sixteen scales .0836.
FACTORS = (1.0, 0.91, 0.82, 0.73)


class Nf4Quantizer(GroupQuantizer):
    levels = LEVELS
    even_shift = 4

    def parts(self, n: int, k: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.bfloat16, (n, k // self.group_size))}

    def _scale(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["weight_scale"].float()

    def _launch(self, kernels: ModuleType, weight: Tensor, out: Parts) -> None:
        words = out["weight_packed"].view(torch.int32)
        kernels.nf4(weight, words, out["weight_scale"], self.group_size, LEVELS, FACTORS, SMALLEST_SCALE)

    def _encode(self, groups: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        largest = groups.abs().amax(0)
        scale = searched_scale(groups, (largest * factor * sign for factor in FACTORS for sign in (1, -1)), _nearest)
        return _codes(groups / scale), scale.bfloat16()


def _codes(scaled: Tensor) -> Tensor:
    """Codes (uint8) of the levels nearest to these values: the number of middles between neighbours that a value is above."""
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    # Comparisons are vectorised; torch.bucketize takes three times as long.
    for middle in MIDDLES:
        codes += scaled > middle
    return codes


def _nearest(scaled: Tensor) -> Tensor:
    table = torch.tensor(LEVELS, dtype=torch.float32, device=scaled.device)
    return torch.nn.functional.embedding(_codes(scaled).int(), table.unsqueeze(1)).squeeze(-1)
