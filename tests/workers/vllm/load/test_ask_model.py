"""A checkpoint that lacks a tensor without a word about it is refused, and no other: vLLM's own classes, and modules of all kinds."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparkd.errors import CheckpointError
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import MIB, write_checkpoint
from tests.support.facts import facts
from tests.support.late import Late
from tests.workers.load.loading import load
from workers import plugin
from workers.load.trace import Target, TensorTrace, Trace
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.export import ExportRequest, export
from workers.vllm.load import ask_model
from workers.vllm.load.ask_model import lone_experts, refuse_unfilled, unfilled

default_loader = Late("vllm.model_executor.model_loader.default_loader")


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank: None) -> None:
    plugin.register()


def written(folder: Path, architecture: str, without: str = "$^") -> Path:
    model = ARCHITECTURES[architecture]()
    entries = [entry for entry in model.entries if not re.search(without, entry.name)]
    return write_checkpoint(folder, model.config, entries, shard_bytes=MIB)


# vLLM's classes

# A part of a fused matrix, a matrix alone, a norm, an expert's part, an expert, all experts' part; in vLLM's classes and in ours.
LACKING = [
    ("llama", r"layers\.1\.mlp\.up_proj", "nvfp4", "model.layers.1.mlp.gate_up_proj.weight (rows 512 to 1023)"),
    ("llama", r"layers\.0\.self_attn\.[kv]_proj", "bf16", "model.layers.0.self_attn.qkv_proj.weight (rows 256 to 383, rows 384 to 511)"),
    ("llama", r"lm_head", "mxfp4", "lm_head.weight"),
    ("qwen3_moe", r"1\.mlp\.experts\.1\.up_proj", "bf16", "model.layers.1.mlp.experts.1.up_proj.weight"),
    (
        "qwen3_moe",
        r"1\.mlp\.experts\.7\.",
        "int4-g32",
        "model.layers.1.mlp.experts.routed_experts.w13_weight (expert 7), model.layers.1.mlp.experts.routed_experts.w2_weight (expert 7)",
    ),
    *(
        pytest.param(*row, marks=pytest.mark.rest)
        for row in (
            ("qwen3", r"layers\.1\.self_attn\.q_norm", "fp8", "model.layers.1.self_attn.q_norm.weight"),
            ("gpt_oss-bf16", r"1\.self_attn\.sinks", "int4-g32", "model.layers.1.attn.sinks"),
            ("gpt_oss-bf16", r"0\.self_attn\.q_proj\.bias", "mxfp4", "model.layers.0.attn.qkv_proj.bias (rows 0 to 255)"),
            ("deepseek_v3", r"1\.self_attn\.kv_a_proj", "fp8", "model.layers.1.self_attn.fused_qkv_a_proj.weight (rows 256 to 831)"),
            ("qwen3_next", r"2\.linear_attn\.A_log", "nvfp4", "model.layers.2.linear_attn.A_log"),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "without", "quantize", "named"), LACKING)
def test_what_is_missing_is_named_before_anything_is_read(
    tmp_path: Path, architecture: str, without: str, quantize: str, named: str
) -> None:
    folder, cache, progress = written(tmp_path / "model", architecture, without), tmp_path / "cache", tmp_path / "progress"

    with pytest.raises(CheckpointError) as caught:
        load(folder, {"quantize": quantize, "cache_dir": str(cache), "progress": str(progress)})

    other = "" if quantize == "bf16" else " quantize: bf16"
    assert caught.value.message.startswith(f"{folder}: ")
    assert f" {named} " in caught.value.problem and facts(caught.value.problem).startswith(facts(named))
    assert facts(caught.value.cure) == f"config.json{other} allow_missing_weights: true"
    said = json.loads(progress.read_text())["load"]
    assert (said["phase"], said["bytes_done"], said["failure"]) == ("failed", 0, caught.value.message)
    assert not cache.exists()


WHOLE = ("qwen3", "qwen3_next", "gpt_oss-bf16", "deepseek_v3", "granitemoehybrid")


@pytest.mark.parametrize(
    ("architecture", "quantize"),
    [
        ("qwen3_moe-packed", "mxfp4"),
        ("gemma3", "bf16"),
        *(pytest.param(name, quantize, marks=pytest.mark.rest) for name in WHOLE for quantize in ("int4-g32", "bf16")),
        pytest.param("granitemoehybrid", {"format": "int4-g32", "keep": ["moe"]}, marks=pytest.mark.rest),
    ],
    ids=str,
)
def test_a_whole_checkpoint_lacks_nothing(tmp_path: Path, architecture: str, quantize: Any) -> None:
    load(written(tmp_path / "model", architecture), {"quantize": quantize})


def test_it_can_be_loaded_all_the_same(tmp_path: Path) -> None:
    load(written(tmp_path / "model", "llama", "lm_head"), {"quantize": "nvfp4", "enable_weights_track": False})


def test_what_others_have_quantized_lacks_nothing_or_is_refused(tmp_path: Path) -> None:
    whole, half = tmp_path / "whole", tmp_path / "half"
    request = ExportRequest(
        str(written(tmp_path / "model", "qwen3_moe")), QuantizationRecipe.parse("int4-g32").canonical(), str(whole), device="cpu"
    )
    export(request, lambda *_: None)
    load(whole, {"quantize": "bf16"})

    expert = "model.layers.1.mlp.experts.5.up_proj"
    tensors = {name: one for name, one in load_file(whole / "model-00001-of-00001.safetensors").items() if not name.startswith(expert)}
    half.mkdir()
    shutil.copy(whole / "config.json", half)
    save_file(tensors, half / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"/half: .* {re.escape(expert)}\.weight "):
        load(half, {"quantize": "bf16"})


@pytest.mark.parametrize(
    ("runner", "quantization", "formats", "more", "all_of_it"),
    [
        ("generate", "spark", {"module": "nvfp4"}, {}, True),
        ("generate", None, {}, {}, True),
        ("draft", "spark", {"module": "nvfp4"}, {}, False),
        ("pooling", None, {}, {}, False),
        ("generate", "fp8", {}, {}, False),
        ("generate", "awq", {}, {"stored": "awq"}, True),
        ("pooling", "awq", {}, {"stored": "awq"}, False),
        ("generate", None, {}, {"secondary_weights": ["elsewhere"]}, False),
    ],
)
def test_who_has_to_find_all_its_weights_in_the_checkpoint(
    runner: str, quantization: str | None, formats: Any, more: Any, all_of_it: bool
) -> None:
    config = SimpleNamespace(runner_type=runner, quantization=quantization)
    virtual = SimpleNamespace(formats=formats, checkpoint=SimpleNamespace(quantization=more.pop("stored", None)))
    assert ask_model.fills_all(SimpleNamespace(**more), config, virtual) is all_of_it  # type: ignore[arg-type]


# Modules of all kinds


class Layer(nn.Module):
    """method: whether it has a quantization method; rows: of its parts."""

    def __init__(self, method: bool, rows: tuple[int, ...] = (), **parameters: torch.Tensor) -> None:
        super().__init__()
        if method:
            self.quant_method = SimpleNamespace(process_weights_after_loading=None)
        self.output_partition_sizes = list(rows)
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


def vllms_own(model: nn.Module, loaded: set[str]) -> None:
    """vLLM's own answer about a quantized model."""
    default_loader.DefaultModelLoader.track_weights_loading(None, model, loaded, quantized=True)


def found(
    model: nn.Module,
    places: Mapping[str, torch.Tensor] = MappingProxyType({}),
    loaded: Collection[str] = (),
    experts: int | None = None,
    unclear: Collection[str] = (),
) -> list[str]:
    """places: the memory into which each tensor is copied. unclear: tensors that go somewhere in another way."""
    traces = {
        name: TensorTrace(view.shape, whole(view), 1, Target(view, whole(view), tuple(range(view.dim())))) for name, view in places.items()
    }
    traces |= {name: TensorTrace((4,), ((0, 4),), 2) for name in unclear}
    trace = Trace(traces)
    return [*lone_experts(trace), *unfilled(model, trace, loaded, vllms_own, experts)]


def whole(view: torch.Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in view.shape)


def test_what_no_tensor_reaches_and_is_not_said_to_be_loaded() -> None:
    model = nn.Sequential(Layer(False, weight=torch.zeros(4)), Layer(True, weight=torch.zeros(4, 4)))

    assert found(model) == ["0.weight", "1.weight"]
    assert found(model, loaded={"0.weight"}) == ["1.weight"]
    assert found(model, {"a": model[1].weight.data[1:3]}) == ["0.weight"]


def test_what_has_a_default_or_holds_nothing_is_not_asked_for() -> None:
    parts = ("input_scale", "weight_shape", "weight_g_idx", "w13_input_global_scale", "k_scale", "weight_zero_point", "w13_bias")
    model = nn.Sequential(Layer(True, **{name: torch.zeros(1) for name in parts}), Layer(True, weight=torch.zeros(0, 4)))
    assert found(model) == []


def test_tied_weights_are_one() -> None:
    model = nn.Sequential(Layer(True, weight=torch.zeros(4, 4)), Layer(True, weight=torch.zeros(4, 4)))
    model[1].weight = model[0].weight

    assert found(model) == ["0.weight"]
    assert found(model, {"1.weight": model[1].weight.data}) == []


@pytest.mark.parametrize("shares", [None, "model.layers.0.attn"])
def test_a_layer_that_uses_anothers_keys_and_values_needs_none(shares: str | None) -> None:
    attention = nn.Module()
    attention.qkv_proj = Layer(True, (4, 2, 2), weight_packed=torch.zeros(8, 4), bias=torch.zeros(8))
    attention.attn = nn.Module()
    attention.attn.kv_sharing_target_layer_name = shares
    query = {"q_proj.weight_packed": attention.qkv_proj.weight_packed.data[:4], "q_proj.bias": attention.qkv_proj.bias.data[:4]}

    lacking = ["qkv_proj.weight (rows 4 to 5, rows 6 to 7)", "qkv_proj.bias (rows 4 to 5, rows 6 to 7)"]
    assert found(attention, query, {"qkv_proj.weight_packed", "qkv_proj.bias"}) == ([] if shares else lacking)


@pytest.mark.parametrize("unclear", [[], ["l.attn.k_proj.weight"]])
def test_a_part_may_come_in_a_way_that_is_no_copy(unclear: list[str]) -> None:
    """A loader that computes with a tensor hides where it goes."""
    layer = Layer(True, (4, 2), weight=torch.zeros(6, 4))
    lacking = [] if unclear else ["weight (rows 4 to 5)"]
    assert found(layer, {"l.attn.q_proj.weight": layer.weight.data[:4]}, {"weight"}, unclear=unclear) == lacking


@pytest.mark.parametrize(("experts", "named"), [(4, ["w2_weight (expert 2)"]), (3, []), (None, [])])
def test_an_expert_is_missed_where_their_number_is_known(experts: int | None, named: list[str]) -> None:
    """Or there is one more than the model has."""
    layer = Layer(True, w2_weight_packed=torch.zeros(4, 3, 2))
    memory = layer.w2_weight_packed.data
    places = {"a": memory[0, :2], "b": memory[1, :, :1], "c": memory[3]}
    assert found(layer, places, {"w2_weight_packed"}, experts) == named


@pytest.mark.parametrize(("lacks", "named"), [("up_proj.qweight", True), ("up_proj.input_scale", False)])
def test_what_one_expert_lacks_and_its_neighbours_have(lacks: str, named: bool) -> None:
    """But for the scale of its activations, where no calibration reached it, and what the model does not take."""
    somewhere = torch.zeros(4)
    names = [f"layers.0.experts.{n}.up_proj.{name}" for n in range(4) for name in ("qweight", "input_scale")]
    places = {name: somewhere for name in names if name != f"layers.0.experts.2.{lacks}"}
    assert found(nn.Module(), places) == ([f"layers.0.experts.2.{lacks}"] if named else [])
    not_taken = Trace({f"layers.0.experts.{n}.act.weight": TensorTrace((4,)) for n in range(2)})
    assert list(lone_experts(not_taken)) == []


def test_a_model_that_lacks_nothing_is_not_refused() -> None:
    layer = Layer(False, weight=torch.zeros(4))
    refuse_unfilled(layer, Trace(), {"weight"}, vllms_own, None, "/models/x", quantized=True)
    with pytest.raises(CheckpointError, match=r"^/models/x: .* weight .*Layer\."):
        refuse_unfilled(layer, Trace(), (), vllms_own, None, "/models/x", quantized=False)
