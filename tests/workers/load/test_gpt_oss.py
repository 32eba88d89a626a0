"""gpt-oss, the model whose experts vLLM takes in a way of its own: loaded into vLLM's real class, in each format that it takes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.architectures import EXPERTS, HIDDEN, gpt_oss
from tests.support.checkpoints import MIB, stored, write_checkpoint
from tests.support.pipelines import pipeline_of
from tests.workers.load.loading import load
from workers import plugin
from workers.load.formats import quantizer
from workers.load.reader import Reader
from workers.load.trace import Trace, phantoms
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.formats import Format
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.export import ExportRequest, export
from workers.vllm.load import config
from workers.vllm.load.config import quantization_config

CPU = torch.device("cpu")
MLP = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = gpt_oss("bf16")
    return write_checkpoint(tmp_path_factory.mktemp("gpt-oss") / "model", model.config, model.entries, shard_bytes=2 * MIB, shuffled=True)


@pytest.fixture
def loaded(folder: Path, one_rank: None) -> Callable[..., Mapping[str, Tensor]]:
    """(quantize, more settings of the loader) -> the parameters of vLLM's model."""
    plugin.register()
    return lambda quantize, **more: dict(load(folder, {"quantize": quantize, **more}).named_parameters())


@pytest.fixture
def stock(one_rank: None) -> ModuleType:
    """vLLM's own module of the model."""
    return importlib.import_module("vllm.model_executor.models.gpt_oss")


@pytest.mark.parametrize("spelling", ["mxfp4", "int4-g32", "fp8"])
def test_every_expert_stands_where_vllm_reads_it(folder: Path, loaded: Any, spelling: str) -> None:
    got = loaded(spelling)
    checkpoint = read_checkpoint(folder)
    kind = quantizer(Format.parse(spelling))
    for name, half in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        weights = stored(checkpoint.tensors[f"{MLP}.{name}"])
        for expert in range(EXPERTS):
            for suffix, part in kind.quantize(weights[expert].t().contiguous()).items():
                if suffix != "weight_shape":
                    parameter = got[f"{MLP}.routed_experts.{half}_{suffix}"]
                    assert torch.equal(parameter[expert].view(torch.uint8), part.view(torch.uint8)), (half, suffix, expert)
        assert torch.equal(got[f"{MLP}.routed_experts.{half}_bias"], stored(checkpoint.tensors[f"{MLP}.{name}_bias"]))


@pytest.mark.parametrize(("spelling", "rank"), [("mxfp4", 0), ("mxfp4", 1), ("fp8-block", 1)])
def test_a_rank_takes_its_rows_of_both_halves_at_once(
    folder: Path, stock: ModuleType, spelling: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Format.parse(spelling)
    layer = experts_of(stock, rank, form, monkeypatch)
    parameters = {f"{MLP}.routed_experts.{name}": parameter for name, parameter in layer.named_parameters()}
    checkpoint = read_checkpoint(folder)
    formats = {module: form for module in QuantizationRecipe.parse(spelling).assign(checkpoint) if module.startswith(MLP)}
    virtual = VirtualCheckpoint(checkpoint, formats, keep=lambda name: name in formats)

    def take(tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            assert stock.GptOssModel._try_load_streamed_expert(name, tensor, parameters, set())

    trace = Trace()
    take(phantoms(((one.name, one.shape, one.dtype) for one in virtual.outputs()), CPU, trace))
    reader = partial(Reader, block_bytes=64 * 1024, blocks=4, threads=2, pin=False)
    take(pipeline_of(virtual, CPU, reader, regions={name: traced.region for name, traced in trace.tensors.items()}).tensors())

    assert all(traced.once for traced in trace.tensors.values())
    kind = quantizer(form)
    for name, half, dim in (("gate_up_proj", "w13", 0), ("down_proj", "w2", 1)):
        for expert, block in enumerate(stored(checkpoint.tensors[f"{MLP}.{name}"])):
            for suffix, part in kind.quantize(block.t().contiguous()).items():
                if suffix != "weight_shape":
                    mine = parameters[f"{MLP}.routed_experts.{half}_{suffix}"][expert]
                    assert torch.equal(mine.view(torch.uint8), part.chunk(2, dim)[rank].contiguous().view(torch.uint8)), (half, suffix)


def experts_of(stock: ModuleType, rank: int, form: Format, monkeypatch: pytest.MonkeyPatch) -> Any:
    """gpt-oss's experts as one rank of two has them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    from workers.vllm.load.method import SparkConfig

    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.get_tensor_model_parallel_rank", lambda: rank)
    config = SparkConfig.from_config({**quantization_config({f"{MLP}.gate_up_proj": form}, []), "quant_method": "spark"})
    with set_current_vllm_config(VllmConfig()):
        runner = FusedMoEFactory(
            num_experts=EXPERTS,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=256,
            params_dtype=torch.bfloat16,
            quant_config=config,
            activation="swigluoai",
            has_bias=True,
            tp_size=2,
            routed_experts_cls=stock.GptOssRoutedExperts,
            prefix=f"rank{rank}.{form.spelling}.{MLP}",
        )
    return runner.routed_experts


def test_attention_may_keep_its_precision_or_have_another_format(folder: Path, loaded: Any) -> None:
    kept = loaded({"format": "mxfp4", "keep": ["self_attn"]})
    checkpoint = read_checkpoint(folder)
    parts = [stored(checkpoint.tensors[f"model.layers.0.self_attn.{name}_proj.weight"]) for name in "qkv"]
    assert torch.equal(kept["model.layers.0.attn.qkv_proj.weight"], torch.cat(parts))
    assert kept[f"{MLP}.routed_experts.w2_weight_packed"].shape == (EXPERTS, HIDDEN, 128)
    other = loaded({"format": "nvfp4", "layers": {"experts": "mxfp4"}})
    assert "model.layers.0.attn.o_proj.weight_global_scale" in other
    assert other[f"{MLP}.routed_experts.w13_weight_scale"].dtype is torch.uint8


def test_the_quantized_cache_is_loaded_in_the_same_way(loaded: Any, tmp_path: Path) -> None:
    first, second = {}, {}
    for got in (first, second):
        got |= loaded("int4-g32", cache_dir=str(tmp_path / "cache"), progress=str(tmp_path / "progress"))
    assert json.loads((tmp_path / "progress").read_text())["load"]["source"] == "cache"
    assert first.keys() == second.keys()
    for name, parameter in first.items():
        if not name.endswith("weight_shape"):  # which no kernel reads, and nobody fills
            assert torch.equal(parameter.view(torch.uint8), second[name].view(torch.uint8)), name


def test_a_published_checkpoint_passes_through_unchanged(tmp_path: Path) -> None:
    model = gpt_oss()
    source = write_checkpoint(tmp_path / "model", model.config, model.entries)
    checkpoint = read_checkpoint(source)
    formats = QuantizationRecipe.parse("int4-g32").assign(checkpoint)
    assert not formats
    assert any("(mxfp4)" in said for said in formats.adjustments)
    outputs = VirtualCheckpoint(checkpoint, formats).outputs()
    assert {(one.name, one.shape) for one in outputs} == {(name, ref.shape) for name, ref in checkpoint.tensors.items()}


def described(folder: Path, quantize: Any, ranks: int = 1) -> None:
    checkpoint = read_checkpoint(folder)
    config.refuse_unserved(checkpoint, QuantizationRecipe.parse(quantize).assign(checkpoint), ranks)


@pytest.mark.parametrize(
    ("quantize", "ranks", "sentence"),
    [
        ("nvfp4", 1, r"_proj: .*nvfp4 experts.*layers: \{experts: mxfp4\}"),
        ("fp8", 2, "fp8 experts .*fp8-block"),
    ],
)
def test_what_vllms_class_cannot_take_is_said_before_anything_is_loaded(
    folder: Path, one_rank: None, quantize: str, ranks: int, sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence) as caught:
        described(folder, quantize, ranks)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(("quantize", "served_there"), [("int4-g32", True), ("mxfp4", False)])
def test_on_a_gpu_only_int4_has_biases(
    folder: Path, one_rank: None, quantize: str, served_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_is_cpu", lambda: False)
    if served_there:
        described(folder, quantize)
        return
    with pytest.raises(CheckpointError, match=rf"{quantize} experts .*biases .*int4-g32"):
        described(folder, quantize)


def test_an_export_that_vllms_class_could_not_take_is_refused_too(folder: Path, one_rank: None, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"experts\.\w+_proj: .*nvfp4 experts"):
        export(ExportRequest(str(folder), {"format": "nvfp4"}, str(tmp_path / "out"), device="cpu"), lambda *_: None)
    assert not list(tmp_path.glob("*out*"))
