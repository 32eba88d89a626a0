"""Every format bit for bit against the reference in numpy: what the parts stand for, and which codes a weight gets under its scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.load import reference, weights
from workers.load.formats import quantizer
from workers.quantization.formats import SPELLINGS, Format

QUANTIZED = tuple(spelling for spelling in SPELLINGS if spelling != "bf16")
# Each way of quantizing once, in the smallest groups that it has: other sizes are `test_any_weight`'s.
KINDS = ("nvfp4", "nvfp4-a4", "mxfp4", "int4-g32", "nf4-g32", "fp8", "fp8-block")
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(spelling: str, weight: Tensor) -> None:
    """One weight [N, K]."""
    parsed = Format.parse(spelling)
    form = quantizer(parsed)
    kept = weight.clone()
    parts = form.quantize(weight)
    assert torch.equal(weight.view(torch.uint8), kept.view(torch.uint8)), "a weight is only read"
    assert {suffix: (part.dtype, tuple(part.shape)) for suffix, part in parts.items()} == form.parts(*weight.shape)
    bits = weights.bits(parts)
    group = parsed.group_size or 0
    expected = reference.dequantize(parsed.weight_name, bits, group)
    made = form.dequantize(parts, torch.float32).numpy()
    assert np.isfinite(made).all()
    assert np.array_equal(made.view(np.uint32), expected.view(np.uint32))
    meant = reference.codes(parsed.weight_name, weight.float().numpy(), bits, group)
    assert np.array_equal(reference.stored_codes(parsed.weight_name, bits), meant)
    half = form.dequantize(parts, torch.bfloat16)
    assert torch.equal(half, torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("spelling", KINDS)
def test_what_is_hard(spelling: str) -> None:
    """As a checkpoint stores it; the other types are `test_any_weight`'s."""
    for weight in weights.adversarial(torch.bfloat16).values():
        check(spelling, weight)


@pytest.mark.parametrize("spelling", QUANTIZED)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_weight(spelling: str, data: st.DataObject) -> None:
    size = Format.parse(spelling).group or 1
    n = data.draw(st.integers(1, 200), label="N")
    k = size * data.draw(st.integers(1, max(2, 300 // size)), label="groups")
    dtype = data.draw(st.sampled_from(TYPES))
    seed = data.draw(st.integers(0, 2**32 - 1))
    exponents = data.draw(st.sampled_from([(0, 0), (-3, 3), (-14, 4), (-30, 12)]), label="powers of two over the rows")
    random = np.random.default_rng(seed)
    weight = random.standard_normal((n, k)) * 2.0 ** random.uniform(*exponents, size=(n, 1))
    if data.draw(st.booleans(), label="few values, many ties"):
        weight = np.rint(weight * 4) / 4
    if data.draw(st.booleans(), label="holes"):
        weight[random.random((n, k)) < 0.5] = 0
    check(spelling, torch.from_numpy(np.clip(weight, -60000, 60000)).to(dtype))


@pytest.mark.parametrize("spelling", KINDS)
def test_a_batch_is_its_matrices(spelling: str) -> None:
    form = quantizer(Format.parse(spelling))
    batch = torch.stack([weights.distribution("gauss", 40, 256), weights.distribution("t5", 40, 256) * 8, torch.zeros(40, 256)])
    parts = form.quantize(batch.bfloat16().view(3, 1, 40, 256))
    for index in range(3):
        alone = form.quantize(batch[index].bfloat16())
        for suffix, part in alone.items():
            assert torch.equal(parts[suffix][index, 0].view(torch.uint8), part.view(torch.uint8))
    whole = form.dequantize(parts, torch.float32)
    assert whole.shape == (3, 1, 40, 256)
    assert torch.equal(whole[1, 0], form.dequantize(form.quantize(batch[1].bfloat16()), torch.float32))


@pytest.mark.parametrize("spelling", KINDS)
def test_strides_and_given_results(spelling: str) -> None:
    form = quantizer(Format.parse(spelling))
    stored = weights.distribution("laplace", 384, 512)
    for view in (stored.t(), stored[::3, 128:384], stored.view(2, 192, 512).transpose(0, 1)[7:9]):
        out = form.empty(view)
        made = form.quantize(view, out=out)
        expected = form.quantize(view.contiguous())
        for suffix, part in expected.items():
            assert made[suffix].data_ptr() == out[suffix].data_ptr()
            assert torch.equal(made[suffix].view(torch.uint8), part.view(torch.uint8))


@pytest.mark.parametrize("spelling", KINDS)
def test_a_weight_of_many_chunks_is_as_one(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut into rows, into columns, and into as little as one scale holds for."""
    form = quantizer(Format.parse(spelling))
    weight = weights.distribution("gauss", 140 if spelling == "fp8-block" else 12, 384)
    whole = form.quantize(weight)
    for elements in (384 * 5, 100, 32):
        monkeypatch.setattr("workers.load.formats.base.SLICE_ELEMENTS", elements)
        for suffix, part in form.quantize(weight).items():
            assert torch.equal(part.view(torch.uint8), whole[suffix].view(torch.uint8))
