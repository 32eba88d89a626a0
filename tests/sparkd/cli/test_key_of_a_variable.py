"""A key that is written as a variable which is not set: `sparkd check` says that, and nothing that follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.cli.config_check import check
from tests.support.facts import lacking


@pytest.mark.parametrize("written", ["${env.X}", "[{laptop: '${env.X}'}]"])
def test_a_variable_that_is_not_set_is_told_once(written: str, tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text(f"keys:\n  admin: {written}\n")
    file.chmod(0o600)

    (problem,) = check(file, {})
    assert (problem.severity, problem.line) == ("error", 2)
    assert lacking(problem.message, "X") == []


def test_a_variable_that_holds_no_key_is_told(tmp_path: Path) -> None:
    file = tmp_path / "sparkd.yaml"
    file.write_text("keys:\n  admin: ${env.X}\n")
    file.chmod(0o600)

    assert [problem.line for problem in check(file, {"X": "a b"}) if problem.severity == "error"] == [2]
