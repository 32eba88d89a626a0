"""Figures over time: the last 15 minutes by the second, in memory, and 24 hours by half a minute, in a table of state.db."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
from array import array
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sparkd.state.store import connect, state_errors

SECONDS, STEP_S, STEPS = 900, 30, 2880
# An excerpt ends with the last second where that is so new.
NEW_S = 3.0

_log = logging.getLogger(__name__)
_FIGURES = msgspec.json.Decoder(dict[str, float])


@dataclass(frozen=True, slots=True)
class Excerpt:
    """series: by name, one number a step, the last at end_s; None where there is none."""

    step_s: int
    end_s: float
    series: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class _Second:
    """places: of the names in `values`; one map for all seconds with the same names."""

    at_s: int
    places: Mapping[str, int]
    values: array[float]

    def value(self, name: str) -> float | None:
        place = self.places.get(name)
        value = math.nan if place is None else self.values[place]
        return value if math.isfinite(value) else None


class Series:
    """Its methods block, and may be called from any thread. Raises StateError where the table cannot be opened."""

    def __init__(self, path: Path) -> None:
        """path: of state.db."""
        former = path.with_name("history.bin")
        if former.exists():
            _log.info("%s of an earlier release is removed: its curves are not carried over", former)
            former.unlink()
        self._path = path
        self._one_at_a_time = threading.Lock()
        self._seconds: deque[_Second] = deque(maxlen=SECONDS)
        self._places: dict[str, int] = {}
        self._full = False
        with state_errors(path, "series"):
            self._db = connect(path, timeout_s=1.0)
            self._db.execute("CREATE TABLE IF NOT EXISTS series(at_s INTEGER PRIMARY KEY, figures TEXT NOT NULL)")

    def close(self) -> None:
        with self._one_at_a_time:
            self._db.close()

    def write(self, at_s: float, figures: Mapping[str, float | None]) -> None:
        """One second, and the half minute that ends with it. at_s: wall clock. A full disk costs half minutes, and one line of the log."""
        with self._one_at_a_time:
            second, last_s = int(at_s), self._seconds[-1].at_s if self._seconds else 0
            if self._seconds and last_s // STEP_S != second // STEP_S:
                self._write_means(last_s // STEP_S)
            if self._places.keys() != figures.keys():
                self._places = {name: place for place, name in enumerate(figures)}
            values = array("f", (math.nan if (value := figures[name]) is None else value for name in self._places))
            if last_s == second:
                self._seconds.pop()  # a page that opens has the daemon look once more within the second
            # A look that came a little late has left one out.
            for taken_s in (second - 1, second) if second - last_s == 2 else (second,):
                self._seconds.append(_Second(taken_s, self._places, values))

    def read(self, names: Collection[str], span_s: float, now_s: float) -> Excerpt:
        """The last span_s: each second up to 15 minutes, else each half minute that has passed. Raises StateError."""
        with self._one_at_a_time:
            if span_s > SECONDS:
                return self._read_means(names, math.ceil(span_s / STEP_S), int(now_s) // STEP_S - 1)
            last_s = self._seconds[-1].at_s if self._seconds else 0
            end_s, steps = last_s if 0 <= now_s - last_s <= NEW_S else int(now_s), math.ceil(span_s)
            series: dict[str, list[float | None]] = {name: [None] * steps for name in names}
            for second in self._seconds:
                if 0 <= (place := second.at_s - end_s + steps - 1) < steps:
                    for name, values in series.items():
                        values[place] = second.value(name)
            return Excerpt(1, float(end_s), series)

    def _write_means(self, step: int) -> None:
        sums: dict[str, list[float]] = {}
        for second in self._seconds:
            if second.at_s // STEP_S == step:
                for name in second.places:
                    if (value := second.value(name)) is not None:
                        sums.setdefault(name, []).append(value)
        figures = {name: float(f"{sum(values) / len(values):.6g}") for name, values in sums.items()}
        try:
            self._db.execute(
                "INSERT OR REPLACE INTO series(at_s, figures) VALUES (?,?)", (step * STEP_S, msgspec.json.encode(figures).decode())
            )
            self._db.execute("DELETE FROM series WHERE at_s <= ?", ((step - STEPS) * STEP_S,))
            self._full = False
        except sqlite3.Error as error:
            if not self._full:
                _log.warning("%s, table series, cannot be written: %s", self._path, error)
            self._full = True

    def _read_means(self, names: Collection[str], steps: int, last: int) -> Excerpt:
        first = last - steps + 1
        with state_errors(self._path, "series"):
            rows = self._db.execute(
                "SELECT at_s, figures FROM series WHERE at_s BETWEEN ? AND ?", (first * STEP_S, last * STEP_S)
            ).fetchall()
        series: dict[str, list[float | None]] = {name: [None] * steps for name in names}
        for at_s, text in rows:
            figures = _FIGURES.decode(text)
            for name, values in series.items():
                values[at_s // STEP_S - first] = figures.get(name)
        return Excerpt(STEP_S, float(last * STEP_S), series)
