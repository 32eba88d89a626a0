"""NaN and infinity in every kind of tensor and on every way that one takes through the pipeline, and what is none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.checkpoint import TensorRef, read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.pipelines import pipeline_of
from tests.workers.load.formats.test_fp8_source_load import described, fp8_source
from tests.workers.load.test_pipeline import CPU, READER, Fused, laid_out, loaded, random_weights, virtual_in, written
from workers.cache.load_session import LoadSession
from workers.load import nonfinite, pipeline
from workers.load.nonfinite import NonFiniteCheck
from workers.load.progress import ProgressFile
from workers.load.read_plan import Run, steps
from workers.load.virtual import VirtualCheckpoint

NAN, INF = float("nan"), float("inf")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
REF = TensorRef("model.norm.weight", "BF16", (4096,), "/nowhere/model.safetensors", 0, 8192)


def refused(tensor: torch.Tensor, ref: TensorRef = REF) -> bool:
    seen = NonFiniteCheck(CPU)
    seen.look([ref], tensor)
    try:
        seen.refuse()
    except CheckpointError as error:
        assert (error.file, error.tensor) == (ref.path, ref.name)
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_bad_element_of_many(dtype: torch.dtype) -> None:
    for bad, at in ((NAN, 0), (INF, 2047), (-INF, 4095)):
        tensor = torch.randn(4096).to(dtype)
        assert not refused(tensor)
        tensor[at] = bad
        assert refused(tensor)
    assert not refused(torch.full((16,), -torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [(E4M3, {0x7F, 0xFF}), (E5M2, {0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF}), (E8M0, {0xFF})],
    ids=["e4m3", "e5m2", "e8m0"],
)
def test_every_code_of_eight_bits(dtype: torch.dtype, bad: set[int]) -> None:
    found = set()
    for code in range(256):
        codes = torch.zeros(64, dtype=torch.uint8)
        codes[code % 64] = code
        assert refused(codes.view(dtype)) == bool(codes.view(dtype).float().isfinite().logical_not().any())
        if refused(codes.view(dtype)):
            found.add(code)
    assert found == bad


def test_what_cannot_hold_one_and_what_may() -> None:
    assert not refused(torch.full((64,), 255, dtype=torch.uint8))
    assert not refused(torch.full((64,), -1, dtype=torch.int32))
    assert not refused(torch.empty(0, dtype=torch.bfloat16))
    bound = REF._replace(name="vision_tower.layers.0.linear.input_max")
    assert not refused(torch.tensor(INF), bound)
    assert refused(torch.tensor([1.0, INF]), bound)
    assert refused(torch.tensor(INF), REF._replace(name="model.layers.0.mlp.up_proj.weight_scale"))
    for name in ("input_scale", "input_global_scale"):  # of an expert that calibration never reached
        assert not refused(torch.tensor([INF]), REF._replace(name=f"model.layers.0.mlp.experts.7.down_proj.{name}"))


EMBEDDING, NORM, ROUTER = "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "bad", "quantize", "batch_bytes"),
    [
        (EMBEDDING, NAN, "nvfp4", 0),
        (NORM, -INF, "bf16", 2**30),
        (ROUTER, NAN, "nvfp4", 2**30),
        (EXPERT, NAN, "nvfp4", 0),
        (EXPERT, -INF, "nvfp4", 200_000),
        (EXPERT, NAN, "int4-g32", 2**30),
        (EXPERT, NAN, "bf16", 2**30),
    ],
)
def test_it_is_named_whatever_it_is_in(tmp_path: Path, name: str, bad: float, quantize: str, batch_bytes: int) -> None:
    weights = random_weights()
    weights[name].view(-1)[-1] = bad
    folder = written(tmp_path / "m", weights)
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, quantize, batch_bytes=batch_bytes)
    assert (caught.value.file, caught.value.tensor) == (read_checkpoint(str(folder)).tensors[name].path, name)


@pytest.mark.parametrize("changed", [False, True], ids=["as it is", "in another dtype"])
def test_a_large_tensor_that_is_never_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    monkeypatch.setattr(pipeline, "STREAMED_BYTES", 64 * 1024)
    weights = random_weights()
    weights[EMBEDDING][300, 5] = NAN

    def load(first: int) -> None:
        """A rank that takes rows from `first` on."""
        stream = pipeline_of(VirtualCheckpoint(checkpoint, {}), CPU, READER, once={EMBEDDING})
        for name, tensor in stream.tensors():
            part = tensor[first:] if name == EMBEDDING else tensor
            torch.zeros(part.shape, dtype=torch.float32 if changed else part.dtype).copy_(part)

    checkpoint = read_checkpoint(str(written(tmp_path / "m", weights)))
    with pytest.raises(CheckpointError, match=rf"{EMBEDDING}: .*NaN"):
        load(0)
    load(301)


def test_of_a_run_of_neighbours_the_bad_ones_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied as one, so a look at their files says which."""
    monkeypatch.setattr("tests.workers.load.test_pipeline.EXPERTS", 9)
    names = tuple(f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in (4, 6))
    weights = random_weights()
    for name in names:
        weights[name][0, 0] = NAN
    written(tmp_path / "m", weights)
    checkpoint = read_checkpoint(str(laid_out(tmp_path, weights)))
    virtual = VirtualCheckpoint(checkpoint, {})
    model = Fused()
    stream = pipeline_of(virtual, CPU, READER, **model.asked(virtual))
    runs = [step for step in steps(stream._plans, 0, stream._direct_targets) if isinstance(step, Run)]
    assert any({*names} <= {plan.unit.name for plan in run.plans} for run in runs)
    with pytest.raises(CheckpointError) as caught:
        model.load(stream)
    assert (caught.value.file, caught.value.tensor) == (checkpoint.shards[0].path, names[0])


MASK = "model.layers.0.self_attn.mask"


def test_a_buffer_that_nobody_said_a_model_takes(tmp_path: Path) -> None:
    """As an export has it, or a model that cannot be asked; one that takes the buffer is another matter."""
    weights = {**random_weights(), MASK: torch.full((8, 8), -INF, dtype=torch.bfloat16).triu(1)}
    virtual = virtual_in(written(tmp_path / "m", weights), "mxfp4")
    assert MASK in {name for name, _ in pipeline_of(virtual, CPU, READER).tensors()}
    regions = {one.name: tuple((0, size) for size in one.shape) for one in virtual.outputs()}
    with pytest.raises(CheckpointError, match=rf": {MASK}: .*NaN"):
        list(pipeline_of(virtual, CPU, READER, regions=regions).tensors())
    assert list(pipeline_of(virtual, CPU, READER, regions={**regions, MASK: None}).tensors())


def test_what_may_be_a_mask_is_never_nan() -> None:
    ref = REF._replace(name="model.layers.0.linear_attn.A_log")
    seen = NonFiniteCheck(CPU, weights_only=True)
    for bounds in ([-INF, 1.0], [-INF, INF]):
        seen.look([ref], torch.tensor(bounds))
    seen.refuse()
    seen.look([ref], torch.tensor([-INF, NAN]))
    with pytest.raises(CheckpointError, match=r"A_log: .*NaN"):
        seen.refuse()


@pytest.mark.parametrize("leaf", ["weight", "bias", "weight_scale_inv", "scale", "experts.gate_up_proj"])
def test_a_weight_is_one_whoever_takes_it(leaf: str) -> None:
    for weights_only in (False, True):
        seen = NonFiniteCheck(CPU, weights_only=weights_only)
        seen.look([REF._replace(name=f"model.layers.0.mlp.{leaf}")], torch.tensor([NAN, 1.0]))
        with pytest.raises(CheckpointError, match=rf"{leaf}: .*NaN"):
            seen.refuse()


def test_our_own_cache_was_looked_at_when_it_was_made(tmp_path: Path) -> None:
    weights = random_weights()
    weights[NORM][3] = NAN
    checkpoint = read_checkpoint(str(written(tmp_path / "m", weights)))
    virtual = VirtualCheckpoint(checkpoint, {})
    source, second = (LoadSession(virtual, CPU, READER, None, torch.bfloat16, ProgressFile(None)) for _ in range(2))
    cached: Any = SimpleNamespace(checkpoint=checkpoint, folder=checkpoint.folder, close=lambda: None)
    second.read_own(cached, source.pipeline.sink_layout())
    assert {name for name, _ in second.tensors()} == weights.keys()
    with pytest.raises(CheckpointError, match=NORM):
        list(source.tensors())


@pytest.mark.parametrize("part", ["weight", "weight_scale_inv"])
@pytest.mark.parametrize(("quantize", "batch_bytes"), [("nvfp4", 0), ("bf16", 0), ("fp8-block", 2**30)])
def test_an_fp8_source_and_its_scale(tmp_path: Path, part: str, quantize: str, batch_bytes: int) -> None:
    stored, _, config = fp8_source(random_weights(), "fp8_block")
    name = f"{EXPERT.removesuffix('.weight')}.{part}"
    if part == "weight":
        stored[name].view(torch.uint8)[3, 3] = 0xFF
    else:
        stored[name][0, 0] = NAN
    folder = described(written(tmp_path / "m", stored), config)
    virtual = virtual_in(folder, quantize)
    with pytest.raises(CheckpointError, match=rf"/.*: {name}: .*NaN"):
        list(pipeline_of(virtual, CPU, READER, batch_bytes=batch_bytes).tensors())


def test_the_flags_are_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonfinite, "CHECKED", 8)
    seen = NonFiniteCheck(CPU)
    seen.look([REF], torch.tensor([NAN, 1.0]))
    seen.look_now_and_then()
    for _ in range(2):
        seen.look([REF], torch.ones(3))
        seen.look_now_and_then()
    seen.look([REF], torch.ones(3))
    with pytest.raises(CheckpointError, match="NaN"):
        seen.look_now_and_then()
