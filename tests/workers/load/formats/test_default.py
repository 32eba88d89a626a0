from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from workers.load.formats import amax, global_scale, quantizer
from workers.quantization.formats import Format

FORMATS = [Format("nvfp4"), Format("mxfp4"), Format("int4", 32), Format("nf4", 64), Format("fp8"), Format("fp8_block")]


def made(form: Format) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weight = torch.randn(144, 384, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(torch.bfloat16)
    shared = {"global_scale": global_scale(amax(weight))} if form.name == "nvfp4" else {}
    parts = quantizer(form).quantize(weight, **shared)
    return parts, quantizer(form).dequantize(parts, torch.float32)


@pytest.fixture
def as_in_vllm() -> Iterator[Callable[[], None]]:
    """vLLM loads weights with the model's dtype as torch's default (set_default_torch_dtype in base_loader.py)."""
    yield lambda: torch.set_default_dtype(torch.bfloat16)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("form", FORMATS, ids=[form.spelling for form in FORMATS])
def test_torchs_default_dtype_changes_nothing(form: Format, as_in_vllm: Callable[[], None]) -> None:
    plain_parts, plain_values = made(form)
    as_in_vllm()
    parts, values = made(form)
    assert torch.equal(values, plain_values)
    assert values.dtype is torch.float32
    for suffix, part in parts.items():
        assert torch.equal(part.view(torch.uint8), plain_parts[suffix].view(torch.uint8)), suffix
