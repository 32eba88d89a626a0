"""What deploy/lock.py wrote: the versions that every installation has."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def _pins(file: str) -> dict[str, str]:
    lines = [line for line in (DEPLOY / file).read_text().splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)  # type: ignore[misc]


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
