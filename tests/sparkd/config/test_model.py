"""A model's entry: its vLLM flags, its hash, its names, and what the admin API may not bring in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.launch import rank_fields
from sparkd.cli.config_check import check
from sparkd.config.config import Config, EngineSettings, ModelConfig, config_hash, load_config, parse_model
from sparkd.errors import ConfigError
from tests.support.facts import lacking
from workers.quantization.best_wish import BestWish
from workers.quantization.recipe import QuantizationRecipe


def from_text(folder: Path, text: str) -> Config:
    file = folder / "sparkd.yaml"
    file.write_text(text)
    return load_config(file, environ={})


def model(**keys: Any) -> ModelConfig:
    return parse_model("m", {"model": "/m", **keys}, over_admin=False)


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({}, ""),
        ({"max_model_len": "32k"}, "--max-model-len 32000"),
        ({"max_model_len": "32K"}, "--max-model-len 32768"),
        ({"max_model_len": "auto"}, "--max-model-len auto"),
        ({"kv_cache": {"utilization": 0.8}}, "--gpu-memory-utilization 0.8"),
        ({"trust_remote_code": True, "enforce_eager": True}, "--trust-remote-code --enforce-eager"),
        ({"sampling": {"top_k": 20, "max_tokens": 64}}, '--override-generation-config {"top_k":20,"max_new_tokens":64}'),
        ({"tool_call_parser": "none", "reasoning_parser": False}, ""),
        ({"tool_call_parser": "hermes"}, "--enable-auto-tool-choice --tool-call-parser hermes"),
        ({"extra_args": ["--seed", 1, "--swap=0.5"], "dtype": "bfloat16"}, "--dtype bfloat16 --seed 1 --swap=0.5"),
        (
            {"reasoning_parser": "r", "load_format": "l", "quantization": "q", "kv_cache_dtype": "k", "max_num_batched_tokens": "8k",
             "max_num_seqs": 2, "revision": "abc"},
            "--revision abc --max-num-seqs 2 --max-num-batched-tokens 8000 --kv-cache-dtype k --quantization q --load-format l"
            " --reasoning-parser r",
        ),
    ],
)  # fmt: skip
def test_keys_become_vllm_flags(keys: dict[str, Any], flags: str) -> None:
    assert model(**keys).vllm_flags() == flags.split()


CHANGES_ENGINE = {
    "media": {"domains": ["example.org"]},
    "model": "/n", "revision": "r", "aliases": ["a"], "served_model_name": ["s"], "executor": "ray", "tensor_parallel": 2, "runtime": "/p",
    "entrypoint": "e", "env": {"A": "b"}, "max_model_len": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "gpu_memory_utilization": 0.5,
    "kv_cache_dtype": "k", "dtype": "d", "quantization": "q", "load_format": "l", "trust_remote_code": True, "enforce_eager": True,
    "tool_call_parser": "t", "reasoning_parser": "r", "extra_args": ["--seed", "1"], "quantize": "nvfp4", "kv_cache": "auto",
    "kv_margin_gib": 2, "sampling": {"temperature": 0.2},
}  # fmt: skip
CHANGES_NOTHING = {
    "default": True,
    "unlisted": True, "metadata": {"a": 1}, "preload": True, "ttl": 1, "pin": True, "priority": 1, "concurrency_limit": 1,
    "wait_for_load_s": 1, "health_check_timeout_s": 1, "memory_gib": 1, "quantized_cache": False,
    "send_loading_state": True, "allow_missing_weights": True,
}  # fmt: skip

NAMED_ABOVE = "each key is in CHANGES_ENGINE (then config_hash in sparkd/config/model.py has it) or in CHANGES_NOTHING, with a value"


def test_the_hash_changes_exactly_with_what_changes_the_engine() -> None:
    plain = config_hash(model(), EngineSettings())
    hashes = {key: config_hash(model(**{key: value}), EngineSettings()) for key, value in CHANGES_ENGINE.items()}

    assert re.fullmatch("[0-9a-f]{16}", plain)
    # A recipe's merging has its own tests: tests/sparkd/recipes/test_merge.py.
    assert set(CHANGES_ENGINE) | set(CHANGES_NOTHING) | {"name", "recipe"} == set(ModelConfig.model_fields), NAMED_ABOVE
    assert len({plain, *hashes.values()}) == len(CHANGES_ENGINE) + 1
    for key, value in CHANGES_NOTHING.items():
        assert config_hash(model(**{key: value}), EngineSettings()) == plain
    assert config_hash(model(), EngineSettings(stop_timeout_s=1, log_backups=0)) == plain
    for engine in (
        EngineSettings(runtime="/p"),
        EngineSettings(entrypoint="e"),
        EngineSettings(platform="cpu"),
        EngineSettings(env={"A": "b"}),
    ):
        assert config_hash(model(), engine) != plain
    assert config_hash(model(runtime="/p", entrypoint="e"), EngineSettings()) == config_hash(
        model(), EngineSettings(runtime="/p", entrypoint="e")
    )


def test_a_model_says_more_than_the_engine_section() -> None:
    engine = EngineSettings(runtime="/e", entrypoint="e", env={"A": "1", "B": "1"})

    assert (model().runtime_of(engine), model().entrypoint_of(engine)) == (Path("/e"), "e")
    assert (model(runtime="/m").runtime_of(engine), model(entrypoint="m").entrypoint_of(engine)) == (Path("/m"), "m")
    assert model(env={"B": 2}).environment(engine) == {"A": "1", "B": "2"}


def test_names_lead_to_models(tmp_path: Path) -> None:
    config = from_text(
        tmp_path, "models: {a: {model: o/a, aliases: [x], preload: true}, b: {model: o/b}}\nhooks: {on_startup: {preload: [b, x]}}"
    )

    assert config.names() == {"a": "a", "x": "a", "b": "b"}
    assert config.lookup("x") is config.models["a"]
    assert config.lookup("y") is None
    assert config.preload() == ("b", "a")


def test_a_model_can_be_added_where_its_names_are_free(tmp_path: Path) -> None:
    config = from_text(tmp_path, "models: {a: {model: o/a, aliases: [x]}}")

    assert set(config.with_model(model()).models) == {"a", "m"}
    assert set(config.models) == {"a"}
    assert config.with_model(model()).with_model(model(ttl=5)).models["m"].ttl == 5
    with pytest.raises(ConfigError, match=r"models\.m\.aliases: 'x' .*'a'"):
        config.with_model(model(aliases=["x"]))


def test_waits_and_deadlines_have_one_default_and_one_per_model(tmp_path: Path) -> None:
    config = from_text(tmp_path, "wait_for_load_s: 5\nhealth_check_timeout_s: 6\nglobal_ttl_s: 7")

    assert (config.wait_s(model()), config.start_deadline_s(model()), config.ttl_s(model())) == (5, 6, 7)
    own = model(wait_for_load_s=0, health_check_timeout_s=1, ttl=0, send_loading_state=True)
    assert (config.wait_s(own), config.start_deadline_s(own), config.ttl_s(own)) == (0, 1, 0)
    assert (config.tells_loading(model()), config.tells_loading(own)) == (False, True)


# Weights in another format


def test_spellings_of_one_recipe_are_one() -> None:
    same = ["int4-g64", "INT4-G64", {"format": "int4", "group_size": 64}, {"format": "int4-g64", "layers": [], "keep": []}]

    assert len({config_hash(model(quantize=each), EngineSettings()) for each in same}) == 1
    assert config_hash(model(quantize="int4"), EngineSettings()) != config_hash(model(quantize="int4-g64"), EngineSettings())
    assert model(quantize=model(quantize="nvfp4").quantize) == model(quantize="nvfp4")


def loader_of(config: Config, spec: ModelConfig) -> dict[str, Any]:
    fields = rank_fields(config, spec, "cuda", "vllm.entrypoints.cli.main", None)
    return {key: fields[key] for key in ("load_format", "loader_extra_config") if key in fields}


def test_an_entry_is_printed_in_its_canonical_spelling() -> None:
    """As /admin/v1/models and the golden documents show it; without it vLLM loads the weights."""
    printed = {each: model(quantize=each).model_dump(mode="json")["quantize"] for each in (None, "AUTO", "best", "int4")}
    assert printed == {None: None, "AUTO": "auto", "best": {"format": "best"}, "int4": {"format": "int4-g128", "layers": []}}
    assert model(quantize=printed["int4"]) == model(quantize="int4")


def test_best_is_kept_as_it_is_until_the_model_is_placed(tmp_path: Path) -> None:
    assert model(quantize="best").quantize == model(quantize={"format": "BEST"}).quantize == BestWish()
    assert model(quantize={"format": "best", "gib": 60}).quantize == BestWish(60.0)
    assert model(quantize=model(quantize="best").quantize) == model(quantize="best")
    with pytest.raises(ConfigError, match="best"):
        loader_of(from_text(tmp_path, ""), model(quantize="best"))


def test_the_hash_of_a_model_without_the_key_is_that_of_the_release_before_it() -> None:
    """Else an upgrade would restart every engine."""
    assert config_hash(model(), EngineSettings()) == "2486ff538c5559d1"


@pytest.mark.parametrize(
    ("keys", "engine", "loader"),
    [
        ({}, "", None),
        ({"quantize": "nvfp4"}, "", {"cache_dir": "/s/quantized", "cache_limit_bytes": None}),
        ({"quantize": "bf16"}, "quantized_cache: {dir: /c, limit_gib: 1.5}", {"cache_dir": "/c", "cache_limit_bytes": 3 << 29}),
        ({"quantize": "fp8", "quantized_cache": False}, "quantized_cache: {limit_gib: 1}", {"cache_dir": None, "cache_limit_bytes": None}),
        ({"allow_missing_weights": True}, "", None),
        (
            {"quantize": "mxfp4", "allow_missing_weights": True},
            "",
            {"cache_dir": "/s/quantized", "cache_limit_bytes": None, "enable_weights_track": False},
        ),
    ],
)
def test_what_the_loader_is_told(tmp_path: Path, keys: dict[str, Any], engine: str, loader: dict[str, Any] | None) -> None:
    fields = loader_of(from_text(tmp_path, f"state_dir: /s\n{engine}"), model(**keys))

    if loader is None:
        assert fields == {}
        return
    assert fields["load_format"] == "spark_stream"
    assert fields["loader_extra_config"] == {"quantize": QuantizationRecipe.parse(keys["quantize"]).canonical(), **loader}
    json.dumps(fields, allow_nan=False)


@pytest.mark.parametrize("args", [["--load-format=auto"], ["--quantization", "fp8"], ["--model-loader-extra-config", "{}"]])
def test_two_loaders_exclude_each_other(args: list[str]) -> None:
    assert model(extra_args=["--seed", "1", *args]).extra_args
    with pytest.raises(ConfigError) as caught:
        model(extra_args=["--seed", "1", *args], quantize="bf16")
    assert lacking(caught.value.message, "quantize", "exclude") == [] and args[0][2:6] in caught.value.message


def test_an_added_model_needs_our_plugin_too(tmp_path: Path) -> None:
    config = from_text(tmp_path, "engine: {env: {VLLM_PLUGINS: other}}")
    with pytest.raises(ConfigError, match="VLLM_PLUGINS"):
        config.with_model(model(quantize="fp8"))

    for env in ({"VLLM_PLUGINS": "other,sparkd"}, {"VLLM_PLUGINS": "sparkd"}):
        assert config.with_model(model(quantize="fp8", env=env)).models
    assert config.with_model(model()).models


def test_a_key_that_does_nothing_is_remarked(tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text("models: {m: {model: o/m, allow_missing_weights: true}}")
    (remark,) = (problem for problem in check(file, {}) if problem.severity == "warning")

    assert lacking(remark.message, "models.m", "allow_missing_weights", "without quantize") == []


@pytest.mark.parametrize("value", ["", {}])
def test_an_empty_value_is_refused(value: Any) -> None:
    """Once it meant rules from variables of the engine: to load the model as it is stored would be more than its memory may hold."""
    with pytest.raises(ConfigError, match="quantize"):
        model(quantize=value)


# What the admin API may bring in


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"model": "/m", "name": "n"}, ["models.m.name", "not a key"]),
        ({"model": "/m", "env": {"LD_PRELOAD": "x"}}, ["'LD_PRELOAD'", "refused", "admin API"]),
        ({"model": "/m", "quantize": {"format": "best", "keep": ["o_proj"]}}, ["models.m.quantize", "keep", "gib"]),
        ({"model": "./m"}, ["absolute path"]),
        ({"model": "/m", "extra_args": ["--max-mod", "9"]}, ["--max-mod", "--max-model-len?"]),
    ],
)
def test_the_admin_api_may_bring_in_less(raw: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", raw, over_admin=True)

    assert lacking(caught.value.message, *words) == []


def test_the_admin_api_may_tune() -> None:
    raw = {"model": "o/m", "extra_args": ["--max-num-seqs", "4"], "env": {"OMP_NUM_THREADS": 2}, "max_model_len": 10, "ttl": 5}

    assert parse_model("m", raw, over_admin=True) == parse_model("m", raw, over_admin=False)
    with pytest.raises(ConfigError, match=r"\.\./m"):
        parse_model("../m", raw, over_admin=True)
