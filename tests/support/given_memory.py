"""A machine of a given size for an engine under test: what the engine's own session takes goes off it, what others take does not.

The numbers of a test must not follow what happens to be free: another process that takes a GiB at the wrong moment would fail it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from workers.host.processes import read_stat
from workers.kv import memory
from workers.kv.memory import MemoryReading

GIB = 2**30
SIZE_BYTES = 12 * GIB
_OWN = ("Anonymous:", "Pss_Shmem:")


def given(*arguments: Any, **more: Any) -> MemoryReading:
    """The host's reading, as the product takes it, with the memory of the given machine in place of this one's."""
    left = max(0, SIZE_BYTES - taken_by_own_session())
    return replace(memory.host(*arguments, **more), total=SIZE_BYTES, available=left, free=left, reclaimable=0)


def install() -> None:
    """From now on the worker class of this process reads the given machine."""
    from workers.vllm.kv import cpu

    cpu.host = given  # type: ignore[attr-defined]


def taken_by_own_session() -> int:
    """Bytes that the processes of this session hold and no page cache: the caller must have been started in a session of its own."""
    session, total = os.getsid(0), 0
    for folder in Path("/proc").iterdir():
        stat = read_stat(int(folder.name)) if folder.name.isdecimal() else None
        if stat is None or stat.session != session:
            continue
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(_OWN))
    return total
