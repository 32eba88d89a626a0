"""Reads the release of the vLLM in a Python environment off the folders of its packages, without running that Python."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

# (0, 32) of 0.32.0.
Release = tuple[int, int]
# The release whose command line sparkd was last held against (sparkd/vllm/vllm-flags-0.32.0.txt).
READ_OFF: Release = (0, 32)
_RELEASE = re.compile(r"v?(\d{1,3})\.(\d{1,4})(?:[.a-z+-]|$)")
# CPU wheels have a name of their own. Installers leave such a folder: packaging.python.org, "Recording installed projects".
_FOLDER = re.compile(r"vllm(?:_cpu)?-(?P<version>[^-]+)\.dist-info")


def release_of(version: str | None) -> Release | None:
    """`0.32.0+cpu`, `0.18.1rc1` -> (0, 32), (0, 18); None for what is no version, such as `unknown`."""
    match = _RELEASE.match(version or "")
    return (int(match[1]), int(match[2])) if match else None


def full_version_in(runtime: Path | None) -> str | None:
    """The full version of the runtime's vLLM, `0.32.0+cpu`; None without one.

    runtime: its interpreter, None for the one that this runs in.
    """
    for packages in packages_of(runtime):
        try:
            names = sorted(os.listdir(packages))
        except OSError:
            continue
        for folder in map(_FOLDER.fullmatch, names):
            if folder is not None and release_of(folder["version"]) is not None:
                return folder["version"]
    return None


def packages_of(runtime: Path | None) -> list[Path]:
    """The folders that an interpreter's packages are installed in. A virtual environment's python is a link that leads out of it: the
    folder counts that the link is in."""
    return [*map(Path, sys.path)] if runtime is None else sorted((runtime.parent.parent / "lib").glob("python3*/*-packages"))
