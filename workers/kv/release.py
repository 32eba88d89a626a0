"""Gives memory that nobody uses back to the system before it is counted. Never frees what is in use."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back() -> None:
    """Python's garbage and the C allocator's free pages (malloc_trim(3); tcmalloc, which vLLM's CPU image preloads, has its own name)."""
    gc.collect()
    libc = ctypes.CDLL(None)
    for name in ("malloc_trim", "MallocExtension_ReleaseFreeMemory"):
        with contextlib.suppress(AttributeError):
            release = getattr(libc, name)
            release(0) if name == "malloc_trim" else release()
