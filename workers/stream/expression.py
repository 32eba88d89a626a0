"""Owns regular expressions that are matched in linear time, whatever the text: who writes a rule may be a client. Never looks back.

Python's `re` tries every way to divide a text among nested repetitions, holds the interpreter's lock meanwhile, and so stops a whole
process over `(a+)+b`. This walks all ways at once, as Thompson's construction does (Russ Cox, "Regular Expression Matching Can Be Simple
And Fast", 2007), and remembers where each component of a dotted path led. It knows literals, sets, classes, groups, alternatives,
repetitions and both anchors. A repetition that would rather be short finds the same, because only whether there is a match is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_CHARACTERS = 512
MAX_STATES = 1000
MAX_DEPTH = 40
_REMEMBERED = 16384
_CHARACTERS = 256
_REPEAT = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_OPENING = re.compile(r"\((?:\?:|\?P<\w+>)?")
# Looking ahead and back, flags (one of them has Python's compiler walk whole ranges of Unicode), groups of all other kinds.
_ODD_GROUP = re.compile(r"\(\?(?!:|P<)[^)]?")
# One character of a text, in the words of an expression: a set, a class, a literal that is escaped, or any.
_CHARACTER = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]|\\[dDwWsS]|\\[^A-Za-z0-9]|[^\\\[]", re.DOTALL)
_ANCHORS = {"^": "^", r"\A": "^", "$": "$", r"\Z": "$"}


class Unreadable(ValueError):
    """The expression is none, or has what cannot be matched in linear time. The message continues a sentence about it."""


@dataclass(slots=True)
class _State:
    """character: what it takes, None where it takes nothing; anchor: ^ or $, where that is what it waits for."""

    following: list[int]
    character: re.Pattern[str] | None = None
    anchor: str = ""


@dataclass(slots=True)
class _Front:
    """states: all that the path so far may have led to. led: by the next component, where it leads on; ended: by the last, the answer."""

    states: frozenset[int]
    led: dict[str, _Front] = field(default_factory=dict)
    ended: dict[str, bool] = field(default_factory=dict)


class Expression:
    """`text` as an expression that is searched anywhere in a dotted path. Raises Unreadable."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise Unreadable(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are read")
        if odd := _ODD_GROUP.search(text):
            raise Unreadable(f"{odd[0]!r} cannot be matched in linear time; write it without")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise Unreadable(str(error)) from None
        self._states: list[_State] = [_State([])]  # the first is where a match is complete
        first = self._built(_Parser(text).whole(), 0)
        self._after: list[frozenset[int] | None] = [None] * len(self._states)
        self._again = self._reached([first])
        self._begin = _Front(self._reached([first], start=True))
        self._fronts: dict[frozenset[int], _Front] = {}
        self._remembered = 0
        self._ends = frozenset(at for at, state in enumerate(self._states) if state.anchor == "$" and 0 in self._reached([at], end=True))
        self._taking: dict[str, frozenset[int]] = {}

    def search(self, path: str) -> bool:
        """Whether it matches anywhere in the path."""
        front = self._begin
        *components, last = path.split(".")
        for component in components:
            front = front.led.get(component) or self._through(front, component)
        ended = front.ended.get(last)
        if ended is None:
            states = self._walked(front.states, last)
            ended = front.ended[last] = 0 in states or not self._ends.isdisjoint(states)
            self._remember(1)
        return ended

    def _through(self, front: _Front, component: str) -> _Front:
        states = self._walked(front.states, component + ".")
        found = front.led[component] = self._fronts.setdefault(states, _Front(states))
        self._remember(1 + len(states))
        return found

    def _remember(self, size: int) -> None:
        """All is forgotten once it takes about a mebibyte."""
        self._remembered += size
        if self._remembered >= _REMEMBERED:
            self._begin = _Front(self._begin.states)
            self._fronts = {}
            self._remembered = 0

    def _walked(self, at: frozenset[int], text: str) -> frozenset[int]:
        for character in text:
            if 0 in at:
                return at
            at = self._again.union(*map(self._behind, at & self._takers(character)))
        return at

    def _behind(self, state: int) -> frozenset[int]:
        found = self._after[state]
        if found is None:
            found = self._after[state] = self._reached(self._states[state].following)
        return found

    def _takers(self, character: str) -> frozenset[int]:
        found = self._taking.get(character)
        if found is None:
            found = frozenset(at for at, one in enumerate(self._states) if one.character is not None and one.character.match(character))
            if len(self._taking) < _CHARACTERS:
                self._taking[character] = found
        return found

    def _reached(self, states: Sequence[int], start: bool = False, end: bool = False) -> frozenset[int]:
        """States that take a character, wait for the end or complete a match, without taking anything."""
        found: set[int] = set()
        seen, waiting = set(states), list(states)
        while waiting:
            at = waiting.pop()
            state = self._states[at]
            if at == 0 or state.character is not None or (state.anchor == "$" and not end):
                found.add(at)
            elif state.anchor != "^" or start:
                waiting += [one for one in state.following if one not in seen]
                seen.update(state.following)
        return frozenset(found)

    def _state(self, following: list[int], character: re.Pattern[str] | None = None, anchor: str = "") -> int:
        if len(self._states) >= MAX_STATES:
            raise Unreadable(f"it has more than {MAX_STATES} characters once its repetitions are written out")
        self._states.append(_State(following, character, anchor))
        return len(self._states) - 1

    def _built(self, node: _Node, following: int) -> int:
        """The state that begins `node`; behind it goes on what is `following`."""
        match node:
            case _Text(character):
                return self._state([following], character)
            case _Anchor(anchor):
                return self._state([following], anchor=anchor)
            case _Row(parts):
                for part in reversed(parts):
                    following = self._built(part, following)
                return following
            case _Choice(ways):
                return self._state([self._built(way, following) for way in ways])
            case _Repeat(part, least, most):
                if most is None:
                    loop = self._state([following])
                    self._states[loop].following.append(self._built(part, loop))
                    following = loop
                for _ in range(0 if most is None else most - least):
                    following = self._state([following, self._built(part, following)])
                for _ in range(least):
                    following = self._state([self._built(part, following)])
                return following


@dataclass(frozen=True, slots=True)
class _Text:
    character: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class _Anchor:
    anchor: str


@dataclass(frozen=True, slots=True)
class _Row:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    ways: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = _Text | _Anchor | _Row | _Choice | _Repeat


class _Parser:
    """Parses a pattern that `re` has accepted, so it only has to refuse constructs that it does not know."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> _Node:
        return self._choice(0)

    def _choice(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise Unreadable(f"its groups are more than {MAX_DEPTH} deep")
        ways = [self._row(depth)]
        while self._next() == "|":
            self._at += 1
            ways.append(self._row(depth))
        return ways[0] if len(ways) == 1 else _Choice(tuple(ways))

    def _row(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._one(depth)))
        return _Row(tuple(parts))

    def _one(self, depth: int) -> _Node:
        rest = self._next()
        if rest == "(":
            opening = _OPENING.match(self._text, self._at)
            self._at = opening.end() if opening else self._at + 1
            inner = self._choice(depth + 1)
            self._at += 1
            return inner
        for written, anchor in _ANCHORS.items():
            if self._text.startswith(written, self._at):
                self._at += len(written)
                return _Anchor(anchor)
        found = _CHARACTER.match(self._text, self._at)
        if found is None:
            raise Unreadable(f"{self._text[self._at : self._at + 2]!r} cannot be matched in linear time; write it without")
        self._at = found.end()
        return _Text(re.compile(found[0]))

    def _repeated(self, part: _Node) -> _Node:
        while mark := self._next():
            counted = _REPEAT.match(self._text, self._at) if mark == "{" else None
            if mark in "*+?":
                least, most = int(mark == "+"), 1 if mark == "?" else None
                self._at += 1
            elif counted is not None:
                least = int(counted[1] or 0)
                most = (int(counted[3]) if counted[3] else None) if counted[2] else least
                self._at = counted.end()
            else:
                break
            if self._next() == "?":
                self._at += 1
            elif self._next() == "+":
                raise Unreadable(f"{mark}+ cannot be matched in linear time; write {mark}")
            part = _Repeat(part, least, most)
        return part

    def _next(self) -> str:
        return self._text[self._at : self._at + 1]
