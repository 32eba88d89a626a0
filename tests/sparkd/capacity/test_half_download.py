"""Folders that are half a model: `sparkd check`, a plan and a load refuse each with one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import load_config, parse_model
from sparkd.errors import CheckpointError, CheckpointUncounted, ModelUnusable
from tests.support.accounts import fault, refuse_unloadable
from tests.support.checkpoints import Tensor, dense, write
from tests.support.plans import planned as plan
from tests.support.published_tensors import tensors_of

CONFIG = dense(num_hidden_layers=2)
TENSORS = tensors_of(CONFIG)
HEADLESS = [tensor for tensor in TENSORS if not tensor[0].startswith("lm_head.")]
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
Break = Callable[[Path], object]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards and an index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    half = len(TENSORS) // 2
    for name, tensors in zip(SHARDS, (TENSORS[:half], TENSORS[half:]), strict=True):
        (write(tmp_path / f"{name}.made", CONFIG, tensors) / "model.safetensors").rename(folder / name)
    names = {name: SHARDS[number >= half] for number, (name, *_) in enumerate(TENSORS)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def cut(folder: Path, name: str, size: int) -> None:
    os.truncate(folder / name, size)


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def with_another_tensor(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["other.weight"] = SHARDS[0]
    (folder / INDEX).write_text(json.dumps(index))


def in_one_file(folder: Path, tensors: list[Tensor], **config: object) -> None:
    without(folder, *SHARDS, INDEX)
    for path in write(folder.with_name("one"), {**CONFIG, **config}, tensors).iterdir():
        path.rename(folder / path.name)


BROKEN: dict[str, Break] = {
    "a shard is missing": lambda folder: without(folder, SHARDS[1]),
    "a shard and the index are missing": lambda folder: without(folder, SHARDS[1], INDEX),
    "a shard is cut off": lambda folder: cut(folder, SHARDS[1], 100_000),
    "a shard is a pointer": lambda folder: (folder / SHARDS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:a\n"),
    "no weights": lambda folder: without(folder, *SHARDS, INDEX),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_a_check_a_plan_and_a_load_refuse_it_with_one_sentence(damage: Break, model: Path, tmp_path: Path) -> None:
    damage(model)
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: {model}\n")

    with pytest.raises(CheckpointError) as planned:
        plan(model)
    (problem,) = check(file, {})
    assert (problem.severity, problem.line) == ("error", 3)
    assert problem.message == f"models.m.model: {planned.value.message}"
    config = load_config(file, environ={})
    with pytest.raises(ModelUnusable) as loaded:
        refuse_unloadable(config.models["m"], config)
    assert planned.value.message in loaded.value.message


@pytest.mark.parametrize("change", [lambda _: None, with_another_tensor], ids=["as it is", "its index names another tensor"])
def test_a_whole_model_is_refused_by_none(change: Break, model: Path, tmp_path: Path) -> None:
    change(model)
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: {model}\n")

    assert check(file, {}) == []
    assert plan(model)["choice"] is not None


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (HEADLESS, {"tie_word_embeddings": True}),
        (HEADLESS, {"architectures": ["NobodysForCausalLM"]}),
        (HEADLESS, {"architectures": ["LlamaModel"]}),
        # As an embedding model's are named.
        ([(name.removeprefix("model."), *rest) for name, *rest in HEADLESS], {}),
        ([(name.replace("lm_head.weight", "lm_head.qweight"), *rest) for name, *rest in TENSORS], {}),
    ],
)
def test_a_model_that_may_need_no_head_is_refused_by_none(tensors: list[Tensor], config: dict[str, object], model: Path) -> None:
    in_one_file(model, tensors, **config)

    assert fault(parse_model("m", {"model": str(model)}, over_admin=False), {}) is None


def test_files_that_an_engine_alone_reads_are_a_warning(model: Path, tmp_path: Path) -> None:
    for name in SHARDS:
        (model / name).rename((model / name).with_suffix(".bin"))
    without(model, INDEX)
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: {model}\n")

    (problem,) = check(file, {})
    assert problem.severity == "warning" and "*.bin" in problem.message
    config = load_config(file, environ={})
    assert isinstance(fault(config.models["m"], {}), CheckpointUncounted)
    refuse_unloadable(config.models["m"], config)


def test_a_load_format_that_reads_no_weights_needs_none(model: Path) -> None:
    without(model, *SHARDS)

    assert fault(parse_model("m", {"model": str(model), "load_format": "dummy"}, over_admin=False), {}) is None


def test_the_missing_files_of_a_hub_id_are_fetched_and_its_broken_ones_are_not(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--o--m"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    shutil.copytree(model, repository / "snapshots" / "abc")
    spec = parse_model("m", {"model": "o/m"}, over_admin=False)

    assert fault(spec, {}) is None
    cut(repository / "snapshots" / "abc", SHARDS[1], 100_000)
    broken = fault(spec, {})
    assert broken is not None and SHARDS[1] in broken.message
    without(repository / "snapshots" / "abc", SHARDS[1])
    assert fault(spec, {}) is None
