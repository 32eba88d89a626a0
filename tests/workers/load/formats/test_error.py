"""How much a format loses: the bars, and that no scale would have been better than the one that was chosen."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch

from tests.workers.load import reference, weights
from workers.load.formats import quantizer
from workers.load.formats.nf4 import LEVELS
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import ERRORS
from workers.quantization.recipe import Format


def squared_error(spelling: str, weight: torch.Tensor, size: int) -> np.ndarray:
    """Of each group, float64."""
    form = quantizer(Format.parse(spelling))
    made = form.dequantize(form.quantize(weight), torch.float32).double()
    return (made - weight.double()).square().view(-1, size).sum(1).numpy()


def relative_error(spelling: str) -> float:
    weight = weights.distribution("gauss", 512, 1024)
    error = squared_error(spelling, weight, weight.numel())[0]
    return float((error / float(weight.double().square().sum())) ** 0.5)


def product_error() -> float:
    """Of Gaussian activations times Gaussian weights, both in NVFP4."""
    weight, x = weights.distribution("gauss"), torch.randn(256, 4096, generator=torch.Generator().manual_seed(1))
    x = x[:, : weight.shape[-1]]
    form = quantizer(Format("nvfp4"))
    made = rounded_activations(x, torch.tensor(256.0)) @ form.dequantize(form.quantize(weight), torch.float32).T
    meant = x @ weight.float().T
    return float((made - meant).norm() / meant.norm())


@pytest.mark.parametrize("spelling", ERRORS)
def test_the_error_that_ranks_a_format_is_the_measured_one(spelling: str) -> None:
    error = product_error() if Format.parse(spelling).rounds_activations else relative_error(spelling)
    assert ERRORS[spelling] == pytest.approx(error, rel=0.005), "ERRORS of workers/quantization/formats.py"


# Tails as heavy as these are where a scale is hardest to choose; what a normal distribution costs, ERRORS says to half a percent.
HEAVY = "t5"


def test_nvfp4_has_the_best_of_all_normal_scales() -> None:
    weight = weights.distribution(HEAVY, 32, 1024)
    divisor = float(quantizer(Format("nvfp4")).quantize(weight)["weight_global_scale"])
    groups = weight.double().view(-1, 16).numpy()
    best = reference.least_error(groups, reference.E4M3[8:0x7F] / divisor, reference.encode_e2m1, reference.E2M1)
    found = squared_error("nvfp4", weight, 16)
    assert np.all(found >= best * (1 - 1e-9))
    assert found.sum() <= best.sum() * (1 + 5e-4)


def test_mxfp4_has_the_best_power_of_two() -> None:
    weight = weights.distribution(HEAVY, 32, 1024)
    groups = weight.double().view(-1, 32).numpy()
    best = reference.least_error(groups, 2.0 ** np.arange(-24, 4), reference.encode_e2m1, reference.E2M1)
    assert np.allclose(squared_error("mxfp4", weight, 32), best, rtol=1e-5)


def test_int4_is_near_the_best_of_160_scales() -> None:
    weight = weights.distribution(HEAVY, 32, 1024)
    groups = weight.double().view(-1, 32)
    tried = [sign * groups.abs().amax(1) / divisor for divisor in np.arange(6.8, 14.8, 0.1) for sign in (1, -1)]
    scales = torch.stack(tried).bfloat16().double().numpy()
    best = reference.least_error(groups.numpy(), scales, reference.encode_int4, np.arange(-8.0, 8.0))
    assert squared_error("int4-g32", weight, 32).sum() <= best.sum() * 1.015


def test_nf4_is_near_the_best_of_120_scales() -> None:
    weight = weights.distribution(HEAVY, 32, 1024)
    groups = weight.double().view(-1, 32)
    tried = [sign * groups.abs().amax(1) * factor for factor in np.arange(0.5, 1.1, 0.01) for sign in (1, -1)]
    scales = torch.stack(tried).bfloat16().double().numpy()
    best = reference.least_error(groups.numpy(), scales, reference.encode_nf4, reference.NF4.astype(np.float64))
    assert squared_error("nf4-g32", weight, 32).sum() <= best.sum() * 1.06


@pytest.mark.parametrize("clipped", [True, False])
def test_mxfp4_takes_the_exponent_below_where_clipping_one_value_saves_the_others(clipped: bool) -> None:
    weight = torch.full((1, 32), 0.25 if clipped else 0.5)
    weight[0, 0] = 4.0
    parts = quantizer(Format("mxfp4")).quantize(weight)
    # 4 is 4 * 2**0; with 2**-1 it is clipped to 3, and each 0.25 is met.
    assert int(parts["weight_scale"]) - 127 == (-1 if clipped else 0)


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """Eight steps above zero and seven below it, between the middle and the quantile whose tail holds half a step (1/30 and 1/32)."""
    quantile, tail = NormalDist().inv_cdf, 1 - (1 / 30 + 1 / 32) / 2
    above = [quantile(tail + (0.5 - tail) * step / 8) for step in range(8)]
    below = [-quantile(tail + (0.5 - tail) * step / 7) for step in range(7)]
    quantiles = [each / above[0] for each in (*below, 0.0, *reversed(above))]
    assert list(LEVELS) == pytest.approx(quantiles, abs=1e-6)
