"""Locks this process's pages in memory: the guard of a machine that runs out of memory must not wait for its own. Never raises a limit."""

from __future__ import annotations

import ctypes
import os
import resource

# linux/mman.h. ONFAULT locks what is used rather than every page of the address space, of which Ray and Python reserve gigabytes.
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
CAP_IPC_LOCK = 14


def lock() -> str | None:
    """Lock present and future pages of this process (mlockall(2)). Returns None on success, else the reason for a log.

    With a limit and without the capability nothing is locked: later allocations would fail once the limit is reached.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not _may_pass_the_limit():
        return f"memlock is limited to {limit >> 20} MiB: set LimitMEMLOCK=infinity"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT) == 0:
            return None
    except (OSError, AttributeError) as error:
        return f"the C library has no mlockall: {error}"
    return f"the kernel refused: {os.strerror(ctypes.get_errno())}"


def _may_pass_the_limit() -> bool:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            held = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    except OSError:
        return False
    return bool(held >> CAP_IPC_LOCK & 1)
