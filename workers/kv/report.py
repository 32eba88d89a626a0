"""Writes the result of the sizing to one small file, always replaced whole. The engine itself never reads it."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import Any

VERSION = 1


class Report:
    """path: None writes no report. rank: number in the tensor-parallel group; rank N > 0 writes to PATH.tpN."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path if path is None or rank == 0 else f"{path}.tp{rank}"
        self._known: dict[str, Any] = {"v": VERSION, "rank": rank}

    def tell(self, phase: str, **values: Any) -> None:
        """Add values and write the report. phase: rehearsing, sized, ready, refused, or stock where vLLM sized the cache. A write error
        loses only the report."""
        self._known |= {"phase": phase, "at": time.time(), **values}
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            replace_json(self._path, self._known)


def replace_json(path: str, value: Any) -> None:
    """Replace a file at once, so that a reader sees the old or the new content. Raises OSError."""
    fd, writing = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f"{os.path.basename(path)}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, default=str)
        os.replace(writing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise
