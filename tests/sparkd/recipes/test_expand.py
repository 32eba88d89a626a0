"""Recipes: how one becomes a model, what wins over what, what is refused, and that every one of ours is taken by vLLM's own parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.cli.config_check import check
from sparkd.config.config import Config, EngineSettings, ModelConfig, config_hash, load_config, parse_model
from sparkd.config.recipe_check import checked, choices
from sparkd.errors import ConfigError
from sparkd.recipes.expand import METHODS, PROFILES, offered
from sparkd.recipes.file import parse_recipe
from sparkd.recipes.library import AsWritten, RecipeLibrary
from sparkd.vllm.translate import values_of
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
  env: {A: recipe, B: recipe}
  metadata: {a: 1}
  extra_args: [--moe-backend, marlin]
profiles:
  single-user: {max_model_len: 65536}
speculative:
  default: ngram
  mtp: {num_speculative_tokens: 3, moe_backend: triton, needs: {kv_cache_dtype: fp8}, source: paper}
  dflash: {model: owner/draft, num_speculative_tokens: 15, needs: {kv_cache_dtype: bfloat16}}
variants:
  long: {description: longer, model: owner/long, settings: {max_model_len: 1M, env: {B: variant}, extra_args: [--seed, "1"]}}
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


def speculation(found: ModelConfig) -> dict[str, Any] | None:
    texts = [text for _, _, text in values_of(found.extra_args, "speculative-config")]
    assert len(texts) <= 1
    made: dict[str, Any] | None = json.loads(texts[0]) if texts else None
    return made


# What wins over what


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {},
            {"model": "owner/model", "max_model_len": 8192, "max_num_seqs": 8, "kv_cache_dtype": "fp8", "reasoning_parser": "qwen3",
             "metadata": {"a": 1}, "extra_args": ("--moe-backend", "marlin")},
        ),
        ({"recipe": "r@long"}, {"model": "owner/long", "max_model_len": 1024**2, "max_num_seqs": 8}),
        ({"profile": "single-user"}, {"max_num_seqs": 2, "kv_cache": {"sequences": 2}, "max_model_len": 65536}),
        ({"profile": "single-user", "max_num_seqs": 3, "kv_cache": {"tokens": 9}}, {"max_num_seqs": 3, "kv_cache": {"tokens": 9}}),
        ({"profile": "balanced", "gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5, "kv_cache": None}),
        ({"env": {"A": "own", "C": 1}}, {"env": {"A": "own", "B": "recipe", "C": "1"}}),
        ({"recipe": "r@long", "env": {"A": "own"}}, {"env": {"A": "own", "B": "variant"}}),
    ],
)  # fmt: skip
def test_own_keys_then_the_profile_then_the_variant_then_the_recipe(folder: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    found = model(folder, **({"recipe": "r", "speculative": "off"} | keys))
    values = {key: getattr(found, key) for key in expected}
    if "env" in values:
        values["env"] = {name: value.get_secret_value() for name, value in found.env.items()}

    assert values == expected


def test_arguments_come_in_the_order_in_which_the_last_one_wins(folder: Path) -> None:
    found = model(folder, recipe="r@long", speculative="dflash", extra_args=["--moe-backend", "triton"])

    assert found.extra_args[:6] == ("--moe-backend", "marlin", "--seed", "1", "--attention-backend", "TRITON_ATTN")
    assert found.extra_args[-2:] == ("--moe-backend", "triton")


@pytest.mark.parametrize(
    ("nodes", "keys", "size"),
    [
        ("{min: 2}", {}, "auto"),
        ("{min: 1, max: 1}", {"tensor_parallel": "auto"}, 1),
    ],
)
def test_a_recipe_for_one_node_stays_on_one_and_auto_is_no_number(folder: Path, nodes: str, keys: dict[str, Any], size: Any) -> None:
    (folder / "recipes" / "n.yaml").write_text(RECIPE.replace("{min: 1, max: 2}", nodes))
    assert model(folder, recipe="n", **keys).tensor_parallel == size


def test_profile_and_speculation_need_no_recipe(folder: Path) -> None:
    found = model(folder, model="o/m", profile="throughput", speculative="mtp")

    assert (found.max_num_seqs, found.kv_cache) == (16, "auto")
    assert speculation(found) == {"method": "mtp", "num_speculative_tokens": 1}


def test_the_hash_is_that_of_what_the_recipe_comes_to(folder: Path) -> None:
    before = config_hash(model(folder, recipe="r"), EngineSettings())

    assert before != config_hash(model(folder, model="owner/model"), EngineSettings())
    assert before == config_hash(model(folder, recipe="r", ttl=5, preload=True), EngineSettings())
    hashes = {config_hash(model(folder, recipe="r", speculative=how), EngineSettings()) for how in METHODS}
    assert len(hashes) == len(METHODS) == 5
    (folder / "recipes" / "r.yaml").write_text(RECIPE.replace("8192", "16384"))
    assert before != config_hash(model(folder, recipe="r"), EngineSettings())


# Speculation


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ({"speculative": "off"}, None),
        ({"speculative": "mtp"}, {"method": "mtp", "num_speculative_tokens": 3, "moe_backend": "triton"}),
        ({"speculative": "dflash"}, {"method": "dflash", "num_speculative_tokens": 15, "model": "owner/draft"}),
        (
            {"speculative": "dflash", "quantize": "mxfp4"},
            {"method": "dflash", "num_speculative_tokens": 15, "model": "owner/draft", "draft_load_config": {"load_format": "auto"}},
        ),
        ({"profile": "throughput"}, None),
        ({"max_num_seqs": 31, "speculative": "suffix"}, {"method": "suffix", "num_speculative_tokens": 8}),
        (
            {"max_num_seqs": 32, "speculative": "suffix"},
            {"method": "suffix", "num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 31, 8], [32, 32, 0]]},
        ),
        (
            {"max_num_seqs": None, "speculative": "mtp"},
            {"method": "mtp", "num_speculative_tokens": 3, "moe_backend": "triton",
             "num_speculative_tokens_per_batch_size": [[1, 31, 3], [32, 32, 0]]},
        ),
        ({"extra_args": ["--speculative-config", '{"method": "eagle"}']}, {"method": "eagle"}),
    ],
)  # fmt: skip
def test_a_choice_is_vllms_configuration_of_it(folder: Path, keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert speculation(model(folder, recipe="r", **keys)) == expected


@pytest.mark.parametrize(
    ("recipe", "keys", "both"),
    [
        ("kv_cache_dtype: fp8", {}, ("kv_cache_dtype auto or bfloat16", "fp8")),
        ("extra_args: [--attention-backend, FLASHINFER]", {}, ("--attention-backend TRITON_ATTN", "FLASHINFER")),
        ("max_num_seqs: 4", {}, None),
        ("env: {VLLM_USE_DEEP_GEMM: '1'}", {}, ("VLLM_USE_DEEP_GEMM=0", "recipe")),
    ],
)
def test_what_dflash_needs_never_overwrites_what_a_recipe_says(
    folder: Path, recipe: str, keys: dict[str, Any], both: tuple[str, str] | None
) -> None:
    text = f"description: d\nmodel: o/m\nsources: {{s: s}}\nsettings: {{{recipe}}}\nspeculative: {{dflash: {{model: o/d}}}}\n"
    (folder / "recipes" / "d.yaml").write_text(text)
    if both is not None:
        message = refused(folder, recipe="d", speculative="dflash", **keys)
        assert all(side in message for side in both)
        return
    found = model(folder, recipe="d", speculative="dflash", **keys)
    assert found.kv_cache_dtype == "bfloat16"
    assert found.env["VLLM_USE_DEEP_GEMM"].get_secret_value() == "0"
    assert found.extra_args[:2] == ("--attention-backend", "TRITON_ATTN")


def test_what_a_recipe_says_of_drafts_in_vllms_words_counts_until_somebody_chooses(folder: Path) -> None:
    config = {"method": "dspark", "num_speculative_tokens": 5, "draft_sample_method": "probabilistic"}
    args = ["--speculative-config", json.dumps(config), "--seed", "1"]
    recipe = {"description": "d", "model": "o/m", "sources": {"s": "s"}, "settings": {"extra_args": args}}
    (folder / "recipes" / "d.yaml").write_text(json.dumps(recipe))
    for keys in ({}, {"profile": "balanced"}, {"profile": "single-user", "max_num_seqs": 64}):
        assert speculation(model(folder, recipe="d", **keys)) == config
    assert speculation(model(folder, recipe="d", speculative="off")) is None
    assert speculation(model(folder, recipe="d", profile="throughput")) is None
    chosen = speculation(model(folder, recipe="d", speculative="ngram"))
    assert chosen is not None and chosen["method"] == "ngram"
    own = {"method": "mtp", "num_speculative_tokens": 1}
    assert model(folder, recipe="d", extra_args=["--speculative-config", json.dumps(own)]).extra_args[-1] == json.dumps(own)
    (folder / "recipes" / "d.yaml").write_text(json.dumps(recipe | {"speculative": {"default": "ngram"}}))
    assert lacking(refused(folder, recipe="d"), "extra_args", "recipe", "'speculative:'", "contradict") == []


def test_a_method_that_drafts_on_the_cpu_leaves_out_what_vllm_does_not_start_with_beside_it() -> None:
    args = {how: model(Path(), recipe="qwen3.6-35b-a3b-nvfp4", speculative=how).extra_args for how in ("off", "ngram", "suffix", "mtp")}

    assert {how: "--async-scheduling" in found for how, found in args.items()} == {
        "off": True,
        "ngram": False,
        "suffix": False,
        "mtp": True,
    }
    assert all("--enable-prefix-caching" in found for found in args.values())


# What is refused, and where it is said to stand


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recipe": "q"}, ["models.m.recipe", "'q'", "`sparkd recipes ls`"]),
        ({"recipe": "r", "tensor_parallel": 4}, ["r", "least 1", "most 2"]),
        ({"model": "o/m", "speculative": "dflash"}, ["no DFlash drafter"]),
        ({"recipe": "r", "speculative": "mtp", "extra_args": ["--speculative-config", "{}"]}, ["--speculative-config", "contradict"]),
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
    file.write_text(RECIPE.replace("max_num_seqs: 8", "max_num_seqs: many"))
    wrong = f"{folder}/recipes/r.yaml:8: models.m.max_num_seqs is 'many'"
    assert [problem for problem in check(config, {}) if str(problem).startswith(wrong)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("source: paper}", "source: book}", ["'book'", "cited"]),
        ("{min: 1, max: 2}", "{min: 3, max: 2}", ["nodes", "max", "min"]),
        ("reasoning_parser: q", "reasoning_parsr: q", ["settings.reasoning_parsr", "reasoning_parser"]),
        ("single-user:", "lonely-user:", ["profiles.lonely-user"]),
        ("mtp: {num_speculative_tokens: 3,", "mtp: {num_speculative_tokens: 0,", ["num_speculative_tokens is 0", "least 1"]),
    ],
)  # fmt: skip
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
    assert BOOK.split("a@b") == ("a", "b") and BOOK.split("a") == ("a", None)


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
    recipes = [BOOK.find(name).recipe for name in OURS]
    images = [one.container for recipe in recipes for one in (recipe, *recipe.variants.values()) if one.container is not None]
    assert images
    for one in images:
        assert one.image.startswith("nvcr.io/") == (one.kind == "ngc") == ("nvidia" in one.image), one
        assert one.image.startswith("vllm/vllm-openai:") == (one.kind == "vllm-openai"), one


@pytest.mark.parametrize("name", OURS)
def test_a_recipe_of_ours_can_be_used_in_every_way_and_needs_no_translation(name: str) -> None:
    file = BOOK.find(name)
    found = checked(file, BOOK)

    assert found.problems == []
    ways = sum(len(PROFILES) + 1 for variant in (None, *file.recipe.variants) for _ in (None, *offered(file, variant)))
    assert len(found.resolved) == ways == len(list(choices(file)))
    assert file.recipe.expected, "what can be expected of it?"
    assert not any(figure.when and "estimat" in figure.when for figure in file.recipe.expected)
