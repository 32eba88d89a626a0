"""How far a product may lie from another that adds in another order: what float32 allows, whatever the machine's kernels do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

OUTPUT_ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def assert_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """`got` [..., N] is `x` [..., K] times `weight` [N, K] plus `bias` [N], added in float32 in any order and then rounded to its dtype.

    The bound is the textbook one of a sum of K products: (K + 1) times half a unit of float32 times the sum of their magnitudes.
    """
    exact = linear(x.double(), weight.double(), None if bias is None else bias.double())
    size = linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
    bound = (weight.shape[-1] + 1) * 2.0**-24 * size
    bound += OUTPUT_ROUNDING[got.dtype] * (exact.abs() + bound)
    assert got.shape == exact.shape
    over = (got.double() - exact).abs() - bound
    assert (over <= 0).all(), f"{int((over > 0).sum())} of {over.numel()} are off, by {over.max():.3g} more than {got.dtype} allows"


def assert_near(got: Tensor, expected: Tensor, share: float = 1e-4) -> None:
    """No number of `got` differs from `expected` by more than `share` of the largest magnitude there is."""
    assert got.shape == expected.shape
    off = (got.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert off <= share, f"{off:.3g} of the largest magnitude, allowed {share:.3g}"
