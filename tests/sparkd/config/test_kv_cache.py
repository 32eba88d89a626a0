"""What `kv_cache:` stands for: the spellings of one size, what contradicts it, and what the worker is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.footprint import room_of
from sparkd.cli.config_check import check
from sparkd.config.config import EngineSettings, ModelConfig, config_hash, load_config, parse_model
from sparkd.config.engine_args import engine_args
from sparkd.config.kv_cache import sizing_of
from sparkd.errors import ConfigError
from sparkd.hardware import machine
from tests.support.facts import lacking
from tests.support.parser_batch import refuse_nothing
from workers.host.memory_limits import spare
from workers.host.runtime import COMMAND_LINE
from workers.kv.settings import VARIABLE, CacheSettings

GIB = 1 << 30


def model(**keys: Any) -> ModelConfig:
    return parse_model("m", {"model": "/m", **keys}, over_admin=True)


def told(keys: dict[str, Any], platform: str = "cuda", entrypoint: str = COMMAND_LINE, reserved_bytes: int | None = None) -> dict[str, Any]:
    config = load_config(None, flags={"state_dir": "/s"}, environ={})
    spec = parse_model("m", {"model": "/m", **keys}, over_admin=False)
    return sizing_of(spec, platform, entrypoint, spec.environment(config.engine), str(config.profiles_path), reserved_bytes)


@pytest.mark.parametrize(
    ("value", "canonical"),
    [
        (None, None),
        ({"bytes": "1.5 GiB"}, {"bytes": 3 << 29}),
        ({"tokens": "32K"}, {"tokens": 32768}),
        ({"sequences": 4, "at": "max_model_len"}, {"sequences": 4}),
        ({"utilization": 1}, {"utilization": 1.0}),
    ],
)
def test_spellings_of_one_size_are_one(value: Any, canonical: Any) -> None:
    assert model(kv_cache=value).kv_cache == canonical
    assert model(kv_cache=canonical).kv_cache == canonical


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"bytes": 2**60}, [f"bytes is {2**60}", "8GiB"]),
        ({"utilization": float("nan")}, ["finite"]),
    ],
)
def test_what_is_no_size_is_said(value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        model(kv_cache=value)

    assert lacking(caught.value.message, "models.m.kv_cache", *words) == []


def test_what_is_no_margin_is_said() -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.kv_margin_gib"):
        model(kv_margin_gib=-1)


@pytest.mark.parametrize(
    ("keys", "pair"),
    [
        ({"kv_margin_gib": 1, "kv_cache": {"utilization": 0.5}}, "kv_margin_gib and kv_cache"),
        ({"kv_cache": "auto", "extra_args": ["--worker-cls", "x.Y"]}, "'--worker-cls' and kv_cache"),
        ({"kv_cache": {"tokens": 5}, "extra_args": ["--kv-cache-memory-bytes=5"]}, "'--kv-cache-memory-bytes' and kv_cache"),
    ],
)
def test_two_who_size_exclude_each_other(keys: dict[str, Any], pair: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model("m", {"model": "/m", **keys}, over_admin=False)
    assert lacking(caught.value.message, pair, "exclude") == []


# What the worker is told

NOTHING = {"profiles": "/s/kv-profiles"}


@pytest.mark.parametrize(
    ("keys", "platform", "kv_cache"),
    [
        ({}, "cuda", {}),
        ({}, "cpu", {"at_most_bytes": 2 * GIB}),
        ({"kv_cache": "auto"}, "cpu", {}),
        ({"kv_cache": {"sequences": 3, "at": 100}}, "cuda", {"sequences": 3, "at": 100}),
        ({"kv_margin_gib": 0, "kv_cache": {"tokens": 7}}, "cpu", {"tokens": 7, "margin_bytes": 0}),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "5"}}, "cpu", {"bytes": 5 * GIB}),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "5"}}, "cuda", {}),
        ({"env": {"VLLM_CPU_KVCACHE_SPACE": "5"}, "kv_cache": {"tokens": 7}}, "cpu", {"tokens": 7}),
    ],
)
def test_what_the_worker_is_told(keys: dict[str, Any], platform: str, kv_cache: dict[str, Any]) -> None:
    fields = told(keys, platform)

    assert fields == {
        "worker_cls": "workers.kv.SparkWorker" if platform == "cuda" else "workers.kv.SparkCPUWorker",
        "kv_cache": NOTHING | kv_cache,
    }
    CacheSettings.parse({VARIABLE: json.dumps(fields["kv_cache"])})


@pytest.mark.parametrize(
    ("keys", "platform", "expected"),
    [
        ({}, "cpu", {"reserved_bytes": 30 * GIB, "at_most_bytes": 2 * GIB}),
        ({"kv_cache": {"bytes": "40GiB"}}, "cuda", {"bytes": 40 * GIB}),
    ],
)
def test_auto_stays_within_the_reservation(keys: dict[str, Any], platform: str, expected: dict[str, int]) -> None:
    found = told(keys, platform, reserved_bytes=30 * GIB)["kv_cache"]

    assert {key: value for key, value in found.items() if key.endswith("bytes") and key != "margin_bytes" and value is not None} == expected


@pytest.mark.parametrize(
    ("keys", "entrypoint", "ours"),
    [
        ({}, COMMAND_LINE, True),
        ({}, "tests.stub", True),
        ({}, "somebody.elses", False),
        ({"kv_cache": "auto"}, "somebody.elses", True),
        ({"gpu_memory_utilization": 0.5}, COMMAND_LINE, False),
        ({"extra_args": ["--worker-cls", "x.Y"]}, COMMAND_LINE, False),
        # Which then reports where we look.
        ({"extra_args": ["--worker-cls", "workers.kv.SparkCPUWorker"]}, COMMAND_LINE, True),
    ],
)
def test_who_sizes(keys: dict[str, Any], entrypoint: str, ours: bool) -> None:
    assert bool(told(keys, "cuda", entrypoint)) is ours


@pytest.mark.parametrize(
    ("keys", "margin"),
    [
        ({}, None),
        ({"kv_margin_gib": 1}, GIB),
    ],
)
def test_the_margin_is_the_plans_too(keys: dict[str, Any], margin: int | None) -> None:
    spec = parse_model("m", {"model": "/m", **keys}, over_admin=False)
    spark = machine("cuda", 100 * GIB, 0)
    assert told(keys, "cuda")["kv_cache"].get("margin_bytes") == margin
    kept = spare(100 * GIB) if margin is None else margin
    assert room_of(engine_args(spec, spec.environment(EngineSettings())), spark) == 100 * GIB - kept


def test_a_variable_that_cannot_be_read_is_found_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "VLLM_CPU_KVCACHE_SPACE"
    refuse_nothing(monkeypatch)
    path = tmp_path / "sparkd.yaml"
    path.write_text(f"models:\n  m:\n    model: org/name\n    env: {{{name}: sk-canary}}\n", encoding="utf-8")
    (found,) = check(path, {})
    assert found.line == 4
    assert lacking(found.message, "models.m.env", name) == []
    assert "sk-canary" not in found.message
    path.write_text(path.read_text() + "    kv_cache: auto\n", encoding="utf-8")
    assert check(path, {}) == []


def test_a_size_changes_the_engine_and_its_spelling_does_not() -> None:
    hashes = [
        config_hash(model(kv_cache=value), EngineSettings()) for value in (None, "auto", {"bytes": "1GiB"}, {"bytes": GIB}, {"bytes": 1})
    ]

    assert len(set(hashes)) == 4
    assert config_hash(model(kv_cache={"utilization": 0.5}), EngineSettings()) == config_hash(
        model(gpu_memory_utilization=0.5), EngineSettings()
    )
