"""Reads the release of the vLLM in a Python environment off the folders of its packages, without running that Python."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
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


def release_in(runtime: Path | None) -> Release | None:
    """runtime: its interpreter, None for the one that this runs in. None where there is no vLLM, or nothing tells its version."""
    return release_of(full_version_in(runtime))


def full_version_in(runtime: Path | None) -> str | None:
    """The full version of the runtime's vLLM, `0.32.0+cpu`; None without one."""
    versions = _versions(runtime)
    return next((version for version in versions if release_of(version) is not None), None)


def version_in(runtime: Path | None) -> str:
    """The full version for a message; `of an unknown release` where it is unknown."""
    return next(iter(_versions(runtime)), "of an unknown release")


def packages_of(runtime: Path) -> list[Path]:
    """The folders that an interpreter's packages are installed in. A virtual environment's python is a link that leads out of it: the
    folder counts that the link is in."""
    return sorted((runtime.parent.parent / "lib").glob("python3*/*-packages"))


def folders_of(runtime: Path | None) -> Iterator[Path]:
    """The folders in which the vLLM there may be; runtime as in release_in."""
    yield from _ours() if runtime is None else packages_of(runtime)


def _versions(runtime: Path | None) -> Iterator[str]:
    for packages in map(Path, sys.path) if runtime is None else packages_of(runtime):
        try:
            names = sorted(os.listdir(packages))
        except OSError:
            continue
        yield from (found["version"] for found in map(_FOLDER.fullmatch, names) if found is not None)


def _ours() -> Iterator[Path]:
    """Wherever ours is imported from, an editable one too; it is not imported for that."""
    from importlib.util import find_spec

    spec = find_spec("vllm")
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent.parent
