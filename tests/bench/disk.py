"""What a disk gives: buffered, mapped, O_DIRECT, and the streaming loader's reader with several rings, in one run. Never asserts; prints.

    python -m tests.bench.disk FOLDER_OR_FILE [--gib 2] [--rounds 3]

In a folder a file is written, read and removed; of a file at most --gib are read, and never written. Every round reads the same bytes once
in every way, after they were dropped from the page cache; a figure is the median of its rounds. "of the disk" is the rate against the best
plain O_DIRECT way of the same rounds. CPU is this process's, user and system; a Reader's consumer does nothing but give chunks back.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench.arguments import Parser, amount, count, there
from workers.stream.reader import Piece, Reader

MIB = 2**20
GIB = 2**30
# (block MiB, blocks, threads): rings of 64 MiB and less.
RINGS = ((1, 64, 4), (2, 32, 4), (4, 16, 2), (4, 16, 4), (8, 4, 2), (8, 8, 1), (8, 8, 2), (8, 8, 3), (8, 8, 4), (8, 8, 6), (16, 4, 2))
RAW = ((8, 1), (16, 1), (8, 2), (8, 4))


@dataclass(slots=True)
class Way:
    """One way to read `nbytes` of a file, and what its rounds gave."""

    name: str
    read: Callable[[str, int], None]
    raw: bool = False
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    cached_bytes: list[int] = field(default_factory=list)


def main() -> int:
    parser = Parser("tests.bench.disk", __doc__, gib=0.02, rounds=1)
    parser.add_argument("path", type=there, help="a folder on the disk, where a file is written and removed, or a large file")
    parser.add_argument("--gib", type=amount, default=2.0, help="how much is read, each time")
    parser.add_argument("--rounds", type=count, default=3)
    options = parser.parse_args()
    ways = [
        Way("read(), page cache", _buffered),
        Way("mmap, page cache", _mapped),
        Way("O_DIRECT, 8 MiB, 1 thread, into small pages", _raw(8 * MIB, 1, huge=False)),
        *(Way(f"O_DIRECT, {size} MiB, {_threads(count)}", _raw(size * MIB, count), raw=True) for size, count in RAW),
        *(Way(f"Reader, {blocks} x {size} MiB, {_threads(count)}", _reader(size * MIB, blocks, count)) for size, blocks, count in RINGS),
        Way("Reader, 8 x 8 MiB, 4 threads, pieces of 64 KiB", _reader(8 * MIB, 8, 4, piece_bytes=64 * 1024)),
        Way("Reader, 8 x 8 MiB, 4 threads, page cache", _reader(8 * MIB, 8, 4, direct=False)),
    ]
    with _file(options.path, int(options.gib * GIB)) as (path, nbytes):
        for _ in range(options.rounds):
            # In another order each time: a virtual disk's host caches what was just read, and its neighbours come and go.
            for way in random.sample(ways, len(ways)):
                _measure(way, path, nbytes)
    _show(ways, nbytes, options.rounds)
    return 0


def _measure(way: Way, path: str, nbytes: int) -> None:
    _drop(path)
    before = resource.getrusage(resource.RUSAGE_SELF)
    since = time.monotonic()
    way.read(path, nbytes)
    way.seconds.append(time.monotonic() - since)
    after = resource.getrusage(resource.RUSAGE_SELF)
    way.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    way.cached_bytes.append(_cached_bytes(path))


def _show(ways: list[Way], nbytes: int, rounds: int) -> None:
    rate = {way.name: nbytes / 1e9 / statistics.median(way.seconds) for way in ways}
    disk = max(rate[way.name] for way in ways if way.raw)
    table = Table(box=box.SIMPLE, title=f"{nbytes / 1e9:.2f} GB, median of {rounds}")
    for column in ("", "GB/s", "slowest", "fastest", "of the disk", "CPU s/GB", "page cache left, MiB"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for way in ways:
        table.add_row(
            way.name,
            f"{rate[way.name]:.2f}",
            *(f"{nbytes / 1e9 / seconds:.2f}" for seconds in (max(way.seconds), min(way.seconds))),
            f"{rate[way.name] / disk:.0%}",
            f"{statistics.median(way.cpu_s) / nbytes * 1e9:.3f}",
            f"{statistics.median(way.cached_bytes) / MIB:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _buffered(path: str, nbytes: int) -> None:
    buffer = memoryview(bytearray(8 * MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        for offset in range(0, nbytes, len(buffer)):
            os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)


def _mapped(path: str, nbytes: int) -> None:
    """As safetensors' safe_open does it: every page is faulted in where it is copied from."""
    buffer = memoryview(bytearray(8 * MIB))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        for offset in range(0, nbytes, len(buffer)):
            with view[offset : offset + len(buffer)] as part:
                buffer[: len(part)] = part


def _raw(block_bytes: int, threads: int, *, huge: bool = True) -> Callable[[str, int], None]:
    """Each thread reads every n-th block into memory of its own: nothing is given to anybody."""
    advice = mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE

    def read(path: str, nbytes: int) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

        def work(first: int) -> None:
            with mmap.mmap(-1, block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory, memoryview(memory) as buffer:
                memory.madvise(advice)
                for offset in range(first * block_bytes, nbytes, threads * block_bytes):
                    os.preadv(fd, [buffer], offset)

        try:
            workers = [threading.Thread(target=work, args=(first,)) for first in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            os.close(fd)

    return read


def _reader(
    block_bytes: int, blocks: int, threads: int, *, piece_bytes: int = 24 * MIB, direct: bool | None = None
) -> Callable[[str, int], None]:
    def read(path: str, nbytes: int) -> None:
        pieces = [Piece(None, path, offset, min(piece_bytes, nbytes - offset)) for offset in range(0, nbytes, piece_bytes)]
        with Reader(pieces, block_bytes=block_bytes, blocks=blocks, threads=threads, pin=False, direct=direct) as reader:
            for chunk in reader:
                chunk.release()

    return read


@contextmanager
def _file(where: Path, nbytes: int) -> Iterator[tuple[str, int]]:
    if where.is_file():
        yield str(where), min(nbytes, where.stat().st_size)
        return
    with tempfile.NamedTemporaryFile(dir=where, prefix="sparkd-bench-", suffix=".bin") as file:
        for written in range(0, nbytes, 64 * MIB):
            file.write(random.randbytes(min(64 * MIB, nbytes - written)))
        file.flush()
        os.fsync(file.fileno())
        yield file.name, nbytes


def _drop(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _cached_bytes(path: str) -> int:
    """mincore(2) tells the truth only to who may write the file; elsewhere everything counts as cached."""
    size = os.path.getsize(path)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    fd = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        known = libc.mincore(address, size, held) == 0
        libc.munmap(address, size)
    finally:
        os.close(fd)
    return sum(page & 1 for page in held) * mmap.PAGESIZE if known else 0


def _threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


if __name__ == "__main__":
    sys.exit(main())
