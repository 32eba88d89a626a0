"""Lists the symbols that sparkd uses (workers.vllm.symbols) and a vLLM lacks, by its source, which needs no GPU and no seconds."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from sparkd.vllm.installed import packages_of
from workers.vllm.symbols import OTHERWISE, TABLE


def missing_in(runtime: Path | None) -> dict[str, list[str]]:
    """The names by what happens without them; empty without a vLLM. runtime: as in sparkd.vllm.installed.full_version_in."""
    found = (packages for packages in packages_of(runtime) if (packages / "vllm" / "__init__.py").is_file())
    return next((missing_symbols(packages) for packages in found), {})


@lru_cache(maxsize=8)
def missing_symbols(packages: Path) -> dict[str, list[str]]:
    """The same for the folder that has the folder `vllm`."""
    missing: dict[str, list[str]] = {}
    for name, row in TABLE.items():
        attribute = name if row.attribute is None else row.attribute.partition(".")[0]
        if row.without != OTHERWISE and not any(_has(packages, home, attribute) for home in row.homes):
            missing.setdefault(row.without, []).append(name)
    return missing


def _has(packages: Path, module: str, attribute: str) -> bool:
    names = _names(packages, module)
    return names is not None and (not attribute or attribute in names)


@lru_cache(maxsize=256)
def _names(packages: Path, module: str) -> frozenset[str] | None:
    """The names that a module binds when it is imported; None where there is no such module. One with a `__getattr__` counts as binding
    every word in it."""
    path = packages.joinpath(*module.split("."))
    file = next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
    if file is None:
        return None
    text = file.read_text("utf-8")
    names: set[str] = set()
    blocks = [ast.parse(text).body]
    while blocks:
        for node in blocks.pop():
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.Assign():
                    names |= {part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)) if node.value is not None:
                    names.add(name)
                case ast.ImportFrom(names=[ast.alias(name="*")]):
                    parent = path if file.name == "__init__.py" else path.parent
                    names |= _names(packages, _absolute(node, parent.relative_to(packages))) or frozenset()
                case ast.Import() | ast.ImportFrom():
                    names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    blocks.append(node.orelse)
                case ast.If() | ast.Try() | ast.With():
                    blocks += [part.body for part in (node, *getattr(node, "handlers", ()))]
                    blocks += [getattr(node, part, []) for part in ("orelse", "finalbody")]
    return frozenset(names | set(re.findall(r"\w+", text)) if "__getattr__" in names else names)


def _absolute(node: ast.ImportFrom, package: Path) -> str:
    """The module of `from .. import`. package: that of the file, as a path."""
    above = package.parts[: len(package.parts) + 1 - node.level] if node.level else ()
    return ".".join([*above, *filter(None, [node.module])])
