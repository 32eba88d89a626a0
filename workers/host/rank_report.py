"""Writes the report of a process inside an engine for its node: one JSON file with a section `load` and a section `cache`.

workers.rank.report reads it. A process writes to PATH, or to PATH.tpN if its rank N in the engine is not 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

_sections: dict[str, dict[str, Any]] = {}
_writing = threading.Lock()


def tell(path: str | None, rank: int, section: str, values: Mapping[str, Any]) -> None:
    """Replace one section of this process's report. A write error loses only the report. path: None writes none."""
    if path is None:
        return
    file = f"{path}.tp{rank}" if rank else path
    with _writing, contextlib.suppress(OSError):
        sections = _sections.setdefault(file, {})
        sections[section] = {**values, "at": time.time()}
        replace_json(file, sections)


def replace_json(path: str, value: Any) -> None:
    """Replace a file at once, so that a reader sees the old or the new content. Raises OSError."""
    fd, writing = tempfile.mkstemp(dir=os.path.dirname(path), prefix=f".{os.path.basename(path)}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(value, file, default=str)
        os.replace(writing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        raise
