"""Writes the result of the sizing to the cache's section of the rank's report. The engine itself never reads it."""

from __future__ import annotations

import time
from typing import Any

from workers.host import rank_report


class Report:
    """path: None writes no report. rank: of this process in the engine."""

    def __init__(self, path: str | None, rank: int) -> None:
        self._path = path
        self._known: dict[str, Any] = {"rank": rank, "began_s": {}}

    def tell(self, phase: str, **values: Any) -> None:
        """Add values and write the section. phase: rehearsing, sized, ready, refused, or stock where vLLM sized the cache."""
        self._known |= {"phase": phase, "began_s": {phase: time.time()} | self._known["began_s"], **values}
        rank_report.tell(self._path, self._known["rank"], "cache", self._known)
