"""What is in sparkd's wheel: the two packages and the page's files, without the tests."""

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


def test_the_wheel_has_every_file_of_the_page() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sparkd.web"]
    package = ROOT / "sparkd/web"
    shipped = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    assert shipped == {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "static/index.html" in shipped
