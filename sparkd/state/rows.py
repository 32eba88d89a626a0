"""Checks a row of the database, or a value from a node, against the types of a noun's fields."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

N = TypeVar("N")


def noun_of(noun: type[N], raw: Mapping[str, Any]) -> N:
    """`raw` as a dataclass; members that it does not know are left out. Raises ValueError."""
    try:
        return _adapter(noun).validate_python(raw)  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors(include_input=False, include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


@cache
def _adapter(noun: type[N]) -> TypeAdapter[N]:
    return TypeAdapter(noun)
