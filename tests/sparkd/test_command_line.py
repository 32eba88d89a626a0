"""What the command line says of errors that are not sparkd's: of the machine, and of another program's modules."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkd import __main__ as command_line
from tests.support.daemon_process import ROOT
from tests.support.facts import lacking
from tests.support.waiting import HUNG_S


def test_modules_of_another_program_are_not_imported(tmp_path: Path) -> None:
    for name in ("typer", "pydantic", "yaml"):
        (tmp_path / f"{name}.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [sys.executable, "-P", "-m", "sparkd", "version"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=HUNG_S, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_is_another_programs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def imports(_argv: list[str]) -> int:
        raise ImportError("cannot import name 'Buffer' from 'typing_extensions' (/opt/other/typing_extensions.py)")

    monkeypatch.setattr(command_line, "_any_verb", imports)
    assert command_line.exit_code(["plan"]) == 1
    assert lacking(capsys.readouterr().err, "/opt/other/typing_extensions.py", "PYTHONPATH", "usercustomize") == []


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (ExceptionGroup("tasks", [RuntimeError("can't start new thread")]), "threads or processes"),
        (MemoryError(), "Cannot allocate memory"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_the_machine_refuses_is_no_bug(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(_argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(command_line, "_any_verb", refused)
    assert command_line.exit_code(["plan"]) == 4
    assert lacking(capsys.readouterr().err, words, "df") == []


def test_any_other_error_is_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command_line, "_any_verb", lambda _argv: {}["secret"])
    assert command_line.exit_code(["plan"]) == 1
    said = capsys.readouterr().err
    assert lacking(said, "bug", "KeyError") == [] and "secret" not in said
