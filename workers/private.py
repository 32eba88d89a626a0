"""Folders and files of this user alone, made so or tightened. Never follows a link in the place of a file, never gives anything away.

A folder that was there before, made by hand or by an earlier release, may be open to others, so nothing relies on the one above it.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_OTHERS = 0o077


def private_folder(path: Path) -> None:
    """Make it, or close it to others. Raises OSError, also where it belongs to another user: what root did there that user could change."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if facts.st_mode & _OTHERS:
        path.chmod(0o700)


def private_file(path: Path) -> None:
    """Make it, empty, or close it to others. Raises OSError, also for a link. For a file that SQLite has open, too: it is not opened here,
    because closing it would let go of the locks that this process holds on it (fcntl_locking(2))."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if stat.S_ISREG(facts.st_mode) and facts.st_mode & _OTHERS:
            path.chmod(0o600)
