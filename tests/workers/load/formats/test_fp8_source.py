"""FP8 weights of a checkpoint, brought back: every kind of scale, any window of the weight, against the reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import CheckpointError
from tests.workers.load import reference
from workers.load.formats import quantizer
from workers.load.formats.fp8_source import dequantize_fp8, holds_codes, restated_fp8
from workers.quantization.formats import Format


def every_code(n: int, k: int) -> torch.Tensor:
    """float8_e4m3fn [n, k] of all codes but the two NaN."""
    code = torch.arange(n * k, dtype=torch.int64) * 37 % 254
    return (code + (code >= 0x7F)).to(torch.uint8).view(torch.float8_e4m3fn).view(n, k)


def expected(weight: torch.Tensor, factor: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    value = reference.E4M3[weight.view(torch.uint8).numpy()].astype(np.float32) * factor.astype(np.float32)
    return torch.from_numpy(value).to(dtype)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_window(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 300), label="N")
    k = data.draw(st.integers(2, 300), label="K")
    kind = data.draw(st.sampled_from(["tensor", "scalar", "channel", "column", "block"]))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    top, left = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    bottom, right = data.draw(st.integers(top + 1, n)), data.draw(st.integers(left + 1, k))
    blocks = (-(-n // 128), -(-k // 128))
    shape = {"tensor": (1,), "scalar": (), "channel": (n,), "column": (n, 1), "block": blocks}[kind]
    scale = torch.from_numpy(np.random.default_rng(n * 1000 + k).uniform(1e-3, 2, size=shape)).to(
        data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    )
    spread = scale.float().numpy()
    if kind == "block":
        spread = np.repeat(np.repeat(spread, 128, 0)[:n], 128, 1)[:, :k]
    elif kind != "scalar" and kind != "tensor":
        spread = spread.reshape(n, 1)
    weight = every_code(n, k)
    whole = expected(weight, np.broadcast_to(spread, (n, k)), dtype)
    made = dequantize_fp8(weight[top:bottom, left:right], scale, (n, k), (top, left), dtype=dtype)
    assert torch.equal(made, whole[top:bottom, left:right])
    assert made.dtype == dtype


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_layout_that_holds_the_codes_says_the_same_of_any_window(data: st.DataObject) -> None:
    """Of a window that begins with one of the layout's blocks."""
    form = data.draw(st.sampled_from([Format("fp8"), Format("fp8_block")]))
    n, k = data.draw(st.integers(2, 400), label="N"), data.draw(st.integers(2, 400), label="K")
    blocks = (-(-n // 128), -(-k // 128))
    shape = data.draw(st.sampled_from([(), (1,), (n,), (n, 1), blocks]))
    step = 128 if form.name == "fp8_block" else 1
    top = data.draw(st.integers(0, (n - 1) // step)) * step
    left = data.draw(st.integers(0, (k - 1) // 128)) * 128 if form.name == "fp8_block" else 0
    weight = every_code(n, k)
    scale = torch.from_numpy(np.random.default_rng(n * 1000 + k).uniform(1e-3, 2, size=shape)).float()
    if not holds_codes(form, shape, (n, k)):
        assert shape not in ((), (1,))
        return
    part = weight[top:, left:]
    parts = restated_fp8(part, scale, (n, k), form, (top, left))
    expected = quantizer(form).parts(*part.shape)
    assert {suffix: (one.dtype, tuple(one.shape)) for suffix, one in parts.items()} == expected
    assert torch.equal(parts["weight"].view(torch.uint8), part.contiguous().view(torch.uint8))
    whole = dequantize_fp8(part, scale, (n, k), (top, left), dtype=torch.float32)
    assert torch.equal(quantizer(form).dequantize(parts, torch.float32), whole)


def test_powers_of_two_as_scales() -> None:
    weight = every_code(130, 256)
    exponents = torch.tensor([[120, 127], [130, 110]], dtype=torch.uint8)
    factor = np.repeat(np.repeat(reference.E8M0[exponents.numpy()], 128, 0)[:130], 128, 1)
    made = dequantize_fp8(weight, exponents.view(torch.float8_e8m0fnu), (130, 256))
    assert torch.equal(made, expected(weight, factor, torch.bfloat16))


def test_chunks_and_a_given_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = every_code(300, 200), torch.rand(3, 2)
    whole = dequantize_fp8(weight, scale, (300, 200))
    monkeypatch.setattr("workers.load.formats.base.SLICE_ELEMENTS", 333)
    out = torch.empty(300, 200, dtype=torch.bfloat16)
    assert dequantize_fp8(weight, scale, (300, 200), out=out) is out
    assert torch.equal(out, whole)


@pytest.mark.parametrize("shape", [(2,), (3, 1), (2, 3)])
def test_a_scale_that_fits_nothing_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CheckpointError, match=r" 300x200 .*\[300, 1\], nor \[3, 2\]\."):
        dequantize_fp8(every_code(300, 200), torch.ones(shape), (300, 200))


@pytest.mark.parametrize("shape", [(), (300, 1), (3, 2)])
def test_several_at_once_are_each_as_it_would_be_alone(shape: tuple[int, ...]) -> None:
    weights = torch.stack(
        [
            every_code(300, 200),
            every_code(200, 300).view(300, 200),
            every_code(300, 200).view(torch.uint8).flip(0).view(torch.float8_e4m3fn),
        ]
    )
    scales = torch.rand(3, *shape) + 0.5
    part, origin = weights[:, 37:290, 10:200], (37, 10)
    made = dequantize_fp8(part, scales, (300, 200), origin)
    each = [dequantize_fp8(part[index], scales[index], (300, 200), origin) for index in range(3)]
    assert torch.equal(made.view(torch.int16), torch.stack(each).view(torch.int16))
