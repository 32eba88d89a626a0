"""Stands beside an engine on a CPU: ends it before the machine stops, and lets it see a machine whose other processes stand still.

It never looks at a device. What the engine's own processes hold is what is counted; where others take or give memory meanwhile, the
ballast gives or takes as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.bench import sampling
from tests.bench.kv_ballast import Ballast, host_memory

# Smaller differences are the kernel's own: page tables, files.
EVEN_BYTES = 48 * 2**20
FAMILY_S = 0.5


class Watch:
    """Called with the engine's process id while it runs; True ends it.

    free: MemAvailable before the engine; held: by the ballast then; least: what must remain of `free`; floor: what must remain of the
    machine; is_sized: says when the engine has looked at the machine for the last time. Afterwards `over` says why it was ended,
    for_others whether they were why, and others_bytes what others took until then for more than a moment, which the ballast did not
    make up for.
    """

    def __init__(self, ballast: Ballast, free: int, held: int, least: int, floor: int, is_sized: Callable[[], bool]) -> None:
        self.over: str | None = None
        self.for_others = False
        self.others_bytes = 0
        self._ballast = ballast
        self._free = free
        self._held = held
        self._least = least
        self._floor = floor
        self._is_sized = is_sized
        self._looks = True
        self._before = 0
        self._family: list[int] = []
        self._listed = float("-inf")

    def __call__(self, pid: int) -> bool:
        own, now = self._own(pid), host_memory()
        if self._free - own < self._least:
            self.over = f"over-commits: ended at {self._least / 2**30:.2f} GiB of free memory"
        elif now < self._floor:
            self.over, self.for_others = f"others left less than {self._floor / 2**30:.2f} GiB of the machine", True
        if self.over:
            return True
        taken = self._free - own - now
        self._looks = self._looks and not self._is_sized()
        if self._looks and taken * self._before > 0:
            self.others_bytes = max(self.others_bytes, min(taken, self._before, key=abs), key=abs)
        if abs(taken) > EVEN_BYTES:
            self._held = self._ballast.hold(max(0, self._held - taken))["held"]
        self._before = taken
        return False

    def _own(self, pid: int) -> int:
        if time.monotonic() - self._listed > FAMILY_S:
            self._family, self._listed = session(pid), time.monotonic()
        return sum(own_bytes(member) for member in self._family)


def own_bytes(pid: int | str = "self") -> int:
    """Memory that a process holds and that nothing but itself can give back. 0 when it is gone."""
    found = sampling.resident(pid)
    return found.get("anon", 0) + found.get("shared", 0)


def session(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """The processes of the session that `pid` leads (proc_pid_stat(5), field 6)."""
    found = []
    for path in proc.iterdir():
        if path.name.isdecimal():
            with suppress(OSError, IndexError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[3]) == pid:
                    found.append(int(path.name))
    return found
