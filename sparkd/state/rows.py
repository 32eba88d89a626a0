"""Owns the checks of a row of the state database before the daemon uses it: text, JSON that can be given out, a noun with its types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from sparkd.config.yaml_file import check_depth

SHOWN_CHARACTERS = 80
# Rows that an event or the conditions name.
DAMAGES_SHOWN = 10

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Damage:
    """A row that was left out. row: SQLite's rowid, None where the rest of the table could not be read. key: its primary key, as it stands
    there: text, a number, bytes or None."""

    table: str
    row: int | None
    key: object
    why: str

    @property
    def handle(self) -> str:
        """The row's name where its key is none: no model is called so, and a shell takes it as it is."""
        return f"@{self.table}:{self.row}"

    def __str__(self) -> str:
        place = "all that is behind a damaged page" if self.row is None else f"row {self.row} ({repr(self.key)[:SHOWN_CHARACTERS]})"
        return f"table {self.table}, {place}: {self.why}"


def text_or_bytes(raw: bytes) -> str | bytes:
    """SQLite's text_factory: text that is no UTF-8 stays bytes, so that it is refused in its row and does not end the whole query."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def object_in(text: object) -> dict[str, Any]:
    """The JSON object in a column. Raises ValueError for anything else, and for what no answer of the admin API could hold."""
    if not isinstance(text, str):
        raise ValueError("it is not text")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    check_depth(value)
    return value


def noun_of(noun: type[N], raw: Mapping[str, Any]) -> N:
    """`raw` as a dataclass with the types that its fields have; members that it does not know are left out. Raises ValueError."""
    try:
        # Numbers that are not finite and lone surrogates cannot be given out as JSON.
        json.dumps(raw, ensure_ascii=False, allow_nan=False).encode()
        value: N = _adapter(noun).validate_python(raw)  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"[: 2 * SHOWN_CHARACTERS]) from None
    except UnicodeEncodeError:
        raise ValueError("its text has half of a character") from None
    except TypeError:
        raise ValueError("it holds bytes where text is expected") from None
    return value


@cache
def _adapter(noun: type[N]) -> TypeAdapter[N]:
    return TypeAdapter(noun)
