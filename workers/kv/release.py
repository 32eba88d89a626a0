"""Gives unused memory back to the system before it is counted."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path


def give_back() -> None:
    """Python's garbage and the C allocator's free pages."""
    gc.collect()
    trim()


def trim() -> None:
    """malloc_trim(3); tcmalloc, which vLLM's CPU image preloads, has its own name."""
    libc = ctypes.CDLL(None)
    for name in ("malloc_trim", "MallocExtension_ReleaseFreeMemory"):
        with contextlib.suppress(AttributeError):
            release = getattr(libc, name)
            release(0) if name == "malloc_trim" else release()


def forget_files(folders: Sequence[str]) -> None:
    """The page cache of checkpoints that a loader has read through it; on unified memory it is what the driver cannot take.

    Pages that are mapped into a process stay (posix_fadvise(2)).
    """
    for path in sorted(file for folder in folders for file in Path(folder).glob("*.safetensors")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
