"""Quantizes in groups of columns that share a scale: searches the scale with the least error, and packs the codes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from workers.load.formats.base import SMALLEST_SCALE, Parts, Quantizer, row_slices

Nearest = Callable[[Tensor], Tensor]


class GroupQuantizer(Quantizer):
    """A format in which columns share a scale.

    levels: the value of each code.
    even_shift: of the even column's code in its byte; the odd column has the other half.
    """

    levels: tuple[float, ...]
    even_shift = 0

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @abstractmethod
    def _encode(self, groups: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
        """(codes uint8 [G, B], scales as they are stored [B]) of groups float32 [G, B]: each column is one group.

        parts: those of the matrix, where they hold for all of its groups.
        """

    @abstractmethod
    def _scale(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The scale of each group, float32 [..., N, K/G]."""

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale = parts["weight_packed"].view(torch.uint8), self._scale(parts)
        codes = torch.stack((packed >> self.even_shift, packed >> 4 - self.even_shift), dim=-1).bitwise_and_(15)
        table = torch.tensor(self.levels, dtype=torch.float32, device=packed.device).unsqueeze(1)
        value = torch.nn.functional.embedding(codes.int(), table).view(*scale.shape, -1)
        return value.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)

    def _fill(self, weight: Tensor, out: Parts) -> None:
        for index, matrix in enumerate(weight):
            parts = {suffix: part[index] for suffix, part in out.items()}
            packed, scale = parts["weight_packed"].view(torch.uint8), parts["weight_scale"]
            for rows in row_slices(matrix):
                groups = matrix[rows].reshape(-1, self.group_size).t().float().contiguous()
                codes, chosen = self._encode(groups, parts)
                scale[rows] = chosen.view(scale[rows].shape)
                packed[rows] = (codes[0::2] << self.even_shift | codes[1::2] << 4 - self.even_shift).t().reshape(packed[rows].shape)


def best_scale(groups: Tensor, scales: Iterable[Tensor], nearest: Nearest) -> Tensor:
    """For each group of [G, B] the scale, of those [B], under which its nearest values are closest to it; the first of equal ones."""
    # In units of the largest magnitude the squares neither overflow nor vanish.
    largest = groups.abs().amax(0).clamp_(min=SMALLEST_SCALE)
    tried = torch.stack(list(scales))
    errors = torch.empty_like(tried)
    for scale, error in zip(tried, errors, strict=True):
        scaled = groups / scale
        error.copy_((nearest(scaled) - scaled).square_().sum(0) * (scale / largest).square())
    return tried.gather(0, errors.argmin(0, keepdim=True))[0]


def searched_scale(groups: Tensor, scales: Iterable[Tensor], nearest: Nearest) -> Tensor:
    """Like `best_scale`, for bfloat16 scales (as float32), with one more: that which fits the values under the best by least squares."""
    scale = best_scale(groups, (as_bf16(each) for each in scales), nearest)
    scaled = groups / scale
    value = nearest(scaled)
    fitted = as_bf16(scale * (scaled.mul_(value).sum(0) / value.square_().sum(0)).nan_to_num_(1.0))
    return best_scale(groups, (scale, fitted), nearest)


def as_bf16(scale: Tensor) -> Tensor:
    """Scales of either sign as a bfloat16 stores them, none a subnormal."""
    return scale.abs().clamp_(min=SMALLEST_SCALE).copysign_(scale).bfloat16().float()
