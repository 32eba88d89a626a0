from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workers.quantization.formats import Format
from workers.stream.formats import amax, global_scale, quantizer

FORMATS = [Format("nvfp4"), Format("mxfp4"), Format("int4", 32), Format("int4", 128), Format("nf4", 64), Format("fp8"), Format("fp8_block")]


@pytest.fixture
def as_in_vllm() -> Iterator[None]:
    """vLLM loads weights with the model's dtype as torch's default (set_default_torch_dtype in base_loader.py)."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def made(form: Format, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    shared = {"global_scale": global_scale(amax(weight))} if form.name == "nvfp4" else {}
    parts = quantizer(form).quantize(weight, **shared)
    return parts, quantizer(form).dequantize(parts, torch.float32)


@pytest.fixture
def plain() -> dict[Format, tuple[dict[str, torch.Tensor], torch.Tensor]]:
    return {form: made(form, weights()) for form in FORMATS}


def weights() -> torch.Tensor:
    return torch.randn(576, 1536, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize("form", FORMATS, ids=[form.spelling for form in FORMATS])
def test_torchs_default_dtype_changes_nothing(form, plain, as_in_vllm):
    parts, back = made(form, weights())
    assert torch.equal(back, plain[form][1])
    assert back.dtype is torch.float32
    for suffix, part in parts.items():
        assert torch.equal(part.view(torch.uint8), plain[form][0][suffix].view(torch.uint8)), suffix
