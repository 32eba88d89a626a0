"""What vLLM's parser was asked once is kept for the same arguments, and asked anew when its environment changes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparkd.errors import EngineError
from sparkd.vllm.arg_check import RefusedArg
from sparkd.vllm.ask import cache as answer_cache
from sparkd.vllm.ask import parser as parser_answers
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.parser import answers, refused
from tests.sparkd.vllm.test_installed import environment


def python(folder: Path, script: str, *packages: str) -> Path:
    """An environment whose interpreter is this program."""
    made = environment(folder, *(packages or ("vllm-0.32.0.dist-info",)))
    made.unlink()
    made.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{script}\n")
    made.chmod(0o755)
    return made


UNKNOWN = {"flag": "--one", "reason": "unrecognized argument"}
SAYS = "echo '" + json.dumps({"vllm": "0.32.0", "refused": [[UNKNOWN]]}) + "'"
ONE = [["--one", "1"]]
REFUSAL = RefusedArg(**UNKNOWN)


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "_unkept", {})


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


def test_it_is_asked_once_for_the_same_arguments_and_again_after_something_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, env = tmp_path / "kept", tmp_path / "env"
    runtime = python(env, SAYS)
    assert answers(ONE, runtime, [kept], ask=False) == [None]
    assert asked(env) == 0
    for _ in range(2):
        assert answers(ONE, runtime, [kept], ask=True) == [(REFUSAL,)]
        monkeypatch.setattr(answer_cache, "_unkept", {})  # as another process
    assert answers([*ONE, *ONE], runtime, [kept], ask=False) == [(REFUSAL,)] * 2
    assert asked(env) == 1
    assert answers([["--max-num-seqs", "8"]], runtime, [kept], ask=True) == [(REFUSAL,)]
    for line in (["--max-num-seqs", "9"], ["--max-num-seqs", "16"]):
        assert answers([line], runtime, [kept], ask=False) == [(REFUSAL,)], "a plain number is no new question"
    assert answers([["--max-num-seqs", "0"]], runtime, [kept], ask=False) == [None]
    assert answers([["--max-num-seqs=9"]], runtime, [kept], ask=False) == [(REFUSAL,)]
    assert asked(env) == 2
    (runtime.parent.parent / "lib/python3.12/site-packages/vllm_plugin-1.0.dist-info").mkdir()
    assert answers(ONE, runtime, [kept], ask=False) == [None]
    assert answers(ONE, runtime, [kept], ask=True) == [(REFUSAL,)]
    assert asked(env) == 3


@pytest.mark.parametrize("script", ["exit 1", """echo '{"refused": [[{"flag": "a"}]]}'"""])
def test_one_that_does_not_answer_is_an_error_and_is_asked_again(tmp_path: Path, script: str) -> None:
    env = tmp_path / "env"
    runtime = python(env, script)
    for tries in (1, 2):
        with pytest.raises(EngineError, match=r"parser gave no answer.*it is asked again"):
            refused(["--one", "1"], {}, runtime, tmp_path, ask=True)
        assert asked(env) == tries
    assert answers(ONE, runtime, [tmp_path], ask=False) == [None]
    runtime.write_text(f"#!/bin/sh\n{SAYS}\n")
    assert answers(ONE, runtime, [tmp_path], ask=True) == [(REFUSAL,)], "a cold disk once is no verdict for ever"


def test_one_that_hangs_gives_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = python(tmp_path / "env", "sleep 3600")
    monkeypatch.setattr(parser_answers, "TIMEOUT_S", 0.1)
    with pytest.raises(EngineError, match="no answer"):
        answers(ONE, runtime, [tmp_path / "kept"], ask=True)


def test_without_an_answer_nothing_is_refused(tmp_path: Path) -> None:
    runtime = python(tmp_path / "env", "exit 1")
    for interpreter, env in ((runtime, {}), (None, {"PYTHONPATH": "/mine"}), (tmp_path / "bin" / "python", {})):
        assert refused(["--no-enable-prefix-caching", "--of-a-plugin", "1"], env, interpreter, tmp_path, ask=False) == ()


def test_a_kept_answer_that_is_damaged_is_asked_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env, kept = tmp_path / "env", tmp_path / "kept"
    runtime = python(env, SAYS)
    answers(ONE, runtime, [kept], ask=True)
    (file,) = kept.iterdir()
    file.write_text("{")
    monkeypatch.setattr(answer_cache, "_unkept", {})
    assert answers(ONE, runtime, [kept], ask=True) == [(REFUSAL,)]
    assert asked(env) == 2


def test_a_folder_that_cannot_be_written_to_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = tmp_path / "env"
    (tmp_path / "file").write_text("")
    assert answers(ONE, python(env, SAYS), [tmp_path / "file" / "kept", tmp_path / "kept"], ask=True) == [(REFUSAL,)]
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".json"]
    for _ in range(2):
        assert answers(ONE, env / "bin" / "python", [], ask=True) == [(REFUSAL,)]
    assert asked(env) == 2, "what no folder keeps this process keeps"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "cache" / "sparkd" / "vllm-answers"
    assert places(tmp_path) == [tmp_path / "vllm-answers", own]
    assert places(tmp_path / "gone") == [own]


def test_no_vllm_is_not_asked(tmp_path: Path) -> None:
    env = tmp_path / "env"
    assert answers(ONE, python(env, SAYS, "numpy-2.0.dist-info"), [tmp_path], ask=True) == [None]
    assert asked(env) == 0
    assert os.listdir(tmp_path) == ["env"]
