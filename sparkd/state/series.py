"""Owns history.bin: up to 1,024 series of the last 15 minutes by the second and of 24 hours by half a minute, in a file of fixed size.

The file is written with pwrite, a row a moment, so whatever ends the daemon, the rows are in the page cache; a full disk is an error of one
write, where a page of a memory map would be a signal that ends the process.
"""

from __future__ import annotations

import math
import os
import stat
import struct
import threading
from array import array
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COLUMNS = 1024
NAME_BYTES = 256
# A series that was written within that time keeps its column, whoever else wants one.
KEPT_S = 900.0
# An excerpt ends with the last row where that is so new.
NEW_S = 3.0

_MAGIC = b"sparkd series 1\n"
_NONE = float("nan")
_ROW_BYTES = 8 + 4 * COLUMNS
_BLOCK_ROWS = 64
_NAMES_AT = len(_MAGIC)
_SINCE_AT = _NAMES_AT + COLUMNS * NAME_BYTES
_ROWS_AT = -(-(_SINCE_AT + COLUMNS * 8) // 8) * 8


@dataclass(frozen=True, slots=True)
class _Ring:
    """Rows of step_s seconds each, from a place in the file. Each begins with its time, a whole number of steps since 1970; 0: never
    written."""

    step_s: int
    rows: int
    at: int

    def place(self, step: int) -> int:
        return self.at + step % self.rows * _ROW_BYTES


_FINE = _Ring(1, 900, _ROWS_AT)
_COARSE = _Ring(30, 2880, _FINE.at + _FINE.rows * _ROW_BYTES)
FILE_BYTES = _COARSE.at + _COARSE.rows * _ROW_BYTES


@dataclass(frozen=True, slots=True)
class Excerpt:
    """values: by series, one number a step, the last at end_s; None where it was not written."""

    step_s: int
    end_s: float
    values: dict[str, list[float | None]]


class _File:
    """A descriptor whose number no other file gets while a thread still uses it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._one_at_a_time = threading.Lock()

    def read(self, size: int, at: int) -> bytes:
        with self._one_at_a_time:
            return os.pread(self._fd, size, at)

    def write(self, content: bytes, at: int) -> None:
        with self._one_at_a_time:
            os.pwrite(self._fd, content, at)

    def written_s(self) -> float:
        return os.fstat(self._fd).st_mtime

    def close(self) -> None:
        with self._one_at_a_time:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Series:
    """One file. Its methods block; they may be called from one thread at a time for writing and from any for reading and closing.

    A write or a read that goes on while it is closed, or comes later, is an OSError, and reaches no other file.

    In memory are the names of its columns and one row of sums, some 200 KB whatever the file holds.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError where there is no room for the file, or it cannot be used."""
        self._file = _File(_opened(path))
        self._since = array("d", self._file.read(COLUMNS * 8, _SINCE_AT))
        self._columns = self._read_names()
        # The daemon that wrote the file last may still write all of them.
        seen_s = self._file.written_s()
        taken = frozenset(self._columns.values())
        self._written_s = array("d", [seen_s if column in taken else float("-inf") for column in range(COLUMNS)])
        self._last_s = float("-inf")
        self._sums, self._counts = array("d", bytes(8 * COLUMNS)), array("L", bytes(array("L").itemsize * COLUMNS))
        self._step = 0

    def close(self) -> None:
        self._file.close()

    def write(self, at_s: float, values: Mapping[str, float]) -> None:
        """One row. at_s: wall clock. A name that is too long, and one beyond COLUMNS series that are all in use, is left out.

        Raises OSError where the disk is full."""
        row = array("f", [_NONE]) * COLUMNS
        coarse = int(at_s) // _COARSE.step_s
        if coarse != self._step:
            self._end_step(coarse)
        for name, value in values.items():
            column = self._columns.get(name)
            if column is None and (column := self._taken(name, at_s)) is None:
                continue
            if at_s < self._since[column]:  # the clock was ahead when it began, and was set back
                self._begin(column, at_s)
            row[column] = value
            self._written_s[column] = at_s
            if math.isfinite(value):
                self._sums[column] += value
                self._counts[column] += 1
        self._write_row(_FINE, int(at_s), row)
        self._last_s = at_s

    def read(self, names: Collection[str], span_s: float, now_s: float) -> Excerpt:
        """The last span_s: each second up to 15 minutes, else each half minute that has passed. Raises OSError."""
        ring = _FINE if span_s <= _FINE.rows else _COARSE
        is_new = 0 <= now_s - self._last_s <= NEW_S
        last = int(self._last_s if is_new else now_s) if ring is _FINE else int(now_s) // ring.step_s - 1
        steps = max(1, min(ring.rows, math.ceil(span_s / ring.step_s)))
        values: dict[str, list[float | None]] = {name: [None] * steps for name in names}
        columns = {name: column for name in names if (column := self._columns.get(name)) is not None}
        for block in range(0, ring.rows, _BLOCK_ROWS):
            rows = min(_BLOCK_ROWS, ring.rows - block)
            raw = memoryview(self._file.read(rows * _ROW_BYTES, ring.at + block * _ROW_BYTES))
            times, numbers = raw.cast("d")[:: _ROW_BYTES // 8], raw.cast("f")
            for row, written in enumerate(times.tolist()):
                place = int(written) - (last - steps + 1) if math.isfinite(written) else -1
                if not 0 <= place < steps:
                    continue
                for name, column in columns.items():
                    value = numbers[row * (_ROW_BYTES // 4) + 2 + column]
                    if math.isfinite(value) and (written + 1) * ring.step_s > self._since[column]:
                        values[name][place] = value
        return Excerpt(ring.step_s, float(last * ring.step_s), values)

    def _end_step(self, coarse: int) -> None:
        """Write the means of the half minute that has passed, and begin the next one."""
        if self._step:
            pairs = zip(self._sums, self._counts, strict=True)
            self._write_row(_COARSE, self._step, array("f", [total / count if count else _NONE for total, count in pairs]))
        self._step = coarse
        self._sums, self._counts = array("d", bytes(8 * COLUMNS)), array("L", bytes(array("L").itemsize * COLUMNS))

    def _write_row(self, ring: _Ring, step: int, row: array[float]) -> None:
        self._file.write(struct.pack("=d", step) + row.tobytes(), ring.place(step))

    def _taken(self, name: str, at_s: float) -> int | None:
        """A column for a new series: a free one, else the one that was written longest ago."""
        raw = name.encode()
        if len(raw) > NAME_BYTES:
            return None
        column = min(range(COLUMNS), key=self._written_s.__getitem__)
        if 0 <= at_s - self._written_s[column] < KEPT_S:
            return None
        former = next((other for other, taken in self._columns.items() if taken == column), None)
        if former is not None:
            del self._columns[former]
        self._sums[column], self._counts[column] = 0.0, 0
        self._file.write(raw.ljust(NAME_BYTES, b"\0"), _NAMES_AT + column * NAME_BYTES)
        self._begin(column, at_s)
        self._columns[name] = column
        return column

    def _begin(self, column: int, at_s: float) -> None:
        """Rows before at_s are of the column's former series."""
        self._since[column] = at_s
        self._file.write(struct.pack("=d", at_s), _SINCE_AT + column * 8)

    def _read_names(self) -> dict[str, int]:
        raw = self._file.read(COLUMNS * NAME_BYTES, _NAMES_AT)
        names = {}
        for column in range(COLUMNS):
            name = raw[column * NAME_BYTES : (column + 1) * NAME_BYTES].rstrip(b"\0").decode("utf-8", "replace")
            if name and math.isfinite(self._since[column]):
                names[name] = column
            else:
                self._since[column] = 0.0
        return names


def _opened(path: Path) -> int:
    """The file, made anew unless it is one of ours. Raises OSError."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        facts = os.fstat(fd)
        if stat.S_ISREG(facts.st_mode) and facts.st_size == FILE_BYTES and os.pread(fd, len(_MAGIC), 0) == _MAGIC:
            return fd
        os.close(fd)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        os.pwrite(fd, _MAGIC, 0)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd
