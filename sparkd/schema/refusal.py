"""Owns how a validator refuses a value, and which free-form values there may be. Never knows a key, and loads pydantic only to refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def refuse(message: str, **context: Any) -> Exception:
    """A validation error with a ready message. In the context, `item` names the list item or map key that is wrong; `repeats` is True where
    the message repeats the value."""
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("refused", "{reason}", {"reason": message, **context})


def plain(value: Any) -> Any:
    """Free-form values that will be sent as JSON, which has neither infinity nor NaN."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number here must be finite")
    return value
