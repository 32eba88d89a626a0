"""Parses a YAML text into plain values, with ${env.NAME} filled in and the line of each value beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import yaml

# Hostile side: recipes of registries, and bench profiles that a client sends. An alias counts each time it is used, which stops the
# "billion laughs"; PyYAML's scanner is quadratic in open brackets and takes 9 s for 128 KiB of them.
MAX_BYTES = 128 * 1024
MAX_VALUES = 20_000
MAX_DEPTH = 32
_BRACKET = re.compile(r"[\[\]{}]")

_TAG = "tag:yaml.org,2002:"
_ENV = re.compile(r"\$\{env\.([^}]*)\}?")

# From the top of the file.
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One error, or warning (severity "warning"). `file` may also name an environment variable or a flag.

    key: the path of the key at fault, from the top of the configuration; empty where no key is at fault.
    """

    file: str | None
    line: int | None
    message: str
    severity: str = "error"
    key: Path = field(default=(), compare=False)

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "severity": self.severity, "message": self.message}

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.file and self.line else f"{self.file}: " if self.file else ""
        return f"{place}{'warning: ' if self.severity == 'warning' else ''}{self.message}"


@dataclass(frozen=True, slots=True)
class Location:
    """The place at which a value was written. secret: the text came from the environment and must not be shown."""

    file: str | None = None
    line: int | None = None
    secret: bool = False

    def problem(self, message: str, severity: str = "error", key: Path = ()) -> ConfigProblem:
        return ConfigProblem(self.file, self.line, message, severity, key)


class Map(dict[Any, Any]):
    """A map of a file, with the place of each key."""

    def __init__(self, values: Mapping[str, Any] | None = None, places: Mapping[Any, Location] | None = None) -> None:
        super().__init__(values or {})
        self.places: dict[Any, Location] = dict(places or {})

    def over(self, below: Mapping[str, Any]) -> Map:
        """Both maps as one; of a key that both have, this map's value and place count."""
        return Map({**below, **self}, {**places_in(below), **self.places})


class Items(list[Any]):
    """A list of a file, with the place of each item."""

    def __init__(self, values: Iterable[Any], places: Iterable[Location]) -> None:
        super().__init__(values)
        self.places = dict(enumerate(places))

    @classmethod
    def joined(cls, *lists: list[Any]) -> Items:
        """The items of several lists as one."""
        return cls(
            [item for items in lists for item in items],
            [places_in(items).get(index, Location()) for items in lists for index in range(len(items))],
        )


def places_in(holder: Any) -> Mapping[Any, Location]:
    """The places of a map's keys or of a list's items; empty for what no file has."""
    return holder.places if isinstance(holder, Map | Items) else {}


@dataclass(slots=True)
class Document:
    """A parsed file.

    values: its map.
    env_names: the environment variables that it names.
    repeated: a sentence for each key that occurs more than once, where the last one counts.
    """

    values: Map = field(default_factory=Map)
    problems: list[ConfigProblem] = field(default_factory=list)
    env_names: set[str] = field(default_factory=set)
    repeated: list[str] = field(default_factory=list)

    def place(self, path: Path) -> Location:
        """The place of the longest part of `path` that was written."""
        holder, place = self.values, Location()
        for part in path:
            place = places_in(holder).get(part, place)
            try:
                holder = holder[part]
            except (LookupError, TypeError):
                break
        return place


def parse(raw: bytes, file: str, environ: Mapping[str, str], *, last_counts: bool = False) -> Document:
    """Parse one YAML document whose top level is a map. Never raises: all errors are in `problems`.

    last_counts: the last of repeated keys counts, as for PyYAML; otherwise a repeated key is a problem.

    Scalars follow the YAML 1.2 core schema (yaml.org/spec/1.2.2 section 10.3), not PyYAML's 1.1: `no` and `1:30` are text, and dates
    stay text. Keys are always text, as they were written. Anchors and merge keys work; tags do not.
    """
    document = Document()
    try:
        if len(raw) > MAX_BYTES:
            raise _WrongYamlError(f"The file has {len(raw)} bytes; at most {MAX_BYTES} are read. Is it the right file?")
        text = raw.decode("utf-8-sig")
        if (line := _deep_line(text)) is not None:
            raise _WrongYamlError(_too_deep(), line)
        # The loader is SafeLoader with fewer implicit types; it only composes nodes and constructs no object.
        root = yaml.compose(text, Loader=_CoreLoader)
        values = None if root is None else _Builder(file, environ, document, last_counts).build(root)
        if values is not None and not isinstance(values, Map):
            raise _WrongYamlError("The file must hold a map (lines of 'key: value') at its top.", 1)
        document.values = values or Map()
    except UnicodeDecodeError as error:
        document.problems.append(ConfigProblem(file, raw.count(b"\n", 0, error.start) + 1, "The file is not UTF-8 text: save it as UTF-8."))
    except _WrongYamlError as error:
        document.problems.append(ConfigProblem(file, error.line, str(error)))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        document.problems.append(ConfigProblem(file, mark.line + 1 if mark else None, f"The YAML is malformed: {_without_quotes(error)}."))
    except RecursionError:
        document.problems.append(ConfigProblem(file, None, _too_deep()))
    except (yaml.YAMLError, ValueError, OverflowError, IndexError):
        # PyYAML does not translate errors of chr() and int(): "\UFFFFFFFF", %YAML with thousands of digits.
        document.problems.append(ConfigProblem(file, None, "The YAML is malformed: it holds a character that YAML forbids. Remove it."))
    return document


def _without_quotes(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's message without its quotes of the text, which may be part of a secret; its token names ('<scalar>') stay."""

    def hide(match: re.Match[str]) -> str:
        return match[0] if len(match[1]) <= 2 or match[1].startswith("<") else "'...'"

    return re.sub(r"'([^']*)'", hide, " ".join(f"{error.context or ''} {error.problem or ''}".split()))


def _deep_line(text: str) -> int | None:
    """The line at which more than MAX_DEPTH brackets are open."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        if depth > MAX_DEPTH:
            return text.count("\n", 0, bracket.start()) + 1
    return None


def _too_deep() -> str:
    return f"The YAML is nested too deeply; at most {MAX_DEPTH} levels are read."


class _WrongYamlError(Exception):
    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class _CoreLoader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, _pattern, _first in (
    ("null", r"(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}$", list("-+0123456789")),
    ("float", r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN))$", list("-+0123456789.")),
    ("merge", r"(?:<<)$", ["<"]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(_pattern), _first)


class _Builder:
    def __init__(self, file: str, environ: Mapping[str, str], document: Document, last_counts: bool) -> None:
        self._file = file
        self._environ = environ
        self._document = document
        self._last_counts = last_counts
        self._maps: dict[int, dict[str, tuple[yaml.ScalarNode, yaml.Node]]] = {}
        self._count = 0

    def build(self, node: yaml.Node, depth: int = 0) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _WrongYamlError(f"The file has more than {MAX_VALUES} values once its aliases are expanded.", _line(node))
        if depth > MAX_DEPTH:
            raise _WrongYamlError(_too_deep(), _line(node))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            entries = self._entries(node)
            places = {key: self._place(*nodes) for key, nodes in entries.items()}
            return Map({key: self.build(value, depth + 1) for key, (_, value) in entries.items()}, places)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return Items([self.build(item, depth + 1) for item in node.value], [self._place(item, item) for item in node.value])
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        self._wrong(node, "YAML tags (!...) are not used here: remove the tag.")
        return None

    def _entries(self, node: yaml.MappingNode) -> dict[str, tuple[yaml.ScalarNode, yaml.Node]]:
        """The key and the value of each entry; of a merge (`<<`), the map's own keys win, then the first of the merged maps."""
        if (known := self._maps.get(id(node))) is not None:
            return known
        own: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        merged: dict[str, tuple[yaml.ScalarNode, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _WrongYamlError("A key must be plain text, not a list or a map.", _line(key))
            if key.tag == _TAG + "merge":
                for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(source, yaml.MappingNode):
                        raise _WrongYamlError("'<<' merges maps: give it an alias (*name) of a map, or a list of such aliases.", _line(key))
                    merged = {**self._entries(source), **merged}
                continue
            if key.value in own and self._last_counts:
                self._document.repeated.append(f"{key.value[:64]!r} stands more than once: the one on line {_line(key)} counts.")
            elif key.value in own:
                first = _line(own[key.value][0])
                self._wrong(key, f"The key {key.value[:64]!r} is set twice; line {first} sets it first. Keep one.")
                continue
            own[key.value] = key, value
        self._maps[id(node)] = entries = {**merged, **own}
        return entries

    def _place(self, key: yaml.Node, value: yaml.Node) -> Location:
        return Location(self._file, _line(key), isinstance(value, yaml.ScalarNode) and "${env." in value.value)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        match node.tag.removeprefix(_TAG):
            case "null":
                return None
            case "bool":
                return node.value.lower() == "true"
            case "int":
                return int(node.value)
            case "float":
                return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))
            case "str" | "merge":
                return _ENV.sub(lambda match: self._filled(node, match), node.value)
        self._wrong(node, "YAML tags (!...) are not used here: remove the tag.")
        return None

    def _filled(self, node: yaml.Node, match: re.Match[str]) -> str:
        name = match[1]
        self._document.env_names.add(name)
        with suppress(KeyError):
            return self._environ[name]
        reason = f"the environment variable {name} is not set" if name.isidentifier() else "it names no environment variable"
        self._wrong(node, f"${{env.{name}}}: {reason}. Set it, or write a value in its place.")
        return ""

    def _wrong(self, node: yaml.Node, message: str) -> None:
        self._document.problems.append(ConfigProblem(self._file, _line(node), message))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
