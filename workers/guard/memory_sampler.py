"""Samples a node's memory: reads /proc and the control groups' limits, keeps two minutes of samples, and computes their trend.

A look opens no file and allocates nothing larger than the text of one. Files stay open, and buffers and the ring are allocated in advance,
because this must work on a machine without a free page.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from pathlib import Path

from workers.host import cgroups
from workers.host.meminfo import ACCOUNTED, RECLAIMABLE, unaccounted_bytes

BUFFER_BYTES = 32 * 1024
KEPT_S = 120.0
# The looks of two minutes at the fastest pace.
ROWS = 1200
COLUMNS = ("at_s", "available", "free", "cached", "swap_free", "cma_free", "unaccounted", "scanned", "swapped", "psi_full")
SHORT_S, MIDDLE_S, LONG_S = 1.0, 5.0, 60.0
# The lines that are read of /proc/meminfo, and how each begins.
_MEMINFO = {name: f"{name}:".encode() for name in ("MemTotal", "MemAvailable", "Cached", "SwapFree", "CmaFree", *RECLAIMABLE, *ACCOUNTED)}
# Pages that a process had to scan itself because none was free, and pages swapped (mm/vmstat.c).
_VMSTAT = (b"pgscan_direct ", b"pswpin ", b"pswpout ")


@dataclass(slots=True)
class MemorySample:
    """One moment, in bytes. at_s is monotonic; scanned and swapped are pages since boot, psi_full_us microseconds since boot.

    total, available: the least of the machine's and its control groups'. A value that the kernel does not report is None.
    unaccounted: see meminfo.unaccounted_bytes.
    """

    at_s: float
    total: int
    available: int
    free: int
    cached: int
    swap_free: int
    cma_free: int | None = None
    unaccounted: int | None = None
    scanned: int = 0
    swapped: int = 0
    psi_full_us: int = 0


@dataclass(frozen=True, slots=True)
class Trend:
    """Slopes of available memory in bytes per second, negative while it shrinks: since the last look, over SHORT_S, over MIDDLE_S.

    dropped, fell: bytes lost since at most MIDDLE_S and LONG_S ago.
    scanned_per_s, swapped_per_s: pages, over MIDDLE_S.
    span_s: the time that the samples cover.
    """

    last: float = 0.0
    short: float = 0.0
    middle: float = 0.0
    dropped: float = 0.0
    fell: float = 0.0
    scanned_per_s: float = 0.0
    swapped_per_s: float = 0.0
    span_s: float = 0.0

    def seconds_to(self, available: float, floor: float) -> float | None:
        """Seconds until `floor` at the steeper of both slopes; None if memory does not shrink, 0 below the floor."""
        slope = min(self.short, self.middle)
        if slope >= 0:
            return None
        return max(0.0, (available - floor) / -slope)


class ProcFile:
    """One file of /proc, read repeatedly into one buffer. Outside /proc (in tests) it is opened each time, because it is replaced."""

    def __init__(self, path: Path, *, held: bool) -> None:
        self._path = path
        self._buffer = bytearray(BUFFER_BYTES)
        self._into = [self._buffer]
        self._length = 0
        self._fd = self._open() if held else -1

    def read(self) -> bool:
        """Read the file. False if it cannot be read; the buffer then keeps its content."""
        fd = self._fd if self._fd >= 0 else self._open()
        if fd < 0:
            return False
        try:
            self._length = os.preadv(fd, self._into, 0)
            return True
        except OSError:
            return False
        finally:
            if self._fd < 0:
                os.close(fd)

    def number(self, name: bytes) -> int | None:
        """The integer after `name` at the beginning of a line."""
        at = 0 if self._buffer.startswith(name) else self._buffer.find(b"\n" + name, 0, self._length) + 1
        if at == 0 and not self._buffer.startswith(name):
            return None
        at += len(name)
        end = self._buffer.find(b"\n", at, self._length)
        try:
            return int(self._buffer[at : end if end >= 0 else self._length].split(b"kB")[0])
        except ValueError:
            return None

    def psi_total_us(self) -> int:
        """`total=` of the line `full` (Documentation/accounting/psi.rst)."""
        line = self._buffer.find(b"full ", 0, self._length)
        at = self._buffer.find(b"total=", line, self._length) if line >= 0 else -1
        end = self._buffer.find(b"\n", at, self._length) if at >= 0 else -1
        try:
            return int(self._buffer[at + 6 : end if end >= 0 else self._length]) if at >= 0 else 0
        except ValueError:
            return 0

    def text(self) -> str:
        return self._buffer[: self._length].decode("ascii", "replace")

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return -1


class MemorySampler:
    """The samples of one node. `look()` adds one, `trend()` computes the slopes, `rows()` returns the last two minutes."""

    def __init__(self, proc: Path) -> None:
        held = proc == Path("/proc")
        self._groups = [[ProcFile(group / name, held=held) for name in cgroups.FILES] for group in cgroups.limited_groups(proc)]
        self.meminfo = ProcFile(proc / "meminfo", held=held)
        self.vmstat = ProcFile(proc / "vmstat", held=held)
        self.pressure = ProcFile(proc / "pressure" / "memory", held=held)
        self._ring = array("d", bytes(8 * ROWS * len(COLUMNS)))
        self._count = self._forgotten = 0

    def look(self, now_s: float) -> MemorySample | None:
        """Take one sample; None if /proc/meminfo cannot be read now."""
        if not self.meminfo.read():
            return None
        values_kib = {name: self.meminfo.number(line) for name, line in _MEMINFO.items()}
        fields = {name: value * 1024 for name, value in values_kib.items() if value is not None}
        has_vmstat, has_psi = self.vmstat.read(), self.pressure.read()
        counters = [(self.vmstat.number(name) or 0) if has_vmstat else 0 for name in _VMSTAT]
        limits = [(fields.get("MemTotal", 0), fields.get("MemAvailable", 0))]
        for group in self._groups:
            for file in group:
                file.read()  # one that cannot be read now keeps what it said
            if limit := cgroups.limit_of(*(file.text() for file in group)):
                limits.append(limit)
        look = MemorySample(
            now_s,
            min(total for total, _ in limits),
            min(available for _, available in limits),
            fields.get("MemFree", 0),
            fields.get("Cached", 0),
            fields.get("SwapFree", 0),
            fields.get("CmaFree"),
            unaccounted_bytes(fields),
            counters[0],
            counters[1] + counters[2],
            self.pressure.psi_total_us() if has_psi else 0,
        )
        self.add(look)
        return look

    def add(self, look: MemorySample) -> None:
        at = self._count % ROWS * len(COLUMNS)
        row = (
            look.at_s, look.available, look.free, look.cached, look.swap_free, look.cma_free or 0, look.unaccounted or 0, look.scanned,
            look.swapped, look.psi_full_us,
        )  # fmt: skip
        for index, value in enumerate(row):
            self._ring[at + index] = value
        self._count += 1

    def forget(self) -> None:
        """Start the trend anew after a kill, which ends the earlier course of memory. The rows stay."""
        self._forgotten = self._count

    def trend(self) -> Trend:
        """The trend up to the newest look. If no look is old enough, a slope covers the looks that there are."""
        looks = min(self._count - self._forgotten, ROWS)
        if looks < 2:
            return Trend()
        now_s, available = self._at(1, 0), self._at(1, 1)
        short, middle, long = (self._back(seconds, looks) for seconds in (SHORT_S, MIDDLE_S, LONG_S))
        return Trend(
            self._slope(2),
            self._slope(short),
            self._slope(middle),
            max(0.0, self._at(middle, 1) - available),
            max(0.0, self._at(long, 1) - available),
            self._per_s(middle, 7),
            self._per_s(middle, 8),
            now_s - self._at(long, 0),
        )

    def rows(self) -> list[list[float]]:
        """The looks of the last KEPT_S, oldest first, in the order of COLUMNS."""
        if not self._count:
            return []
        last = self._back(KEPT_S, min(self._count, ROWS))
        return [[self._at(back, column) for column in range(len(COLUMNS))] for back in range(last, 0, -1)]

    def _at(self, back: int, column: int) -> float:
        """One value of an earlier look. back: 1 is the newest look."""
        return self._ring[(self._count - back) % ROWS * len(COLUMNS) + column]

    def _back(self, seconds: float, looks: int) -> int:
        """How far back, in looks, the oldest of the last `looks` is that is at most `seconds` old."""
        oldest_s = self._at(1, 0) - seconds - 1e-6
        back, beyond = 1, looks + 1
        while beyond - back > 1:
            middle = (back + beyond) // 2
            back, beyond = (middle, beyond) if self._at(middle, 0) >= oldest_s else (back, middle)
        # A slope needs two looks, however old the second is.
        return min(looks, max(back, 2))

    def _slope(self, back: int) -> float:
        return self._per_s(back, 1)

    def _per_s(self, back: int, column: int) -> float:
        elapsed_s = self._at(1, 0) - self._at(back, 0)
        return (self._at(1, column) - self._at(back, column)) / elapsed_s if elapsed_s > 0 else 0.0
