"""Owns reading and writing a file's chunks past the page cache, and their sums. Never opens a socket.

On a Spark the page cache is memory that CUDA lacks: a copy of 100 GB must not leave 100 GB there. Where a file system has no O_DIRECT,
what was read or written is dropped again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 16 << 20
ALIGNED = 4096  # suits every file system and disk that names no other (open(2), "O_DIRECT")


class Buffer:
    """Memory of one chunk, aligned as O_DIRECT wants it: an anonymous mapping begins at a page."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, CHUNK_BYTES)
        self.view = memoryview(self._map)

    def close(self) -> None:
        self.view.release()
        self._map.close()


class ChunkFile:
    """One file, open for chunks. Every chunk but the last has CHUNK_BYTES; a part may be written in any order."""

    def __init__(self, path: Path, *, write: bool = False) -> None:
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_CLOEXEC
        self.direct = True
        try:
            self.fd = os.open(path, flags | os.O_DIRECT, 0o644)
        except OSError:
            self.direct = False
            self.fd = os.open(path, flags, 0o644)

    def read(self, buffer: Buffer, offset: int, size: int) -> memoryview:
        """`size` bytes from `offset`, fewer at the file's end. Raises OSError."""
        wanted = _rounded(size) if self.direct else size
        got = 0
        while got < wanted:
            direct = self.direct
            try:
                more = os.preadv(self.fd, [buffer.view[got:wanted]], offset + got)
            except OSError as error:
                self._go_buffered(error, direct)
                continue
            got += more
            # O_DIRECT goes on at an aligned offset only; another is the file's end.
            if not more or (self.direct and got % ALIGNED):
                break
        self._drop(offset, got)
        return buffer.view[: min(got, size)]

    def write(self, buffer: Buffer, offset: int, size: int) -> None:
        """Write the first `size` bytes of the buffer. O_DIRECT may write beyond the file's end; `finish` truncates that. Raises OSError."""
        wanted, done = (_rounded(size) if self.direct else size), 0
        while done < wanted:
            direct = self.direct
            try:
                done += os.pwritev(self.fd, [buffer.view[done:wanted]], offset + done)
            except OSError as error:
                self._go_buffered(error, direct)
        if not self.direct:
            os.fdatasync(self.fd)
            self._drop(offset, size)

    def finish(self, size: int) -> None:
        os.ftruncate(self.fd, size)
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def _go_buffered(self, error: OSError, direct: bool) -> None:
        """Some file systems open a file with O_DIRECT and refuse to read or write it so (FUSE, network file systems).

        direct: `self.direct` as it was before the call that failed, because another thread may have changed it since.
        """
        if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def _drop(self, offset: int, size: int) -> None:
        if not self.direct:
            with suppress(OSError):
                os.posix_fadvise(self.fd, offset, size, os.POSIX_FADV_DONTNEED)


def chunks_of(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def span(size: int, index: int) -> tuple[int, int]:
    """(offset, bytes) of a chunk."""
    offset = index * CHUNK_BYTES
    return offset, min(CHUNK_BYTES, size - offset)


def digest(data: memoryview | bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path, buffer: Buffer) -> str:
    """The digest of the bytes that lie on the disk: O_DIRECT asks the disk itself. Blocks."""
    total, offset, file = hashlib.sha256(), 0, ChunkFile(path)
    try:
        while len(data := file.read(buffer, offset, CHUNK_BYTES)):
            total.update(data)
            offset += len(data)
            if len(data) < CHUNK_BYTES:
                break
    finally:
        file.close()
    return total.hexdigest()


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
