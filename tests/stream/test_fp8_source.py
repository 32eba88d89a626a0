"""FP8 checkpoints on their way through the pipeline: what is quantized anew, what is not, and what is wrong with their scales."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.stream.test_pipeline import BATCHES, CPU, HIDDEN, READER, Fused, loaded, random_weights, same_memory, written
from workers.stream.ct_config import linear_modules, quantization_config
from workers.stream.pipeline import Pipeline
from workers.stream.plan import Batch, steps
from workers.stream.recipe import Recipe
from workers.stream.virtual import VirtualCheckpoint


def fp8_source(
    weights: dict[str, torch.Tensor], kind: str, is_fp8: Callable[[str], bool] = lambda name: name.endswith("_proj.weight")
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict]:
    """(what is stored, what it stands for in bf16, quantization_config)"""
    stored, meant = {}, {}
    for name, weight in weights.items():
        if not is_fp8(name):
            stored[name] = meant[name] = weight
            continue
        value = weight.float()
        n, k = value.shape
        if kind == "fp8_block":
            rows, cols = -(-n // 128), -(-k // 128)
            scale = torch.rand(rows, cols) * 0.01 + 0.01
            spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        else:
            scale = torch.rand(n, 1) * 0.01 + 0.01 if kind == "fp8_channel" else torch.tensor(0.0125)
            spread = scale
        code = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name] = code
        stored[name.removesuffix(".weight") + (".weight_scale_inv" if kind == "fp8_block" else ".weight_scale")] = scale
        meant[name] = (code.float() * spread).to(torch.bfloat16)
    config = (
        {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if kind == "fp8_block"
        else {"quant_method": "fp8", "activation_scheme": "dynamic"}
    )
    if kind == "fp8_channel":
        config = {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
                }
            },
            "ignore": [],
        }
    return stored, meant, config


def described(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": HIDDEN, "quantization_config": config}))
    return folder


@BATCHES
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block"])
def test_an_fp8_source_is_undone_unit_by_unit(tmp_path, kind, batch_bytes):
    stored, meant, config = fp8_source(random_weights(), kind)
    folder = described(written(tmp_path / "a", stored), config)
    got = loaded(folder, "nvfp4", batch_bytes=batch_bytes)
    want = loaded(written(tmp_path / "b", meant), "nvfp4")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)) for name in want)


@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("quantize", ["nvfp4", "int4-g32"])
def test_a_ranks_part_of_like_experts_is_undone_together(tmp_path, monkeypatch, kind, quantize):
    """Rows that begin within a block of scales, and columns."""
    monkeypatch.setattr("tests.stream.test_pipeline.EXPERTS", 6)
    stored, _, config = fp8_source(random_weights(inter=2 * 96), kind)
    checkpoint = read_checkpoint(str(described(written(tmp_path / "m", stored), config)))
    virtual = VirtualCheckpoint(checkpoint, Recipe.parse(quantize).assign(checkpoint))
    alone, together = Fused(2, 1), Fused(2, 1)
    alone.load(Pipeline(virtual, CPU, READER, **alone.asked(virtual), batch_bytes=0))
    stream = Pipeline(virtual, CPU, READER, **together.asked(virtual), batch_bytes=2**30)
    batches = [step for step in steps(stream._plans, 2**30, stream._straight) if isinstance(step, Batch)]
    assert max(len(plans) for batch in batches for plans in batch.alike.values()) >= 6
    together.load(stream)
    same_memory(together, alone)


INDEXER = "model.layers.0.self_attn.indexer.wq_b.weight"
TOWER = "visual.blocks.0.attn.qkv.weight"
KEPT = (INDEXER, TOWER, "model.layers.1.mlp.gate.weight", "model.embed_tokens.weight")


def with_more() -> dict[str, torch.Tensor]:
    """Weights of the classes that no recipe quantizes unless it names them, as DeepSeek-V3.2 has an indexer in FP8."""
    more = {INDEXER: torch.randn(192, HIDDEN), TOWER: torch.randn(3 * 160, 160)}
    return {**random_weights(), **{name: tensor.to(torch.bfloat16) for name, tensor in more.items()}}


@BATCHES
@pytest.mark.parametrize("kind", ["fp8_tensor", "fp8_channel", "fp8_block"])
@pytest.mark.parametrize("quantize", ["nvfp4", {"format": "int4-g32", "keep": ["visual", "o_proj"]}], ids=["default", "kept by a rule"])
def test_fp8_that_keeps_its_precision_beside_quantized_layers_comes_as_its_values(tmp_path, kind, quantize, batch_bytes):
    stored, meant, config = fp8_source(with_more(), kind, lambda name: name.endswith("_proj.weight") or name in KEPT)
    assert {stored[name].dtype for name in KEPT} == {torch.float8_e4m3fn}
    folder = described(written(tmp_path / "a", stored), config)
    got = loaded(folder, quantize, batch_bytes=batch_bytes)

    assert [name for name in KEPT if not torch.equal(got[name], meant[name])] == []
    assert not [name for name in got if name.startswith(tuple(kept.removesuffix(".weight") for kept in KEPT)) and name not in KEPT]
    checkpoint = read_checkpoint(str(folder))
    formats = Recipe.parse(quantize).assign(checkpoint)
    assert not formats.keys() & {name.removesuffix(".weight") for name in KEPT}
    told = quantization_config(formats, linear_modules(checkpoint))["ignore"]
    assert {part for part in ("wq_b", "visual", "gate") if any(part in pattern for pattern in told)} == {"wq_b", "visual", "gate"}


@pytest.mark.parametrize("shape", [(3, 1), (191, 1), (1, 2)], ids=["a block too many", "a row too few", "turned"])
@pytest.mark.parametrize("name", [INDEXER, "model.layers.0.self_attn.q_proj.weight"], ids=["kept", "quantized"])
def test_a_scale_of_a_wrong_shape_is_named_before_anything_is_read(tmp_path, name, shape):
    stored, _, config = fp8_source(with_more(), "fp8_block", lambda one: one.endswith("_proj.weight") or one in KEPT)
    rows = stored[name].shape[0]
    right = (rows // 128 + (rows % 128 > 0), 1)
    wrong = name.replace(".weight", ".weight_scale_inv")
    stored[wrong] = torch.ones(shape)
    folder = described(written(tmp_path / "m", stored), config)
    checkpoint = read_checkpoint(str(folder))
    formats = Recipe.parse("nvfp4").assign(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        VirtualCheckpoint(checkpoint, formats)
    assert str(caught.value) == (
        f"{checkpoint.tensors[wrong].path}: {wrong}: an FP8 weight {rows}x{HIDDEN} has a scale of shape {list(shape)}, which is neither "
        f"one value, nor [{rows}, 1], nor {list(right)}. Fetch the checkpoint again, or take its original precision."
    )


@pytest.mark.parametrize("name", [INDEXER, "model.layers.0.self_attn.q_proj.weight"], ids=["kept", "quantized"])
def test_a_scale_of_codes_is_no_number(tmp_path, name):
    """E8M0 stored as bytes: 120 would stand for 2^-7."""
    stored, _, config = fp8_source(with_more(), "fp8_block", lambda one: one.endswith("_proj.weight") or one in KEPT)
    wrong = name.replace(".weight", ".weight_scale_inv")
    stored[wrong] = torch.full(stored[wrong].shape, 120, dtype=torch.uint8)
    checkpoint = read_checkpoint(str(described(written(tmp_path / "m", stored), config)))
    with pytest.raises(CheckpointError, match=rf"{wrong}: an FP8 weight's scale holds U8, and F32, BF16, F16, F8_E8M0 are known"):
        VirtualCheckpoint(checkpoint, Recipe.parse("nvfp4").assign(checkpoint))


@pytest.mark.parametrize("name", KEPT)
def test_fp8_that_keeps_its_precision_and_has_no_scale_is_not_handed_over_as_it_is(tmp_path, name):
    stored, _, config = fp8_source(with_more(), "fp8_block", lambda one: one.endswith("_proj.weight") or one in KEPT)
    del stored[name.replace(".weight", ".weight_scale_inv")]
    checkpoint = read_checkpoint(str(described(written(tmp_path / "m", stored), config)))
    formats = Recipe.parse("nvfp4").assign(checkpoint)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: an FP8 weight has no scale beside it"):
        VirtualCheckpoint(checkpoint, formats)


def test_fp8_of_another_form_is_refused_by_a_cure_that_helps(tmp_path):
    stored, _, config = fp8_source(random_weights(), "fp8_tensor")
    stored["visual.patch_embed.proj.weight"] = torch.zeros(64, 3, 2, 14, 14).to(torch.float8_e4m3fn)
    stored["visual.patch_embed.proj.weight_scale"] = torch.tensor(0.5)
    folder = described(written(tmp_path / "m", stored), config)
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight: a F8_E4M3 tensor .* cannot be dequantized here\. Leave out"):
        loaded(folder, "nvfp4")
    assert loaded(folder, "bf16")["visual.patch_embed.proj.weight"].dtype == torch.float8_e4m3fn
