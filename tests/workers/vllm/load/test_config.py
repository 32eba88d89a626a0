"""The description that a quantized checkpoint carries: what vLLM itself reads out of it, module by module."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.checkpoint import read_checkpoint
from tests.support.checkpoints import Tensor, write_checkpoint
from tests.support.late import Late
from workers.quantization.formats import SPELLINGS, Format
from workers.vllm.load.config import in_our_formats, linear_modules, matches, patterns, quantization_config

compressed = Late("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
NVFP4 = Format("nvfp4")
FORMATS = [Format.parse(spelling) for spelling in SPELLINGS if spelling != "bf16"]
ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkvo"]
EXPERTS = [
    f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj" for layer in range(3) for expert in range(4) for name in ("gate", "up", "down")
]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in range(3)]
MOE = [*ATTENTION, *EXPERTS, *ROUTERS, "lm_head"]
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Linear(torch.nn.Module):
    """A layer whose class name vLLM matches against the target "Linear"."""


def read_by_vllm(config: dict[str, Any], modules: list[str]) -> dict[str, dict[str, Any] | None]:
    """What vLLM makes of each module; through JSON, as config.json is read."""
    read = compressed.CompressedTensorsConfig.from_config(json.loads(json.dumps(config)))
    read.packed_modules_mapping = FUSED
    layer = Linear()
    return {module: read.get_scheme_dict(layer, module) for module in modules}


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda chosen: chosen.spelling)
def test_one_format_is_one_group_with_what_is_left_out(chosen: Format) -> None:
    config = quantization_config(dict.fromkeys(EXPERTS, chosen), MOE)

    assert list(config["config_groups"]) == ["group_0"]
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert config["format"] == config["config_groups"]["group_0"]["format"]
    assert len(config["ignore"]) == 6
    schemes = read_by_vllm(config, MOE)
    assert {module for module, scheme in schemes.items() if scheme} == set(EXPERTS)


def test_what_vllm_recognises_each_format_as() -> None:
    def args(chosen: Format) -> dict[str, Any]:
        scheme = read_by_vllm(quantization_config({"model.layers.0.mlp.up_proj": chosen}, []), ["model.layers.0.mlp.up_proj"])
        found = scheme["model.layers.0.mlp.up_proj"]
        assert found is not None
        return found

    of = compressed.CompressedTensorsConfig
    nvfp4, mxfp4, int4 = args(NVFP4), args(Format("mxfp4")), args(Format("int4", 128))
    assert of._is_nvfp4_format(nvfp4["weights"])
    assert nvfp4["format"] == "nvfp4-pack-quantized"
    assert of._is_mxfp4(mxfp4["weights"])
    assert mxfp4["weights"].scale_dtype == torch.uint8
    assert of._is_wNa16_group_channel(int4["weights"], int4["input_activations"])
    assert (int4["weights"].num_bits, int4["weights"].group_size, int4["format"]) == (4, 128, "pack-quantized")
    assert [found["input_activations"] for found in (nvfp4, mxfp4, int4)] == [None, None, None]
    for chosen, strategy in ((Format("fp8"), "token"), (Format("fp8_block"), "group")):
        fp8 = args(chosen)
        assert of._is_fp8_w8a8(fp8["weights"], fp8["input_activations"])
        assert fp8["input_activations"].strategy == strategy
    assert args(Format("fp8_block"))["weights"].block_structure == [128, 128]


def test_several_formats_are_several_groups() -> None:
    dense = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(3) for name in ("gate", "up", "down")]
    chosen = {
        **dict.fromkeys(ATTENTION, Format("fp8")),
        **dict.fromkeys(dense[:3], Format("int4", 32)),
        **dict.fromkeys(dense[3:], NVFP4),
    }

    config = quantization_config(chosen, [*dense, *ATTENTION, "lm_head"])

    assert config["format"] == "mixed-precision"
    fused = ["model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.2.mlp.gate_up_proj"]
    schemes = read_by_vllm(config, [*chosen, *fused, "lm_head"])
    formats = {module: scheme and scheme["format"] for module, scheme in schemes.items()}
    assert [formats[module] for module in ATTENTION] == ["float-quantized"] * len(ATTENTION)
    assert [formats[module] for module in dense] == ["pack-quantized"] * 3 + ["nvfp4-pack-quantized"] * 6
    assert [formats[module] for module in fused] == ["float-quantized", "pack-quantized", "nvfp4-pack-quantized"]
    assert formats["lm_head"] is None


@pytest.mark.parametrize("kept", [True, False])
def test_values_that_are_the_keys_have_their_format(kept: bool) -> None:
    """vLLM asks for all three parts of the matrix that it builds, whichever of them a checkpoint has (Gemma 4)."""
    modules = [name for name in ATTENTION if name != "model.layers.1.self_attn.v_proj"]
    assigned = {name: Format("nvfp4" if ".1." in name else "fp8") for name in modules if not (kept and ".1." in name)}
    config = quantization_config(assigned, modules)

    for fused in ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj"):
        scheme = read_by_vllm(config, [fused])[fused]
        bits = scheme["weights"].num_bits if scheme is not None else None
        assert bits == (8 if ".0." in fused else None if kept else 4)


def test_packed_experts_match_the_names_that_vllm_asks_for() -> None:
    packed = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")]
    asked = [f"model.layers.1.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")]

    left_out = read_by_vllm(quantization_config(dict.fromkeys(ATTENTION, NVFP4), [*ATTENTION, *packed]), asked)
    chosen = {**dict.fromkeys(packed, Format("mxfp4")), **dict.fromkeys(ATTENTION, Format("fp8"))}
    meant = read_by_vllm(quantization_config(chosen, []), asked)

    assert not any(left_out.values())
    assert {scheme and scheme["format"] for scheme in meant.values()} == {"mxfp4-pack-quantized"}


@pytest.mark.parametrize("tower", ["vision_tower", "vpm"])
def test_a_vision_tower_keeps_its_precision_whatever_vllm_calls_it(tower: str) -> None:
    vision = [f"model.vision_tower.encoder.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkv"]
    text = [f"model.language_model.layers.{layer}.self_attn.{name}_proj" for layer in range(3) for name in "qkv"]

    config = quantization_config(dict.fromkeys(text, NVFP4), [*vision, *text, "lm_head"])

    assert len(config["ignore"]) == 3
    in_vllm = [
        f"{tower}.encoder.layers.1.self_attn.qkv_proj",
        "language_model.model.layers.1.self_attn.qkv_proj",
        "language_model.lm_head",
    ]
    assert [bool(scheme) for scheme in read_by_vllm(config, in_vllm).values()] == [False, True, False]


def test_a_layer_of_a_tower_that_is_quantized_is_not_left_out_under_another_name() -> None:
    attention, mlp = ([f"model.visual.blocks.{layer}.{name}" for layer in range(3)] for name in ("attn.qkv", "mlp.up_proj"))

    schemes = read_by_vllm(quantization_config(dict.fromkeys(mlp, NVFP4), [*attention, *mlp]), [attention[0], *mlp])

    assert [bool(scheme) for scheme in schemes.values()] == [False, True, True, True]


def test_layers_that_vllm_calls_otherwise_are_matched_all_the_same() -> None:
    dense, mamba = [[f"model.layers.{layer}.{name}" for layer in range(3)] for name in ("mlp.up_proj", "mamba.in_proj")]
    config = quantization_config(dict.fromkeys(dense, NVFP4), [*dense, *mamba, *ATTENTION, "model.projector"])

    schemes = read_by_vllm(config, ["layers.1.attn.o_proj", "layers.1.mixer.in_proj", *dense])

    assert [bool(scheme) for scheme in schemes.values()] == [False, False, True, True, True]
    assert "model.projector" in config["ignore"], "a plain name is translated by vLLM"


def test_a_part_that_vllm_puts_elsewhere_is_matched_there() -> None:
    quantized = ["model.language_model.layers.0.mlp.up_proj", "model.language_model.altup_projections.0"]
    config = quantization_config(
        dict(zip(quantized, map(Format, ("nvfp4", "mxfp4")), strict=True)), [*quantized, "model.language_model.per_layer_model_projection"]
    )

    in_vllm = [f"language_model.model.self_decoder.{name}" for name in ("per_layer_model_projection", "altup_projections.0")]
    assert [scheme and scheme["format"] for scheme in read_by_vllm(config, in_vllm).values()] == [None, "mxfp4-pack-quantized"]


def test_which_modules_may_be_linear(tmp_path: Path) -> None:
    entries = [
        Tensor("model.embed_tokens.weight", (8, 4)),
        Tensor("model.norm.weight", (4,)),
        Tensor("model.layers.0.mlp.up_proj.weight", (4, 4)),
    ]
    entries += [Tensor("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 4)), Tensor("model.layers.0.mlp.up_proj.weight_scale", (4, 1))]
    entries += [Tensor("model.layers.1.mlp.input_linear.weight", (2, 4, 4)), Tensor("model.layers.1.mamba.conv1d.weight", (2, 1, 4))]

    found = linear_modules(read_checkpoint(write_checkpoint(tmp_path / "model", {"vocab_size": 8}, entries)))

    assert set(found) == {
        "model.embed_tokens",
        "model.layers.0.mlp.up_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.input_linear",
        "model.layers.1.mamba.conv1d",
    }


NAMES = sorted(
    {
        f"{front}.{layer}.{tail}"
        for front, layer, tail in itertools.product(
            ("model.layers", "model.visual.blocks", "mtp.layers", "layers"),
            range(3),
            ("attn.q", "attn.qk", "mlp.experts.0.up", "mlp.experts.1.up", "gate"),
        )
    }
    | {"lm_head", "model.projector.0", "model.projector.fc"}
)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(NAMES)), st.booleans())
def test_patterns_match_what_is_meant_and_nothing_else(wanted: set[str], towers: bool) -> None:
    found = patterns(sorted(wanted), NAMES, towers=towers)

    assert {name for name in NAMES if any(matches(name, pattern) for pattern in found)} == wanted


def test_its_own_description_is_recognised() -> None:
    assert [chosen for chosen in FORMATS if not in_our_formats(quantization_config(dict.fromkeys(EXPERTS, chosen), MOE))] == []
    mixed = quantization_config({**dict.fromkeys(EXPERTS, Format("mxfp4")), **dict.fromkeys(ATTENTION, Format("fp8"))}, MOE)
    assert in_our_formats(mixed)
    assert not in_our_formats({**mixed, "kv_cache_scheme": {"num_bits": 8}})
    assert not in_our_formats({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert in_our_formats(quantization_config({}, MOE)) is False


@pytest.mark.parametrize(
    ("chosen", "where", "value", "ours"),
    [
        (Format("int4", 128), ("weights", "observer"), "minmax", True),
        (Format("int4", 128), ("weights", "actorder"), "group", False),
        (Format("int4", 128), ("weights", "symmetric"), False, False),
        (Format("int4", 128), ("weights", "group_size"), 256, False),
        (NVFP4, ("input_activations",), {"num_bits": 4, "type": "float", "dynamic": "local"}, False),
        (Format("nvfp4_a4"), ("input_activations", "dynamic"), True, False),
        (Format("fp8"), ("input_activations",), None, False),
        (Format("mxfp4"), ("output_activations",), {"num_bits": 8}, False),
        (Format("mxfp4"), ("format",), "pack-quantized", False),
        (Format("mxfp4"), ("format",), None, True),
    ],
)
def test_what_is_described_otherwise_is_not(chosen: Format, where: tuple[str, ...], value: Any, ours: bool) -> None:
    described = json.loads(json.dumps(quantization_config(dict.fromkeys(EXPERTS, chosen), MOE)))
    *path, last = where
    place = described["config_groups"]["group_0"]
    for key in path:
        place = place[key]
    place[last] = value
    assert in_our_formats(described) == ours


@pytest.mark.parametrize("kept", [False, True])
def test_granites_experts_are_matched_where_vllm_has_them(kept: bool) -> None:
    moe, asked = "model.layers.{}.block_sparse_moe", "model.layers.1.block_sparse_moe.experts.0.gate_proj"
    experts = [f"{moe.format(layer)}.{name}_linear" for layer in range(2) for name in ("input", "output")]
    shared = [f"model.layers.{layer}.shared_mlp.{name}_linear" for layer in range(2) for name in ("input", "output")]
    chosen = dict.fromkeys(shared, Format("int4", 32)) | ({} if kept else dict.fromkeys(experts, NVFP4))

    schemes = read_by_vllm(quantization_config(chosen, [*experts, *shared]), [asked, *shared])

    sizes = [scheme and scheme["weights"].group_size for scheme in schemes.values()]
    assert sizes == [None if kept else 16, 32, 32, 32, 32]
