"""Owns which release of vLLM a Python environment has, its models, and what that release has dropped. Never runs that Python."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sparkd.vllm.releases import Release
from sparkd.vllm.translate import release_of

_REGISTRY = Path("vllm/model_executor/models/registry.py")
# A row of its tables: architecture, module and class. Those of older names have a release or an address instead.
_MODEL = re.compile(r'^    "(\w+)": \(', re.MULTILINE)
# The tables of `--tool-call-parser` and `--reasoning-parser`; older releases name each parser by a decorator in its own file.
_TOOL_PARSERS = (Path("vllm/tool_parsers"), Path("vllm/entrypoints/openai/tool_parsers"))
_REASONING_PARSERS = (Path("vllm/reasoning"),)
_PARSER = re.compile(r'^    "([\w-]+)": \((?:  #.*)?$|register_module\(\s*(?:name=)?\[?"([\w-]+)"', re.MULTILINE)
# CPU wheels have a name of their own. Installers leave such a folder: packaging.python.org, "Recording installed projects".
_FOLDER = re.compile(r"vllm(?:_cpu)?-(?P<version>[^-]+)\.dist-info")


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


def has_module(name: str, runtime: Path | None) -> bool:
    """Whether a module can be imported there, by the names of files alone; runtime as in release_in. True where nothing tells."""
    top, *parts = name.split(".")
    if runtime is None:
        spec = importlib.util.find_spec(top)
        places = list(spec.submodule_search_locations or ()) if spec is not None else None
    else:
        places = [str(folder / top) for folder in packages_of(runtime) if (folder / top).is_dir()]
        if not places:
            return True  # a module by itself, or installed as a link
    if places is None:
        return False
    for part in parts:
        if any((Path(place) / f"{part}.py").is_file() for place in places):
            return part == parts[-1]
        places = [str(Path(place) / part) for place in places if (Path(place) / part).is_dir()]
    return not parts or bool(places)


def models_of(runtime: Path | None) -> frozenset[str] | None:
    """The architectures of the vLLM there, without what plugins add; runtime as in release_in. None where there is none to read."""
    for packages in folders_of(runtime):
        try:
            text = (packages / _REGISTRY).read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if found := frozenset(_MODEL.findall(text)):
            return found
    return None


def parsers_of(runtime: Path | None) -> tuple[frozenset[str], frozenset[str]] | None:
    """The parsers of tool calls and those of reasoning that the vLLM there has, without what plugins add; runtime as in release_in. None
    where there is none to read."""
    for packages in folders_of(runtime):
        tools = next(filter(None, (_names_in(packages / folder) for folder in _TOOL_PARSERS)), None)
        reasonings = next(filter(None, (_names_in(packages / folder) for folder in _REASONING_PARSERS)), None)
        if tools and reasonings:
            return tools, reasonings
    return None


def _names_in(folder: Path) -> frozenset[str]:
    found: set[str] = set()
    try:
        for path in sorted(folder.glob("*.py")):
            found |= {name for pair in _PARSER.findall(path.read_text("utf-8")) for name in pair if name}
            if path.name == "__init__.py" and found:
                break
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(found)


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
