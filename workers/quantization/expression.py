"""Owns regular expressions that are matched in linear time for any text, because a client may write a rule. Never backtracks.

Python's `re` tries every way to divide a text among nested repetitions and holds the interpreter's lock meanwhile, so `(a+)+b` can stop the
whole process. This module follows all states at once, as Thompson's construction does (Russ Cox, "Regular Expression Matching Can Be
Simple And Fast", 2007), and caches each transition between sets of states, as RE2 does: a repeated character costs one look-up. Many
expressions are searched together, component by component of a dotted path. Each step is counted, so that an expression with many sets of
states, or many expressions and many names, end with an error and not after minutes.

It supports literals, sets, classes, groups, alternatives, repetitions and both anchors. Lazy and greedy repetitions are equal here, because
only the existence of a match counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

MAX_CHARACTERS = 512
MAX_STATES = 1000
MAX_DEPTH = 40
# Limits in steps of about 0.1 us: 0.5 s for the new fronts of one expression, 5 s for a whole Search.
MAX_STEPS_OF_ONE = 5_000_000
MAX_STEPS = 50_000_000
# A look-up is one step. The costs of other operations, in time or memory, as multiples of it.
_STEP_STEPS, _STATE_STEPS, _FRONT_STEPS = 50, 4, 500
_REPEAT = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_OPENING = re.compile(r"\((?:\?:|\?P<\w+>)?")
# Unsupported groups: look-ahead and look-behind, flags (one makes Python's compiler walk whole ranges of Unicode), and all other kinds.
_ODD_GROUP = re.compile(r"\(\?(?!:|P<)[^)]?")
# One element of an expression that matches one character: a set, a class, an escaped literal, or any other character.
_CHARACTER = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]|\\[dDwWsS]|\\[^A-Za-z0-9]|[^\\\[]", re.DOTALL)
_ANCHORS = {"^": "^", r"\A": "^", "$": "$", r"\Z": "$"}


class Unreadable(ValueError):
    """The text is no expression, or uses a construct without linear-time matching. The message continues a sentence about the text."""


class TooCostly(Exception):
    """The limit of steps is reached. number: the expression of a Search that took too many by itself; None where all together did."""

    def __init__(self, number: int | None = None) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class _State:
    """A state of the automaton. character: the characters it consumes, None where it consumes none; anchor: ^ or $ for an anchor."""

    following: list[int]
    character: re.Pattern[str] | None = None
    anchor: str = ""


@dataclass(slots=True)
class _Front:
    """The set of states after a text. states: one bit for each state; ended: whether the expression matches if the text ends here."""

    states: int
    ended: bool
    led: dict[str, _Front] = field(default_factory=dict)


class Expression:
    """An expression that is searched anywhere in a path. steps: the cost of its fronts so far. Raises Unreadable."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise Unreadable(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are read")
        if odd := _ODD_GROUP.search(text):
            raise Unreadable(f"{odd[0]!r} cannot be matched in linear time; write it without")
        try:
            re.compile(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise Unreadable(str(error)) from None
        self.steps = 0
        # The first state is the accepting one.
        self._states: list[_State] = [_State([])]
        first = self._built(_Parser(text).whole(), 0)
        self._alike: dict[re.Pattern[str], int] = {}
        self._waiting = 0
        for at, state in enumerate(self._states):
            if state.character is not None:
                self._alike[state.character] = self._alike.get(state.character, 0) | 1 << at
            self._waiting |= (state.anchor == "$") << at
        self._behind: dict[int, _Front] = {}
        self._fronts: dict[int, _Front] = {}
        self._again = self._reached([first])
        begin = self._reached([first], start=True)
        self.begin = _Front(begin, bool(self._reached(_bits(begin & (self._waiting | 1)), start=True, end=True) & 1))

    @property
    def size(self) -> int:
        """Number of states: the expression's characters with all repetitions written out."""
        return len(self._states)

    def search(self, path: str) -> bool:
        """Whether the expression matches anywhere in the path. Raises TooCostly."""
        return self.walk(self.begin, path).ended

    def walk(self, front: _Front, text: str) -> _Front:
        """The front after reading `text` from `front`. Raises TooCostly."""
        for character in text:
            front = front.led.get(character) or self._step(front, character)
        return front

    def _step(self, front: _Front, character: str) -> _Front:
        if front.states & 1:
            following = front
        else:
            taken = 0
            for pattern, states in self._alike.items():
                if states & front.states and pattern.match(character):
                    taken |= states
            taken &= front.states
            following = self._behind.get(taken) or self._stepped(taken)
        self._charge(_STEP_STEPS + 2 * len(self._alike))
        front.led[character] = following
        return following

    def _stepped(self, taken: int) -> _Front:
        """The front after the states in `taken` have consumed their character."""
        states = self._again | self._reached({following for at in _bits(taken) for following in self._states[at].following})
        if states & 1:
            states = 1
        front = self._fronts.get(states)
        if front is None:
            self._charge(_FRONT_STEPS)
            ended = bool(self._reached(_bits(states & (self._waiting | 1)), end=True) & 1)
            front = self._fronts[states] = _Front(states, ended)
        self._behind[taken] = front
        return front

    def _charge(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS_OF_ONE:
            raise TooCostly

    def _reached(self, states: Iterable[int], start: bool = False, end: bool = False) -> int:
        """The states reachable without consuming a character that consume one, wait for the end or accept."""
        reached = 0
        waiting = list(states)
        seen = set(waiting)
        while waiting:
            at = waiting.pop()
            state = self._states[at]
            if at == 0 or state.character is not None or (state.anchor == "$" and not end):
                reached |= 1 << at
            elif state.anchor != "^" or start:
                waiting += [following for following in state.following if following not in seen]
                seen.update(state.following)
        self._charge(_STATE_STEPS * len(seen))
        return reached

    def _state(self, following: list[int], character: re.Pattern[str] | None = None, anchor: str = "") -> int:
        if len(self._states) >= MAX_STATES:
            raise Unreadable(f"it has more than {MAX_STATES} characters once its repetitions are written out")
        self._states.append(_State(following, character, anchor))
        return len(self._states) - 1

    def _built(self, node: _Node, following: int) -> int:
        """The first state of `node`; after the node the automaton goes on in the state `following`."""
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


class Search:
    """Several expressions, searched together in many dotted paths that begin alike."""

    def __init__(self, expressions: Sequence[Expression]) -> None:
        self._expressions = tuple(expressions)
        self._begin = _Together(tuple(expression.begin for expression in expressions))
        self._known: dict[tuple[int, ...], _Together] = {}
        self._steps = 0

    def matches(self, path: str) -> frozenset[int]:
        """The numbers of the expressions that match anywhere in the path; equal answers are mostly one object. Raises TooCostly."""
        together = self._begin
        *components, last = path.split(".")
        for component in components:
            together = together.led.get(component) or self._through(together, component)
        matching = together.ended.get(last)
        if matching is None:
            fronts = self._walked(together, last)
            matching = together.ended[last] = frozenset(number for number, front in enumerate(fronts) if front.ended)
        return matching

    def charge(self, steps: int) -> None:
        """Add the steps of a caller's own work on these paths. Raises TooCostly."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise TooCostly

    def _through(self, together: _Together, component: str) -> _Together:
        fronts = self._walked(together, component + ".")
        following = together.led[component] = self._known.setdefault(tuple(map(id, fronts)), _Together(fronts))
        return following

    def _walked(self, together: _Together, text: str) -> tuple[_Front, ...]:
        self.charge(_STEP_STEPS + (len(text) + 2) * len(self._expressions))
        fronts = []
        for number, (expression, front) in enumerate(zip(self._expressions, together.fronts, strict=True)):
            before = expression.steps
            try:
                fronts.append(expression.walk(front, text))
            except TooCostly:
                raise TooCostly(number) from None
            if expression.steps != before:
                self.charge(expression.steps - before)
        return tuple(fronts)


@dataclass(slots=True)
class _Together:
    """The fronts of all expressions after some components. led: the next state by inner component; ended: the answer by last component."""

    fronts: tuple[_Front, ...]
    led: dict[str, _Together] = field(default_factory=dict)
    ended: dict[str, frozenset[int]] = field(default_factory=dict)


def _bits(states: int) -> Iterator[int]:
    while states:
        lowest = states & -states
        yield lowest.bit_length() - 1
        states ^= lowest


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
        match = _CHARACTER.match(self._text, self._at)
        if match is None:
            raise Unreadable(f"{self._text[self._at : self._at + 2]!r} cannot be matched in linear time; write it without")
        self._at = match.end()
        return _Text(re.compile(match[0]))

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
