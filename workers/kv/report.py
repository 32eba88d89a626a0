"""Tells what came of sizing, in one small file that is always replaced whole. Never read by the engine itself."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from typing import Any

VERSION = 1


class Report:
    """path: None writes no report. rank: of the tensor-parallel group; rank N > 0 writes to PATH.tpN."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path if path is None or rank == 0 else f"{path}.tp{rank}"
        self._known: dict[str, Any] = {"v": VERSION, "rank": rank}

    def tell(self, phase: str, **values: Any) -> None:
        """phase: rehearsing, sized, ready, refused, or stock where vLLM sized it. A disk that refuses costs the report only."""
        self._known |= {"phase": phase, "at": time.time(), **values}
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            replace_json(self._path, self._known)


def replace_json(path: str, value: Any) -> None:
    """The whole file at once, so that a reader sees the old one or the new one. Raises OSError."""
    fd, writing = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f"{os.path.basename(path)}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, default=str)
        os.replace(writing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise
