"""Activations in NVFP4 against the arithmetic in numpy (vllm/test_stock_formats.py: against vLLM's own reference)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.load.reference import E2M1, E4M3, encode_e2m1, encode_e4m3
from workers.load.formats.nvfp4 import rounded_activations


def plain(x: np.ndarray, divisor: float) -> np.ndarray:
    """float32 [N, K], in float32 as the kernels compute it."""
    groups = x.reshape(len(x), -1, 16)
    largest = np.abs(groups).max(-1, keepdims=True)
    scaled = np.minimum(largest * np.float32(1 / 6) * np.float32(divisor), np.float32(448))
    scale = E4M3[encode_e4m3(scaled.astype(np.float64))].astype(np.float32)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(divisor) / scale)
    value = E2M1[encode_e2m1((groups * inverse).astype(np.float64))].astype(np.float32)
    return (value * (scale / np.float32(divisor))).reshape(x.shape)


@given(st.integers(0, 2**32 - 1), st.integers(-20, 20), st.sampled_from([(0, 0), (-4, 4), (-20, 12)]))
@settings(max_examples=60, deadline=None)
def test_activations_are_those_of_the_arithmetic_in_numpy(seed: int, power: int, spread: tuple[int, int]) -> None:
    random = np.random.default_rng(seed)
    x = (random.standard_normal((5, 64)) * 2.0 ** random.uniform(*spread, size=(5, 64))).astype(np.float32)
    made = rounded_activations(torch.from_numpy(x), torch.tensor(2.0**power)).numpy()
    assert np.array_equal(made, plain(x, 2.0**power))


def test_the_largest_activations_saturate_and_the_smallest_are_zero() -> None:
    x = torch.tensor([[10_000.0] + [0.0] * 15, [1e-6] * 16, [0.0] * 16])
    made = rounded_activations(x, torch.tensor(1.0))
    assert made[0, 0] == 448 * 6
    assert not made[1:].any()
