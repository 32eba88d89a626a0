"""Values as text."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

# Output that goes to a file or a pipe is never folded or cut.
PIPE_WIDTH = 4096
# With the signs that turn the direction of writing (Unicode's Bidi_Control).
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def say_json(value: Any) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json_text(value, indent=2) + "\n")


def json_text(value: Any, indent: int | None = None) -> str:
    """The value as JSON, with every control character escaped, those above ASCII too, because a terminal may obey them."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def printable(text: str) -> str:
    """Without control characters other than tab and newline: what an engine or a model wrote must not steer the terminal."""
    return _CONTROL.sub("", text)


def all_printable(value: Any) -> Any:
    """Plain JSON with `printable` applied to every text."""
    if isinstance(value, dict):
        return {printable(str(key)): all_printable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [all_printable(inner) for inner in value]
    return printable(value) if isinstance(value, str) else value


def verdict(errors: int, warnings: int) -> str:
    """The last line of a check: "2 errors, 1 warning", or "valid" where there is neither."""
    counts = ((errors, "error"), (warnings, "warning"))
    return ", ".join(f"{number} {noun}{'s' if number > 1 else ''}" for number, noun in counts if number) or "valid"


def date(at_s: float) -> str:
    """In local time, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def duration(seconds: float) -> str:
    """`42s`, `3m`, `5h`, `12d`: the largest whole unit that keeps two digits where it can."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"
