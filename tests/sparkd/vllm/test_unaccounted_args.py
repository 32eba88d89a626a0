"""Which flags change the account of a model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparkd.config.config import parse_model
from sparkd.config.kv_cache import WORKERS, vllm_sizes
from sparkd.vllm.arg_check import FLAGS_FILE
from sparkd.vllm.flags import parsed
from sparkd.vllm.unaccounted_args import (
    _FLAGS,
    BLOCKS,
    CACHE,
    OTHER,
    WEIGHTS,
    changed_by,
    count_in,
    reserved_whole,
    unanswered,
    unsized,
)
from tests.support.accounts import needed_gib


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--mamba-block-size=32"], ["--mamba-block-size"]),
        (["--no-enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens=8k"], []),
        (["--hf-overrides", "{}"], ["--hf-overrides"]),
        (["--seed", "-1", "--moe-backend=marlin", "--max-cudagraph-capture-size", "8"], []),
    ],
)
def test_what_changes_the_account_is_named(args: list[str], told: list[str]) -> None:
    assert list(unsized(parsed(args))) == told


@pytest.mark.parametrize(
    ("args", "keys", "told"),
    [
        (["--block-size", "32"], {}, None),
        (["--mamba-block-size", "24"], {}, "vLLM .* node lends.* memory_gib"),
        (["--mamba-block-size", "24"], {"memory_gib": 4}, None),
        (["--gpu-memory-utilization", "0.5", "--mamba-block-size", "24"], {}, None),
        (["--kv-cache-memory-bytes", "1G"], {}, "node lends.* kv_cache of the entry"),
        (["--worker-cls", "some.Worker"], {}, "--worker-cls in .*node lends"),
        (["--max-num-seqs", "4", "--enforce-eager"], {"kv_cache": {"bytes": "1GiB"}}, None),
    ],
)
def test_check_says_what_has_a_whole_machine_reserved(args: list[str], keys: dict[str, Any], told: str | None) -> None:
    spec = parse_model("m", {"model": "o/m", "extra_args": args, **keys}, over_admin=False)
    found = list(reserved_whole(spec))
    assert len(found) == (told is not None)
    assert told is None or re.search(told, found[0])
    if told is not None:
        assert [needed_gib(spec, platform, 100, {}, 90.0) for platform in ("cuda", "cpu")] == [90, 90]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ([], set()),
        (["--mamba-block-size", "--kv-cache-dtype"], {CACHE}),
        (["--hf-overrides"], {WEIGHTS, CACHE}),
        (["--worker-cls"], {OTHER}),
    ],
)
def test_what_a_flag_may_change_is_known_by_its_kind(flags: list[str], changed: set[str]) -> None:
    assert changed_by(flags) == changed
    assert list(unanswered(flags)) == [flag for flag in flags if OTHER in changed_by([flag])]


@pytest.mark.parametrize(
    ("args", "blocks"),
    [
        (["--num-gpu-blocks-override", "300", "--num-gpu-blocks-override", "40"], 40),
        (["--num-gpu-blocks-override", "4k"], None),
    ],
)
def test_a_number_of_blocks_is_a_size(args: list[str], blocks: int | None) -> None:
    assert count_in(parsed(args), BLOCKS) == blocks
    assert list(unsized(parsed(args))) == ([] if blocks is not None else [arg for arg in args if arg[:2] == "--"])


@pytest.mark.parametrize("name", sorted(WORKERS.values()))
def test_a_worker_class_of_ours_is_the_same_whoever_names_it(name: str) -> None:
    args = ["--worker-cls", name]
    spec = parse_model("m", {"model": "o/m", "extra_args": args, "kv_cache": {"tokens": 4096}}, over_admin=False)
    assert not vllm_sizes(spec)
    assert list(unsized(parsed(args))) == []
    spec = parse_model("m", {"model": "o/m", "extra_args": ["--worker-cls", f"{name}s"]}, over_admin=False)
    assert vllm_sizes(spec)


def test_every_flag_of_the_table_is_one_of_the_release() -> None:
    spelled = {word for line in FLAGS_FILE.read_text().splitlines() if line[:1] != "#" for word in line.split()[1:] if word[:2] == "--"}
    assert {word[2:] for word in spelled} >= _FLAGS


@pytest.mark.parametrize(
    ("args", "keys", "rest"),
    [
        (["--seed", "1", "--max-model-len", "-1"], {"max_model_len": "auto"}, ["--seed", "1"]),
        (["--max-num-seqs=8", "--max_num_seqs", "9", "--enforce-eager"], {"max_num_seqs": 9, "enforce_eager": True}, []),
        (["--trust-remote-code", "--tool-call-parser", "hermes"], {"trust_remote_code": True, "tool_call_parser": "hermes"}, []),
        (["--dtype", "a", "b", "--no-enforce-eager"], {"dtype": None, "enforce_eager": False}, ["--dtype", "a", "b", "--no-enforce-eager"]),
    ],
)
def test_a_flag_that_has_a_key_becomes_the_key(args: list[str], keys: dict[str, Any], rest: list[str]) -> None:
    spec = parse_model("m", {"model": "o/m", "extra_args": args}, over_admin=False)
    assert {key: getattr(spec, key) for key in keys} == keys
    assert list(spec.extra_args) == rest
    assert spec.given["extra_args"] == args, "the entry is shown as it was written"
