"""Shows that every dependency of sparkd, direct or not, has wheels for aarch64, x86_64 and Python 3.11 to 3.13. Never installs any.

pip resolves for a foreign platform but evaluates environment markers on the interpreter that runs it, so the markers are evaluated
here once more for the target, and what they add is resolved in another round.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from setup import CPU_ENGINE, CUDA_ENGINE, MODEL_PACKAGE

ROOT = Path(__file__).resolve().parent.parent
# A Spark runs Ubuntu 24.04: glibc 2.39.
_GLIBC_MINORS = range(5, 40)
_LEGACY = {"x86_64": ("manylinux1", "manylinux2010", "manylinux2014"), "aarch64": ("manylinux2014",)}
# The engines bring a hundred packages of their own; here only that they exist for every target.
ENGINES = (CPU_ENGINE, "torch==2.13.0", MODEL_PACKAGE)


@dataclass(frozen=True, slots=True)
class Target:
    machine: str
    python: str

    @property
    def name(self) -> str:
        return f"{self.machine} {self.python}"

    def platforms(self) -> list[str]:
        return [f"{old}_{self.machine}" for old in _LEGACY[self.machine]] + [f"manylinux_2_{n}_{self.machine}" for n in _GLIBC_MINORS]

    def environment(self) -> dict[str, str]:
        """The PEP 508 marker variables of this target."""
        here = {name: str(value) for name, value in default_environment().items()}
        there = {"python_version": self.python, "python_full_version": f"{self.python}.0", "platform_machine": self.machine}
        return {**here, **there, "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}


SPARK = Target("aarch64", "3.12")
TARGETS = tuple(Target(machine, python) for machine in ("aarch64", "x86_64") for python in ("3.11", "3.12", "3.13"))


@dataclass(frozen=True, slots=True)
class Wheel:
    """One resolved package: `tag` is what its wheel is built for, such as any, abi3 or cp312."""

    version: str
    tag: str


class NoWheel(Exception):
    """pip found no wheel of `requirement`."""

    def __init__(self, requirement: str) -> None:
        super().__init__(requirement)
        self.requirement = requirement


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None).parse_args(argv)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    roots = [*project["dependencies"], *project["optional-dependencies"]["embedded"]]
    found: dict[str, dict[str, Wheel]] = {}
    missing: dict[str, set[str]] = {}
    for target in TARGETS:
        wheels: dict[str, Wheel] = {}
        try:
            wheels |= resolve(roots, target)
        except NoWheel as error:
            missing.setdefault(target.name, set()).add(error.requirement)
        for engine in ENGINES:
            try:
                wheels |= parse_report(_pip_report([engine], target, deps=False))
            except NoWheel as error:
                missing.setdefault(target.name, set()).add(error.requirement)
        if target == SPARK:
            try:
                resolve([CUDA_ENGINE], target)  # what `make serve` installs there, beside the versions of constraints.txt
            except NoWheel as error:
                missing.setdefault(target.name, set()).add(error.requirement)
        found[target.name] = wheels
        print(f"{target.name}: {len(wheels)} packages", file=sys.stderr, flush=True)
    print(table(found))
    for name, requirements in missing.items():
        print(f"{name}: no wheel of {', '.join(sorted(requirements))}")
    if not missing:
        print(f"every package has a wheel for all {len(TARGETS)} targets")
    return 1 if missing else 0


def resolve(roots: Sequence[str], target: Target) -> dict[str, Wheel]:
    """Everything that `roots` need on `target`. Raises NoWheel."""
    wanted = list(roots)
    while True:
        report = _pip_report(wanted, target)
        reached, unmet = reach(roots, report, target)
        if not unmet:
            return {name: wheel for name, wheel in parse_report(report).items() if name in reached}
        wanted += unmet


def reach(roots: Iterable[str], report: Mapping[str, Any], target: Target) -> tuple[set[str], list[str]]:
    """Follows the requirements of pip's `report` with the markers of `target`: the names it comes to, and what the report lacks."""
    environment = target.environment()
    requires = {canonicalize_name(item["metadata"]["name"]): item["metadata"].get("requires_dist", []) for item in report["install"]}
    reached: set[str] = set()
    unmet: dict[str, None] = {}
    seen: set[tuple[str, str]] = set()
    queue = [Requirement(root) for root in roots]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name not in requires:
            requirement.marker = None
            unmet[str(requirement)] = None
            continue
        reached.add(name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            children = map(Requirement, requires[name])
            queue += [child for child in children if child.marker is None or child.marker.evaluate({**environment, "extra": extra})]
    return reached, list(unmet)


def parse_report(report: Mapping[str, Any]) -> dict[str, Wheel]:
    """pip's installation report (version 1) as wheels by canonical package name."""
    wheels: dict[str, Wheel] = {}
    for item in report["install"]:
        filename = item["download_info"]["url"].rsplit("/", 1)[-1].replace("%2B", "+")
        name, version, _, tags = parse_wheel_filename(filename)
        tag = sorted(tags, key=str)[0]
        wheels[name] = Wheel(str(version), "any" if tag.platform == "any" else "abi3" if tag.abi == "abi3" else tag.interpreter)
    return wheels


def missing_requirement(output: str) -> str | None:
    """The package that pip's error output found no wheel of, or None when it failed of something else."""
    found = re.search(r"No matching distribution found for (.+?)(?: \(from .*)?$", output, re.MULTILINE)
    return found.group(1).strip() if found else None


def table(found: Mapping[str, Mapping[str, Wheel]]) -> str:
    """One row a package, one column a target; a cell is the wheel's tag, with its version where the targets differ."""
    names = sorted({name for wheels in found.values() for name in wheels})
    rows = [["package", "version", *found]]
    for name in names:
        versions = {wheels[name].version for wheels in found.values() if name in wheels}
        one = versions.pop() if len(versions) == 1 else None
        cells = []
        for wheels in found.values():
            wheel = wheels.get(name)
            cells.append("-" if wheel is None else wheel.tag if one else f"{wheel.tag} {wheel.version}")
        rows.append([name, one or "", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _pip_report(requirements: Sequence[str], target: Target, *, deps: bool = True) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as nowhere:
        argv = [sys.executable, "-P", "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--disable-pip-version-check"]
        argv += ["--only-binary=:all:", "--implementation=cp", f"--python-version={target.python}", f"--target={nowhere}", "--report=-"]
        argv += [f"--platform={platform}" for platform in target.platforms()]
        argv += ["-c", str(ROOT / "deploy" / "constraints.txt")] if deps else ["--no-deps"]
        done = subprocess.run([*argv, *requirements], capture_output=True, text=True, timeout=900)
    if done.returncode == 0:
        report: dict[str, Any] = json.loads(done.stdout)
        return report
    lacking = missing_requirement(done.stderr)
    if lacking is None:
        sys.exit(f"pip cannot resolve for {target.name}: {done.stderr.strip()[-300:] or 'it gave no reason'}")
    raise NoWheel(lacking)


if __name__ == "__main__":
    sys.exit(main())
