"""A model that takes a part of a checkpoint and the whole model beside it: each has its entry in the cache. vLLM's real class."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.architectures import llama
from tests.checkpoints import MIB, write_checkpoint
from tests.stream.loading import load
from workers import plugin
from workers.stream import loader
from workers.stream.cache import Entry, entries, remove
from workers.stream.pipeline import Pipeline

LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama()
    return write_checkpoint(tmp_path_factory.mktemp("partial") / "model", model.config, model.entries, shard_bytes=MIB)


@pytest.fixture(autouse=True)
def registered(one_rank: None) -> None:
    plugin.register()


def stage(model: Any) -> None:
    """A stage of a pipeline, as vLLM builds one: the second layer is another's."""
    from vllm.model_executor.models.utils import PPMissingLayer

    model.model.layers[1] = PPMissingLayer()


def headless(model: Any) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    model.lm_head = PPMissingLayer()


def loaded(folder: Path, tmp_path: Path, part: Any = lambda _model: None) -> tuple[str, dict[str, torch.Tensor]]:
    """(where it was read from, the model's parameters), once its cache is whole."""
    tmp_path.mkdir(exist_ok=True)
    progress = tmp_path / "progress"
    model = load(folder, {"quantize": "int4-g32", "cache_dir": str(tmp_path / "cache"), "progress": str(progress)}, part)
    for thread in threading.enumerate():
        if thread.name == "quantized-cache":
            thread.join()
    return json.loads(progress.read_text())["source"], {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith("weight_shape")  # which nothing reads, so nothing fills it
    }


def names(entry: Entry) -> set[str]:
    return {name for name in read_checkpoint(entry.folder).tensors if name.startswith(LAYER)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("part", [stage, headless])
def test_a_part_neither_takes_the_wholes_name_nor_stands_in_its_way(folder: Path, tmp_path: Path, part: Any) -> None:
    cache = str(tmp_path / "cache")
    source, first = loaded(folder, tmp_path, part)
    (partial,) = entries(cache)
    assert source == "checkpoint"
    assert "without" in partial.manifest.recipe

    source, whole = loaded(folder, tmp_path)
    both = entries(cache)
    assert source == "checkpoint", "the part's entry is not the whole's"
    assert len(both) == 2
    (full,) = (one for one in both if one.name != partial.name)
    assert "without" not in full.manifest.recipe
    assert names(full)
    assert len(read_checkpoint(partial.folder).tensors) < len(read_checkpoint(full.folder).tensors)

    for wanted, which in ((first, part), (whole, lambda _model: None)):
        source, again = loaded(folder, tmp_path, which)
        assert source == "cache"
        assert same(again, wanted)
    assert len(entries(cache)) == 2


def test_a_part_is_read_from_the_wholes_entry_where_it_has_none(folder: Path, tmp_path: Path) -> None:
    loaded(folder, tmp_path)
    source, part = loaded(folder, tmp_path, stage)

    assert source == "cache"
    assert len(entries(str(tmp_path / "cache"))) == 1
    assert same(part, loaded(folder, tmp_path / "apart", stage)[1])


def test_two_parts_do_not_share_an_entry(folder: Path, tmp_path: Path) -> None:
    for part in (stage, headless):
        assert loaded(folder, tmp_path, part)[0] == "checkpoint"
    recipes = [one.manifest.recipe["without"] for one in entries(str(tmp_path / "cache"))]
    assert len(set(recipes)) == 2


def test_a_rank_that_leaves_something_out_does_not_stand_in_the_way_either(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ranks take parts of tensors; what is a part is not the point here."""
    monkeypatch.setattr(loader, "rank_of_world", lambda: (0, 2))
    monkeypatch.setattr(loader, "ranks", lambda: {"tp": 2, "pp": 1, "ep": False})
    monkeypatch.setattr(Pipeline, "handed_whole", lambda _self: None)

    assert loaded(folder, tmp_path, stage)[0] == "checkpoint"
    assert [loaded(folder, tmp_path)[0] for _ in range(2)] == ["checkpoint", "cache"]
    assert loaded(folder, tmp_path, stage)[0] == "cache"


def test_an_entry_that_does_not_suit_the_model_costs_the_time_only(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
