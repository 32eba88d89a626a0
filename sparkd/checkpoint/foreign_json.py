"""JSON of a foreign file, bounded before it is parsed.

Hostile side: the author of a repository on a hub. Python's parser holds the interpreter's lock for a whole text and takes up to a hundred
bytes for each value, so a file of 32 MiB with nothing but brackets would stop the daemon for seconds and take gigabytes.
"""

from __future__ import annotations

import json
from typing import Any

from sparkd.errors import CheckpointError

# Limit for a header, an index, a listing and any other JSON file, far above any real one: an index of 190,000 tensors is 18 MB. The
# reference reader of headers accepts 100 MB (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
MAX_JSON_BYTES = 32 << 20
# An index has one value for each tensor. The largest published models have 280,000 tensors.
MAX_VALUES = 400_000
# A header has eight for each tensor: 100,000 tensors in one file. The 280,000 are in more than ten files.
MAX_HEADER_VALUES = 800_000
_SHOWN = 120


def parsed(raw: bytes, path: str, cure: str, *, most: int = MAX_VALUES) -> Any:
    """The value. Raises CheckpointError for more than `most` values, for text that is not UTF-8 or JSON, and for one nested too deeply."""
    # Too many rather than too few: a text may have these characters, too.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most:
        raise CheckpointError(f"the JSON in it has more than {most} values", file=path, cure=cure)
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        reason = str(error)
    except ValueError:
        # Python reads no number of more than 4300 digits (sys.set_int_max_str_digits).
        reason = "a number in it is too long"
    raise CheckpointError(f"the JSON in it cannot be read: {reason}", file=path, cure=cure)


def object_of(raw: bytes, path: str, cure: str) -> dict[str, Any]:
    """The JSON object in a foreign file. Raises CheckpointError."""
    value = parsed(raw, path, cure)
    if not isinstance(value, dict):
        raise CheckpointError("it holds no JSON object", file=path, cure=cure)
    return value


def shown(name: object) -> str:
    """A name from a foreign file, short enough and printable for a message."""
    text = str(name) if isinstance(name, str) and name.isprintable() and name else ascii(name)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
