"""FP8 experts that are packed into one tensor, in every layout that is published: the same as what they stand for, expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sparkd.checkpoint import TensorRef, read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.pipelines import pipeline_of
from tests.workers.load.formats.test_fp8_source_load import described
from tests.workers.load.reference import E4M3
from tests.workers.load.test_pipeline import CPU, EXPERTS, HIDDEN, READER, Rank, loaded, random_weights, written
from workers.load.formats import quantizer
from workers.load.read_plan import Batch, steps
from workers.load.trace import Trace, phantoms
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.formats import Format
from workers.quantization.packed import PackedWeight
from workers.quantization.packed_scale import packed_module_of, scale_of_weight
from workers.quantization.recipe import QuantizationRecipe

INTER = 192  # gate ends within a block of 128 rows
BLOCKS: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def spread(scale: np.ndarray, rows: int, cols: int, *, blocks: bool) -> np.ndarray:
    """[experts, rows, columns] of a scale as the file has it."""
    if blocks:
        return scale.repeat(128, 1)[:, :rows].repeat(128, 2)[:, :, :cols]
    return np.broadcast_to(scale, (EXPERTS, rows, cols))


def of_all(_rows: int, _cols: int, _across: bool) -> tuple[int, ...]:
    return ()


def of_rows(rows: int, cols: int, transposed: bool) -> tuple[int, ...]:
    return (EXPERTS, 1, cols) if transposed else (EXPERTS, rows, 1)


def of_blocks(rows: int, cols: int, _across: bool) -> tuple[int, ...]:
    return (EXPERTS, -(-rows // 128), -(-cols // 128))


# As nvidia's Llama 4 (ModelOpt), Meta's Llama 4 Maverick (fbgemm) and transformers' fine-grained FP8 have it.
LAYOUTS: dict[str, tuple[str, Callable[[int, int, bool], tuple[int, ...]], bool, dict[str, Any]]] = {
    "modelopt": ("_weight_scale", of_all, True, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "rows": ("_scale", of_rows, False, {"quant_method": "fbgemm_fp8"}),
    "blocks": ("_scale_inv", of_blocks, False, BLOCKS),
    "blocks, transposed": ("_scale_inv", of_blocks, True, BLOCKS),
}


def packed(layout: str, folder: Path, inter: int = INTER) -> tuple[Path, Path]:
    """(the FP8 checkpoint, the BF16 one that it stands for)"""
    suffix, shape_of, transposed, config = LAYOUTS[layout]
    random = np.random.default_rng(5)
    values = E4M3.astype(np.float32)
    stored, meant = {}, {}
    for name, tensor in random_weights(packed=True, inter=inter).items():
        stored[name] = meant[name] = tensor
        if tensor.dim() != 3:
            continue
        _, rows, cols = tensor.shape
        rows, cols = (cols, rows) if transposed else (rows, cols)
        scale = np.asarray(0.01 + random.random(shape_of(rows, cols, transposed)) / 50, dtype=np.float32)
        codes = (
            random.integers(0, 127, (EXPERTS, rows, cols), dtype=np.uint8)
            | random.integers(0, 2, (EXPERTS, rows, cols), dtype=np.uint8) << 7
        )
        stored[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        stored[f"{name}{suffix}"] = torch.from_numpy(scale)
        stored[f"{name}_{'input' if layout == 'modelopt' else 'activation'}_scale"] = torch.ones(())
        meant[name] = torch.from_numpy(values[codes] * spread(scale, rows, cols, blocks=shape_of is of_blocks)).to(torch.bfloat16)
    return described(written(folder / "fp8", stored), config), written(folder / "meant", meant)


@pytest.mark.parametrize(
    ("layout", "quantize", "batch_bytes"),
    [*zip(LAYOUTS, ("nvfp4", "int4-g32") * 2, (0, 2**30, 200_000, 0), strict=True)],
)
def test_each_expert_is_what_it_stands_for(tmp_path: Path, layout: str, quantize: str, batch_bytes: int) -> None:
    fp8, meant = packed(layout, tmp_path)
    got = loaded(fp8, quantize, batch_bytes=batch_bytes)
    want = loaded(meant, quantize)
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))] == []


PARTS = (("gate_proj", "gate_up_proj", 0, 256), ("up_proj", "gate_up_proj", 256, 256), ("down_proj", "down_proj", 0, HIDDEN))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_are_kept_become_fp8_of_their_own(tmp_path: Path, layout: str) -> None:
    """Nobody takes the packed ones beside layers that are quantized anew."""
    fp8, meant = packed(layout, tmp_path, inter=256)
    got = loaded(fp8, {"format": "nvfp4", "keep": ["experts"]})
    form = Format("fp8_block") if layout.startswith("blocks") else Format("fp8")
    want = loaded(meant, {"format": "nvfp4", "layers": {"experts": form.spelling}})
    assert {name: (one.dtype, one.shape) for name, one in got.items()} == {name: (one.dtype, one.shape) for name, one in want.items()}
    stored, values, transposed = tensors_of(fp8), tensors_of(meant), LAYOUTS[layout][2]
    for layer, expert, (name, packed_name, first, count) in product(range(2), range(EXPERTS), PARTS):
        experts = f"model.layers.{layer}.mlp.experts"
        codes, value = (one[f"{experts}.{packed_name}"][expert] for one in (stored, values))
        codes = (codes.t() if transposed else codes)[first : first + count]
        made = {suffix: got[f"{experts}.{expert}.{name}.{suffix}"] for suffix in ("weight", "weight_scale")}
        assert torch.equal(made["weight"].view(torch.uint8), codes.contiguous().view(torch.uint8))
        value = (value.t() if transposed else value)[first : first + count]
        assert torch.equal(quantizer(form).dequantize(made, torch.bfloat16), value)
    others = [name for name in want if ".experts." not in name]
    assert [name for name in others if not torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))] == []


@pytest.mark.parametrize(("layout", "inter"), [("rows", INTER), ("modelopt", INTER), ("blocks", INTER), ("blocks", 256)])
def test_experts_that_lie_as_they_are_needed_are_quantized_together(tmp_path: Path, layout: str, inter: int) -> None:
    """Gate and up are of one kind where no block of scales is part of both."""
    checkpoint = read_checkpoint(str(packed(layout, tmp_path, inter)[0]))
    virtual = VirtualCheckpoint(checkpoint, QuantizationRecipe.parse("mxfp4").assign(checkpoint))
    units = [step for step in steps(pipeline_of(virtual, CPU, READER)._plans, 2**30, {}) if isinstance(step, Batch)]
    together = {plan.unit.name for batch in units for plan in batch.plans}
    alike = any("gate_proj" in name for name in together)
    transposed = LAYOUTS[layout][2]
    assert any("experts" in name for name in together) == (not transposed)
    assert alike == (not transposed and (layout, inter) != ("blocks", INTER))


@pytest.mark.parametrize(("layout", "rank", "batch_bytes"), [*zip(LAYOUTS, (0, 1) * 2, (0, 0, 2**30, 2**30), strict=True)])
def test_a_rank_takes_its_part(tmp_path: Path, layout: str, rank: int, batch_bytes: int) -> None:
    checkpoint = read_checkpoint(str(packed(layout, tmp_path, 256)[0]))
    virtual = VirtualCheckpoint(checkpoint, QuantizationRecipe.parse("mxfp4").assign(checkpoint))
    trace = Trace()
    Rank(rank).load_weights(phantoms(((one.name, one.shape, one.dtype) for one in virtual.outputs()), CPU, trace))
    regions = {name: traced.region for name, traced in trace.tensors.items()}
    one, whole = Rank(rank), Rank(rank)
    one.load_weights(pipeline_of(virtual, CPU, READER, regions=regions, batch_bytes=batch_bytes).tensors())
    whole.load_weights(pipeline_of(virtual, CPU, READER).tensors())
    assert one.taken.keys() == whole.taken.keys()
    assert [name for name in one.taken if not torch.equal(one.taken[name], whole.taken[name])] == []


WEIGHT = TensorRef("model.layers.0.mlp.experts.gate_up_proj", "F8_E4M3", (EXPERTS, 2 * INTER, HIDDEN), "/m/model.safetensors", 0, 0)


@pytest.mark.parametrize("shape", [(EXPERTS, HIDDEN), (EXPERTS, 1, 3), (EXPERTS + 1, 1, 1)])
def test_a_scale_of_another_shape_is_named(shape: tuple[int, ...]) -> None:
    scale = TensorRef(f"{WEIGHT.name}_scale_inv", "F32", shape, WEIGHT.path, 0, 4 * int(np.prod(shape)))
    with pytest.raises(CheckpointError) as caught:
        scale_of_weight(WEIGHT, PackedWeight("m", 0, False, 0, INTER), scale)
    assert (caught.value.file, caught.value.tensor) == (WEIGHT.path, scale.name)


def test_what_is_a_scale_of_packed_experts_is_told_by_its_name() -> None:
    scales = ("_scale", "_scale_inv", "_weight_scale", ".weight_scale", "_input_scale", "_activation_scale")
    assert {packed_module_of(f"{WEIGHT.name}{suffix}") for suffix in scales} == {WEIGHT.name}
    # _scales: gpt-oss's MXFP4.
    others = (f"{WEIGHT.name}_scales", f"{WEIGHT.name}_bias", "model.layers.0.mlp.experts.3.gate_proj.weight_scale")
    assert {packed_module_of(name) for name in others} == {None}


def test_a_block_that_is_shared_by_gate_and_up_stays_whole() -> None:
    scale = TensorRef("s", "F32", (EXPERTS, 3, 1), "/m", 1000, 4 * EXPERTS * 3)
    up = PackedWeight("m", 2, False, INTER, INTER)
    found = scale_of_weight(WEIGHT, up, scale)
    assert (found.first, found.shape, found.ref.shape, found.ref.offset) == (INTER, (2 * INTER, HIDDEN), (3, 1), 1000 + 4 * 2 * 3)
    whole = scale_of_weight(WEIGHT, replace(up, row_start=0, row_count=None), scale)
    assert (whole.first, whole.shape) == (0, (2 * INTER, HIDDEN))
