"""Quantized layers on vLLM's CPU backend: its own layers and weight loaders around our kernels, against products with decoded weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from sparkd.errors import CheckpointError
from tests.support.late import Late
from tests.workers.load.products import assert_product
from workers.load.formats import quantizer
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import Format
from workers.vllm.load import cpu_kernels

packed_layers = Late("workers.vllm.load.packed_layers")
layers = Late("vllm.model_executor.layers.linear")
compressed = Late("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
quant_utils = Late("vllm.model_executor.layers.quantization.utils.quant_utils")
embedding = Late("vllm.model_executor.layers.vocab_parallel_embedding")

# Those whose products are those of their weights, each in one group size.
FORMATS = [Format.parse(spelling) for spelling in ("nvfp4", "mxfp4", "int4-g32", "nf4-g64", "fp8", "fp8-block")]
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.spelling)


pytestmark = pytest.mark.usefixtures("one_rank")


def on_cpu(form: Format) -> Any:
    """A compressed-tensors configuration that gives every layer our scheme."""

    class OnCpu(compressed.CompressedTensorsConfig):  # type: ignore[misc]
        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            layer.scheme = packed_layers.PackedScheme(form)
            return compressed.CompressedTensorsLinearMethod(self)

    return OnCpu(target_scheme_map={}, ignore=[], quant_format="dense")


def quantized(form: Format, n: int, k: int, seed: int = 0, factor: float = 1.0) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a random weight, and what they mean."""
    weight = torch.randn((n, k), generator=torch.Generator().manual_seed(seed)) * factor
    made = quantizer(form)
    parts = made.quantize(weight)
    return parts, made.dequantize(parts, torch.float32)


def packed(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    weight = parts["weight"] if "weight" in parts else parts["weight_packed"]
    return weight, parts["weight_scale"], parts.get("weight_global_scale")


def load(layer: torch.nn.Module, parts: dict[str, Tensor], shard: Any = None) -> None:
    for name, tensor in parts.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))


def finish(layer: torch.nn.Module) -> torch.nn.Module:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@each_format
@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.bfloat16, (3,)), (torch.float16, (1,)), (torch.float32, (2, 20))], ids=["bfloat16", "float16", "float32"]
)
def test_a_product_is_that_of_the_dequantized_weights(form: Format, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of more rows than are dequantized at a time."""
    parts, meant = quantized(form, cpu_kernels.ROWS + 300, 256)
    x, bias = torch.randn(*shape, 256).to(dtype), torch.randn(len(meant)).to(dtype)
    got = torch.ops.sparkd.packed_linear(x, *packed(parts), bias, form.name)
    assert (got.dtype, got.shape) == (dtype, (*shape, len(meant)))
    assert_product(got, x, meant, bias)


def test_a_weight_is_not_dequantized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    monkeypatch.setattr("torch.nn.functional.linear", lambda x, weight: rows.append(len(weight)) or linear(x, weight))
    parts, meant = quantized(Format("nvfp4"), 3 * cpu_kernels.ROWS + 1, 32)
    x = torch.randn(1, 32)
    assert_product(torch.ops.sparkd.packed_linear(x, *packed(parts), None, "nvfp4"), x, meant)
    assert rows == [*[cpu_kernels.ROWS] * 3, 1]


def test_torch_compile_sees_one_operator() -> None:
    parts, meant = quantized(Format("nvfp4"), 128, 128)
    compiled = torch.compile(
        lambda x: torch.ops.sparkd.packed_linear(x, *packed(parts), None, "nvfp4") + 1, backend="eager", fullgraph=True
    )
    for tokens in (1, 4):
        x = torch.randn(tokens, 128)
        assert_product(compiled(x), x, meant, torch.ones(128))


@each_format
def test_fused_matrices_keep_their_own_scales(form: Format) -> None:
    """gate and up differ in magnitude, so NVFP4's divisors differ: stock vLLM would take one of them for both.

    Its MLA asks for kv_b_proj's weight by multiplying an identity matrix.
    """
    layer = layers.MergedColumnParallelLinear(
        256, [128, 128], bias=False, quant_config=on_cpu(form), prefix="gate_up", params_dtype=torch.bfloat16
    )
    (gate, gate_meant), (up, up_meant) = quantized(form, 128, 256, 1), quantized(form, 128, 256, 2, factor=100.0)
    for shard, parts in enumerate((gate, up)):
        load(layer, parts, shard)
    before = {name: tensor.data_ptr() for name, tensor in layer.named_parameters() if name.startswith("weight") and tensor.numel() > 2}
    meant = torch.cat([gate_meant, up_meant])
    x = torch.randn(2, 256)
    assert_product(finish(layer)(x)[0], x, meant)
    assert {name: getattr(layer, name).data_ptr() for name in before} == before, "nothing is repacked"
    assert torch.equal(quant_utils.get_and_maybe_dequant_weights(layer, out_dtype=torch.float32), meant)


def test_activations_in_four_bits_are_rounded_by_the_largest_divisor_of_a_fused_layer() -> None:
    form = Format("nvfp4_a4")
    layer = layers.MergedColumnParallelLinear(
        256, [128, 128], bias=False, quant_config=on_cpu(form), prefix="gate_up", params_dtype=torch.bfloat16
    )
    (gate, gate_meant), (up, up_meant) = quantized(form, 128, 256, 1), quantized(form, 128, 256, 2)
    gate["input_global_scale"].fill_(64.0)
    up["input_global_scale"].fill_(512.0)
    for shard, parts in enumerate((gate, up)):
        load(layer, parts, shard)
    x = torch.randn(2, 3, 256)
    x[0, 0] *= 100.0
    got = finish(layer)(x)[0]
    rounded = rounded_activations(x, torch.tensor(512.0))
    assert_product(got, rounded, torch.cat([gate_meant, up_meant]))
    assert not torch.equal(rounded, rounded_activations(x, torch.tensor(64.0))), "448 * 6 / 512 holds the row; it saturates with neither"


@each_format
def test_a_rank_of_two_has_its_rows_or_columns(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = 1
    for module in ("layers.linear", "parameter"):
        monkeypatch.setattr(f"vllm.model_executor.{module}.get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(f"vllm.model_executor.{module}.get_tensor_model_parallel_world_size", lambda: 2)
    parts, meant = quantized(form, 256, 512)
    x = torch.randn(2, 512)
    columns = layers.ColumnParallelLinear(512, 256, bias=False, quant_config=on_cpu(form), prefix="up")
    load(columns, parts)
    assert_product(finish(columns)(x)[0], x, meant[rank * 128 : rank * 128 + 128])
    rows = layers.RowParallelLinear(
        512, 256, bias=False, input_is_parallel=True, reduce_results=False, quant_config=on_cpu(form), prefix="down"
    )
    load(rows, parts)
    part = slice(rank * 256, rank * 256 + 256)
    assert_product(finish(rows)(x[:, part])[0], x[:, part], meant[:, part])


@pytest.mark.parametrize("form", [Format("nvfp4"), Format("fp8")], ids=lambda form: form.spelling)
def test_the_head_of_a_padded_vocabulary(form: Format) -> None:
    head = embedding.ParallelLMHead(250, 256, params_dtype=torch.bfloat16, quant_config=on_cpu(form), prefix="lm_head")
    parts, meant = quantized(form, 250, 256)
    load(head, parts)
    finish(head)
    x = torch.randn(2, 256)
    assert_product(head.quant_method.apply(head, x)[:, :250], x, meant)


def column(k: int, form: Format, prefix: str) -> torch.nn.Module:
    return layers.ColumnParallelLinear(k, 64, bias=False, quant_config=on_cpu(form), prefix=prefix)


def test_a_shard_that_groups_do_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"odd: .*168 .* 16"):
        column(168, Format("nvfp4"), "odd")
    with pytest.raises(CheckpointError, match=r"down: .*192 .* int4-g128"):
        column(192, Format("int4", 128), "down")
    with pytest.raises(CheckpointError, match=r"gate_up: 64 .*fp8-block"):
        layers.MergedColumnParallelLinear(256, [64, 64], bias=False, quant_config=on_cpu(Format("fp8_block")), prefix="gate_up")
    with pytest.raises(CheckpointError, match=r"head: .* fp8"):
        embedding.ParallelLMHead(256, 256, quant_config=on_cpu(Format("fp8_block")), prefix="head")
