"""E2M1, the 4-bit float: rounding and codes. It never chooses a scale.

Code = sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0, section 5.3.3). In a byte the even column has the
low nibble; eight codes of an int32, the first in the lowest nibble, are the same bytes on a little-endian machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.load.formats.sums import squared_distance

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6.0
_EXPONENT = 0x7F800000
# With e = floor(log2(max(x, 1))), the neighbours of x are 2**(e-1) apart, and so are those float32 that begin at 2**(e+22): in a sum of
# both the adder itself rounds to nearest even.
_SHIFT = 2.0**22
# Three more, six units in the last place, let exponent and low bits of that sum add up to the code (mod 8); see `encode`.
_CODE_SHIFT = 2.0**22 + 3


def encode(value: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Codes (int32, 0 to 15) of float32 values as cvt.rn.satfinite.e2m1x2 gives them: to nearest even, saturating, a zero keeps its sign.

    a, b: float32 of value's shape. All three are overwritten; the codes lie in a.
    """
    torch.abs(value, out=a).clamp_(max=LARGEST)
    torch.bitwise_and(a.view(torch.int32), _EXPONENT, out=b.view(torch.int32))
    b.clamp_(min=1.0)
    code = torch.add(a, b, alpha=_CODE_SHIFT, out=a).view(torch.int32)
    # Bits 22 and up: 298 + 2e. Low bits: 6 + steps of 2**(e-1). A binade begins two codes after the last one, and 304 is 0 (mod 8).
    code.add_(torch.bitwise_right_shift(code, 22, out=b.view(torch.int32))).bitwise_and_(7)
    return code.bitwise_or_(value.view(torch.int32).bitwise_right_shift_(28).bitwise_and_(8))


def rounded(value: Tensor) -> Tensor:
    """The E2M1 values (float32) nearest to float32 values: to nearest even, saturating."""
    magnitude = value.abs().clamp_(max=LARGEST)
    power = magnitude.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_(min=1.0)
    return torch.add(magnitude, power, alpha=_SHIFT).sub_(power, alpha=_SHIFT).copysign_(value)


def squared_error(magnitude: Tensor, a: Tensor, b: Tensor, *, saturate: bool) -> Tensor:
    """Sum over dim 0 of the squared distances between magnitudes (float32 [G, B], >= 0) and their nearest E2M1 values; overwrites a and b.

    saturate: magnitudes of 7 and more may occur. Both neighbours of a tie are equally far, so which one is taken does not matter here, and
    max(x, 1) can stand for the power of two below it.
    """
    torch.clamp(magnitude, min=1.0, out=a)
    torch.add(magnitude, a, alpha=_SHIFT, out=b).sub_(a, alpha=_SHIFT)
    if saturate:
        b.clamp_(max=LARGEST)
    return squared_distance(b, magnitude)


def decode(packed: Tensor) -> Tensor:
    """Values (float32 [..., K]) of packed codes (uint8 [..., K/2])."""
    signed = (*VALUES, *(-value for value in VALUES))
    table = torch.tensor([(signed[byte & 15], signed[byte >> 4]) for byte in range(256)], dtype=torch.float32, device=packed.device)
    return torch.nn.functional.embedding(packed.int(), table).flatten(-2)
