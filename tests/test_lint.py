"""The linter, the contracts between packages and the type checker, which `make lint` runs by hand, are part of every test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKERS = {"style": ("ruff", "check", "--quiet"), "contracts": ("lint-imports", "--no-logo"), "types": ("mypy",)}


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_checker_finds_nothing(checker: str) -> None:
    program, *arguments = CHECKERS[checker]
    done = subprocess.run([Path(sys.executable).with_name(program), *arguments], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
