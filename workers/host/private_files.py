"""Makes folders and files that only this user may open, or restricts existing ones. Never follows a link in place of a file, never widens
access.

A folder made by hand or by an earlier release may be open to others, so every folder and file is restricted by itself.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("sparkd.private")

_OTHERS = 0o077
_EVERYBODY = 0o007
_GROUP_READS = 0o050
_GROUP_WRITES, _OTHERS_WRITE = 0o020, 0o002
# As many as Linux follows.
_MOST_LINKS = 40


def private_folder(path: Path, *, keep_group: bool = False) -> None:
    """Make a folder, or close it to other users. Raises OSError, also for another user's folder, because that user could change its files.

    keep_group: a group that an operator has given access, and not all users, may go on reading it. An earlier release left its folders
    open to all users, by the umask.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    group_bits = _GROUP_READS if keep_group and not facts.st_mode & _EVERYBODY else 0
    if facts.st_mode & _OTHERS & ~group_bits:
        before = stat.S_IMODE(facts.st_mode)
        after = before & ~_OTHERS | before & group_bits
        path.chmod(after)
        log.warning("the folder %s was open to other users: its mode was %04o and is now %04o", path, before, after)


def write_private(path: Path, text: str, *, sync: bool = True) -> None:
    """Replace the file by one that only this user may read. A concurrent reader sees the old or the new content, whole. Raises OSError.

    sync: whether the file and its name are on the disk when this returns (fsync(2)).
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A new file: one that another user laid there, or left open to all, would stay theirs and stay open.
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            if sync:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
        if sync:
            sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Put the names in a folder on the disk (fsync(2)). Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def private_file(path: Path) -> None:
    """Make an empty file, or close an existing one to other users. Raises OSError, also for a link. An existing file is not opened, because
    closing it would release the locks that SQLite holds on it in this process (fcntl_locking(2))."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except FileExistsError:
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if stat.S_ISREG(facts.st_mode) and facts.st_mode & _OTHERS:
            path.chmod(0o600)


def in_others_hands(folder: Path) -> Path | None:
    """The first file on the way to a folder by which another user could lead root elsewhere. None without one, or if this is not root."""
    if os.geteuid() != 0:
        return None
    for path, below_is_there in _way(folder.absolute()):
        facts = path.lstat()
        writers = _OTHERS_WRITE | (_GROUP_WRITES if facts.st_gid else 0)
        # In a folder such as /tmp every user may add what is missing, and no user replaces a file of another user's.
        closed = stat.S_ISLNK(facts.st_mode) or not facts.st_mode & writers or (facts.st_mode & stat.S_ISVTX and below_is_there)
        if facts.st_uid or not closed:
            return path
    return None


def _way(path: Path, links: int = _MOST_LINKS) -> Iterator[tuple[Path, bool]]:
    """Each file on the way to the path, a link before what it leads to, and whether the next one is there. Ends where one is missing."""
    parts = (*reversed(path.parents), path)
    for at, part in enumerate(parts):
        if not os.path.lexists(part):
            return
        yield part, any(os.path.lexists(below) for below in parts[at + 1 : at + 2])
        if part.is_symlink():
            if links:
                yield from _way((part.parent / os.readlink(part)).joinpath(*path.parts[at + 1 :]), links - 1)
            return
