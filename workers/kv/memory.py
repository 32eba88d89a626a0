"""Reads the free memory of a machine and a device at one moment.

On a GB10 cudaMemGetInfo's free memory is MemFree, so page cache counts against it, while vLLM counts MemAvailable: both are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from workers.host.meminfo import read_fields
from workers.host.processes import anonymous_bytes, table

PROC = Path("/proc")
EVERY_S = 0.05
# The kernel gives clean, unused page cache to the driver at once; some of it is mapped or under write-back.
RECLAIMABLE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes.

    device_free, device_total: from the driver, None on a CPU.
    integrated: the device's memory is the host's.
    sharers: ranks on this host, each of which takes an equal part of its memory.
    """

    total: int
    available: int
    free: int
    reclaimable: int
    device_free: int | None = None
    device_total: int | None = None
    integrated: bool = False
    sharers: int = 1

    @property
    def room(self) -> int:
        """The bytes that this rank can take now: of a discrete GPU's own memory, else its part of the host's memory, by the tightest of the
        readings."""
        return self._whole_room // self.sharers

    @property
    def size(self) -> int:
        """This rank's part of the total memory of the kind that holds the cache, used or not."""
        whole = self.device_total if self.device_total is not None and not self.integrated else self.total
        return whole // self.sharers

    @property
    def is_shared(self) -> bool:
        """Whether the cache shares its memory with all processes of the host."""
        return self.device_free is None or self.integrated

    @property
    def _whole_room(self) -> int:
        host = self.available
        if self.device_free is not None:  # the driver reclaims less page cache for a device's allocation than the kernel for a process
            host = min(host, self.free + int(RECLAIMABLE_SHARE * self.reclaimable))
        if self.device_free is None:
            return host
        if not self.integrated:
            return self.device_free
        return min(host, self.device_free + int(RECLAIMABLE_SHARE * self.reclaimable))


def host(proc: Path = PROC) -> MemoryReading:
    """The host's memory, within the limits of this process's control groups. Raises OSError where /proc/meminfo is unreadable."""
    fields = read_fields(proc)
    files = [fields[name] for name in ("Active(file)", "Inactive(file)") if name in fields]
    reclaimable = sum(files) if files else fields.get("Cached", 0)
    total, available, free = (fields.get(name, 0) for name in ("MemTotal", "MemAvailable", "MemFree"))
    return MemoryReading(total, available, free, reclaimable)


def lowest(read: Callable[[], MemoryReading], window_s: float, *, sleep: Callable[[float], None] = time.sleep) -> MemoryReading:
    """Each number's minimum over a window, because memory that is free only for a moment does not count. window_s: 0 for one reading."""
    minimum = read()
    for _ in range(int(window_s / EVERY_S)):
        sleep(EVERY_S)
        now = read()
        minimum = replace(
            minimum,
            available=min(minimum.available, now.available),
            free=min(minimum.free, now.free),
            reclaimable=min(minimum.reclaimable, now.reclaimable),
            device_free=None if minimum.device_free is None or now.device_free is None else min(minimum.device_free, now.device_free),
        )
    return minimum


def taken_by_session(proc: Path = PROC) -> int:
    """Anonymous memory of all processes of this process's session, which is the engine's own, or its Ray worker's, in bytes."""
    session = os.getsid(0)
    return sum(anonymous_bytes(pid, str(proc)) for pid, stat in table(str(proc)).items() if stat.session == session)
