"""Reads a file that a user or another program has written. Never waits for a pipe, never reads a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read(path: str | Path, limit_bytes: int = -1) -> bytes:
    """The first limit_bytes of a regular file, all of it where the limit is negative.

    Raises OSError with a readable strerror, also for a pipe, a socket or a device. Raises ValueError for a path with a zero byte.
    """
    # Checked before opening, because opening some devices has an effect.
    _refuse_others(os.stat(path).st_mode, path)
    # O_NONBLOCK, because the file may have become a pipe since.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _refuse_others(os.fstat(file.fileno()).st_mode, path)
        return file.read(limit_bytes)


def _refuse_others(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
