"""E2M1, the 4-bit float: rounding, codes and packing. It never chooses a scale.

Code = sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0, table 4). Eight codes make an int32, the first in
the lowest nibble; on a little-endian machine that is the byte order of compressed-tensors, even column in the low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
_EXPONENT = 0x7F800000


def step_magic(magnitude: Tensor, out: Tensor) -> Tensor:
    """2**e of each magnitude (float32, >= 0), at least 1: half of it is the distance of E2M1 neighbours there. Written to out (float32)."""
    torch.bitwise_and(magnitude.view(torch.int32), _EXPONENT, out=out.view(torch.int32))
    return out.clamp_(min=1.0)


# Adding 1.5 * 2**22 * 2**e leaves a float32 whose unit in the last place is 2**(e-1): the FPU itself rounds to nearest, ties to even.
MAGIC = 1.5 * 2**22


def round_(magnitude: Tensor, spare: Tensor) -> Tensor:
    """Rounds magnitudes (float32, 0 to 6) to E2M1 in place, to nearest, ties to even code; spare has the same shape and is overwritten."""
    step_magic(magnitude, spare)
    return magnitude.add_(spare, alpha=MAGIC).sub_(spare, alpha=MAGIC)


def encode(value: Tensor) -> Tensor:
    """Codes (int32, 0 to 15) of float32 values, as cvt.rn.satfinite.e2m1x2 rounds: to nearest even, saturating, the sign of a zero kept."""
    magnitude = value.abs().clamp_(max=LARGEST)
    step = step_magic(magnitude, torch.empty_like(magnitude))
    magnitude.add_(step, alpha=MAGIC)
    code = magnitude.view(torch.int32)
    # The low bits count steps; each binade above the first begins two codes later.
    code.bitwise_and_(0xF)
    step.view(torch.int32).bitwise_right_shift_(23).sub_(127).bitwise_left_shift_(1)
    code.add_(step.view(torch.int32))
    sign = step.view(torch.int32).copy_(value.view(torch.int32)).bitwise_right_shift_(28).bitwise_and_(8)
    return code.bitwise_or_(sign)


def pack(code: Tensor, out: Tensor) -> Tensor:
    """Packs codes (int32 [G, B], G columns of B blocks) into out (int32 [B, G/8])."""
    columns, blocks = code.shape
    octets = code.view(columns // 8, 8, blocks)
    words = octets[:, 7].clone()
    for nibble in range(6, -1, -1):
        words.bitwise_left_shift_(4).bitwise_or_(octets[:, nibble])
    return out.copy_(words.t())


def decode(packed: Tensor) -> Tensor:
    """Values (float32 [..., K]) of packed codes (uint8 [..., K/2])."""
    signed = [*VALUES, *(-value for value in VALUES)]
    table = torch.tensor([[signed[byte & 15], signed[byte >> 4]] for byte in range(256)], device=packed.device)
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)
