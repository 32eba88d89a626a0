"""Gives unused memory back to the system before it is counted."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path


def give_back() -> None:
    """Free Python's garbage and return the C allocator's free pages to the system: malloc_trim(3)."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def forget_files(folders: Sequence[str]) -> None:
    """Drop the page cache of checkpoints; on unified memory the driver cannot take that memory.

    Pages that are mapped into a process stay (posix_fadvise(2)).
    """
    for path in sorted(file for folder in folders for file in Path(folder).glob("*.safetensors")):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
