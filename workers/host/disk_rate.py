"""Measures how fast a disk gives one large file, past the page cache. Never writes, and reads no more than LIMIT_BYTES or LIMIT_S."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

LIMIT_BYTES = 2 << 30
LIMIT_S = 3.0
STEP_BYTES = 8 << 20
SMALLEST_BYTES = 64 << 20


def largest(folders: Iterable[Path]) -> Path | None:
    """The largest weights file at most three levels below these folders; None where none is large enough to measure."""
    sizes = [
        (size, path)
        for folder in folders
        for pattern in ("*.safetensors", "*/*.safetensors", "*/snapshots/*/*.safetensors")
        for path in folder.glob(pattern)
        if (size := _size(path)) >= SMALLEST_BYTES
    ]
    return max(sizes, default=(0, None))[1]


def rate(path: Path) -> tuple[int, float, bool]:
    """(bytes read, seconds, whether the page cache was bypassed), with one reader, like a loader with one stream. Raises OSError."""
    fd, direct = _open(path)
    # Anonymous memory begins at a page, which O_DIRECT asks for (open(2)).
    buffer = mmap.mmap(-1, STEP_BYTES)
    try:
        done, began_s = 0, time.monotonic()
        while done < LIMIT_BYTES and time.monotonic() - began_s < LIMIT_S and (got := os.preadv(fd, [buffer], done)):
            done += got
            if got < STEP_BYTES:
                break
        return done, time.monotonic() - began_s, direct
    finally:
        buffer.close()
        os.close(fd)


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), True
    except OSError:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd, False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
