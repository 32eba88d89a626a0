"""Files with known bytes, readers over them, and what a reader could leave behind. Never a test."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from workers.load.reader import ByteRange, Chunk, Reader

KIB = 1024
SIZES = (0, 1, 4095, 4096, 4097, 3 * 65536, 300_007)


def write_shards(folder: Path) -> dict[str, bytes]:
    """Path -> bytes, one file of each size."""
    made = {str(folder / f"{size}.bin"): random.Random(size).randbytes(size) for size in SIZES}
    for path, data in made.items():
        Path(path).write_bytes(data)
    return made


@contextmanager
def nothing_left() -> Iterator[None]:
    gc.collect()  # what an earlier test has left would be closed in the middle of this one
    fds, threads = open_files(), set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= threads
    assert open_files() <= fds


def make_reader(ranges: Sequence[ByteRange], **options: Any) -> Reader:
    return Reader(ranges, **{"block_bytes": 64 * KIB, "blocks": 4, "threads": 3, "pin": False, **options})


def released(reader: Reader) -> Iterator[Chunk]:
    for chunk in reader:
        yield chunk
        chunk.release()


def drain(reader: Reader) -> None:
    with reader:
        for _ in released(reader):
            pass


def contents(reader: Reader) -> list[bytes]:
    found: list[bytearray] = []
    with reader:
        for chunk in released(reader):
            if chunk.start == 0:
                found.append(bytearray())
            found[-1] += bytes(chunk.view.numpy())
    return [bytes(one) for one in found]


def expected(shards: dict[str, bytes], ranges: Sequence[ByteRange]) -> list[bytes]:
    return [shards[one.path][one.offset : one.offset + one.nbytes] for one in ranges]


def shard_of(shards: dict[str, bytes], size: int) -> str:
    return next(path for path, data in shards.items() if len(data) == size)


def write_shard(folder: Path, size: int) -> str:
    """Written through, and out of the page cache."""
    path = folder / "shard.bin"
    path.write_bytes(random.Random(size).randbytes(size))
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    return str(path)


def any_range(shards: dict[str, bytes]) -> st.SearchStrategy[ByteRange]:
    def ranges(path: str) -> st.SearchStrategy[ByteRange]:
        size = len(shards[path])
        near = st.sampled_from(sorted({min(size, edge) for edge in (0, 1, 4095, 4096, 4097, 8192, 65536, 65537, size)}))
        edge = st.one_of(near, st.integers(0, size))
        small = st.builds(lambda begin, more: (begin, min(size, begin + more)), edge, st.integers(0, 5000))
        return st.one_of(st.tuples(edge, edge), small).map(lambda two: ByteRange(None, path, min(two), abs(two[1] - two[0])))

    return st.sampled_from(sorted(shards)).flatmap(ranges)


def cached_pages(path: str) -> int:
    """Pages of the file that the page cache holds: mincore(2)."""
    size = os.path.getsize(path)
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        whole = (ctypes.c_char * size).from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(whole), ctypes.c_size_t(size), held) == 0
        del whole
        return sum(page & 1 for page in held)


def ring_bytes_mapped() -> int:
    """Bytes that this process has mapped without inheritance to children (madvise MADV_DONTFORK), as the ring is."""
    gc.collect()
    found, size = 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Size:"):
            size = int(line.split()[1]) * KIB
        elif line.startswith("VmFlags:") and " dc" in line:
            found += size
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
