"""`sparkd check` over configuration files with one mistake each: every one is refused for its reason, at its line, and none by accident.

Here is what needs the machine, the model's files or vLLM's parser. What the file alone shows is in tests/golden/outputs.py (BROKEN).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkd.__main__ import exit_code
from sparkd.cli.config_check import check
from sparkd.config.yaml_file import ConfigProblem
from tests.support.checkpoints import dense, write
from tests.support.parser_batch import ask_at_once
from tests.support.published_tensors import tensors_of

SOUND: list[dict[str, Any]] = [
    {},
    {"max_model_len": 4096, "kv_cache": {"sequences": 2, "at": 4096}},
    {"dtype": "bfloat16", "tool_call_parser": "hermes"},
]
# Mistakes of one pass: those of keys are found without vLLM and the model's files, the others once the keys are right.
TOGETHER: list[tuple[dict[str, Any], list[int]]] = [
    ({"env": ["VLLM_PORT=1", "A"], "memory_gib": "lots", "ttl": "x", "modl": 1}, [4, 5, 6, 7]),
    ({"extra_args": ["--enforce-eagr"], "memory_gib": 4, "kv_cache": {"bytes": "8GiB"}}, [4, 6]),
    # One mistake is told once.
    ({"kv_cache": {"bytes": "8Gb", "tokens": 5}}, [4]),
]
# Keys of an entry whose model is sound -> what the reason has to name, and its line. The first key stands in line 4.
ENTRIES: list[tuple[dict[str, Any], tuple[str, ...], int]] = [
    ({"dtype": "float99"}, ("models.m.dtype", "float"), 4),
    ({"tool_call_parser": "hermess"}, ("models.m.tool_call_parser", "hermes?"), 4),
    ({"sampling": {"temperature": 9}}, ("models.m.sampling.temperature",), 4),
    ({"memory_gib": 4, "kv_cache": {"bytes": "8GiB"}}, ("kv_cache", "8GiB", "4 GiB"), 5),
    ({"quantize": "nvfp4", "quantization": "fp8"}, ("quantization", "exclude each other"), 5),
    ({"env": {"1A": "1"}}, ("models.m.env", "environment variable"), 4),
    ({"extra_args": ["--tensor-parallel-size", "2"]}, ("tensor_parallel",), 4),
    ({"extra_args": ["model"]}, ("no flag",), 4),
    ({"extra_args": ["--enforce-eagr"]}, ("--enforce-eagr: vLLM",), 4),
    ({"extra_args": ["--max-num-seqs", "many"]}, ("max_num_seqs", "a whole number", "not shown"), 4),
]


@dataclass(frozen=True, slots=True)
class Broken:
    """words: what the reason has to name, in any one error. line: of that error."""

    text: bytes
    words: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Folders:
    """Models on disk: a sound one, one of 9 heads, one without config.json, an empty one."""

    sound: Path
    nine_heads: Path
    no_config: Path
    empty: Path

    @classmethod
    def under(cls, folder: Path) -> Folders:
        config = dense(num_hidden_layers=2)
        nine = dense(num_hidden_layers=2, hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
        sound, nine_heads = (write(folder / name, shape, tensors_of(shape)) for name, shape in (("sound", config), ("nine", nine)))
        no_config, empty = folder / "bare", folder / "empty"
        no_config.mkdir()
        (no_config / "model.safetensors").write_bytes(b"")
        empty.mkdir()
        return cls(sound, nine_heads, no_config, empty)


def entry(model: object, keys: Mapping[str, Any]) -> str:
    """One key of the entry `m` a line, from line 4 on."""
    own = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in keys.items())
    return f"models:\n  m:\n    model: {json.dumps(str(model))}\n{own}"


def corpus(folder: Path) -> list[Broken]:
    """folder: an empty one, for the models that entries name."""
    models = Folders.under(folder)
    of_entries = [(entry(models.sound, keys), words, line) for keys, words, line in ENTRIES]
    rows = [*of_entries, *_of_files(models), *_of_the_machine(models), *_of_names(models), *_of_texts(models)]
    return [Broken(text if isinstance(text, bytes) else text.encode(), words, line) for text, words, line in rows]


Rows = Iterator[tuple[str | bytes, tuple[str, ...], int]]


def _of_files(models: Folders) -> Rows:
    yield entry("Qwen3-8B", {}), ("models.m.model", "owner"), 3
    yield entry(models.empty, {}), ("models.m.model", "empty"), 3
    yield entry(models.no_config, {}), ("models.m.model", "config.json"), 3
    yield entry(models.nine_heads, {"tensor_parallel": 2}), ("models.m.tensor_parallel", "9 attention heads"), 4
    yield entry(models.nine_heads, {"quantize": "int4-g128"}), ("models.m.quantize", "groups of 128"), 4


def _of_the_machine(models: Folders) -> Rows:
    """A file where a program is expected, and addresses that are none."""
    file = models.sound / "config.json"
    yield f"log_level: info\nengine: {{runtime: {file}}}\n", ("engine.runtime", "run"), 2
    yield "log_level: info\ncluster: {address: 999.1.1.1:6379}\n", ("cluster.address", "IPv4"), 2
    yield "log_level: info\nlisten: 0.0.0.0:4000\n", ("listen", "no key"), 2
    yield "log_level: info\ncors: {origins: ['*']}\n", ("cors.origins", "no key"), 2


def _of_names(models: Folders) -> Rows:
    two = f"models:\n  a: {{model: {models.sound}, preload: true}}\n  b: {{model: {models.sound}, preload: true, default: true}}\n"
    yield f"{two}  d: {{model: {models.sound}, default: true}}\n", ("models.d.default", "'b'"), 4
    yield f"{two}groups: {{exclude: [[a, b]]}}\n", ("models.b.preload", "groups.exclude"), 3
    yield f"{two}groups: {{exclude: [[a, b]], accompany: [[a, c]]}}\n", ("groups.accompany", "'c'"), 4
    yield f"{two}groups: {{accompany: [[a, bb]]}}\n", ("groups.accompany", "'bb'", "Did you mean b?"), 4
    yield f"{two}hooks: {{on_startup: {{preload: [aa]}}}}\n", ("preload", "'aa'", "Did you mean a?"), 4
    yield "models:\n  m:\n    recipe: gpt-oss-120\n", ("models.m.recipe", "did you mean gpt-oss-120b?"), 3


def _of_texts(models: Folders) -> Rows:
    whole = entry(models.sound, {"ttl": 5})
    yield whole.replace("    ttl", "\tttl"), ("malformed",), 4
    yield whole.encode() + b"a: \xff\xfe\n", ("UTF-8",), 5
    yield "- a\n- b\n", ("map",), 1


def errors_of(broken: Broken, folder: Path) -> list[ConfigProblem]:
    file = folder / "sparkd.yaml"
    file.write_bytes(broken.text)
    return [problem for problem in check(file, {"HOME": str(folder)}) if problem.severity == "error"]


@pytest.fixture(scope="module", autouse=True)
def _asked(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's parser has answered for every file of this module, in one child."""
    folder = tmp_path_factory.mktemp("asked")
    files = corpus(folder)
    files += [Broken(entry(folder / "sound", keys).encode(), (), 0) for keys in (*SOUND, *(keys for keys, _ in TOGETHER))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        ask_at_once(lambda: [errors_of(one, folder) for one in files])


def test_every_file_is_refused_for_its_reason(tmp_path: Path) -> None:
    wrong = []
    for one in corpus(tmp_path):
        found = errors_of(one, tmp_path)
        if not any(one.line == error.line and all(word in f"{error.message} {error.file}" for word in one.words) for error in found):
            wrong.append((one, [str(error) for error in found]))

    assert wrong == []


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
    file = tmp_path / "sparkd.yaml"
    file.write_text(
        "lisen: x\nlog_level: loud\nmodels:\n  a:\n    model: o/m\n    ttl: many\n    max_num_seqs: 0\n    executor: raay\n"
        "  c:\n    tool_call_parser: hermes\nlisten: 1\nlisten: ${env.NOPE}\n"
    )
    assert [problem.line for problem in check(file, {}) if problem.severity == "error"] == [1, 2, 6, 7, 8, 9, 11, 12]


@pytest.mark.parametrize(("keys", "lines"), TOGETHER)
def test_the_mistakes_of_a_pass_are_told_together(keys: dict[str, Any], lines: list[int], tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(entry(Folders.under(tmp_path).sound, keys))
    assert [problem.line for problem in check(file, {}) if problem.severity == "error"] == lines
