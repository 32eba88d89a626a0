"""What a user is told, and what is left, when a checkpoint cannot be loaded: a damaged one on its way into vLLM's real model class."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.errors import CheckpointError
from tests.support.architectures import ARCHITECTURES, llama
from tests.support.checkpoints import MIB, write_checkpoint
from tests.support.waiting import until
from tests.workers.load.loading import load
from workers import plugin
from workers.load import pipeline
from workers.load.progress import ProgressFile
from workers.load.trace import PhantomTensor

INDEX = "model.safetensors.index.json"
DAMAGED = "model.layers.1.mlp.up_proj"
W = f"{DAMAGED}.weight"
ALONE = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama()
    return write_checkpoint(tmp_path_factory.mktemp("sound") / "model", model.config, model.entries, shard_bytes=MIB)


@pytest.fixture(scope="module", autouse=True)
def registered(one_rank: None) -> None:
    plugin.register()


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def weight_map(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def header(folder: Path, change: Callable[[dict[str, Any], bytearray], Any], name: str = W) -> None:
    """Changes the header and the data of the shard that holds this tensor."""
    path = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    entries, data = json.loads(raw[8:end]), bytearray(raw[end:])
    change(entries, data)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def truncated(folder: Path) -> None:
    os.truncate(shards(folder)[-1], shards(folder)[-1].stat().st_size - 4096)


def reshaped(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(shape=[1024, 128]))


def reshaped_alone(folder: Path) -> None:
    """One that vLLM runs as one with nothing else."""
    header(folder, lambda entries, _: entries[ALONE].update(shape=[128, 512]), ALONE)


def narrow(folder: Path) -> None:
    header(folder, lambda entries, _: entries[ALONE].update(shape=[1024, 64]), ALONE)


def of_integers(folder: Path) -> None:
    header(folder, lambda entries, _: entries[W].update(dtype="I16"))


def not_finite(folder: Path) -> None:
    def spoil(entries: dict[str, Any], data: bytearray) -> None:
        at = entries[W]["data_offsets"][0] + 100
        data[at : at + 2] = b"\xc0\x7f"

    header(folder, spoil)


def renamed(folder: Path) -> None:
    header(folder, lambda entries, _: entries.update({f"{DAMAGED}s.weight": entries.pop(W)}))
    weight_map(folder, lambda where: where.update({f"{DAMAGED}s.weight": where.pop(W)}))


def longer(folder: Path) -> None:
    """Longer than config.json says. vLLM's linear layers cut such a tensor without a word."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] - 128}))


# One for each place that finds it: the headers, the index, the recipe, the model's shapes, the model's names, the values. The reader of
# headers has its own tests (tests/sparkd/checkpoint).
CASES: list[tuple[str, Callable[[Path], Any], Any, str]] = [
    ("truncated shard", truncated, "nvfp4", r"model-\d+-of-\d+\.safetensors: "),
    ("missing shard", lambda folder: shards(folder)[1].unlink(), "nvfp4", r"model-00002-of-\d+\.safetensors: "),
    ("integers", of_integers, "nvfp4", rf"{W}: .* I16\b"),
    ("another shape", reshaped_alone, "nvfp4", rf"{ALONE}: .*LlamaForCausalLM .* BF16 .*\[128, 512\]"),
    ("other columns than its sibling", reshaped, "nvfp4", rf"{W}: .*LlamaForCausalLM .*\[1024, 128\]"),
    ("another shape, plain", reshaped, "bf16", rf"{DAMAGED}.*"),
    ("longer than the model", longer, "nvfp4", r"layers\.0\.mlp\.\w+_proj\.weight: .*512.*LlamaForCausalLM .*config\.json"),
    ("longer than the model, plain", longer, "bf16", r"layers\.0\.mlp\.\w+_proj\.weight: .*512.*LlamaForCausalLM .*config\.json"),
    ("another name", renamed, "nvfp4", rf"{DAMAGED}s\.weight: .* in LlamaModel\)\. .*`keep`"),
    ("NaN", not_finite, "nvfp4", rf"{W}.*NaN"),
    ("a group that does not divide", narrow, {"format": "nvfp4", "layers": {"o_proj": "int4-g128"}}, rf"{ALONE}: K=64 .*128.* int4-g64"),
    ("a group that is not built", lambda folder: None, "nf4-g16", r" 16\b"),
]


def shared_memory() -> set[str]:
    """What is left there, but for other tests' own, which say so: they run beside this one."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sparkd-test-")}


@pytest.mark.parametrize(("damage", "quantize", "sentence"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_sentence_and_nothing_left(sound: Path, tmp_path: Path, damage: Callable[[Path], Any], quantize: Any, sentence: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    damage(folder)
    progress, cache = tmp_path / "progress", tmp_path / "cache"
    before = shared_memory()

    with pytest.raises((ValueError, CheckpointError), match=sentence) as caught:
        load(folder, {"quantize": quantize, "cache_dir": str(cache), "progress": str(progress)})

    said = json.loads(progress.read_text())["load"]
    assert said["phase"] == "failed"
    assert said["failure"] == str(caught.value)
    assert "\n" not in str(caught.value)
    assert [one.name for one in cache.rglob("*")] in ([], [".lock"])
    until(lambda: shared_memory() <= before, "no shared memory is left; a semaphore of another process goes by itself")


@pytest.mark.parametrize("quantize", ["bf16", "int4-g32"])
def test_an_expert_that_is_longer_than_the_model_is_named(tmp_path: Path, quantize: str) -> None:
    model = ARCHITECTURES["qwen3_moe"]()
    entries = [one._replace(shape=(one.shape[0] + 64, *one.shape[1:])) if "experts.1.up_proj" in one.name else one for one in model.entries]
    folder = write_checkpoint(tmp_path / "model", model.config, entries, shard_bytes=MIB)

    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight: "):
        load(folder, {"quantize": quantize})


def test_a_longer_tensor_is_cut_where_the_model_may_lack_weights(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    longer(folder)
    load(folder, {"quantize": "bf16", "enable_weights_track": False})


# Memory that is used up in the middle

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")
HOST = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 2147483648 bytes."
)
TRITON = RuntimeError("Triton Error [CUDA]: out of memory")


class Exhausted:
    """A quantizer that finds no memory for its sixth weight."""

    def __init__(self, real: Any, error: Exception) -> None:
        self.real, self.error, self.left = real, error, 5

    def __call__(self, form: Any) -> Any:
        return SimpleNamespace(parts=self.real(form).parts, quantize=partial(self._quantize, self.real(form)))

    def _quantize(self, kind: Any, weight: torch.Tensor, **more: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return kind.quantize(weight, **more)


def placing(model: Any, error: BaseException) -> None:
    """A model that finds no memory for the 20th tensor that it is handed."""
    real = model.load_weights

    def some(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(tensors):
            if number >= 20 and not isinstance(tensor, PhantomTensor):
                raise error
            yield name, tensor

    model.load_weights = lambda tensors: real(some(tensors))


@pytest.mark.parametrize(
    ("where", "error"),
    [("quantizing", CUDA), ("placing", HOST), ("quantizing", TRITON), ("placing", MemoryError())],
    ids=["device", "torch's allocator", "Triton", "Python"],
)
def test_memory_that_is_used_up_in_the_middle(
    sound: Path, tmp_path: Path, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, cache = tmp_path / "progress", tmp_path / "cache"
    if where == "quantizing":
        monkeypatch.setattr(pipeline, "quantizer", Exhausted(pipeline.quantizer, error))

    with pytest.raises(type(error)) as caught:
        settings = {"quantize": "nvfp4", "cache_dir": str(cache), "progress": str(progress)}
        load(sound, settings, partial(placing, error=error) if where == "placing" else lambda _model: None)

    assert caught.value is error
    said = json.loads(progress.read_text())["load"]
    assert said["phase"] == "failed"
    assert 0 < said["bytes_done"] < said["bytes_total"]
    told = str(error).partition("\n")[0].rstrip(".") or "MemoryError"
    assert f"({told})" in said["failure"]
    assert said["failure_lasts"] is False
    assert said["cache_state"] == "failed"
    assert [one.name for one in cache.rglob("*")] == [".lock"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("stream-", "quantized-"))]


# Decided by where it was raised, not by its type


def at_the_end(model: Any, error: BaseException) -> None:
    """A class that raises once it has all tensors, as one that counts them does."""
    real = model.load_weights

    def counting(tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        phantoms = []
        loaded = real((phantoms.append(isinstance(tensor, PhantomTensor)) or (name, tensor)) for name, tensor in tensors)
        if not any(phantoms):
            raise error
        return loaded

    model.load_weights = counting


@pytest.mark.parametrize("where", ["quantizing", "placing", "after the last tensor"])
def test_only_what_vllms_class_raises_over_a_tensor_is_the_checkpoints_fault(
    sound: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("Triton Error [CUDA]: an illegal instruction was encountered")
    progress = tmp_path / "progress"
    if where == "quantizing":
        monkeypatch.setattr(pipeline, "quantizer", Exhausted(pipeline.quantizer, error))
    prepare = {"quantizing": lambda _model: None, "placing": partial(placing, error=error)}.get(where, partial(at_the_end, error=error))

    with pytest.raises((RuntimeError, CheckpointError)) as caught:
        load(sound, {"quantize": "nvfp4", "cache_dir": None, "progress": str(progress)}, prepare)

    said = json.loads(progress.read_text())["load"]
    assert (isinstance(caught.value, CheckpointError), said["failure_lasts"]) == (where == "placing", where == "placing")
    assert "Triton Error" in said["failure"]


# Ended from outside


@pytest.mark.parametrize(
    ("when", "error"), [("placing", SystemExit(0)), ("before the first tensor", KeyboardInterrupt())], ids=["SIGTERM", "SIGINT"]
)
def test_a_load_that_is_ended_from_outside_leaves_nothing(
    sound: Path, tmp_path: Path, when: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's handler of SIGTERM raises SystemExit wherever the load is (v1/engine/core.py, v1/executor/multiproc_executor.py)."""
    progress, cache = tmp_path / "progress", tmp_path / "cache"
    before = shared_memory()

    def ended(*_: Any) -> None:
        raise error

    if when != "placing":
        monkeypatch.setattr(ProgressFile, "begin", ended)

    with pytest.raises(type(error)) as caught:
        settings = {"quantize": "nvfp4", "cache_dir": str(cache), "progress": str(progress)}
        load(sound, settings, partial(placing, error=error) if when == "placing" else lambda _model: None)

    assert caught.value is error
    said = json.loads(progress.read_text())["load"]
    assert (said["phase"], type(error).__name__ in said["failure"]) == ("failed", False)
    assert said["cache_state"] == "failed"
    assert [one.name for one in cache.rglob("*")] == [".lock"]
    until(lambda: shared_memory() <= before, "no shared memory is left; a semaphore of another process goes by itself")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("stream-", "quantized-"))]
