"""Reads one file in aligned blocks past the page cache, or through it where the file system allows nothing else. Never decides what is
read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading

from sparkd.errors import CheckpointError

# Offset, length and memory of an O_DIRECT read: 4096 suits every file system and disk that does not name its own (open(2), "O_DIRECT").
ALIGNMENT = 4096
# Errors of open and read without support for O_DIRECT: EINVAL (open(2)); FUSE and network file systems also return EOPNOTSUPP.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
_AGAIN = "Download it again"


class SourceFile:
    """A file of a checkpoint; safe for several threads.

    direct: None reads through the page cache where the file system does not take O_DIRECT, True raises there, False always does so.
    Raises CheckpointError when the file is not there or is none.
    """

    def __init__(self, path: str, *, direct: bool | None, block_bytes: int) -> None:
        self.path = path
        try:
            facts = os.stat(path)
        except OSError as error:
            raise _unreadable(path, "the file cannot be read", error) from error
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError("this is not a regular file", file=path, cure="Name a checkpoint whose shards are files")
        self.size_bytes = facts.st_size
        self.alignment = ALIGNMENT
        self.direct = True
        self.fallback_reason: str | None = None
        self._must_be_direct = direct is True
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._readers_left = 0
        if direct is False:
            self._go_buffered("buffered reads were chosen")
            return
        memory, offset = _direct_alignment(path) or (ALIGNMENT, ALIGNMENT)
        if not offset:
            self._go_buffered("the file system has no O_DIRECT for it")
        elif memory > ALIGNMENT or block_bytes % max(offset, ALIGNMENT):
            self._go_buffered(
                f"O_DIRECT needs an alignment of {offset} bytes, {memory} in memory, which blocks of {block_bytes} bytes do not have"
            )
        else:
            self.alignment = max(offset, ALIGNMENT)

    def expect(self, reads: int) -> None:
        """Announce reads; the file is closed after the last of them."""
        self._readers_left += reads

    def read(self, buffer: memoryview, offset: int, wanted: int) -> int:
        """Fill `buffer` with the file's bytes from `offset` on, at least `wanted`; returns the number read. Raises CheckpointError."""
        fd = self._opened()
        done = 0
        while done < wanted:
            direct = self.direct  # as it was for this read: another thread may be turning it off
            try:
                count = os.preadv(fd, [buffer[done:]], offset + done)
            except OSError as error:
                if direct and error.errno in _NOT_DIRECT:
                    self._turn_buffered(fd, error)
                    continue
                raise _unreadable(self.path, f"{len(buffer)} bytes at {offset} cannot be read", error) from error
            before, done = done, done + count
            if done < wanted and direct:
                # O_DIRECT can only go on at an aligned offset; the end of a file is the only place where it stops at another.
                done -= done % self.alignment
            if done <= before:
                raise CheckpointError(
                    f"the file ends at byte {offset + before + count}, before byte {offset + wanted}", file=self.path, cure=_AGAIN
                )
        if not self.direct:
            _forget(fd, offset, len(buffer))
        return done

    def finished(self) -> None:
        """Note the end of one of the expected reads."""
        with self._lock:
            self._readers_left -= 1
        if self._readers_left == 0:
            self.close()

    def close(self) -> None:
        """Close the file. No thread may be reading. A second call has no effect."""
        with self._lock:
            fd, self._fd = self._fd, None
        if fd is None:
            return
        if not self.direct:
            _forget(fd, 0, 0)
        os.close(fd)

    def _opened(self) -> int:
        with self._lock:
            if self._fd is None:
                self._fd = self._open()
            return self._fd

    def _open(self) -> int:
        try:
            if self.direct:
                try:
                    return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    if error.errno not in _NOT_DIRECT:
                        raise
                    self._go_buffered(f"the file system does not open it with O_DIRECT ({error.strerror})")
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(self.path, "the file cannot be opened", error) from error
        _read_ahead(fd)
        return fd

    def _turn_buffered(self, fd: int, error: OSError) -> None:
        """Read through the page cache from now on, with the same descriptor, because other threads are reading from it."""
        with self._lock:
            if not self.direct:
                return
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            self._go_buffered(f"the file system refused an O_DIRECT read ({error.strerror})")
        _read_ahead(fd)

    def _go_buffered(self, reason: str) -> None:
        if self._must_be_direct:
            raise CheckpointError(
                f"O_DIRECT is required, but {reason}",
                file=self.path,
                cure="Put the checkpoint on a local ext4 or xfs, or allow buffered reads",
            )
        self.direct = False
        self.fallback_reason = f"{self.path} is read through the page cache, which is dropped behind every block: {reason}."


def _read_ahead(fd: int) -> None:
    with contextlib.suppress(OSError):  # advice
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)


def _forget(fd: int, offset: int, length: int) -> None:
    """Drops these bytes (length 0: to the end) from the page cache; only whole pages are dropped."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):  # advice
        os.posix_fadvise(fd, start, length and -(-(offset + length - start) // mmap.PAGESIZE) * mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)


def _unreadable(path: str, what: str, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOENT:
        return CheckpointError("the file is missing", file=path, cure=_AGAIN)
    if error.errno == errno.EACCES:
        return CheckpointError(f"{what}: permission denied", file=path, cure="Make it readable for the user that sparkd runs as")
    cure = "Look for disk errors in the kernel's log, then download the file again" if error.errno == errno.EIO else None
    return CheckpointError(f"{what}: {error.strerror or error}", file=path, cure=cure)


class _Statx(ctypes.Structure):
    """struct statx of linux/stat.h, as far as it is read here; the kernel writes 256 bytes."""

    _fields_ = (
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("after", ctypes.c_uint8 * 96),
    )


_AT_FDCWD = -100
_STATX_DIOALIGN = 0x2000


def _direct_alignment(path: str) -> tuple[int, int] | None:
    """The alignment that O_DIRECT needs of memory and of offset and length, in bytes; (0, 0) where it is not possible, None where the
    kernel (before 6.1), the C library or the file system does not say. statx(2), STATX_DIOALIGN."""
    call = getattr(ctypes.CDLL(None), "statx", None)
    facts = _Statx()
    if call is None or call(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, ctypes.byref(facts)) or not facts.mask & _STATX_DIOALIGN:
        return None
    return facts.dio_mem_align, facts.dio_offset_align
