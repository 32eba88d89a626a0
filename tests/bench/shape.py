"""How well a reader finds anything in the tree: rooms, contracts, circles, doubled names, writers, length. It counts, and runs none of it.

    python -m tests.bench.shape [--list] [--json FILE]

A row for each figure with its goal. --list: also the names behind each figure. Exit status 1: a goal is missed.
Stops: the functions that one function calls, and those that these call, each once, depth first; a stop is a call that leads into another
file than its caller's. A call is followed where its name says which function it is: one of the module, one that was imported, a method of
the class itself, or a method whose name no second class has, unless it is called on a module that is not ours. Parsers: functions that cut,
strip or search a sentence of ours (tests/support/sentences.py).
"""

from __future__ import annotations

import ast
import json
import logging
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.arguments import Parser, new
from tests.support.sentences import parsers_of

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("sparkd", "workers")
# The flows of docs/architecture.md, by their headings there, and the goal of each.
FLOWS = {"One load": 14, "One request": 12, "One kill": 6}
NEED = "sparkd.capacity.requirement.need_of"
# Methods of Python's own types: which object such a call is on, only a type checker knows. `_replace`: of a named tuple.
_KINDS = (str, bytes, dict, list, set, Path, re.Pattern, re.Match, Exception, Counter, json, logging.Logger)
_COMMON = {name for kind in _KINDS for name in dir(kind)} | {"call", "_replace"}


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    lines: int
    names: dict[str, str] = field(default_factory=dict)  # of imports: a local name -> its full name


@dataclass(frozen=True)
class Figure:
    what: str
    value: int | str
    goal: str
    missed: bool
    names: tuple[str, ...] = ()


def main() -> int:
    parser = Parser("tests.bench.shape", __doc__)
    parser.add_argument("--list", action="store_true", help="the names behind each figure")
    parser.add_argument("--json", type=new, help="file for all figures")
    given = parser.parse_args()
    figures = list(measured(modules()))
    width = max(len(figure.what) for figure in figures)
    print(f"{'FIGURE':<{width}}  {'NOW':>16}  GOAL")
    for figure in figures:
        print(f"{figure.what:<{width}}  {figure.value:>16}  {figure.goal}{'   MISSED' if figure.missed else ''}")
        if given.list:
            print("".join(f"    {name}\n" for name in figure.names), end="")
    if given.json:
        given.json.write_text(json.dumps([vars(figure) for figure in figures], indent=1), encoding="utf-8")
    return 1 if not given.smallest and any(figure.missed for figure in figures) else 0


def modules() -> dict[str, Module]:
    """By full name. A package's own name stands for its __init__."""
    every = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        relative = path.relative_to(ROOT).with_suffix("")
        name = ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)
        text = path.read_text(encoding="utf-8")
        every[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    for module in every.values():
        module.names = dict(_imported(module, every))
    return every


def measured(every: Mapping[str, Module]) -> Iterator[Figure]:
    for package in PACKAGES:
        direct = [path.name for path in (ROOT / package).glob("*.py") if path.name != "__init__.py"]
        yield _at_most(f"modules directly in {package}/", direct, 10)
    yield _at_most("modules under no layers contract", _uncontracted(every), 0)
    yield _at_most("import circles", [" <-> ".join(circle) for circle in _circles(every)], 0)
    yield _at_most("stops under need_of", _stops(every, NEED), 30)
    for heading, goal in FLOWS.items():
        what, files = f"files of {heading.lower()}", _flow(heading)
        yield _at_most(what, files, goal) if files else Figure(what, "-", f"<= {goal}", True)
    writers = record_writers(every)
    crowded = [f"{slot}: {', '.join(sorted(at))}" for slot, at in sorted(writers.items()) if len(at) > 1]
    yield _at_most("values of a model's record with two writers", crowded, 0)
    yield _at_most("class names with two meanings", _doubled(every), 0)
    parsers = parsers_of((full, node) for full, _, _, node in functions_of(every))
    yield _at_most("functions that parse a sentence", [f"{full}: {', '.join(cuts)}" for full, cuts in parsers.items()], 0)
    yield _number("product lines", sum(module.lines for module in every.values()), 48_000)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    yield _number("README lines", len(readme.splitlines()), 260)
    yield _number("README words", len(readme.split()), 3_000)


def _at_most(what: str, names: list[str], goal: int) -> Figure:
    return Figure(what, len(names), f"<= {goal}", len(names) > goal, tuple(names))


def _number(what: str, value: int, goal: int) -> Figure:
    return Figure(what, f"{value:,}", f"<= {goal:,}", value > goal)


def _imported(module: Module, every: Mapping[str, Module]) -> Iterator[tuple[str, str]]:
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                yield alias.asname or alias.name, f"{source}.{alias.name}"


def _uses(module: Module, every: Mapping[str, Module]) -> set[str]:
    """The modules of ours that it imports anywhere: also in functions, and for types alone."""
    used = set()
    for full in module.names.values():
        while full and full not in every:
            full = full.rpartition(".")[0]
        used.add(full)
    return {name for name in used if name and name != module.name and name not in PACKAGES}


def _circles(every: Mapping[str, Module]) -> list[list[str]]:
    """Strongly connected modules (Tarjan), each circle once."""
    uses = {name: _uses(module, every) for name, module in every.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in uses[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                circles.append(sorted(stack[at:]))
            del stack[at:]

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 10 * len(every))
    for name in every:
        if name not in index:
            visit(name)
    sys.setrecursionlimit(limit)
    return circles


def _uncontracted(every: Mapping[str, Module]) -> list[str]:
    """Modules that no layers contract of pyproject.toml has in a layer, by the nearest container above them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    covered: set[str] = set()
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            layers = {part.strip(" ()") for layer in contract["layers"] for part in re.split(r"[|:]", layer)}
            covered |= {f"{container}.{layer}" for container in contract.get("containers", ()) for layer in layers}
            covered |= layers if not contract.get("containers") else set()
    return [name for name in every if name not in PACKAGES and not any(name == one or name.startswith(f"{one}.") for one in covered)]


def functions_of(every: Mapping[str, Module]) -> Iterator[tuple[str, str, Module, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(full name, class or nothing, module, definition)"""
    for module in every.values():
        for node in module.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module.name}.{node.name}", "", module, node
            elif isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield f"{module.name}.{node.name}.{part.name}", node.name, module, part


def _stops(every: Mapping[str, Module], start: str) -> list[str]:
    functions = {full: (owner, module, node) for full, owner, module, node in functions_of(every)}
    methods: dict[str, list[str]] = defaultdict(list)
    for full, (owner, _module, node) in functions.items():
        if owner:
            methods[node.name].append(full)
    stops: list[str] = []
    seen: set[str] = set()

    def follow(full: str) -> None:
        seen.add(full)
        owner, module, node = functions[full]
        for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
            callee = _callee(call.func, owner, module, functions.keys(), methods)
            if callee and callee not in seen:
                if functions[callee][1] is not module:
                    stops.append(f"{module.name} -> {callee}")
                follow(callee)

    follow(start)
    return stops


def _callee(target: ast.expr, owner: str, module: Module, functions: object, methods: Mapping[str, list[str]]) -> str | None:
    known = functions if isinstance(functions, set | dict) else set(functions)  # type: ignore[call-overload]
    if isinstance(target, ast.Name):
        for full in (module.names.get(target.id), f"{module.name}.{target.id}"):
            if full in known:
                return full
    if isinstance(target, ast.Attribute):
        if isinstance(target.value, ast.Name):
            if target.value.id == "self" and f"{module.name}.{owner}.{target.attr}" in known:
                return f"{module.name}.{owner}.{target.attr}"
            imported = module.names.get(target.value.id, "")
            if f"{imported}.{target.attr}" in known:
                return f"{imported}.{target.attr}"
            if imported and imported.partition(".")[0] not in PACKAGES:
                return None
        if len(methods[target.attr]) == 1 and target.attr not in _COMMON:
            return methods[target.attr][0]
    return None


def _flow(heading: str) -> list[str]:
    """The files that docs/architecture.md lists below this heading, each once."""
    path = ROOT / "docs/architecture.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    below = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"\]\(\.\./((?:sparkd|workers)/[\w/]+\.py)", below)))


# By value of the record that is an object of its own, the module that has its class, which alone may change it.
OWNERS = {"queue": "sparkd.control.request_queue", "observed": "sparkd.control.observed"}


def record_writers(every: Mapping[str, Module]) -> dict[str, set[str]]:
    """By value of a model's record, the modules with an assignment to it through a name that ends with `record`."""
    writers: dict[str, set[str]] = defaultdict(set)
    for module in every.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            base = node.value
            if isinstance(base, ast.Name) and base.id.endswith("record"):
                writers[node.attr].add(module.name)
            elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id.endswith("record"):
                writers[f"{base.attr}.{node.attr}"] |= {module.name, OWNERS.get(base.attr, module.name)}
    return writers


def _doubled(every: Mapping[str, Module]) -> list[str]:
    at: dict[str, list[str]] = defaultdict(list)
    for module in every.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                at[node.name].append(module.name)
    return [f"{name}: {', '.join(places)}" for name, places in sorted(at.items()) if len(places) > 1]


if __name__ == "__main__":
    sys.exit(main())
