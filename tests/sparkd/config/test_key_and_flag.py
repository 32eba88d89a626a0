"""A key of a model's entry and its flag in extra_args that say different things: refused, with both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.config import parse_model, read
from sparkd.config.engine_flags import contradictions
from sparkd.errors import ConfigError

DIFFERENT: list[tuple[str, Any, list[str]]] = [
    ("max_model_len", "8K", ["--max-model-len=8000"]), ("enforce_eager", True, ["--no-enforce-eager"]),
    ("sampling", {"temperature": 0.5}, ["--override-generation-config", '{"temperature":0.7}']),
]  # fmt: skip
EQUAL: list[tuple[str, Any, list[str]]] = [
    ("max_model_len", "8k", ["--max-model-len", "8000"]), ("max_model_len", "auto", ["--max-model-len", "-1"]),
    ("gpu_memory_utilization", 0.5, ["--gpu-memory-utilization", "0.50"]), ("max_num_seqs", 8, ["--max-num-batched-tokens", "4"]),
    ("sampling", {"max_tokens": 9}, ["--override-generation-config", '{"max_new_tokens": 9}']),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "args"), DIFFERENT)
def test_a_key_and_its_flag_with_another_value_are_refused_with_both(key: str, value: Any, args: list[str], tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: o/m\n    {key}: {json.dumps(value)}\n    extra_args: {json.dumps(args)}\n")

    (problem,) = read(file, {}, {}).document.problems
    assert (problem.severity, problem.line) == ("error", 4)
    assert key in problem.message and " and --" in problem.message
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", key: value, "extra_args": args}, over_admin=False)


@pytest.mark.parametrize(("key", "value", "args"), EQUAL)
def test_equal_values_pass(key: str, value: Any, args: list[str]) -> None:
    assert list(contradictions({key: value, "extra_args": args})) == []
