"""JSON of a foreign file, bounded before it is parsed.

Hostile side: the author of a repository on a hub. Python's parser holds the interpreter's lock for a whole text and takes up to a hundred
bytes for each value, so a file of 32 MiB with nothing but brackets would stop the daemon for seconds and take gigabytes.
"""

from __future__ import annotations

import json
from typing import Any

from sparkd.errors import CheckpointError

# An index of 300,000 tensors and a header of 100,000 have fewer, more than any published file.
MAX_VALUES = 1_000_000
_SHOWN = 120


class _NoJson(ValueError):
    """A fault of JSON that Python's parser accepts."""


def parsed(raw: bytes, path: str, cure: str, *, strict: bool = False) -> Any:
    """The value. Raises CheckpointError for more than MAX_VALUES values, for other text than UTF-8 and JSON, and for one that is nested too
    deeply.

    strict: refuse a repeated key, NaN, Infinity and -Infinity. Python, transformers and vLLM accept them, and published files have them;
    the Rust reader of safetensors headers does not accept them
    """
    # Too many rather than too few: a text may have these characters, too.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_VALUES:
        raise CheckpointError(f"the JSON in it has more than {MAX_VALUES} values", file=path, cure=cure)
    hooks: dict[str, Any] = {"object_pairs_hook": _object, "parse_constant": _constant} if strict else {}
    try:
        return json.loads(raw.decode(), **hooks)
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "it is nested too deeply"
    except (json.JSONDecodeError, _NoJson) as error:
        reason = str(error)
    except ValueError:
        # Python reads no number of more than 4300 digits (sys.set_int_max_str_digits).
        reason = "a number in it is too long"
    raise CheckpointError(f"the JSON in it cannot be read: {reason}", file=path, cure=cure)


def shown(name: object) -> str:
    """A name from a foreign file, short enough and printable for a message."""
    text = str(name) if isinstance(name, str) and name.isprintable() and name else ascii(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _NoJson(f"the key {shown(twice)} stands twice in one object")
    return mapping


def _constant(name: str) -> Any:
    raise _NoJson(f"{name} is no JSON")
