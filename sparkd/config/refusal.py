"""The refusal of a value by a validator, the words for pydantic's errors, and the check of free-form values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparkd.errors import clause

_INPUT = "Input should be "
# pydantic's own words name Python's types.
_EXPECTED: Mapping[str, str] = {
    "string_type": "text (put it in quotes)",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a map of 'key: value' lines",
    "model_type": "a map of 'key: value' lines",
    "model_attributes_type": "a JSON object",
}


def refuse(message: str, **context: Any) -> Exception:
    """A validation error with a complete message. context: `item` names the wrong list item or map key."""
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
    match error["type"]:
        case "json_invalid":
            return "The body is not JSON: correct it."
        case "missing":
            return f"{name} is missing, and it is required: add it."
        case "extra_forbidden":
            return f"{name} is not a known key: correct its spelling, or remove it."
    wanted = expected(error)
    return f"{name} must be {wanted}: correct it." if wanted else f"{name}: {clause(reason(error))}."


def expected(error: Mapping[str, Any]) -> str | None:
    """The value that one of pydantic's errors asks for; None where its message is a whole sentence."""
    if error["type"] in _EXPECTED:
        return _EXPECTED[error["type"]]
    message = str(error["msg"])
    return message.removeprefix(_INPUT).partition(", unable to")[0] if message.startswith(_INPUT) else None


def reason(error: Mapping[str, Any]) -> str:
    """The message of an error, or of a refusal of ours."""
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])
