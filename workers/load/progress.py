"""Writes the progress of a load to its section of the rank's report; a write error loses only the progress."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from workers.host import rank_report

INTERVAL_S = 0.25
RATE_POINTS = 16
HONEST_AFTER_S = 2.0  # an ETA from fewer seconds of reading is a guess
FAILURE_CHARS = 500


class ProgressFile:
    """The progress of one rank, written at most four times a second, or at once where it ends; without a path nothing is written.

    The names are those of sparkd.state.nouns.Progress, and phase: reading, done or failed.
    """

    def __init__(self, path: str | None, rank: int = 0) -> None:
        self._path = path
        self._rank = rank
        self._written_s = 0.0
        self._began_s = time.monotonic()
        self._points: deque[tuple[float, int]] = deque(maxlen=RATE_POINTS)
        self._section: dict[str, Any] = {
            "phase": "reading",
            "bytes_done": 0,
            "bytes_total": 0,
            "units_done": 0,
            "units_total": 0,
            "bytes_per_s": 0.0,
            "eta_s": None,
            "read_bytes": 0,
            "source": "checkpoint",
            "format": None,
            "direct": False,
            "cache_state": "none",
            "cache_bytes": 0,
            "cache_why": None,
            "failure": None,
            "failure_lasts": False,
            "began_s": {},
        }

    def begin(self, bytes_total: int, units_total: int, form: str, source: str) -> None:
        self._section |= {"bytes_total": bytes_total, "units_total": units_total, "format": form or None, "source": source}
        self._section["began_s"] = {**self._section["began_s"], source: time.time()}
        self._began_s = time.monotonic()
        self._points.clear()
        self._points.append((self._began_s, 0))
        self._write()

    def advance(self, bytes_done: int, units_done: int) -> None:
        self._section["bytes_done"] = bytes_done
        self._section["units_done"] = units_done
        if self._path is None or time.monotonic() - self._written_s < INTERVAL_S:
            return
        self._points.append((time.monotonic(), bytes_done))
        (first_s, first), (last_s, last) = self._points[0], self._points[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        honest = rate > 0 and last_s - first_s >= HONEST_AFTER_S
        self._section["bytes_per_s"] = rate
        self._section["eta_s"] = round((self._section["bytes_total"] - bytes_done) / rate, 1) if honest else None
        self._write()

    def cache(self, state: str, size_bytes: int = 0, why: str | None = None) -> None:
        """Report the state of the cache: none, writing, written, failed or skipped. why: of the latter two, or why the load waits."""
        self._section |= {"cache_state": state, "cache_bytes": size_bytes, "cache_why": why}
        self._write()

    def done(self, read_bytes: int, direct: bool) -> None:
        rate = self._section["bytes_done"] / max(time.monotonic() - self._began_s, 1e-9)
        self._section |= {"phase": "done", "eta_s": None, "bytes_per_s": rate, "read_bytes": read_bytes, "direct": direct}
        self._write()

    def failed(self, message: str, *, lasting: bool = False) -> None:
        """Report the end of the load by an error. lasting: the next load with the same settings would end the same way.

        A checkpoint that comes from the hub chooses the names in the message, so it becomes one short line.
        """
        line = " ".join("".join(char if char.isprintable() else " " for char in message[: 2 * FAILURE_CHARS]).split())[:FAILURE_CHARS]
        self._section |= {"phase": "failed", "eta_s": None, "failure": line, "failure_lasts": lasting}
        self._write()

    def _write(self) -> None:
        self._written_s = time.monotonic()
        rank_report.tell(self._path, self._rank, "load", self._section)
