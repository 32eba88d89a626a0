"""Recipes: how one becomes a model, what wins over what, what is refused, and that every one of ours can be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import Config, EngineSettings, ModelConfig, config_hash, load_config, parse_model
from sparkd.config.recipe_check import resolve
from sparkd.errors import ConfigError
from sparkd.recipes.dropped_settings import translated
from sparkd.recipes.file import parse_recipe
from sparkd.recipes.library import AsWritten, RecipeLibrary
from tests.support.facts import lacking
from tests.support.parser_batch import refuse_nothing

BOOK = RecipeLibrary(None, AsWritten())
OURS = sorted(BOOK.names())
RECIPE = """
description: a recipe
model: owner/model
sources: {paper: a paper}
nodes: {min: 1, max: 2}
settings:
  max_model_len: 8192
  max_num_seqs: 8
  kv_cache_dtype: fp8
  reasoning_parser: qwen3
  gpu_memory_utilization: 0.5
  env: {A: recipe, B: recipe}
  metadata: {a: 1}
  extra_args: [--moe-backend, marlin]
expected:
  - {what: decode_tokens_per_s, value: 12, source: paper}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    (recipes / "r.yaml").write_text(RECIPE)
    return tmp_path


def model(folder: Path, over_admin: bool = False, **keys: Any) -> ModelConfig:
    return parse_model("m", keys, over_admin=over_admin, book=RecipeLibrary(folder / "recipes", {}))


def refused(folder: Path, over_admin: bool = False, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        model(folder, over_admin, **keys)
    return str(caught.value)


# What wins over what


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {},
            {"model": "owner/model", "max_model_len": 8192, "max_num_seqs": 8, "kv_cache_dtype": "fp8", "reasoning_parser": "qwen3",
             "metadata": {"a": 1}, "extra_args": ("--moe-backend", "marlin")},
        ),
        ({"max_num_seqs": 3, "kv_cache": {"tokens": 9}}, {"max_num_seqs": 3, "kv_cache": {"tokens": 9}, "gpu_memory_utilization": None}),
        ({"max_num_seqs": None, "model": "o/other"}, {"max_num_seqs": None, "model": "o/other", "max_model_len": 8192}),
        ({"env": {"A": "own", "C": 1}}, {"env": {"A": "own", "B": "recipe", "C": "1"}}),
        ({"env": ["A=own"], "metadata": {"b": 2}}, {"env": {"A": "own", "B": "recipe"}, "metadata": {"a": 1, "b": 2}}),
    ],
)  # fmt: skip
def test_own_keys_go_over_the_recipes(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = model(folder, recipe="r", **keys)
    values = {key: getattr(found, key) for key in expected}
    if "env" in values:
        values["env"] = {name: value.get_secret_value() for name, value in found.env.items()}

    assert values == expected


def test_arguments_come_in_the_order_in_which_the_last_one_wins(folder: Path) -> None:
    found = model(folder, recipe="r", extra_args=["--moe-backend", "triton"])

    assert found.extra_args == ("--moe-backend", "marlin", "--moe-backend", "triton")


def test_the_hash_is_that_of_what_the_recipe_comes_to(folder: Path) -> None:
    before = config_hash(model(folder, recipe="r"), EngineSettings())

    assert before != config_hash(model(folder, model="owner/model"), EngineSettings())
    assert before == config_hash(model(folder, recipe="r", ttl=5, preload=True), EngineSettings())
    (folder / "recipes" / "r.yaml").write_text(RECIPE.replace("8192", "16384"))
    assert before != config_hash(model(folder, recipe="r"), EngineSettings())


# Entries that a check refuses, and the place that its message names


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recipe": "q"}, ["models.m.recipe", "'q'", "`sparkd recipes ls`"]),
        ({"recipe": "gemma-4-26b-a4b-it-nvfp4@nvidia"}, ["models.m.recipe", "a4b-it-nvfp4@nvidia'", "registries"]),
        ({"recipe": "r", "profile": "balanced"}, ["models.m.profile", "kv_cache", "docs/upgrading.md"]),
    ],
)
def test_what_cannot_be_is_said(folder: Path, keys: dict[str, Any], words: list[str]) -> None:
    message = refused(folder, **keys)

    assert lacking(message, *words) == []
    assert message.count("\n") == 0, message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recipe": "./r.yaml"}, ["recipe", "a name"]),
        ({"recipe": "r", "env": {"LD_PRELOAD": "x"}}, ["'LD_PRELOAD'", "refused", "admin API"]),
        ({"recipe": "mimo-v2.6-flash", "model": "evil/model"}, ["model", "another", "refused", "admin API"]),
    ],
)
def test_an_admin_key_brings_in_no_more_with_a_recipe(folder: Path, keys: dict[str, Any], words: list[str]) -> None:
    assert lacking(refused(folder, over_admin=True, **keys), *words) == []


def test_problems_have_file_and_line_of_the_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_nothing(monkeypatch)
    file = folder / "recipes" / "r.yaml"
    file.write_text(RECIPE.replace("{paper: a paper}", "{paper: a paper}\nneeds_vlm: '0.2'"))
    config = folder / "sparkd.yaml"
    config.write_text("recipes_dir: recipes\nmodels:\n  m: {recipe: r}\n  n: {recipe: q}\n  o: {recipe: r}\n")
    problems = [str(problem).removeprefix(f"{folder}/") for problem in check(config, {})]

    (key,) = (problem for problem in problems if problem.startswith("recipes/r.yaml:5: "))
    (recipe,) = (problem for problem in problems if problem.startswith("sparkd.yaml:4: "))
    assert (lacking(key, "needs_vlm", "needs_vllm"), lacking(recipe, "models.n.recipe", "'q'")) == ([], [])
    assert len(problems) == 2, problems
    file.write_text(RECIPE.replace("max_num_seqs: 8", "max_num_seqs: many").replace("reasoning_parser", "reasoning_parsr"))
    config.write_text("recipes_dir: recipes\nmodels:\n  m:\n    recipe: r\n    extra_args: [--seed, 1, true]\n")
    assert [(problem.file, problem.line) for problem in check(config, {})] == [(str(config), 5), (str(file), 8), (str(file), 10)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("source: paper}", "source: book}", ["'book'", "cited"]),
        ("{min: 1, max: 2}", "{min: 3, max: 2}", ["nodes", "max", "min"]),
        ("reasoning_parser: q", "preload: q", ["settings", "preload", "on the model"]),
        ("nodes:", "variants:", ["variants", "not a key"]),
    ],
)
def test_a_recipe_that_is_wrong_says_where_and_why(old: str, new: str, words: list[str]) -> None:
    assert old in RECIPE
    file, problems = parse_recipe("r", RECIPE.replace(old, new).encode(), "r.yaml", {})

    assert file is None
    assert [] in [lacking(str(problem), *words) for problem in problems], [str(problem) for problem in problems]
    assert all(str(problem).startswith("r.yaml") for problem in problems)


# Where recipes lie


def test_the_operators_recipe_counts_before_ours(folder: Path) -> None:
    (folder / "recipes" / "gpt-oss-120b.yaml").write_text(RECIPE)
    book = RecipeLibrary(folder / "recipes", {})

    assert set(book.names()) == {*OURS, "r"}
    assert book.find("gpt-oss-120b").recipe.model == "owner/model"
    assert book.find(str(folder / "recipes" / "r.yaml")).name == "r"
    assert book.find("gpt-oss-120b") is book.find("gpt-oss-120b")


def test_a_file_names_recipes_by_folder_path_and_variable(folder: Path) -> None:
    (folder / "recipes" / "r.yaml").write_text(RECIPE.replace("A: recipe", "A: '${env.OF_THE_RECIPE}'"))
    file = folder / "sparkd.yaml"
    file.write_text(f"recipes_dir: ./recipes\nmodels: {{a: {{recipe: r}}, b: {{recipe: {folder}/recipes/r.yaml, preload: true}}}}")
    config = load_config(file, environ={"OF_THE_RECIPE": "x"})

    assert config.models["a"].model_copy(update={"name": "b", "recipe": None, "preload": True}) == config.models["b"].model_copy(
        update={"recipe": None}
    )
    assert config.models["a"].env["A"].get_secret_value() == "x"
    assert config.book().names().keys() == {*OURS, "r"}
    assert Config().book().names().keys() == set(OURS)
    with pytest.raises(ConfigError, match="OF_THE_RECIPE"):
        load_config(file, environ={})


# Ours


def test_an_image_of_ours_is_where_docker_looks_for_it() -> None:
    """A name without a registry is Docker Hub's, which has vLLM's images and none of NVIDIA's vLLM."""
    images = [recipe.container for recipe in (BOOK.find(name).recipe for name in OURS) if recipe.container is not None]
    assert images
    for one in images:
        assert one.image.startswith("nvcr.io/") == (one.kind == "ngc") == ("nvidia" in one.image), one
        assert one.image.startswith("vllm/vllm-openai:") == (one.kind == "vllm-openai"), one


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_of_ours_can_be_used_and_needs_no_translation(name: str) -> None:
    file = BOOK.find(name)

    model = resolve(name, BOOK)
    assert translated(model.vllm_flags(), file.settings.get("env") or {}).notes == []
    assert file.recipe.expected, "what can be expected of it?"
    assert not any(figure.when and "estimat" in figure.when for figure in file.recipe.expected)
