"""What a process costs: its memory every 10 ms, seen from another process, bytes read, page cache of its files. Never touches a device.

    python -m tests.bench.sampling PID      one JSON line of peaks when its standard input ends

Standard library only. The sampler is a process because a thread would wait for the interpreter lock exactly while memory peaks.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Self

INTERVAL_S = 0.01
PAGE_BYTES = mmap.PAGESIZE
BLOCK_BYTES = 8 * 2**20
DISK_THREADS, DISK_S = 4, 20.0
_FIELDS = {b"RssAnon": "anon", b"RssFile": "mapped", b"RssShmem": "shared"}
_libc = ctypes.CDLL(None, use_errno=True)


def resident(pid: int | str = "self") -> dict[str, int]:
    """Bytes: anon, mapped (file pages), shared (pinned buffers of CUDA are there), sum. {} when the process is gone."""
    found: dict[str, int] = {}
    with suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            key, _, value = line.partition(b":")
            if key in _FIELDS:
                found[_FIELDS[key]] = int(value.split()[0]) * 1024
    return {**found, "sum": sum(found.values())} if found else {}


def settled() -> dict[str, int]:
    """`resident` of this process after garbage went and free heap pages went back."""
    gc.collect()
    _libc.malloc_trim(0)
    return resident()


class Sampler:
    """The largest `resident` values of this process while the context is open, in `peaks` afterwards; {} where no sampler could run."""

    peaks: dict[str, int]

    def __enter__(self) -> Self:
        command = [sys.executable, "-S", "-E", str(Path(__file__)), str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._process.stdout is None or self._process.stdin is None:
            raise RuntimeError("The sampler has no pipes.")
        self._process.stdout.readline()
        return self

    def __exit__(self, *_error: object) -> None:
        out, _ = self._process.communicate(timeout=30)
        self.peaks = json.loads(out) if out.strip() else {}


def read_bytes() -> int | None:
    """What this process has fetched from storage so far, page faults and O_DIRECT included. None where the kernel does not say."""
    with suppress(OSError, ValueError), open("/proc/self/io", encoding="ascii") as file:
        for line in file:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return None


def files_cached_bytes(paths: Iterable[str | os.PathLike[str]]) -> int:
    """How much of these files is in the page cache (mincore(2))."""
    pages = 0
    for path in paths:
        size = os.path.getsize(path)
        if not size:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            there = (ctypes.c_ubyte * -(-size // PAGE_BYTES))()
            view = ctypes.c_char.from_buffer(mapped)
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), there)
            del view
            if failed:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
            pages += bytes(there).count(1)
    return pages * PAGE_BYTES


def forget(paths: Iterable[str | os.PathLike[str]]) -> int:
    """Puts the files out of the page cache; bytes that stayed there. Only these files: libraries stay warm, so that they move no figure."""
    paths = list(paths)
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    left = files_cached_bytes(paths)
    if left and os.geteuid() == 0:
        with suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")
        left = files_cached_bytes(paths)
    return left


def _blocks(paths: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str, int]]:
    """Each whole block of the files: its path, and where it begins."""
    for path in paths:
        for at in range(0, os.path.getsize(path) // BLOCK_BYTES * BLOCK_BYTES, BLOCK_BYTES):
            yield os.fspath(path), at


def direct_rate(paths: Iterable[str | os.PathLike[str]]) -> float:
    """Bytes/s of O_DIRECT reads of whole 8 MiB blocks in the order of the files, DISK_THREADS at a time. 0 where O_DIRECT is refused.

    Into huge pages where the kernel gives them: a disk takes a block that lies in 2048 places of memory in many small requests.
    """
    blocks = _blocks(paths)
    lock = threading.Lock()
    started = perf_counter()

    def work() -> int:
        done = 0
        opened: dict[str, int] = {}
        buffer = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        try:
            while perf_counter() - started < DISK_S:
                with lock:
                    path, at = next(blocks, ("", 0))
                if not path:
                    break
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY | os.O_DIRECT)
                done += os.preadv(opened[path], [buffer], at)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return done

    try:
        with ThreadPoolExecutor(DISK_THREADS) as pool:
            total = sum(pool.map(lambda _index: work(), range(DISK_THREADS)))
    except OSError:
        return 0.0
    return total / (perf_counter() - started)


def main() -> None:
    pid = sys.argv[1]
    print(flush=True)
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    peaks: dict[str, int] = {}
    while not ended.wait(INTERVAL_S):
        now = resident(pid)
        if not now:
            break
        peaks = {key: max(value, peaks.get(key, 0)) for key, value in now.items()}
    print(json.dumps(peaks), flush=True)


if __name__ == "__main__":
    main()
