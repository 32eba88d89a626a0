"""An entry is parsed once: a value counts wherever it is written, and the flags of the parsed entry are those of the entry."""

from __future__ import annotations

from typing import Any

import pytest

from sparkd.config.config import parse_model
from sparkd.config.engine_args import EngineArgs, engine_args
from sparkd.config.model import ModelConfig
from sparkd.errors import ConfigError
from sparkd.vllm.unaccounted_args import CACHE, OTHER, WEIGHTS

GIB = 1 << 30


def entry(**keys: Any) -> ModelConfig:
    return parse_model("m", {"model": "o/m", **keys}, over_admin=False)


def parsed(**keys: Any) -> EngineArgs:
    return engine_args(entry(**keys), {})


@pytest.mark.parametrize(
    ("key", "value", "flag"),
    [
        ("max_num_seqs", 16, ["--max-num-seqs", "16"]),
        ("max_num_batched_tokens", 4000, ["--max-num-batched-tokens=4k"]),
        ("enforce_eager", True, ["--enforce-eager"]),
    ],
)
def test_a_value_counts_alike_as_a_key_and_as_a_flag(key: str, value: object, flag: list[str]) -> None:
    by_key, by_flag = parsed(**{key: value}), parsed(extra_args=flag)
    assert getattr(by_key.spec, key) == getattr(by_flag.spec, key) == value
    assert by_flag.uncounted == () and by_flag.changes == frozenset()


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"revision": "main", "max_model_len": 4096, "max_num_seqs": 3, "dtype": "bfloat16"},
        {"max_model_len": "auto", "quantize": "nvfp4"},
        {"extra_args": ["--max-model-len", "4096", "--seed", "1"]},
    ],
)
def test_the_flags_are_those_of_the_entry(keys: dict[str, Any]) -> None:
    """By them a start finds what an earlier one has measured."""
    assert parsed(**keys).flags == entry(**keys).vllm_flags()


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({"extra_args": ["--cpu-offload-gb", "4"]}, {OTHER}),
        ({"extra_args": ["--mamba-block-size", "8"]}, {CACHE}),
        ({"dtype": "float32"}, set()),
        ({"dtype": "float32", "quantize": "fp8"}, {WEIGHTS, CACHE}),
    ],
)
def test_what_no_formula_has_is_named(keys: dict[str, Any], changes: set[str]) -> None:
    found = parsed(**keys)
    assert found.changes == changes
    assert found.uncounted == tuple(keys.get("extra_args", ())[:1])


def test_a_share_goes_by_its_last_word() -> None:
    assert parsed(gpu_memory_utilization=0.5).share == 0.5
    assert parsed(kv_cache={"utilization": 0.25}).share == 0.25
    assert parsed(extra_args=["--gpu-memory-utilization", "0.3", "--gpu-memory-utilization=0.4"]).share == 0.4
    with pytest.raises(ConfigError):
        parsed(extra_args=["--gpu-memory-utilization", "2"])


def test_the_size_of_a_cache() -> None:
    assert parsed(kv_cache={"bytes": "2GiB"}).cache == {"bytes": 2 * GIB}
    assert parsed(kv_cache={"bytes": "2GiB"}, extra_args=["--num-gpu-blocks-override", "8"]).cache == {"blocks": 8}
    spec = entry()
    assert engine_args(spec, {"VLLM_CPU_KVCACHE_SPACE": "5"}).given_cache("cpu") == {"bytes": 5 * GIB}
    assert engine_args(spec, {"VLLM_CPU_KVCACHE_SPACE": "5"}).given_cache("cuda") is None


def test_a_recipes_draft_is_turned_off_by_none() -> None:
    recipe = {"recipe": "qwen3.6-35b-a3b-nvfp4"}
    for keys, drafts in (({}, True), ({"extra_args": ["--speculative-config", "None"]}, False)):
        args = engine_args(parse_model("m", recipe | keys, over_admin=False), {})
        assert (args.drafts, args.draft is not None) == (drafts, drafts)
