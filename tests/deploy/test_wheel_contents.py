"""The contents of sparkd's wheel: the two packages and their data files, without the tests."""

from __future__ import annotations

import tomllib
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def test_the_wheel_has_every_package_and_no_test() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    shipped = set(find_packages(str(ROOT), include=settings["include"]))
    there = {".".join(path.parent.relative_to(ROOT).parts) for top in ("sparkd", "workers") for path in (ROOT / top).rglob("__init__.py")}
    assert shipped == there


def test_the_wheel_has_every_file_that_is_no_code() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {path for package, globs in patterns.items() for glob in globs for path in (ROOT / package.replace(".", "/")).glob(glob)}
    there = {
        path for top in ("sparkd", "workers") for path in (ROOT / top).rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {path for path in shipped if path.is_file()} == there
    assert {ROOT / "sparkd/web/static/index.html", ROOT / "workers/rank/signatures.toml"} <= there
