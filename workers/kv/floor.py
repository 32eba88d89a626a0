"""Watches what is left while a rehearsal takes memory, and ends this process before the machine freezes. Never frees anything by itself.

On unified memory nothing else would: there is no out-of-memory kill for what a driver holds, the machine stands still instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from workers.kv.readings import EVERY_S, Reading

LEAST_BYTES, MOST_BYTES = 256 * 2**20, 2 * 2**30
MARGIN_SHARE = 0.5


def floor_of(margin: int) -> int:
    """Bytes under which the rehearsal ends: half the margin, which is nobody's to use; within bounds where the margin is a wish."""
    return min(MOST_BYTES, max(LEAST_BYTES, int(margin * MARGIN_SHARE)))


class Floor:
    """While it is entered, `under` is called once, from a thread, with the first reading whose room is less than `floor` bytes."""

    def __init__(self, read: Callable[[], Reading], floor: int, under: Callable[[Reading], None]) -> None:
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
        while not self._ended.wait(EVERY_S):
            reading = self._read()
            if reading.room < self._floor:
                self._under(reading)
                return
