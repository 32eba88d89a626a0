"""Watches free memory during a rehearsal, and ends this process before the machine freezes. Never frees anything by itself.

On unified memory nothing else would: the kernel has no out-of-memory kill for a driver's memory, and the machine freezes instead.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from workers.kv.memory import EVERY_S, MemoryReading

logger = logging.getLogger("vllm.sparkd.kv")

LEAST_BYTES, MOST_BYTES = 256 * 2**20, 2 * 2**30
MARGIN_SHARE = 0.5


def floor_of(margin: int) -> int:
    """Free bytes below which the rehearsal ends: half of the margin, within bounds, because an operator may set the margin."""
    return min(MOST_BYTES, max(LEAST_BYTES, int(margin * MARGIN_SHARE)))


class Floor:
    """A context in which a thread calls `under` once, with the first reading whose room is less than `floor` bytes.

    A failed reading ends nothing; the first is logged.
    """

    def __init__(self, read: Callable[[], MemoryReading], floor: int, under: Callable[[MemoryReading], None]) -> None:
        self._read = read
        self._floor = floor
        self._under = under
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kv-floor", daemon=True)

    def __enter__(self) -> Floor:
        self._thread.start()
        return self

    def __exit__(self, _type: type[BaseException] | None, _value: BaseException | None, _traceback: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        warned = False
        while not self._ended.wait(EVERY_S):
            try:
                reading = self._read()
            except Exception as error:  # noqa: BLE001 - /proc, the driver and torch have their own; this thread outlives all of them
                if not warned:
                    logger.warning("sparkd: the memory that is left could not be read (%s: %s); trying again.", type(error).__name__, error)
                warned = True
                continue
            if reading.room < self._floor:
                self._under(reading)
                return
