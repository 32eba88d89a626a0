"""Owns a validator's refusal of a value, and the check of free-form values. Never knows a key, and loads pydantic only to refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def refuse(message: str, **context: Any) -> Exception:
    """A validation error with a complete message. context: `item` names the wrong list item or map key; `repeats` is True where the message
    repeats the value."""
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("refused", "{reason}", {"reason": message, **context})


def plain(value: Any) -> Any:
    """Check free-form values that are later sent as JSON, which has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number here must be finite")
    return value
