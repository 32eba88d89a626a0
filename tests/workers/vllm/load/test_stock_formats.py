"""What vLLM's own library, compressed-tensors, reads out of our codes and packs from the same ones; vLLM's arithmetic of activations."""

from __future__ import annotations

import pytest
import torch

from tests.support.late import Late
from tests.workers.load.weights import distribution
from workers.load.formats import quantizer
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import Format

N, K = 37, 384


nvfp4 = Late("compressed_tensors.compressors.nvfp4.helpers")
int4 = Late("compressed_tensors.compressors.pack_quantized.helpers")
emulation = Late("vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils")


@pytest.mark.parametrize("spelling", ["nvfp4", "mxfp4"])
def test_e2m1(spelling: str) -> None:
    form = quantizer(Format.parse(spelling))
    parts = form.quantize(distribution("gauss", N, K))
    value = nvfp4.unpack_fp4_from_uint8(parts["weight_packed"], N, K, torch.float32)
    if spelling == "nvfp4":
        scale = parts["weight_scale"].float() / parts["weight_global_scale"]
    else:
        scale = torch.exp2(parts["weight_scale"].float() - 127)
    assert torch.equal(form.dequantize(parts, torch.float32), value * scale.repeat_interleave(form.group_size or 1, 1))
    assert torch.equal(parts["weight_packed"], nvfp4.pack_fp4_to_uint8(value))


def test_int4() -> None:
    form = quantizer(Format("int4", 64))
    parts = form.quantize(distribution("t5", N, K))
    assert parts["weight_shape"].tolist() == [N, K]
    code = int4.unpack_from_int32(parts["weight_packed"], 4, torch.Size(parts["weight_shape"].tolist()))
    value = code.float() * parts["weight_scale"].float().repeat_interleave(64, 1)
    assert torch.equal(form.dequantize(parts, torch.float32), value)
    assert torch.equal(parts["weight_packed"], int4.pack_to_int32(code.to(torch.int8), 4))


def test_activations() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 4, 64).unsqueeze(1)
    for divisor in (0.25, 1.0, 530.7):
        made = rounded_activations(x, torch.tensor(divisor))
        torch.testing.assert_close(made, emulation.ref_nvfp4_quant_dequant(x, torch.tensor(divisor), 16), rtol=1e-6, atol=0)
