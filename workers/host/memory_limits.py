"""The levels of free memory on a node: what the guard watches, and what the sizing of a KV cache leaves. Never reads memory."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30
# On a Spark; a smaller machine has the same shares of SPARK_GIB. A sized engine leaves SPARE_GIB once it is ready: it lies above what the
# guard calls tight, and above what ends a tight time (RISE).
SPARE_GIB, SOFT_GIB, HARD_GIB, FLOOR_GIB = 7.0, 6.0, 4.0, 2.0
SPARK_GIB = 120
# The share of a GPU's own memory.
DEVICE_SHARE = 0.03
RISE = 1.1


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes of MemAvailable. Below soft no load begins. Below hard, with proof, the guard kills one engine. Floor must not be reached."""

    soft: int
    hard: int
    floor: int

    @classmethod
    def of(cls, total: int, soft_gib: float | None = None, hard_gib: float | None = None, floor_gib: float | None = None) -> MemoryLimits:
        """total: bytes of the node's memory. None: the default."""
        given = ((soft_gib, SOFT_GIB), (hard_gib, HARD_GIB), (floor_gib, FLOOR_GIB))
        return cls(*(_share(total, default) if asked is None else int(asked * GIB) for asked, default in given))


def spare(total: int, *, shared: bool = True) -> int:
    """Bytes that `kv_cache: auto` leaves of `total`, at least 1 GiB: for the driver, other programs, and whatever else no rehearsal shows.
    shared: whether the cache is in the node's memory, which the guard watches; else in a GPU's own."""
    return max(GIB, _share(total, SPARE_GIB) if shared else int(total * DEVICE_SHARE))


def _share(total: int, gib: float) -> int:
    return min(int(gib * GIB), int(total * gib / SPARK_GIB))
