"""Owns the refusal of a value by a validator, the words for pydantic's errors, and the check of free-form values.

Never knows a key, and loads pydantic only to refuse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparkd.errors import clause


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


def fault(name: str, error: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence with one thing to do. It never repeats the value, which may be a secret."""
    sentence = expected(error["type"], error["msg"], error.get("ctx", {}))
    match error["type"]:
        case "json_invalid":
            return "The body is not JSON: correct it."
        case "missing":
            return f"{name} is missing, and it is required: add it."
        case "extra_forbidden":
            return f"{name} is not a known key: correct its spelling, or remove it."
        case "refused" | "value_error":
            return f"{name}: {clause(sentence)}."
        case kind if kind in EXPECTED:
            return f"{name} must be {sentence}: correct it."
    return f"{name}: {sentence}. Correct it."


def expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """The value that one of pydantic's errors asks for, or the message of a refusal of ours."""
    if kind == "refused":
        return message
    if kind == "value_error":
        return str(context["error"])
    if kind in EXPECTED:
        return EXPECTED[kind].format(**context)
    return message.removeprefix("Input should be ").rstrip(".")


EXPECTED: Mapping[str, str] = {
    "missing": "it is required",
    "extra_forbidden": "a known key",
    "string_type": "text (put it in quotes)",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length} items",
    "too_long": "a list of at most {max_length} items",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a map of 'key: value' lines",
    "model_type": "a map of 'key: value' lines",
    "model_attributes_type": "a JSON object",
    "path_type": "a path",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
}
