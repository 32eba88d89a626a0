"""Processes that a driver holds: whoever reads a file that the kernel takes from their memory waits, as on a machine whose GPU hangs.

`cmdline`, `environ` and `maps` need the lock of a process's memory (mm/mmap_lock.c); `stat` and `status` do not.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

_OF_MEMORY = re.compile(r"/proc/(\d+)/(cmdline|environ|maps|smaps|smaps_rollup|mem|auxv|map_files)")


def a_stuck_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Made a fixture by each test module: the files that somebody in this process waits for. Their readers go on once the test is over."""
    waits: list[str] = []
    released = threading.Event()

    def blocking(real: Any) -> Any:
        def opened(path: Any, *args: Any, **named: Any) -> Any:
            found = _OF_MEMORY.match(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else None
            if found and int(found[1]) != os.getpid():
                waits.append(found[0])
                released.wait()
            return real(path, *args, **named)

        return opened

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", blocking(module.open))
    yield waits
    released.set()
