"""Sums the errors of groups in one fixed order, and finds the scale with the least. It never rounds to a format.

Two scales often have exactly the same error. torch's own sum adds in an order that depends on a tensor's shape, so the choice between
them would depend on how a weight was cut. Here neighbours are added within eight columns, as a GPU's thread can do alone, and then the
halves of what is left, as a warp does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def squared_distance(value: Tensor, other: Tensor) -> Tensor:
    """Sum over dim 0 of (value - other)**2, float32 [G, B] -> [B]; overwrites value."""
    # One pass instead of two: the element-wise loss is the fused difference and square.
    return columns(torch.ops.aten.mse_loss.out(value, other, 0, out=value))


def columns(value: Tensor) -> Tensor:
    """Sum over dim 0, [G, B] -> [B]; G is a power of two, 8 or more. Overwrites value."""
    octets = value.view(-1, 8, value.shape[1])
    quads = octets[:, 0::2].add_(octets[:, 1::2])
    pairs = quads[:, 0::2].add_(quads[:, 1::2])
    left = pairs[:, 0].add_(pairs[:, 1])
    while (half := left.shape[0] // 2) > 0:
        left = left[:half].add_(left[half:])
    return left[0]


def least(errors: Tensor) -> Tensor:
    """For each group the number (int32 [B]) of the least of its errors (float32 [S, B], >= 0, S at most 8), compared to 20 bits.

    The first of equal errors counts. Overwrites the errors. Floats >= 0 are ordered like their bits, so the number is put into the low bits
    and one minimum finds it; a comparison and a selection would cost as much as rounding a whole group.
    """
    numbers = torch.arange(errors.shape[0], dtype=torch.int32, device=errors.device).unsqueeze(1)
    return errors.view(torch.int32).bitwise_and_(-8).bitwise_or_(numbers).amin(0).bitwise_and_(7)
