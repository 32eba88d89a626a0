"""One file of known size, filled in any order, mostly past the page cache. Never decides what is written, never catches a full disk."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading

# Offset and length of an O_DIRECT write: 4096 suits every file system and disk that does not name its own (open(2), "O_DIRECT").
ALIGNMENT = 4096
# The most bytes in the page cache before they are written out and dropped.
FLUSH_BYTES = 16 << 20
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


class TargetFile:
    """A new file. All of its space is allocated at once, so that a full disk shows before the first byte. Every method raises OSError.

    `write` is safe for several threads.

    fallback_reason: why it is written through the page cache, where O_DIRECT is not possible.
    """

    def __init__(self, path: str, size_bytes: int, *, direct: bool = True) -> None:
        self.path = path
        self.fallback_reason: str | None = None if direct else "buffered reads were chosen"
        self._direct_fd: int | None = None
        self._direct = direct
        self._unwritten = 0
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _allocate(self._fd, size_bytes)
            if direct:
                self._direct_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                self.close()
                raise
            self._direct = False
            self.fallback_reason = f"the file system has no O_DIRECT ({error.strerror})"

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`, past the page cache where offset and length are multiples of ALIGNMENT; the memory must be aligned then."""
        if self._direct and self._direct_fd is not None and offset % ALIGNMENT == 0 and len(data) % ALIGNMENT == 0:
            try:
                _write_all(self._direct_fd, offset, data)
                return
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                # The descriptor stays open until the end: another thread may be writing through it.
                self._direct = False
                self.fallback_reason = f"the file system refused an O_DIRECT write ({error.strerror})"
        _write_all(self._fd, offset, data)
        with self._lock:
            self._unwritten += len(data)
            if self._unwritten < FLUSH_BYTES:
                return
            self._unwritten = 0
        os.fdatasync(self._fd)
        self._forget()

    def settle(self) -> None:
        """Sync the file to the disk, drop it from the page cache, and close it."""
        os.fsync(self._fd)
        self._forget()
        self.close()

    def close(self) -> None:
        """Close the file. A second call has no effect."""
        for fd in (self._direct_fd, self._fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._direct_fd, self._fd = None, -1

    def _forget(self) -> None:
        with contextlib.suppress(OSError):  # advice
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _allocate(fd: int, size_bytes: int) -> None:
    """Allocate the file's space by fallocate(2). Without its support, glibc's posix_fallocate writes into every block
    (posix_fallocate(3))."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while size_bytes and libc.fallocate(fd, 0, 0, size_bytes):
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size_bytes)
        return
