"""What vLLM's own library, compressed-tensors, reads out of our codes, and what it packs from the same ones."""

from __future__ import annotations

import warnings
from statistics import NormalDist

import pytest
import torch

from tests.workers.stream.weights import distribution
from workers.quantization.recipe import Format
from workers.stream.formats import quantizer
from workers.stream.formats.nf4 import LEVELS

with warnings.catch_warnings():
    # What it and torch deprecate among themselves is not ours.
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

N, K = 37, 384


@pytest.mark.parametrize("spelling", ["nvfp4", "mxfp4"])
def test_e2m1(spelling: str) -> None:
    form = quantizer(Format.parse(spelling))
    parts = form.quantize(distribution("gauss", N, K))
    value = unpack_fp4_from_uint8(parts["weight_packed"], N, K, torch.float32)
    if spelling == "nvfp4":
        scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    else:
        scale = torch.exp2(parts["weight_scale"].float() - 127)
    assert torch.equal(form.dequantize(parts, torch.float32), value * scale.repeat_interleave(form.group_size or 1, 1))
    assert torch.equal(parts["weight_packed"], pack_fp4_to_uint8(value))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4(group: int) -> None:
    form = quantizer(Format("int4", group))
    parts = form.quantize(distribution("t5", N, K))
    assert parts["weight_shape"].tolist() == [N, K]
    code = unpack_from_int32(parts["weight_packed"], 4, torch.Size(parts["weight_shape"].tolist()))
    value = code.float() * parts["weight_scale"].float().repeat_interleave(group, 1)
    assert torch.equal(form.dequantize(parts, torch.float32), value)
    assert torch.equal(parts["weight_packed"], pack_to_int32(code.to(torch.int8), 4))


def test_the_levels_of_nf4_are_quantiles_of_a_normal_distribution() -> None:
    """Eight steps above zero and seven below it, between the middle and the quantile whose tail holds half a step (1/30 and 1/32)."""
    quantile, tail = NormalDist().inv_cdf, 1 - (1 / 30 + 1 / 32) / 2
    above = [quantile(tail + (0.5 - tail) * step / 8) for step in range(8)]
    below = [-quantile(tail + (0.5 - tail) * step / 7) for step in range(7)]
    quantiles = [each / above[0] for each in (*below, 0.0, *reversed(above))]
    assert list(LEVELS) == pytest.approx(quantiles, abs=1e-6)
