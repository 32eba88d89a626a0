"""Owns parsing a YAML text into plain values that keep their line, with ${env.NAME} filled in. Never knows the meaning of a key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

# A configuration is written by hand: these bounds are far above any real one and limit a hostile one to about a second. MAX_VALUES counts
# an alias each time it is used, which stops the "billion laughs".
MAX_BYTES = 128 * 1024
MAX_VALUES = 20_000
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_BROKEN = "The text holds half a character (a lone surrogate, or bytes that are not UTF-8): write it anew."
# A shorter secret is not masked, because it occurs in many words.
SHORTEST_SECRET, SHORTEST_BEGINNING = 4, 8
_ENV = re.compile(r"\$\{env\.([^}]*)(\}?)")
_CUT = re.compile(r"\.\.\.|'")
_DEEP = re.compile(rf"(?:[\[{{]\s*){{{MAX_DEPTH + 1}}}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One error, or warning (severity "warning"). `file` may also name an environment variable or a flag.

    key: the path of the key at fault, from the top of the configuration; empty where no key is at fault.
    """

    file: str | None
    line: int | None
    message: str
    severity: str = "error"
    key: tuple[str | int, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{place}{'warning: ' if self.severity == 'warning' else ''}{self.message}"


@dataclass(frozen=True, slots=True)
class Location:
    """The place at which a value was written. secret: the text came from the environment and must not be shown."""

    file: str | None = None
    line: int | None = None
    secret: bool = False

    def problem(self, message: str, severity: str = "error", key: Iterable[str | int] = ()) -> ConfigProblem:
        return ConfigProblem(self.file, self.line, message, severity, tuple(key))


class Table(dict[str, Any]):
    """A map that knows the place of each of its keys. meant: missing keys for which a misspelt key probably stands."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, Location] = {}
        self.meant: set[str] = set()

    def put(self, key: str, value: Any, place: Location) -> None:
        self[key] = value
        self.places[key] = place


class Items(list[Any]):
    """A list that knows the place of each of its items."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[Location] = []


@dataclass(slots=True)
class Document:
    """A parsed file: its values, its problems, and the environment variables that it names.

    repeated: a sentence for each key that occurs more than once, where the last one counts.
    """

    table: Table = field(default_factory=Table)
    problems: list[ConfigProblem] = field(default_factory=list)
    env_names: set[str] = field(default_factory=set)
    repeated: list[str] = field(default_factory=list)


def parse(raw: bytes, file: str, environ: Mapping[str, str], *, last_counts: bool = False) -> Document:
    """Parse one YAML document whose top level is a map. Never raises: all errors are in `problems`. last_counts: the last of repeated keys
    counts, as for PyYAML; otherwise a repeated key is a problem.

    Scalars follow the YAML 1.2 core schema (yaml.org/spec/1.2.2 section 10.3), not PyYAML's 1.1: `no` and `1:30` are text, and dates
    stay text. Keys are always text, as they were written. Anchors and merge keys work; tags do not.
    """
    document = Document()
    root = _compose(raw, file, document)
    if root is None:
        return document
    builder = _Builder(file, environ, document, last_counts)
    try:
        value = builder.build(root, 0)
    except _TooMuchError as error:
        document.problems.append(ConfigProblem(file, error.line, str(error)))
        return document
    if isinstance(value, Table):
        document.table = value
    elif value is not None:
        document.problems.append(ConfigProblem(file, _line(root), "The file must hold a map (lines of 'key: value') at its top."))
    return document


def masked(problems: Iterable[ConfigProblem], names: Iterable[str], environ: Mapping[str, str]) -> list[ConfigProblem]:
    """The problems with `${env.NAME}` in place of every value that the file took from the environment, because it may be a secret. Covers
    the whole value, Python's quoted form, lower case, and shortened forms. names: Document.env_names."""
    spellings: dict[str, str] = {}
    for name in sorted(names):
        value = environ.get(name, "")
        for text in (value, value.strip(), repr(value)[1:-1], ascii(value)[1:-1], json.dumps(value)[1:-1]):
            for spelt in (text, text.lower()):
                if len(spelt) >= SHORTEST_SECRET:
                    spellings.setdefault(spelt, f"${{env.{name}}}")
    return [
        replace(problem, message=_without(problem.message, spellings), file=_without(problem.file, spellings) if problem.file else None)
        for problem in problems
    ]


def _without(message: str, spellings: Mapping[str, str]) -> str:
    for spelt in sorted(spellings, key=len, reverse=True):
        message = message.replace(spelt, spellings[spelt])
        # A message may shorten a value: mask its longest prefix before dots or a quotation mark.
        start = 0
        while cut := _CUT.search(message, start):
            kept, rest = message[: cut.start()], message[cut.start() if cut[0] == "'" else cut.end() :]
            longest = min(len(spelt) - 1, len(kept))
            shown = next((size for size in range(longest, SHORTEST_BEGINNING - 1, -1) if kept.endswith(spelt[:size])), 0)
            start = cut.end()
            if shown:
                kept = kept[:-shown] + spellings[spelt]
                message, start = kept + rest, len(kept) + rest.startswith("'")
    return message


def check_depth(value: Any, levels: int = MAX_DEPTH) -> None:
    """Raise ValueError for JSON with more nested levels: sparkd could store it, but not return it."""
    level: list[Any] = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in _members(outer)]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {levels} levels")


def whole(text: str) -> str | None:
    """The text with surrogate pairs joined (JSON's spelling of an emoji); None where half a pair is left, which cannot be encoded."""
    try:
        return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return None


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class _TooMuchError(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


_INTEGER = re.compile(r"[-+]?[0-9]{1,18}|0x[0-9a-fA-F]{1,15}|0o[0-7]{1,20}")
for _name, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", rf"(?:{_INTEGER.pattern})$", list("-+0123456789")),
    ("float", r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN))$", list("-+0123456789.")),
    ("merge", r"(?:<<)$", ["<"]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


def _compose(raw: bytes, file: str, document: Document) -> yaml.Node | None:
    def wrong(message: str, line: int | None) -> None:
        document.problems.append(ConfigProblem(file, line, message))

    if len(raw) > MAX_BYTES:
        wrong(f"The file has {len(raw)} bytes; a configuration has at most {MAX_BYTES}. Is it the right file?", None)
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        wrong("The file is not UTF-8 text: save it as UTF-8.", raw.count(b"\n", 0, error.start) + 1)
        return None
    # PyYAML's scanner is quadratic in open brackets: measured 9 s for 128 KiB of 300-fold nested lists, none of which is read below.
    if deep := _DEEP.search(text):
        wrong(f"The YAML is nested too deeply; at most {MAX_DEPTH} levels are read.", text.count("\n", 0, deep.start()) + 1)
        return None
    try:
        # The loader is SafeLoader with fewer implicit types; it only composes nodes and constructs no object.
        return yaml.compose(text, Loader=_CoreLoader)
    except yaml.reader.ReaderError as error:
        wrong("The file holds a control character, which YAML forbids: remove it.", text.count("\n", 0, error.position) + 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part) or "it cannot be read"
        wrong(f"The YAML is malformed: {_without_quotes(said)}.", mark.line + 1 if mark else None)
    except RecursionError:
        wrong(f"The YAML is nested too deeply; at most {MAX_DEPTH} levels are read.", None)
    except (ValueError, OverflowError, IndexError):
        # PyYAML does not translate errors of chr() and int(): "\UFFFFFFFF", %YAML with thousands of digits.
        wrong("The YAML is malformed: an escape or a directive holds a number out of range.", None)
    return None


def _without_quotes(problem: str) -> str:
    """PyYAML's message without its quotes of the text, which may be part of a secret key; its token names ('<scalar>') stay."""

    def hide(match: re.Match[str]) -> str:
        return match[0] if len(match[1]) <= 2 or match[1].startswith("<") else "'...'"

    return re.sub(r"'([^']*)'", hide, " ".join(problem.split()))[:200]


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


class _Builder:
    def __init__(self, file: str, environ: Mapping[str, str], document: Document, last_counts: bool = False) -> None:
        self._last_counts = last_counts
        self._file = file
        self._environ = environ
        self._document = document
        self._count = 0

    def build(self, node: yaml.Node, depth: int) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _TooMuchError(f"The file has more than {MAX_VALUES} values once its aliases are expanded.", _line(node))
        if depth > MAX_DEPTH:
            raise _TooMuchError(f"The YAML is nested too deeply; at most {MAX_DEPTH} levels are read.", _line(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._table(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return self._items(node, depth)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._wrong(node, "YAML tags (!...) are not used here: remove the tag.")
        return None

    def _table(self, node: yaml.MappingNode, depth: int) -> Table:
        table = Table()
        merges: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(key_node, "A key must be plain text, not a list or a map.")
                continue
            if key_node.tag == _TAG + "merge":
                merges.append(value_node)
                continue
            key = whole(key_node.value)
            if key is None:
                self._wrong(key_node, _BROKEN)
                continue
            if key in table and self._last_counts:
                self._document.repeated.append(f"{_shown(key)} stands more than once: the one on line {_line(key_node)} counts.")
            elif key in table:
                first = table.places[key].line
                self._wrong(key_node, f"The key {_shown(key)} is set twice; line {first} sets it first. Keep one.")
                continue
            table.put(key, self.build(value_node, depth + 1), self._place(key_node, value_node))
        for value_node in merges:
            self._merge(table, value_node, depth)
        return table

    def _merge(self, table: Table, node: yaml.Node, depth: int) -> None:
        """Merge the maps of `<<`: the map's own keys win, then the first of the merged maps (yaml.org/type/merge.html)."""
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for source in sources:
            value = self.build(source, depth + 1)
            if not isinstance(value, Table):
                self._wrong(source, "'<<' merges maps: give it an alias (*name) of a map, or a list of such aliases.")
                continue
            for key, merged in value.items():
                if key not in table:
                    table.put(key, merged, value.places[key])

    def _items(self, node: yaml.SequenceNode, depth: int) -> Items:
        items = Items()
        for item in node.value:
            items.append(self.build(item, depth + 1))
            items.places.append(self._place(item, item))
        return items

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in {"true", "false"}:
            return text.lower() == "true"
        if kind == "int" and _INTEGER.fullmatch(text):
            return int(text, 16) if text.startswith("0x") else int(text, 8) if text.startswith("0o") else int(text)
        if kind == "float":
            try:
                return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
            except ValueError:
                kind = "tag"
        if kind in {"str", "merge"}:
            return self._expand(node, text)
        self._wrong(node, "YAML tags (!...) are not used here: remove the tag.")
        return None

    def _expand(self, node: yaml.Node, text: str) -> str:
        def fill(match: re.Match[str]) -> str:
            name, closed = match.groups()
            if closed and _ENV_NAME.fullmatch(name):
                self._document.env_names.add(name)
                if name in self._environ:
                    return self._environ[name]
                self._wrong(node, f"The environment variable {name} is not set. Set it, or replace ${{env.{name}}} by a value.")
            elif closed and _ENV_NAME.match(name) and ":" in name:
                known = name.partition(":")[0]
                self._wrong(node, f"${{env.{known}:...}} is not supported: sparkd has no defaults. Write ${{env.{known}}} and set {known}.")
            else:
                self._wrong(node, "'${env.' must be followed by the name of an environment variable and '}'.")
            return ""

        filled = whole(_ENV.sub(fill, text))
        if filled is None:
            self._wrong(node, _BROKEN)
        return filled or ""

    def _place(self, key_node: yaml.Node, value_node: yaml.Node) -> Location:
        secret = isinstance(value_node, yaml.ScalarNode) and "${env." in value_node.value
        return Location(self._file, _line(key_node), secret)

    def _wrong(self, node: yaml.Node, message: str) -> None:
        self._document.problems.append(ConfigProblem(self._file, _line(node), message))


def _shown(key: str) -> str:
    return repr(key if len(key) <= 64 else key[:61] + "...")
