"""Reads and writes one file past the page cache, or through it where the file system allows nothing else.

On a Spark the page cache is memory that CUDA lacks: a copy of 100 GB must not leave 100 GB there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

# Offset, length and memory of O_DIRECT: 4096 suits every file system and disk that does not name its own (open(2), "O_DIRECT").
ALIGNMENT = 4096
# The most written bytes in the page cache before they are synced and dropped.
FLUSH_BYTES = 16 << 20
# Errors without support for O_DIRECT: EINVAL (open(2)); FUSE and network file systems also return EOPNOTSUPP.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)

_Call = Callable[[int, Sequence[memoryview], int], int]


class DirectFile:
    """A file that is opened where its bytes are needed. Every method raises OSError; `read` and `write` are safe for several threads.

    size_bytes: of a file that is written, made where it is missing. None: it is only read.

    direct: whether O_DIRECT is in use.
    fallback_reason: why it is not.
    """

    def __init__(self, path: str | os.PathLike[str], *, size_bytes: int | None = None) -> None:
        self.path = os.fspath(path)
        self.direct = True
        self.fallback_reason: str | None = None
        self._flags = os.O_RDONLY if size_bytes is None else os.O_RDWR | os.O_CREAT
        self._fds: dict[bool, int] = {}  # with O_DIRECT, and without it
        self._unwritten = 0
        self._lock = threading.Lock()
        if size_bytes is not None:
            os.ftruncate(self._opened(direct=False), size_bytes)

    def reserve(self) -> None:
        """Allocate all of the file's space by fallocate(2), so that a full disk shows before the first byte.

        Nothing is done where the file system cannot: glibc's posix_fallocate would write into every block then (posix_fallocate(3)).
        """
        fd = self._opened(direct=False)
        size_bytes = os.fstat(fd).st_size
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        while size_bytes and libc.fallocate(fd, 0, 0, size_bytes):
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), self.path)

    def read(self, buffer: memoryview, offset: int, wanted: int) -> int:
        """Fill `buffer` with the file's bytes from `offset` on, at least `wanted` unless the file ends before; returns the number read.

        Past the page cache where offset, memory and length of the buffer are multiples of ALIGNMENT.
        """
        done = 0
        while done < wanted:
            count = self._call(os.preadv, buffer[done:], offset + done, direct=self.direct)
            before, done = done, done + count
            if done < wanted and self.direct:
                # O_DIRECT can only go on at an aligned offset; the end of a file is the only place where it stops at another.
                done -= done % ALIGNMENT
            if done <= before:
                return before + count
        return done

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`, past the page cache where offset and length are multiples of ALIGNMENT; the memory must be aligned then."""
        aligned = offset % ALIGNMENT == len(data) % ALIGNMENT == 0
        done = 0
        while done < len(data):
            done += self._call(os.pwritev, data[done:], offset + done, direct=self.direct and aligned)

    def settle(self) -> None:
        """Sync the file to the disk, drop it from the page cache, and close it."""
        os.fsync(self._opened(direct=False))
        self.close()

    def close(self) -> None:
        """Close the file. No thread may be in a call. A second call has no effect."""
        with self._lock:
            fds, self._fds = self._fds, {}
        for fd in fds.values():
            _drop(fd, 0, 0)
            os.close(fd)

    def _call(self, call: _Call, view: memoryview, offset: int, *, direct: bool) -> int:
        """One read or write. Some file systems refuse O_DIRECT where the file is opened, others where it is read or written."""
        if direct:
            try:
                fd = self._opened(direct=True)
                count = call(fd, [view], offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.direct, self.fallback_reason = False, f"the file system refuses O_DIRECT ({error.strerror})"
                direct = False
        if not direct:
            fd = self._opened(direct=False)
            count = call(fd, [view], offset)
        if call is os.preadv:
            # Also after O_DIRECT: some file systems take it and read through the page cache nevertheless.
            _drop(fd, offset, count)
        elif not direct:
            self._flush(fd, count)
        return count

    def _flush(self, fd: int, more_bytes: int) -> None:
        with self._lock:
            self._unwritten += more_bytes
            if self._unwritten < FLUSH_BYTES:
                return
            self._unwritten = 0
        os.fdatasync(fd)
        _drop(fd, 0, 0)

    def _opened(self, *, direct: bool) -> int:
        with self._lock:
            if direct not in self._fds:
                self._fds[direct] = os.open(self.path, self._flags | (os.O_DIRECT if direct else 0), 0o644)
                if not direct:
                    _advise(self._fds[direct], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return self._fds[direct]


def _drop(fd: int, offset: int, length: int) -> None:
    """Drops these bytes (length 0: to the end) from the page cache; only whole pages are dropped."""
    start = offset // mmap.PAGESIZE * mmap.PAGESIZE
    _advise(fd, start, length and -(-(offset + length - start) // mmap.PAGESIZE) * mmap.PAGESIZE, os.POSIX_FADV_DONTNEED)


def _advise(fd: int, offset: int, length: int, advice: int) -> None:
    with suppress(OSError):
        os.posix_fadvise(fd, offset, length, advice)
