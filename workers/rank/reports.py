"""Small JSON files in which an engine's ranks tell of themselves, read on their node. Never trusts one, never writes one.

PATH is rank 0's of the tensor-parallel group and PATH.tpN rank N's, each always replaced whole. The engine may be of another release, or
broken: what cannot be read costs detail only.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 16
MAX_RANKS = 64
_OTHER_RANK = re.compile(r"\.tp\d{1,4}")


def paths_of(path: Path) -> list[Path]:
    """Rank 0's file, whether it is there or not, and those of the others that are."""
    others = [other for other in path.parent.glob(f"{path.name}.tp*") if _OTHER_RANK.fullmatch(other.name.removeprefix(path.name))]
    return [path, *sorted(others)[:MAX_RANKS]]


def read_object(path: Path) -> dict[str, Any] | None:
    """None for what is no plain file, too large or no JSON object. Links are not followed, and no pipe is waited for."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            raw = json.loads(file.read(MAX_BYTES + 1) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def remove(path: Path) -> None:
    """Every rank's, and what a writer that was killed has left beside them."""
    for report in (path, *path.parent.glob(f"{path.name}.*")):
        report.unlink(missing_ok=True)


def number(value: Any) -> float | None:
    """A finite number from 0 to 2**63, as a file of another release may not have it."""
    figure = signed(value)
    return None if figure is None or figure < 0 else figure


def signed(value: Any) -> float | None:
    """A finite number between -2**63 and 2**63."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -(2**63) < value < 2**63:
        return None
    return value


def text(value: Any, chars: int) -> str | None:
    """One line without control characters, cut."""
    if not isinstance(value, str):
        return None
    return " ".join("".join(each if each.isprintable() else " " for each in value[: 2 * chars]).split())[:chars] or None
