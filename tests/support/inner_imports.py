"""Finds the imports inside functions that make no package optional: those of our own modules, which cost a reader and save nothing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("sparkd", "workers")
# Every verb is loaded for `sparkd -h`; what one of them runs is not.
_VERBS = ("sparkd.__main__", "sparkd.cli.")


@dataclass(frozen=True)
class Imports:
    """Full names, as `package.module.name`: those of a module's top level and those inside its functions, with their lines."""

    top: frozenset[str]
    inner: tuple[tuple[int, str], ...]


def needless(every: Mapping[str, Imports]) -> Iterator[tuple[str, int, str]]:
    """(module, line, module of ours): without a package of others behind it that the first does not load anyway.

    A verb may load what it runs, unless that is loaded already.
    """
    for module, imports in every.items():
        ours, others = loaded_with(module, every)
        for line, full in imports.inner:
            target = _module_of(full, every)
            if target is None:
                continue
            if target in ours or (not module.startswith(_VERBS) and not loaded_with(target, every)[1] - others):
                yield module, line, target


def loaded_with(module: str, every: Mapping[str, Imports]) -> tuple[set[str], set[str]]:
    """What the import of a module loads: modules of ours, and packages of others that are not Python's own."""
    ours: set[str] = set()
    others: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in ours or name not in every:
            continue
        ours.add(name)
        waiting += [name.rpartition(".")[0]]
        for full in every[name].top:
            target = _module_of(full, every)
            if target is not None:
                waiting.append(target)
            elif (package := full.partition(".")[0]) not in sys.stdlib_module_names:
                others.add(package)
    return ours, others


@cache
def modules() -> Mapping[str, Imports]:
    every = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        every[name] = imports_of(path.read_text(encoding="utf-8"))
    return every


def imports_of(text: str) -> Imports:
    top: set[str] = set()
    inner: list[tuple[int, str]] = []

    def walk(node: ast.AST, inside: bool) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING":
                continue
            if isinstance(part, ast.Import | ast.ImportFrom):
                start = f"{part.module}." if isinstance(part, ast.ImportFrom) else ""
                names = [f"{start}{alias.name}" for alias in part.names]
                top.update(() if inside else names)
                inner.extend((part.lineno, name) for name in names if inside)
            walk(part, inside or isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(ast.parse(text), False)
    return Imports(frozenset(top), tuple(inner))


def _module_of(full: str, every: Mapping[str, Imports]) -> str | None:
    """The module of ours that a full name is in; None if there is none."""
    while full and full not in every:
        full = full.rpartition(".")[0]
    return full or None
