"""What happens to a load's source when the load is over: the device belongs to the engine from then on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from tests.support.checkpoints import Tensor, normal, write_checkpoint
from tests.support.waiting import HUNG_S
from workers.cache.load_session import LoadSession
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.recipe import QuantizationRecipe

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64}
MODULES = [f"model.layers.{layer}.mlp.up_proj" for layer in range(3)]
READER = partial(Reader, block_bytes=64 * 1024, blocks=4, threads=1, pin=False)


class Cache:
    """In the writer's place: notes what is asked of it, by which thread, and what it gets once more."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.came: dict[str, torch.Tensor] = {}
        self.again: dict[str, torch.Tensor] = {}
        self.damaged: set[str] = set()
        self.ended = threading.Event()

    def _note(self, call: str) -> None:
        self.calls.append((call, threading.current_thread() is threading.main_thread()))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if not self.came:
            self._note("add")
        self.came[name] = tensor.clone()

    def add_stacked(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        for name, tensor in zip(names, stacked, strict=True):
            self.add(name, tensor)

    def leave_device(self) -> None:
        self._note("leave_device")

    def finish(self, refill: Callable[[Collection[str]], Iterator[tuple[str, torch.Tensor]]]) -> None:
        self._note("finish")
        self.again = dict(refill([f"{MODULES[1]}.weight_packed"]))
        self.ended.set()

    def abandon(self, reason: str) -> None:
        self._note(f"abandon: {reason}")


@pytest.fixture
def source(tmp_path: Path) -> LoadSession:
    entries = [Tensor("model.norm.weight", (64,)), *(Tensor(f"{module}.weight", (64, 64), draw=normal(0.1)) for module in MODULES)]
    checkpoint = read_checkpoint(write_checkpoint(tmp_path / "model", CONFIG, entries))
    virtual = VirtualCheckpoint(checkpoint, QuantizationRecipe.parse("int4-g32").assign(checkpoint))
    return LoadSession.of(virtual, torch.device("cpu"), READER, None, torch.bfloat16, ProgressFile(None))


def test_the_cache_leaves_the_device_before_the_engine_goes_on(source: LoadSession) -> None:
    """What it still lacks is made by another thread, later, and on the CPU: the engine may be capturing graphs."""
    cache = source.writer = source.pipeline.sink = Cache()  # type: ignore[assignment]
    handed = {name: tensor.clone() for name, tensor in source.tensors()}

    source.finish()

    assert cache.calls[:2] == [("add", True), ("leave_device", True)]
    assert cache.ended.wait(HUNG_S)
    assert cache.calls[2:] == [("finish", False)]
    (name,) = cache.again
    assert cache.again[name].device.type == "cpu"
    assert torch.equal(cache.again[name], handed[name])


def test_without_a_cache_there_is_nothing_to_finish(source: LoadSession) -> None:
    before = set(threading.enumerate())
    list(source.tensors())

    source.finish()

    assert set(threading.enumerate()) <= before
