"""Owns which literals of the tests pin sparkd's own wording: three words in a row that a string of sparkd or workers has too.

Counted where a test compares: in an assert, as `match=`, and in the table of a parametrized test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

WORDS = 3
_WORD = re.compile(r"[(\"'`]*([A-Za-z][A-Za-z']*(?:-[A-Za-z]+)?)[,.:;)\"'`?]*")

Run = tuple[str, ...]


def runs_of(sources: Iterable[str]) -> set[Run]:
    """Every run of three words in the strings of these modules, lower-case, without their docstrings."""
    return {run for source in sources for _, text in _strings(ast.parse(source)) for run in _runs(text)}


def pinned(source: str, known: set[Run]) -> list[tuple[int, str]]:
    """Line and text of each literal of a test module that pins one of them."""
    found: dict[tuple[int, int], str] = {}
    for node in ast.walk(ast.parse(source)):
        for compared in _compared(node):
            found |= {(literal.lineno, literal.col_offset): text for literal, text in _strings(compared) if known & {*_runs(text)}}
    return [(line, text) for (line, _), text in sorted(found.items())]


def _compared(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assert):
        yield node.test
    elif isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "match")
        if ast.unparse(node.func).endswith("parametrize"):
            yield from node.args[1:2]


def _strings(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The literals and their texts; a blank word stands for each value in an f-string. No docstring is one."""
    if isinstance(tree, ast.JoinedStr):
        yield tree, "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in tree.values)
        for part in tree.values:
            if not isinstance(part, ast.Constant):
                yield from _strings(part)
    elif isinstance(tree, ast.Constant):
        if isinstance(tree.value, str):
            yield tree, tree.value
    else:
        for child in ast.iter_child_nodes(tree):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                yield from _strings(child)


def _runs(text: str) -> Iterator[Run]:
    words = [match[1].lower() if (match := _WORD.fullmatch(word)) else None for word in text.replace("\\", "").split()]
    for first in range(len(words) - WORDS + 1):
        run = [word for word in words[first : first + WORDS] if word]
        if len(run) == WORDS:
            yield tuple(run)
