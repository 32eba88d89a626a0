"""E2M1, the 4-bit float: rounding and codes.

Code = sign << 3 | index into 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP Microscaling Formats v1.0, section 5.3.3). In a byte the even column has the
low nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*MAGNITUDES, *(-value for value in MAGNITUDES))
LARGEST = 6.0
_EXPONENT = 0x7F800000
# The neighbours of x are 2**(e-1) apart, with e = floor(log2(max(x, 1))), and so are those float32 that begin at 2**(e+22): in a sum of
# both the adder itself rounds to nearest even.
_SHIFT = 2.0**22


def rounded(value: Tensor) -> Tensor:
    """The E2M1 values (float32) nearest to float32 values: to nearest even, saturating; a zero keeps its sign."""
    magnitude = value.abs().clamp_(max=LARGEST)
    power = magnitude.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32).clamp_(min=1.0)
    return torch.add(magnitude, power, alpha=_SHIFT).sub_(power, alpha=_SHIFT).copysign_(value)


def encode(value: Tensor) -> Tensor:
    """Codes (uint8, 0 to 15) of float32 values as cvt.rn.satfinite.e2m1x2 gives them."""
    nearest = rounded(value)
    magnitude = nearest.abs()
    # Three lines through the indices of 0 to 2, of 2 to 4, and of 4 and 6.
    index = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude / 2 + 4)
    return index.to(torch.uint8) | torch.signbit(nearest).to(torch.uint8) << 3
