"""Writes the report of a process inside an engine for its node: one JSON file with a section `load` and a section `cache`.

workers.rank.report reads it. A process writes to PATH, or to PATH.tpN if its rank N in the engine is not 0.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workers.host.private_files import write_private

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
        write_private(Path(file), json.dumps(sections, default=str), sync=False)
