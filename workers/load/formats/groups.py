"""Quantizes in groups of columns that share a scale, chunk by chunk on a CPU. It never chooses a scale."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from workers.load.formats.base import Quantizer, chunk_elements, windows

# The column of eight that each nibble of a word holds, the highest nibble first: where the even column of a byte has the low nibble, and
# where it has the high one.
PLAIN = (7, 6, 5, 4, 3, 2, 1, 0)
SWAPPED = (6, 7, 4, 5, 2, 3, 0, 1)


class GroupChunk(NamedTuple):
    """One chunk, float32 [G, B]: row i holds the i-th element of each of B groups, so that a value per group broadcasts over whole rows.

    value is the weight; a to d are uninitialised memory of its shape.
    """

    value: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor


class GroupQuantizer(Quantizer):
    group_size: int
    order = PLAIN

    @abstractmethod
    def _encode(self, groups: GroupChunk) -> tuple[Tensor, Tensor]:
        """(codes int32 [G, B], scales as they are stored [B]) of a chunk; overwrites all of it."""

    def _fill_matrix(self, weight: Tensor, words: Tensor, scale: Tensor, divisor: Tensor | None = None) -> None:
        """Quantizes [N, K], times divisor, into words (int32 [N, K/8], eight codes each) and scale [N, K/G]."""
        size = self.group_size
        elements = min(weight.numel(), chunk_elements(weight.device))
        scratch = torch.empty((5, elements), dtype=torch.float32, device=weight.device)
        for rows, columns in windows(weight.shape[0], weight.shape[1], 1, size, weight.device):
            chunk = weight[rows, columns]
            height, count = chunk.shape[0], chunk.numel()
            groups = GroupChunk(*(part[:count].view(size, -1) for part in scratch))
            groups.value.copy_(chunk.reshape(-1, size).t())
            if divisor is not None:
                groups.value.mul_(divisor)
            codes, chosen = self._encode(groups)
            scale[rows, columns.start // size : columns.stop // size] = chosen.view(height, -1)
            words[rows, columns.start // 8 : columns.stop // 8] = pack(codes, self.order).view(height, -1)


def pack(codes: Tensor, order: tuple[int, ...] = PLAIN) -> Tensor:
    """Codes (int32 [G, B]) -> int32 [B, G/8]: eight codes a word, in this order of columns. Overwrites the codes."""
    size, blocks = codes.shape
    octets = codes.view(size // 8, 8, blocks)
    words = octets[:, order[0]]
    for column in order[1:]:
        words.bitwise_left_shift_(4).bitwise_or_(octets[:, column])
    return words.t().contiguous()
