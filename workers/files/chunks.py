"""The chunks in which a model's files are copied, and their sums."""

from __future__ import annotations

import hashlib
import mmap
from contextlib import closing
from pathlib import Path

from workers.files.direct_file import DirectFile

CHUNK_BYTES = 16 << 20


class Buffer:
    """Memory of one chunk, aligned as O_DIRECT wants it: an anonymous mapping begins at a page."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, CHUNK_BYTES)
        self.view = memoryview(self._map)

    def read(self, file: DirectFile, offset: int, size: int) -> memoryview:
        """`size` bytes of a chunk that begins at `offset`, fewer at the file's end. Raises OSError."""
        return self.view[: min(size, file.read(self.view, offset, size))]

    def close(self) -> None:
        self.view.release()
        self._map.close()


def chunks_of(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def range_of(size: int, index: int) -> tuple[int, int]:
    """(offset, bytes) of a chunk."""
    offset = index * CHUNK_BYTES
    return offset, min(CHUNK_BYTES, size - offset)


def digest(data: memoryview | bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path, buffer: Buffer) -> str:
    """The digest of the bytes that lie on the disk: O_DIRECT asks the disk itself. Blocks."""
    total, offset = hashlib.sha256(), 0
    with closing(DirectFile(path)) as file:
        while len(data := buffer.read(file, offset, CHUNK_BYTES)):
            total.update(data)
            offset += len(data)
            if len(data) < CHUNK_BYTES:
                break
    return total.hexdigest()
