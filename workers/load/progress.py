"""Writes the progress of a load to a small file that the rank's agent reads. Never fails a load: a write error loses only the progress."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from contextlib import suppress
from typing import Any

INTERVAL_S = 0.25
RATE_POINTS = 16
HONEST_AFTER_S = 2.0  # an ETA from fewer seconds of reading is a guess


class ProgressFile:
    """The JSON file of one rank, replaced as a whole at most four times a second; without a path nothing is written.

    tp_rank: ranks that share one file name get a suffix, `.tp1` and so on; the first rank none.
    """

    def __init__(self, path: str | None, tp_rank: int = 0) -> None:
        self._path = f"{path}.tp{tp_rank}" if path and tp_rank else path
        self._written_s = 0.0
        self._began_s = time.monotonic()
        self._points: deque[tuple[float, int]] = deque(maxlen=RATE_POINTS)
        self._said: dict[str, Any] = {
            "v": 1,
            "rank": tp_rank,
            "tp_rank": tp_rank,
            "phase": "reading",
            "bytes_done": 0,
            "bytes_total": 0,
            "units_done": 0,
            "units_total": 0,
            "bytes_per_s": 0.0,
            "eta_s": None,
            "read_bytes": 0,
            "source": "checkpoint",
            "format": "",
            "direct": None,
            "cache": {"state": "none", "bytes": 0, "why": None},
            "error": None,
        }

    def begin(self, bytes_total: int, units_total: int, form: str, source: str) -> None:
        self._said |= {"bytes_total": bytes_total, "units_total": units_total, "format": form, "source": source}
        self._began_s = time.monotonic()
        self._points.clear()
        self._points.append((self._began_s, 0))
        self._write(always=True)

    def advance(self, bytes_done: int, units_done: int) -> None:
        self._said["bytes_done"] = bytes_done
        self._said["units_done"] = units_done
        if self._path is None or time.monotonic() - self._written_s < INTERVAL_S:
            return
        self._points.append((time.monotonic(), bytes_done))
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        honest = rate > 0 and last_s - first_s >= HONEST_AFTER_S
        self._said["bytes_per_s"] = rate
        self._said["eta_s"] = round((self._said["bytes_total"] - bytes_done) / rate, 1) if honest else None
        self._write()

    def cache(self, state: str, size_bytes: int = 0, why: str | None = None) -> None:
        """Report the state of the cache: none, writing, written, failed or skipped. why: of the latter two, or why the load waits."""
        self._said["cache"] = {"state": state, "bytes": size_bytes, "why": why}
        self._write(always=True)

    def done(self, read_bytes: int, direct: bool) -> None:
        rate = self._said["bytes_done"] / max(time.monotonic() - self._began_s, 1e-9)
        self._said |= {"phase": "done", "eta_s": None, "bytes_per_s": rate, "read_bytes": read_bytes, "direct": direct}
        self._write(always=True)

    def failed(self, message: str, *, lasting: bool = False) -> None:
        """Report the end of the load by an error. lasting: the next load with the same settings would end the same way."""
        self._said |= {"phase": "failed", "eta_s": None, "error": {"message": message, "lasting": lasting}}
        self._write(always=True)

    def _write(self, *, always: bool = False) -> None:
        if self._path is None or (not always and time.monotonic() - self._written_s < INTERVAL_S):
            return
        self._written_s = time.monotonic()
        temporary = f"{self._path}.{os.getpid()}"
        with suppress(OSError):
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(self._said | {"at": time.time()}, file)
            os.replace(temporary, self._path)
