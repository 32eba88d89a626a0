"""A load hands to its cache all of the checkpoint, whatever the model takes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from workers.cache.load_session import LoadSession, layout_key
from workers.load import pipeline
from workers.load.pipeline import SinkTensor
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.trace import TensorTrace, Trace
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.recipe import QuantizationRecipe

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
NORM, EMBEDDING = "model.norm.weight", "mtp.embed_tokens.weight"
MODULES = [f"model.layers.{layer}.mlp.up_proj" for layer in range(3)]
READER = partial(Reader, block_bytes=64 * 1024, blocks=4, threads=1, pin=False)
CPU = torch.device("cpu")


class Cache:
    """In the writer's place: notes what it gets and how it ends."""

    def __init__(self) -> None:
        self.came: dict[str, torch.Tensor] = {}
        self.ends: list[str] = []

    def add(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        self.came.update((name, tensor.clone()) for name, tensor in zip(names, stacked, strict=True))

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        known = self.came.get(name, torch.empty(0, dtype=torch.uint8))
        assert len(known) == start_byte
        self.came[name] = torch.cat([known, view])

    def finish(self) -> None:
        self.ends.append("finish")

    def abandon(self, reason: str) -> None:
        self.ends.append(reason)


def virtual_in(folder: Path, bad: str = "") -> VirtualCheckpoint:
    entries = [Tensor(NORM, (64,)), *(Tensor(f"{module}.weight", (64, 64), draw=normal(0.1)) for module in MODULES)]
    entries.append(Tensor(EMBEDDING, (64, 64), draw=normal(0.1)))
    checkpoint = read_checkpoint(write_checkpoint(folder / "model", CONFIG, entries))
    if bad:
        with open(checkpoint.tensors[bad].path, "r+b") as file:
            file.seek(checkpoint.tensors[bad].offset)
            file.write(b"\xc0\x7f")  # NaN of bfloat16
    return VirtualCheckpoint(checkpoint, QuantizationRecipe.parse("int4-g32").assign(checkpoint))


def trace_of(virtual: VirtualCheckpoint, left_out: tuple[str, ...]) -> Trace:
    traces = {}
    for tensor in virtual.outputs():
        region = None if tensor.name.startswith(left_out) else tuple((0, size) for size in tensor.shape)
        traces[tensor.name] = TensorTrace(tensor.shape, region, 1)
    return Trace(traces)


def session_of(virtual: VirtualCheckpoint, *left_out: str) -> tuple[LoadSession, Cache]:
    cache = Cache()
    session = LoadSession(virtual, CPU, READER, trace_of(virtual, left_out), torch.bfloat16, ProgressFile(None))
    session.write_whole(cache)  # type: ignore[arg-type]
    return session, cache


@pytest.fixture(params=[0, 32 * 2**20], ids=["a tensor in chunks", "each tensor whole"])
def streamed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pipeline, "STREAMED_BYTES", request.param)
    yield


def test_the_cache_gets_what_the_model_leaves_out_too(tmp_path: Path, streamed: None) -> None:
    virtual = virtual_in(tmp_path)
    session, cache = session_of(virtual, EMBEDDING, MODULES[1])
    # A parameter's copy, as a weight loader makes it.
    handed = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in session.tensors()}
    session.finish()

    assert cache.came.keys() == {tensor.name for tensor in virtual.outputs()}
    assert not [name for name in handed if name.startswith((EMBEDDING, MODULES[1]))]
    assert cache.ends == ["finish"]
    plain = LoadSession(virtual, CPU, READER, None, torch.bfloat16, ProgressFile(None))
    for name, tensor in plain.tensors():
        assert torch.equal(cache.came[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("bad", [EMBEDDING, f"{MODULES[1]}.weight"])
def test_a_nan_in_what_the_model_leaves_out_costs_the_cache_only(tmp_path: Path, streamed: None, bad: str) -> None:
    session, cache = session_of(virtual_in(tmp_path, bad), EMBEDDING, MODULES[1])
    for _, tensor in session.tensors():
        torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    session.finish()

    assert cache.ends[0].split()[0] == bad


@pytest.mark.parametrize(("left_out", "most"), [((), True), (tuple(MODULES[:1]), True), ((EMBEDDING, MODULES[1]), False)])
def test_a_draft_does_not_take_most_of_its_targets_folder(tmp_path: Path, left_out: tuple[str, ...], most: bool) -> None:
    virtual = virtual_in(tmp_path)
    trace = trace_of(virtual, left_out)
    assert LoadSession(virtual, CPU, READER, trace, torch.bfloat16, ProgressFile(None)).takes_most() is most


def test_ranks_that_read_different_parts_have_different_keys() -> None:
    one = SinkTensor(torch.uint8, (32, 64), (64, 64), (0, 0))
    other = SinkTensor(torch.uint8, (32, 64), (64, 64), (32, 0))
    keys = {layout_key(parts) for parts in ({"a": one}, {"a": other}, {"b": one}, {"a": one, "b": one}, {"b": one, "a": one})}
    assert len(keys) == 4
