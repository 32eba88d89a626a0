"""No message shows a value of `env`, `keys` or `extra_args`, whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparkd.cli.config_check import check

SECRET = "Canary-4f1c9e77d2"
ENTRIES: list[dict[str, Any]] = [
    {"keys": {"admin": [f"{SECRET} {SECRET}"]}},
    {"keys": {"inference": [SECRET, 5]}},
    {"keys": {"inferense": SECRET}},
    {"engine": {"env": {"HF_TOKEN": [SECRET]}}},
    {"engine": {"env": [f"{SECRET} 1"]}},
    {"models": {"m": {"model": "o/m", "env": {"HF_TOKEN": [SECRET]}}}},
    {"models": {"m": {"model": "o/m", "env": SECRET}}},
    {"models": {"m": {"model": "o/m", "env": {"VLLM_PORT": SECRET}}}},
    {"models": {"m": {"model": "o/m", "extra_args": [f"--hf-token={SECRET}", "--enforce-eagr"]}}},
    {"models": {"m": {"model": "o/m", "extra_args": ["--api-key", SECRET]}}},
    {"models": {"m": {"model": "o/m", "extra_args": SECRET}}},
    {"models": {"m": {"model": "o/m", "extra_args": [{"a": SECRET}]}}},
    {"limits": {"max_body_bytes": "${env.S}"}},
]


@pytest.mark.parametrize("values", ENTRIES)
def test_no_message_shows_a_secret(values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.cli.config_check._ask_parsers", lambda *_: ())
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps(values))
    messages = [str(problem) for problem in check(file, {"S": SECRET})]
    assert messages and "anary-4f1c" not in "\n".join(messages)
