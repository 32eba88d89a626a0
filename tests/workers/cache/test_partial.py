"""A model that takes a part of a checkpoint and the whole model beside it: each has its entry in the cache. vLLM's real class."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparkd.checkpoint import read_checkpoint
from sparkd.errors import CheckpointError
from tests.support.architectures import llama, qwen3_next
from tests.support.checkpoints import MIB, write_checkpoint
from tests.workers.load.loading import load, wait_for_cache
from workers import plugin
from workers.cache.omitted import can_be_completed, left_out
from workers.cache.store import CacheEntry, entries, remove
from workers.load.pipeline import Pipeline
from workers.load.virtual import Emitted
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


@pytest.fixture
def of_two_ranks(loader: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ranks take parts of tensors; what is a part is not the point here."""
    monkeypatch.setattr(loader, "rank_of_world", lambda: (0, 2))
    monkeypatch.setattr(loader, "ranks", lambda: {"tp": 2, "pp": 1, "ep": False})
    monkeypatch.setattr(Pipeline, "handed_whole", lambda _self: None)


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
    wait_for_cache()
    return json.loads(progress.read_text())["source"], {
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
    assert "without" not in entry.manifest.recipe
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
    assert "without" not in entry.manifest.recipe
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


# nvfp4 has one divisor for q, k and v together.
@pytest.mark.parametrize(("part", "quantize"), [("input_layernorm", "int4-g32"), ("self_attn.k_proj", "nvfp4")])
def test_what_is_left_out_and_is_damaged_harms_who_takes_it_alone(folder: Path, tmp_path: Path, part: str, quantize: str) -> None:
    """The load did not look at it, and what is read from a cache is not looked at again: so the entry says which it is."""
    damaged = damaged_in(folder, part)
    source, first = loaded(damaged, tmp_path, stage, quantize)
    again, second = loaded(damaged, tmp_path, stage, quantize)

    assert (source, again) == ("checkpoint", "cache")
    assert same(first, second)
    (entry,) = entries(str(tmp_path / "cache"))
    assert entry.manifest is not None
    assert entry.manifest.notes["damaged"]
    fused = ("q_proj", "k_proj", "v_proj") if quantize == "nvfp4" and "k_proj" in part else (part.rpartition(".")[2],)
    assert {name.split(".")[-2] for name in entry.manifest.notes["damaged"]} == {*fused}
    with pytest.raises(CheckpointError, match=rf"{part}.weight: it holds NaN"):
        loaded(damaged, tmp_path, quantize=quantize)
    request = ExportRequest(
        str(damaged), QuantizationRecipe.parse(quantize).canonical(), str(tmp_path / "copied"), str(tmp_path / "cache"), "cpu"
    )
    with pytest.raises(CheckpointError, match=rf"{part}.weight: it holds NaN"):
        export(request, lambda *_: None)
    assert loaded(damaged, tmp_path, stage, quantize)[0] == "cache", "and it is still there for who does not take it"


def test_a_cache_of_a_part_is_not_read_where_it_is_damaged(
    folder: Path, tmp_path: Path, loader: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model is asked about the checkpoint first, as a rank that may have an entry of its own does."""
    damaged = damaged_in(folder, "mlp.down_proj")
    loaded(damaged, tmp_path, stage)
    monkeypatch.setattr(loader.SparkStreamLoader, "_whole_entry", lambda *_: None)
    request.getfixturevalue("of_two_ranks")

    assert loaded(damaged, tmp_path, stage)[0] == "cache"
    with pytest.raises(CheckpointError, match=r"down_proj.weight: it holds NaN"):
        loaded(damaged, tmp_path)


def test_a_unit_that_is_taken_in_part_is_not_completed() -> None:
    """q alone: the scale that it shares with k and v was made without them."""
    one = Emitted("q.weight_packed", (64, 64), torch.uint8, 0, 0, "weight_packed")
    two, other = one._replace(name="k.weight_packed", weight=1), one._replace(name="o.weight_packed", unit=1, shape=(512, 64))
    virtual: Any = SimpleNamespace(emitted=lambda: [one, two, other], emitted_bytes=64 * 64 * 10)

    assert can_be_completed(virtual, left_out(virtual, {other.name}))
    assert not can_be_completed(virtual, left_out(virtual, {one.name, other.name}))
    assert not can_be_completed(virtual, left_out(virtual, {one.name, two.name}))


def test_a_part_neither_takes_the_wholes_name_nor_stands_in_its_way(folder: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    source, first = loaded(folder, tmp_path, last)
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

    for wanted, which in ((first, last), (whole, lambda _model: None)):
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


def test_two_parts_do_not_share_an_entry(folder: Path, tmp_path: Path, loader: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "rank_of_world", lambda: (0, 2))  # where no stage makes what the others take
    for part in (stage, headless):
        assert loaded(folder, tmp_path, part)[0] == "checkpoint"
    recipes = [one.manifest.recipe["without"] for one in entries(str(tmp_path / "cache"))]
    assert len(set(recipes)) == 2


def test_a_rank_that_leaves_something_out_does_not_stand_in_the_way_either(folder: Path, tmp_path: Path, of_two_ranks: None) -> None:
    assert loaded(folder, tmp_path, stage)[0] == "checkpoint"
    assert [loaded(folder, tmp_path)[0] for _ in range(2)] == ["checkpoint", "cache"]
    assert loaded(folder, tmp_path, stage)[0] == "cache"


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
