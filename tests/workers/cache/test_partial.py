"""A model that takes a part of a checkpoint and the whole model beside it: each has its entry in the cache. vLLM's real class."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.architectures import llama, qwen3_next
from tests.support.checkpoints import MIB, write_checkpoint
from tests.workers.load.loading import load
from workers import plugin
from workers.cache.store import CacheEntry, entries, remove
from workers.cache.writer import CacheWriter
from workers.files import direct_file
from workers.quantization.recipe import QuantizationRecipe
from workers.vllm.export import ExportRequest, export

LAYER = "model.layers.1."
AHEAD = "mtp."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama()
    return write_checkpoint(tmp_path_factory.mktemp("partial") / "model", model.config, model.entries, shard_bytes=MIB)


@pytest.fixture(autouse=True)
def loader(one_rank: None) -> ModuleType:
    """The loader's module, which imports vLLM."""
    plugin.register()
    return importlib.import_module("workers.vllm.load.loader")


def stage(model: Any) -> None:
    """A stage of a pipeline, as vLLM builds one: the second layer is another's."""
    from vllm.model_executor.models.utils import PPMissingLayer

    model.model.layers[1] = PPMissingLayer()


def headless(model: Any) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    model.lm_head = PPMissingLayer()


def last(model: Any) -> None:
    """Most is another's, as it is to a draft."""
    from vllm.model_executor.models.utils import PPMissingLayer

    model.model.layers[0] = model.model.embed_tokens = PPMissingLayer()
    headless(model)


def loaded(
    folder: Path, tmp_path: Path, part: Any = lambda _model: None, quantize: str = "int4-g32"
) -> tuple[str, dict[str, torch.Tensor]]:
    """(where it was read from, the model's parameters), once its cache is whole."""
    tmp_path.mkdir(exist_ok=True)
    progress = tmp_path / "progress"
    model = load(folder, {"quantize": quantize, "cache_dir": str(tmp_path / "cache"), "progress": str(progress)}, part)
    return json.loads(progress.read_text())["load"]["source"], {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith("weight_shape")  # which nothing reads, so nothing fills it
    }


def names(entry: CacheEntry) -> set[str]:
    return {name for name in read_checkpoint(entry.folder).tensors if name.startswith(LAYER)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_files(one: Path, other: Path) -> bool:
    """Tensors, whatever their order in the files."""
    checkpoints = [read_checkpoint(folder) for folder in (one, other)]
    first, second = (
        {name: Path(ref.path).read_bytes()[ref.offset : ref.offset + ref.nbytes] for name, ref in found.tensors.items()}
        for found in checkpoints
    )
    return first == second and checkpoints[0].config == checkpoints[1].config


def test_layers_that_predict_ahead_are_kept_though_the_model_leaves_them_out(
    tmp_path: Path, loader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the second start asks about the quantized cache alone, and an export copies it."""
    made = qwen3_next(ahead=True)
    source = write_checkpoint(tmp_path / "ahead", made.config, made.entries, shard_bytes=MIB)
    asked: list[str] = []
    ask = loader.ask
    monkeypatch.setattr(
        loader, "ask", lambda virtual, *args, **more: asked.append(virtual.checkpoint.folder) or ask(virtual, *args, **more)
    )

    where, first = loaded(source, tmp_path)
    (entry,) = entries(str(tmp_path / "cache"))
    again, second = loaded(source, tmp_path)

    assert (where, again) == ("checkpoint", "cache")
    assert asked == [str(source), entry.folder]
    assert same(first, second)
    recipe = QuantizationRecipe.parse("int4-g32").canonical()
    cached = export(ExportRequest(str(source), recipe, str(tmp_path / "copied"), str(tmp_path / "cache"), "cpu"), lambda *_: None)
    straight = export(ExportRequest(str(source), recipe, str(tmp_path / "made"), None, "cpu"), lambda *_: None)
    assert (cached[0], straight[0]) == ("cache", "checkpoint")
    assert any(name.startswith(AHEAD) for name in read_checkpoint(tmp_path / "copied").tensors)
    assert same_files(tmp_path / "copied", tmp_path / "made")


@pytest.mark.parametrize("part", [stage, pytest.param(headless, marks=pytest.mark.rest)])
def test_what_leaves_out_less_than_it_takes_has_the_wholes_entry(folder: Path, tmp_path: Path, part: Any) -> None:
    assert loaded(folder, tmp_path, part)[0] == "checkpoint"
    (entry,) = entries(str(tmp_path / "cache"))
    assert names(entry)

    source, whole = loaded(folder, tmp_path)

    assert source == "cache"
    assert same(whole, loaded(folder, tmp_path / "apart")[1])


def damaged_in(folder: Path, part: str) -> Path:
    """A copy with a NaN in this part of the second layer."""
    copy = Path(shutil.copytree(folder, folder.parent / f"damaged-{part}", dirs_exist_ok=True))
    ref = read_checkpoint(copy).tensors[f"{LAYER}{part}.weight"]
    with open(ref.path, "r+b") as file:
        file.seek(ref.offset)
        file.write(b"\xc0\x7f")  # NaN of bfloat16
    return copy


@pytest.mark.parametrize(("part", "quantize"), [("input_layernorm", "int4-g32"), ("self_attn.k_proj", "nvfp4")])
def test_what_is_left_out_and_is_damaged_costs_the_cache_only(folder: Path, tmp_path: Path, part: str, quantize: str) -> None:
    damaged = damaged_in(folder, part)

    assert loaded(damaged, tmp_path, stage, quantize)[0] == "checkpoint"

    said = json.loads((tmp_path / "progress").read_text())["load"]
    assert (said["phase"], said["cache_state"]) == ("done", "failed")
    assert f"{LAYER}{part}.weight" in said["cache_why"]
    assert entries(str(tmp_path / "cache")) == []
    with pytest.raises(CheckpointError, match=rf"{part}.weight: it holds NaN"):
        loaded(damaged, tmp_path, quantize=quantize)


def test_what_takes_the_lesser_part_keeps_nothing_and_reads_the_wholes_entry(folder: Path, tmp_path: Path) -> None:
    """A draft in the folder of its target would quantize a foreign model."""
    source, part = loaded(folder, tmp_path, last)
    assert (source, entries(str(tmp_path / "cache"))) == ("checkpoint", [])

    assert loaded(folder, tmp_path)[0] == "checkpoint"
    (entry,) = entries(str(tmp_path / "cache"))
    source, again = loaded(folder, tmp_path, last)
    assert source == "cache"
    assert same(again, part)
    assert [one.name for one in entries(str(tmp_path / "cache"))] == [entry.name]


def test_ranks_that_take_different_parts_have_their_own_entries(
    folder: Path, tmp_path: Path, loader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "rank_of_world", lambda: (0, 2))
    first = {part: loaded(folder, tmp_path, part) for part in (stage, headless)}
    assert [source for source, _ in first.values()] == ["checkpoint"] * 2
    assert len(entries(str(tmp_path / "cache"))) == 2
    for part, (_, values) in first.items():
        source, again = loaded(folder, tmp_path, part)
        assert source == "cache"
        assert same(again, values)
    assert loaded(folder, tmp_path / "one", stage)[0] == "checkpoint"


def test_a_rank_without_room_for_its_entry_hands_nothing_to_a_writer(
    folder: Path, tmp_path: Path, loader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a writer each tensor is placed by itself. The rank of a stage, whose tensor-parallel rank is 0, has a report of its own."""
    handed: list[str] = []
    monkeypatch.setattr(loader, "rank_of_world", lambda: (1, 2))
    monkeypatch.setattr(CacheWriter, "add", lambda _self, names, _stacked: handed.extend(names))
    settings = {"quantize": "int4-g32", "cache_dir": str(tmp_path / "cache"), "progress": str(tmp_path / "progress")}
    load(folder, settings | {"cache_limit_bytes": 1}, stage)

    said = json.loads((tmp_path / "progress.tp1").read_text())["load"]
    assert (said["phase"], said["cache_state"]) == ("done", "skipped")
    assert handed == []
    assert not (tmp_path / "progress").exists()


def test_an_entry_that_does_not_suit_the_model_costs_the_time_only(
    folder: Path, tmp_path: Path, loader: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = loaded(folder, tmp_path)
    ask, asked = loader.ask, []

    def refused_once(virtual: Any, *args: Any, **more: Any) -> Any:
        asked.append(virtual.checkpoint.folder)
        if len(asked) == 1:
            raise CheckpointError("it has nothing for model.norm.weight", file=asked[0])
        return ask(virtual, *args, **more)

    monkeypatch.setattr(loader, "ask", refused_once)
    _, again = loaded(folder, tmp_path)
    assert asked[1] == str(folder)
    assert same(again, first)
    (entry,) = entries(str(tmp_path / "cache"))
    assert remove(entry.folder), "nobody holds it any more"


def test_a_disk_that_fails_in_the_midst_costs_the_cache_only(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = loaded(folder, tmp_path / "apart")[1]
    writes: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, data: Sequence[memoryview], offset: int) -> int:
        writes.append(offset)
        if len(writes) > 2:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, data, offset)

    monkeypatch.setattr(direct_file.os, "pwritev", pwritev)
    source, values = loaded(folder, tmp_path)

    assert source == "checkpoint"
    assert same(values, wanted)
    said = json.loads((tmp_path / "progress").read_text())["load"]
    assert (said["phase"], said["cache_state"]) == ("done", "failed")
    assert [name for name in os.listdir(tmp_path / "cache") if name != ".lock"] == []
