"""`sparkd check` over a corpus of broken configurations: each is refused for its reason, at its line, and none by accident."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.config_check import check
from tests.support.broken_configs import COLUMNS, Broken, Folders, corpus, entry, outcome
from tests.support.parser_batch import ask_at_once

SOUND: list[dict[str, Any]] = [
    {},
    {"max_model_len": 4096, "kv_cache": {"sequences": 2, "at": 4096}},
    {"dtype": "bfloat16", "tool_call_parser": "hermes"},
]
HIDING: list[tuple[dict[str, Any], list[int]]] = [
    # A refused argument hides none behind it, and no length.
    ({"extra_args": ["--port", "1", "--uds", "/x", "--enforce-eagr", "--max-model-len", "9000"]}, [4, 4, 4, 4]),
    ({"env": ["VLLM_PORT=1", "RAY_ADDRESS=x", "A"], "dtype": "float99"}, [4, 4, 4, 5]),
    # A plugin that is shut out hides no size.
    ({"quantize": "nvfp4", "env": {"VLLM_PLUGINS": "other"}, "max_model_len": 9000, "ttl": "x"}, [4, 6, 7]),
    # One mistake is told once.
    ({"kv_cache": {"bytes": "8Gb", "tokens": 5}}, [4]),
]


@pytest.fixture(scope="module", autouse=True)
def _asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's parser has answered for every file of this module, in one child."""
    folder = tmp_path_factory.mktemp("asked")
    files = corpus(folder)
    files += [Broken("", entry(folder / "sound", keys).encode(), (), None) for keys in (*SOUND, *(keys for keys, _ in HIDING))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        ask_at_once(lambda: [outcome(one, folder) for one in files])


def test_every_file_is_refused_for_its_reason(tmp_path: Path) -> None:
    outcomes = [f"{outcome(one, tmp_path)}: {one.kind}, {one.words}" for one in corpus(tmp_path)]

    assert outcomes
    assert [line for line in outcomes if not line.startswith(f"{COLUMNS[0]}: ")] == []


def test_what_they_were_made_from_is_sound(tmp_path: Path) -> None:
    models = Folders.under(tmp_path)
    file = tmp_path / "sparkd.yaml"
    for keys in SOUND:
        file.write_text(entry(models.sound, keys))
        assert [problem for problem in check(file, {}) if problem.severity == "error"] == []


def test_the_last_line_is_the_only_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = Folders.under(tmp_path)
    file = tmp_path / "sparkd.yaml"
    for keys, code, verdict in (
        ({}, 0, "valid"),
        ({"memory_gib": "lots"}, 2, "1 error"),
        ({"runtime": "/no/python"}, 0, "1 warning"),
    ):
        file.write_text(entry(models.sound, keys))
        assert exit_code(["check", str(file)]) == code
        *lines, last = capsys.readouterr().out.splitlines()
        assert last.startswith(f"{file}: ") and verdict in last
        assert ("error" in last) is (code != 0)
        assert not [line for line in lines if line.startswith(f"{file}: ")]
        assert exit_code(["--json", "check", str(file)]) == code
        assert json.loads(capsys.readouterr().out)["ok"] is (code == 0)


def test_a_path_that_this_user_may_not_look_at_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = str(tmp_path / "closed" / "x")
    file = tmp_path / "sparkd.yaml"
    file.write_text(json.dumps({"state_dir": closed, "engine": {"runtime": closed}}))
    look = os.stat

    def refuse(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(closed):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, *args, **more)

    monkeypatch.setattr(os, "stat", refuse)
    assert {problem.severity for problem in check(file, {})} <= {"warning"}


def test_many_mistakes_are_told_at_once(tmp_path: Path) -> None:
    """Mistakes of one entry, of other entries, and those that can be judged only once the rest is right."""
    models = Folders.under(tmp_path)
    file = tmp_path / "sparkd.yaml"
    file.write_text(
        f"lisen: x\nlog_level: loud\nmodels:\n  a:\n    model: {models.sound}\n    ttl: many\n    max_num_seqs: 0\n    dtype: float99\n"
        f"    quantize: nvfp4\n    quantization: fp8\n  b:\n    model: {models.nine_heads}\n    tensor_parallel: 2\n    executor: raay\n"
        "  c:\n    tool_call_parser: hermess\nhooks: {on_startup: {preload: [a, b, c, d]}}\n"
    )
    assert [problem.line for problem in check(file, {}) if problem.severity == "error"] == [1, 2, 6, 7, 8, 10, 13, 14, 15, 16, 17]


@pytest.mark.parametrize(("keys", "lines"), HIDING)
def test_no_mistake_hides_another(keys: dict[str, Any], lines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(entry(Folders.under(tmp_path).sound, keys))
    assert [problem.line for problem in check(file, {}) if problem.severity == "error"] == lines
