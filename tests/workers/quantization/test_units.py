"""The units of a checkpoint: which weights have one format, and their bytes in each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sparkd.checkpoint import SourceQuantization, read_checkpoint
from tests.support.checkpoints import checkpoint_of, layered, write_folder
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.mix import recipe_of, select
from workers.quantization.units import BF16, units_of

W = (128, 128)
DENSE = {
    "model.embed_tokens.weight": ("BF16", (512, 128)),
    **layered(
        3,
        {
            "input_layernorm.weight": (128,),
            "self_attn.q_proj.weight": W,
            "self_attn.k_proj.weight": (64, 128),
            "self_attn.v_proj.weight": (64, 128),
            "self_attn.o_proj.weight": W,
            "mlp.gate_proj.weight": (192, 128),
            "mlp.up_proj.weight": (192, 128),
            "mlp.down_proj.weight": (128, 192),
        },
    ),
}
EXPERTS = {f"mlp.experts.{expert}.{name}_proj.weight": W for expert in range(4) for name in ("gate", "up", "down")}
MIXTURE = {**DENSE, **layered(2, {"mlp.gate.weight": (128, 128), **EXPERTS}, "model.layers.7")}
PACKED = {
    **DENSE,
    **layered(2, {"mlp.experts.gate_up_proj": (4, 256, 128), "mlp.experts.down_proj": (4, 128, 128)}, "model.layers.7"),
}
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 128}


def test_a_unit_is_what_vllm_multiplies_as_one_matrix() -> None:
    keys = {unit.key.removeprefix("model.layers."): unit for unit in units_of(checkpoint_of(DENSE)).units}
    assert len(keys) == 12
    assert keys["0.self_attn.q_proj"].modules == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert keys["0.mlp.gate_proj"].layer == "0"
    assert keys["0.mlp.down_proj"].nbytes[BF16] == 2 * 128 * 192


def test_a_format_whose_groups_do_not_divide_the_columns_is_none_of_a_unit() -> None:
    units = {unit.key: unit for unit in units_of(checkpoint_of(DENSE)).units}
    assert "int4-g128" not in units["model.layers.0.mlp.down_proj"].nbytes
    assert {"int4-g64", "nvfp4", "mxfp4", "fp8"} <= units["model.layers.0.mlp.down_proj"].nbytes.keys()


def test_every_rank_gets_whole_groups() -> None:
    units = {unit.key: unit for unit in units_of(checkpoint_of(DENSE), ranks=4).units}
    assert "int4-g64" not in units["model.layers.0.self_attn.q_proj"].nbytes
    assert "int4-g32" in units["model.layers.0.self_attn.q_proj"].nbytes


@pytest.mark.parametrize("tensors", [MIXTURE, PACKED], ids=["one by one", "packed"])
def test_all_experts_of_a_layer_are_one_unit(tensors: dict[str, Any]) -> None:
    units = {unit.key: unit for unit in units_of(checkpoint_of(tensors, config=CONFIG)).units}
    experts = units["model.layers.7.0.mlp.experts"]
    assert (experts.kind, experts.nbytes[BF16]) == ("expert", 12 * 2 * 128 * 128)


@pytest.mark.parametrize("tensors", [DENSE, MIXTURE, PACKED], ids=["dense", "one by one", "packed"])
@pytest.mark.parametrize("share", [0.35, 0.9])
def test_the_predicted_bytes_are_those_of_the_tensors_that_the_loader_makes(tmp_path: Path, tensors: dict[str, Any], share: float) -> None:
    checkpoint = read_checkpoint(write_folder(tmp_path / "m", {"model.safetensors": tensors}, CONFIG))
    listed = units_of(checkpoint)
    budget = listed.kept_bytes + int(share * (listed.stored_bytes - listed.kept_bytes))
    choice = select(listed, budget)
    formats = recipe_of(listed, choice).assign(checkpoint)
    real = VirtualCheckpoint(checkpoint, formats).output_bytes
    assert math.isclose(listed.nbytes(choice), real, rel_tol=0.01)


def test_a_source_in_fp8_gains_nothing_from_fp8() -> None:
    tensors = {
        "model.layers.0.self_attn.o_proj.weight": ("F8_E4M3", (256, 256)),
        "model.layers.0.self_attn.o_proj.weight_scale_inv": ("F32", (2, 2)),
    }
    source = SourceQuantization("fp8_block", {})
    (unit,) = units_of(checkpoint_of(tensors, quantization=source)).units
    assert "fp8" not in unit.nbytes
    assert unit.nbytes[BF16] == 256 * 256 + 16
