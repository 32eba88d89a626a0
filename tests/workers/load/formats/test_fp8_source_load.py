"""FP8 checkpoints on their way through the pipeline: what is quantized anew, what is not, and what is wrong with their scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.facts import lacking
from tests.support.pipelines import pipeline_of
from tests.workers.load.test_pipeline import (
    CPU,
    HIDDEN,
    READER,
    Fused,
    Rank,
    loaded,
    random_weights,
    same_memory,
    same_tensors,
    virtual_in,
    written,
)
from workers.load.formats import quantizer
from workers.load.formats.fp8_source import holds_codes
from workers.load.read_plan import Batch, steps
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.formats import Format
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.load.config import linear_modules, quantization_config


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
            scale = torch.rand(n, 1) * 0.01 + 0.01 if kind == "fp8_channel" else torch.rand(()) * 0.01 + 0.01
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


@pytest.mark.parametrize(("kind", "batch_bytes"), [("fp8_tensor", 0), ("fp8_channel", 200_000), ("fp8_block", 2**30)])
def test_an_fp8_source_is_undone_unit_by_unit(tmp_path, kind, batch_bytes):
    stored, meant, config = fp8_source(random_weights(), kind)
    folder = described(written(tmp_path / "a", stored), config)
    got = loaded(folder, "nvfp4", batch_bytes=batch_bytes)
    want = loaded(written(tmp_path / "b", meant), "nvfp4")
    same_tensors(got, want)


@pytest.mark.parametrize(("kind", "quantize"), [("fp8_channel", "int4-g32"), ("fp8_block", "nvfp4")])
def test_a_ranks_part_of_like_experts_is_undone_together(tmp_path, monkeypatch, kind, quantize):
    """Rows that begin within a block of scales, and columns."""
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 6)
    stored, _, config = fp8_source(random_weights(inter=2 * 96), kind)
    virtual = virtual_in(described(written(tmp_path / "m", stored), config), quantize)
    alone, together = Fused(2, 1), Fused(2, 1)
    alone.load(pipeline_of(virtual, CPU, READER, **alone.asked(virtual), batch_bytes=0))
    stream = pipeline_of(virtual, CPU, READER, **together.asked(virtual), batch_bytes=2**30)
    batches = [step for step in steps(stream._plans, 2**30, stream._direct_targets) if isinstance(step, Batch)]
    assert max(len(plans) for batch in batches for plans in batch.alike.values()) >= 6
    together.load(stream)
    same_memory(together, alone)


# What a source's scales stand for, and what holds its codes: more than one block of columns has no place in a scale for each row.
HELD = [("fp8_tensor", "fp8"), ("fp8_tensor", "fp8-block"), ("fp8_channel", "fp8"), ("fp8_block", "fp8-block"), ("fp8_block", "fp8")]


def codes(weight: torch.Tensor) -> torch.Tensor:
    return weight.contiguous().view(torch.uint8)


def spread(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """float32 [n, k]: the factor of each element."""
    scale = scale.float()
    if scale.numel() == 1 or tuple(scale.shape) in ((n,), (n, 1)):
        return scale.reshape(-1, 1).expand(n, k)
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def scale_beside(stored: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    return next(stored[name] for name in (f"{module}.weight_scale", f"{module}.weight_scale_inv") if name in stored)


def modules(stored: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".weight") for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]


def scales_of_powers(stored: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Scales that no weight would have been given by its largest value: rounding to them anew moves codes."""
    for name, tensor in stored.items():
        if "weight_scale" in name:
            stored[name] = torch.exp2(torch.randint(-9, -5, tensor.shape).float()).to(dtype)


@pytest.mark.parametrize(("dtype", "batch_bytes"), [(torch.float32, 0), (torch.bfloat16, 2**30), (torch.float8_e8m0fnu, 0)], ids=str)
@pytest.mark.parametrize(("kind", "quantize"), HELD)
def test_what_is_kept_in_fp8_keeps_its_own_codes_and_scales(tmp_path, kind, quantize, dtype, batch_bytes):
    """q/k/v and gate/up with a scale of their own each included."""
    stored, _, config = fp8_source(random_weights(), kind)
    scales_of_powers(stored, dtype)
    got = loaded(described(written(tmp_path / "m", stored), config), quantize, batch_bytes=batch_bytes)
    held = []
    for module in modules(stored):
        n, k = stored[f"{module}.weight"].shape
        made, scale = got[f"{module}.weight"], got[f"{module}.weight_scale"]
        assert scale.dtype == torch.float32
        meant = stored[f"{module}.weight"].float() * spread(scale_beside(stored, module), n, k)
        if kind == "fp8_block" and scale.shape == (n, 1) and k > 128:
            whole = quantizer(Format("fp8")).quantize(meant.to(torch.bfloat16))
            assert torch.equal(codes(made), codes(whole["weight"]))
            assert torch.equal(scale, whole["weight_scale"])
            continue
        held.append(module)
        assert torch.equal(codes(made), codes(stored[f"{module}.weight"])), module
        assert torch.equal(spread(scale, n, k), spread(scale_beside(stored, module), n, k)), module
    assert len(held) >= len(modules(stored)) / 2


@pytest.mark.parametrize(("kind", "quantize"), HELD)
def test_a_ranks_part_of_what_is_kept_has_the_sources_codes(tmp_path, kind, quantize):
    """Rows of some and columns of others, in whole blocks."""
    rank = 1
    stored, _, config = fp8_source(random_weights(), kind)
    virtual = virtual_in(described(written(tmp_path / "m", stored), config), quantize)
    regions = Rank(rank).regions(virtual)
    for batch_bytes in (0, 2**30):
        mine = Rank(rank)
        mine.load_weights(pipeline_of(virtual, CPU, READER, regions=regions, batch_bytes=batch_bytes).tensors())
        for module in modules(stored):
            axis = 1 if "down_proj" in module or "o_proj" in module else 0
            if module.startswith("model.layers.1.") or (axis == 1 and (kind, quantize) == ("fp8_block", "fp8")):
                continue  # another stage's, or with two blocks in a row
            want = stored[f"{module}.weight"].chunk(2, dim=axis)[rank]
            factor = spread(scale_beside(stored, module), *stored[f"{module}.weight"].shape).chunk(2, dim=axis)[rank]
            made, scale = mine.taken[f"{module}.weight"], mine.taken[f"{module}.weight_scale"]
            scale = scale.view(-1)[rank] if scale.numel() == 2 else scale  # Rank takes both, as if they were global ones
            assert torch.equal(codes(made), codes(want)), module
            assert torch.equal(made.float() * spread(scale, *made.shape), want.float() * factor), module


@pytest.mark.parametrize(("ranks", "rank", "batch_bytes"), [(1, 0, 0), (2, 1, 2**30)])
@pytest.mark.parametrize(("kind", "quantize"), [("fp8_channel", "fp8"), ("fp8_block", "fp8-block")])
def test_experts_that_are_kept_are_placed_with_their_own_codes(tmp_path, monkeypatch, kind, quantize, ranks, rank, batch_bytes):
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 9)
    stored, _, config = fp8_source(random_weights(), kind)
    virtual = virtual_in(described(written(tmp_path / "m", stored), config), quantize)
    got = Fused(ranks, rank)
    got.load(pipeline_of(virtual, CPU, READER, **got.asked(virtual), batch_bytes=batch_bytes))
    for number in range(9):
        for which, name in enumerate(("gate_proj", "up_proj")):
            want = stored[f"model.layers.1.mlp.experts.{number}.{name}.weight"].chunk(ranks)[rank]
            assert torch.equal(codes(got.memory["model.layers.1.mlp.w13.weight"][number, which]), codes(want))


def test_blocks_that_begin_within_a_block_of_the_source_are_rounded_anew() -> None:
    """Up behind gate in one packed tensor, in a format that counts blocks from its own first row."""
    block, row = Format("fp8_block"), Format("fp8")
    whole, own = (768, 256), (6, 2)
    assert holds_codes(block, own, whole, 0)
    assert holds_codes(block, own, whole, 384)
    assert not holds_codes(block, own, whole, 192)
    assert holds_codes(block, (1, 2), (128, 256), 64), "one row of blocks has no seam"
    assert not holds_codes(row, own, whole, 0)
    assert holds_codes(row, (6, 1), (768, 128), 192)
    assert not holds_codes(block, (768, 1), whole, 0)
    assert holds_codes(row, (768, 1), whole, 192)
    assert all(holds_codes(form, (), whole, 192) for form in (row, block))
    assert not any(holds_codes(Format(name), (), whole) for name in ("bf16", "nvfp4", "mxfp4", "int4"))


INDEXER = "model.layers.0.self_attn.indexer.wq_b.weight"
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
TOWER = "visual.blocks.0.attn.qkv.weight"
KEPT = (INDEXER, TOWER, "model.layers.1.mlp.gate.weight", "model.embed_tokens.weight")


def with_more() -> dict[str, torch.Tensor]:
    """Weights of the classes that no recipe quantizes unless it names them, as DeepSeek-V3.2 has an indexer in FP8."""
    more = {INDEXER: torch.randn(192, HIDDEN), TOWER: torch.randn(3 * 160, 160)}
    return {**random_weights(), **{name: tensor.to(torch.bfloat16) for name, tensor in more.items()}}


@pytest.mark.parametrize(
    ("kind", "quantize", "batch_bytes"),
    [
        ("fp8_tensor", "nvfp4", 0),
        ("fp8_channel", {"format": "int4-g32", "keep": ["visual", "o_proj"]}, 200_000),
        ("fp8_block", "nvfp4", 2**30),
    ],
    ids=str,
)
def test_fp8_that_keeps_its_precision_beside_quantized_layers_comes_as_its_values(tmp_path, kind, quantize, batch_bytes):
    stored, meant, config = fp8_source(with_more(), kind, lambda name: name.endswith("_proj.weight") or name in KEPT)
    assert {stored[name].dtype for name in KEPT} == {torch.float8_e4m3fn}
    folder = described(written(tmp_path / "a", stored), config)
    got = loaded(folder, quantize, batch_bytes=batch_bytes)

    assert [name for name in KEPT if not torch.equal(got[name], meant[name])] == []
    assert not [name for name in got if name.startswith(tuple(kept.removesuffix(".weight") for kept in KEPT)) and name not in KEPT]
    checkpoint = read_checkpoint(str(folder))
    formats = QuantizationRecipe.parse(quantize).assign(checkpoint)
    assert not formats.keys() & {name.removesuffix(".weight") for name in KEPT}
    told = quantization_config(formats, linear_modules(checkpoint))["ignore"]
    assert {part for part in ("wq_b", "visual", "gate") if any(part in pattern for pattern in told)} == {"wq_b", "visual", "gate"}


def with_fp8_kept() -> tuple[dict[str, torch.Tensor], dict]:
    """(what is stored, quantization_config) of weights of which KEPT too are in FP8."""
    stored, _, config = fp8_source(with_more(), "fp8_block", lambda one: one.endswith("_proj.weight") or one in KEPT)
    return stored, config


def refused(folder: Path, stored: dict[str, torch.Tensor], config: dict) -> CheckpointError:
    """The error that names it before anything is read."""
    checkpoint = read_checkpoint(str(described(written(folder, stored), config)))
    formats = QuantizationRecipe.parse("nvfp4").assign(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        VirtualCheckpoint(checkpoint, formats)
    return caught.value


@pytest.mark.parametrize(("name", "shape"), [(INDEXER, (191, 1)), (PROJECTION, (1, 2))], ids=["kept: a row too few", "quantized: turned"])
def test_a_scale_of_a_wrong_shape_is_named_before_anything_is_read(tmp_path, name, shape):
    stored, config = with_fp8_kept()
    rows = stored[name].shape[0]
    wrong = name.replace(".weight", ".weight_scale_inv")
    stored[wrong] = torch.ones(shape)
    error = refused(tmp_path / "m", stored, config)
    assert error.tensor == wrong
    assert lacking(error.problem, f"{rows}x{HIDDEN}", str(list(shape)), f"[{rows}, 1]", f"[{-(-rows // 128)}, 1]") == []


def test_a_scale_of_codes_is_no_number(tmp_path):
    """E8M0 stored as bytes: 120 would stand for 2^-7."""
    stored, config = with_fp8_kept()
    wrong = PROJECTION.replace(".weight", ".weight_scale_inv")
    stored[wrong] = torch.full(stored[wrong].shape, 120, dtype=torch.uint8)
    error = refused(tmp_path / "m", stored, config)
    assert error.tensor == wrong
    assert lacking(error.problem, "U8", "F32", "F8_E8M0") == []


def test_fp8_that_keeps_its_precision_and_has_no_scale_is_not_handed_over_as_it_is(tmp_path):
    stored, config = with_fp8_kept()
    del stored[TOWER.replace(".weight", ".weight_scale_inv")]
    assert refused(tmp_path / "m", stored, config).tensor == TOWER


def test_fp8_of_another_form_is_refused_by_a_cure_that_helps(tmp_path):
    stored, _, config = fp8_source(random_weights(), "fp8_tensor")
    stored["visual.patch_embed.proj.weight"] = torch.zeros(64, 3, 2, 14, 14).to(torch.float8_e4m3fn)
    stored["visual.patch_embed.proj.weight_scale"] = torch.tensor(0.5)
    folder = described(written(tmp_path / "m", stored), config)
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight: .*F8_E4M3 .*`quantize`"):
        loaded(folder, "nvfp4")
    assert loaded(folder, "bf16")["visual.patch_embed.proj.weight"].dtype == torch.float8_e4m3fn
