"""A key of a model's entry and its flag in extra_args are refused together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.config.config import parse_model, read
from sparkd.errors import ConfigError

BOTH: list[tuple[str, Any, list[str]]] = [
    ("max_model_len", "8K", ["--max-model-len=8192"]), ("enforce_eager", True, ["--no-enforce-eager"]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "args"), BOTH)
def test_a_key_and_its_flag_are_refused_with_both(key: str, value: Any, args: list[str], tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: o/m\n    {key}: {json.dumps(value)}\n    extra_args: {json.dumps(args)}\n")

    (problem,) = read(file, {}, {}).document.problems
    assert (problem.severity, problem.line) == ("error", 4)
    assert key in problem.message and " and --" in problem.message
    with pytest.raises(ConfigError):
        parse_model("m", {"model": "o/m", key: value, "extra_args": args}, over_admin=False)


@pytest.mark.parametrize("args", [["--trust-remote-code", "True"], ["--trust_remote_code=True"], ["--seed=1", "--enforce-eager", "no"]])
def test_a_switch_with_a_value_is_refused(args: list[str], tmp_path: Path) -> None:
    """vLLM's server ignores the word and turns the switch on: trust_remote_code would be on without a pinned commit."""
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"models:\n  m:\n    model: o/m\n    extra_args: {json.dumps(args)}\n")

    (problem,) = read(file, {}, {}).document.problems
    assert (problem.severity, problem.line) == ("error", 4) and "takes no value" in problem.message
