"""Keeps docs/architecture.md true: the line numbers of its links, and the picture of the packages, drawn from their imports.

python -m tests.support.architecture_page
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE, PICTURE = ROOT / "docs/architecture.md", ROOT / "deploy/pictures/house.svg"
# [`name`](../path.py#L12): a class, a function, or a method as `Class.method`.
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)#L(\d+)\)")
_WIDTH, _HEIGHT, _GAP, _ROW = 128, 38, 16, 66
_COLOURS = {"sparkd": "#dbe9ff", "workers": "#e3f3df"}


def line_of(name: str, path: Path) -> int:
    """The line of `def` or `class`. Raises LookupError where the file has no such name."""
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    line = 0
    for part in name.split("."):
        named = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part)
        node = next(named, None)
        if node is None:
            raise LookupError(f"{path.relative_to(ROOT)} has no {name}.")
        line, body = node.lineno, node.body
    return line


def with_lines(page: str) -> str:
    """The page with the line of each link as it is now."""
    return LINK.sub(lambda link: f"[`{link[1]}`](../{link[2]}#L{line_of(link[1], ROOT / link[2])})", page)


def imports() -> dict[str, set[str]]:
    """By package, or module beside the packages, those that it imports: also inside functions, not for types alone."""
    uses: dict[str, set[str]] = {}
    for path in _files():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_types = {id(node) for part in ast.walk(tree) if _is_for_types(part) for node in ast.walk(part)}
        names: list[str] = []
        for node in (node for node in ast.walk(tree) if id(node) not in for_types):
            if isinstance(node, ast.ImportFrom) and node.module:
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
        rooms = {_room(tuple(name.split("."))) for name in names if name.split(".")[0] in _COLOURS}
        room = _room(path.relative_to(ROOT).with_suffix("").parts)
        uses[room] = uses.get(room, set()) | rooms - {room}
    return uses


def rows(package: str) -> list[list[str]]:
    """Its layers from the top, as the contract in pyproject.toml has them, which the linter holds the imports against."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == [package])
    return [[f"{package}.{name.strip()}" for name in re.split(r"[|:]", layer)] for layer in layers]


def picture() -> str:
    """The packages as SVG: one imports only what lies below it. A line that another way implies is left out."""
    uses = imports()
    sizes = Counter(_room(path.relative_to(ROOT).with_suffix("").parts) for path in _files() if path.name != "__init__.py")
    columns = {package: rows(package) for package in _COLOURS}
    height = max(len(column) for column in columns.values()) * _ROW
    at: dict[str, tuple[float, float]] = {}
    left = 0.0
    for column in columns.values():
        width = max(len(row) for row in column) * (_WIDTH + _GAP) + _GAP
        for below, row in enumerate(reversed(column)):
            start = left + (width - len(row) * (_WIDTH + _GAP) + _GAP) / 2
            for number, room in enumerate(row):
                at[room] = start + number * (_WIDTH + _GAP), height - (below + 1) * _ROW + _GAP
        left += width + _GAP
    lines = [_line(at[room], at[other]) for room in sorted(at) for other in sorted(_shown(room, uses) & at.keys())]
    boxes = [_box(room, sizes[room], *at[room]) for room in sorted(at)]
    style = 'font-family="system-ui, sans-serif" font-size="13" text-anchor="middle"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left:.0f} {height:.0f}" {style}>'
    return "\n".join([begin, f'<rect width="{left:.0f}" height="{height:.0f}" fill="#ffffff"/>', *lines, *boxes, "</svg>", ""])


def _files() -> list[Path]:
    return [path for package in _COLOURS for path in sorted((ROOT / package).rglob("*.py"))]


def _room(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2])


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _shown(room: str, uses: Mapping[str, set[str]]) -> set[str]:
    """Those of its own side that it imports, without those that another of them leads to."""
    side = room.partition(".")[0]
    below = {other for other in uses[room] if other.startswith(f"{side}.")}

    def reached(start: str, seen: set[str]) -> set[str]:
        for other in uses.get(start, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return {other for other in below if not any(other in reached(way, {room}) for way in below - {other})}


def _line(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1, x2, y2 = start[0] + _WIDTH / 2, start[1] + _HEIGHT, end[0] + _WIDTH / 2, end[1]
    middle = (y1 + y2) / 2
    way = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}"
    return f'<path d="{way}" fill="none" stroke="#9aa5b1" stroke-width="1"/>'


def _box(room: str, modules: int, x: float, y: float) -> str:
    package, _, name = room.partition(".")
    middle = x + _WIDTH / 2
    frame = f'<rect x="{x:.0f}" y="{y:.0f}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{_COLOURS[package]}" stroke="#52606d"/>'
    label = f'<text x="{middle:.0f}" y="{y + 17:.0f}" font-weight="600">{name}</text>'
    about = f"{package}, {modules} modules" if modules > 1 else package
    return f'{frame}{label}<text x="{middle:.0f}" y="{y + 32:.0f}" font-size="10">{about}</text>'


if __name__ == "__main__":
    PAGE.write_text(with_lines(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
