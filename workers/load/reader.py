"""Reads byte ranges of files ahead, by a few threads into one bounded ring, and yields them in order."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sparkd.errors import CheckpointError
from workers.files.direct_file import ALIGNMENT, DirectFile
from workers.load.ring import Ring

BLOCK_BYTES = 8 * 2**20
# Seconds for which its end waits for the threads; a thread that is in a longer read (a dead network file system) ends after that read.
_JOIN_S = 10.0
# Measured: every other part of 1 GiB (one of two ranks needs the rows of a row-parallel weight like that), on a disk that reads 1.5 GB/s
# with four threads and O_DIRECT. Parts of 8, 16, 32, 64 and 128 KiB take 5.0 to 6.8, 2.4 to 3.7, 1.3 to 2.6, 0.8 to 1.5 and 0.6 to 0.7 s if
# the gaps are skipped, and 0.6 to 1.1 s with them. A smaller limit would cost time; a larger one would read bytes that half of an NVFP4
# cache does not need.
GAP_BYTES = 32 * 1024
_AGAIN = "Download it again"


class ByteRange(NamedTuple):
    """One contiguous byte range to read. `key` is the caller's own; `offset` counts from the file's beginning."""

    key: Any
    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """bytes_read: bytes read from files so far, aligned.

    direct: every file so far was read with O_DIRECT.
    fallback_reason: a sentence for the log, where not.
    unpinned_reason: why the ring could not be pinned.
    waited_s: seconds in which the consumer waited for a block.
    """

    bytes_read: int
    direct: bool
    fallback_reason: str | None
    unpinned_reason: str | None
    waited_s: float


class Chunk:
    """A part of a byte range: `view` (uint8, 1-D, contiguous, in the ring) holds its bytes from `start` on; `last` ends the range.

    The view's address is congruent to its offset in the file modulo 4096, hence aligned to a dtype only where the file is. It may be
    read until `release`.
    """

    __slots__ = ("_held", "byte_range", "last", "start", "view")

    def __init__(self, byte_range: ByteRange, start: int, view: torch.Tensor, last: bool, held: _HeldBlock) -> None:
        self.byte_range = byte_range
        self.start = start
        self.view = view
        self.last = last
        self._held = held

    def release(self) -> None:
        """Release the chunk, once; its block is free once all its chunks are. From any thread, in any order."""
        self._held.reader._release(self._held)


class _HeldBlock:
    """A block that the consumer holds, and the number of its chunks that are not released yet."""

    __slots__ = ("chunks_left", "reader", "ring_block")

    def __init__(self, reader: Reader, ring_block: int, chunks_left: int) -> None:
        self.reader = reader
        self.ring_block = ring_block
        self.chunks_left = chunks_left


class Reader:
    """A context in which one iteration gives the chunks in the order of `ranges`; its end ends the threads and frees the ring.

    A range comes in one chunk if a block can hold it, with the bytes before it down to a multiple of the alignment; otherwise in several.
    An empty range comes as one empty chunk. Small ranges share a block, which is free again when all their chunks are released.

    The consumer may request the next chunk while it holds fewer than `blocks` blocks (`held_blocks`); with half of them or fewer the disk
    stays busy.

    pin: registers the ring with CUDA; stats.unpinned_reason says why where that fails.

    A file whose file system has no O_DIRECT is read through the page cache. Raises CheckpointError for a file that is missing, unreadable
    or too short: at once where the file system shows it, otherwise with the chunk.
    """

    def __init__(
        self, ranges: Sequence[ByteRange], *, block_bytes: int = BLOCK_BYTES, blocks: int = 8, threads: int = 4, pin: bool
    ) -> None:
        """block_bytes: a multiple of ALIGNMENT. blocks: at least two."""
        self.blocks = blocks
        self._files = {path: SourceFile(path) for path in {byte_range.path: None for byte_range in ranges}}
        self._plan: list[Block] = plan_blocks(ranges, self._files, block_bytes)
        self._block_bytes = block_bytes
        self._pin = pin
        self._ring: Ring | None = None
        self._threads = [threading.Thread(target=self._work, name=f"stream-read-{number}", daemon=True) for number in range(threads)]
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._filled = threading.Condition(self._lock)
        self._free = list(range(blocks))
        self._next_read = 0
        self._next_given = 0
        self._results: dict[int, int | BaseException] = {}
        self._ended = False
        self._bytes_read = 0
        self._waited_s = 0.0
        self._unpinned_reason: str | None = None

    def __enter__(self) -> Reader:
        self._ring = Ring(self._block_bytes, self.blocks, pin=self._pin)
        self._unpinned_reason = self._ring.unpinned_reason
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._ended = True
            self._results.clear()
            self._freed.notify_all()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # of a dead network file system, files stay open
            for file in self._files.values():
                file.close()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __iter__(self) -> Iterator[Chunk]:
        ring = self._ring
        if ring is None:
            raise RuntimeError("The reader is closed.")
        for index, block in enumerate(self._plan):
            ring_block = self._filled_block(index)
            held, base = _HeldBlock(self, ring_block, len(block.chunks)), ring_block * self._block_bytes
            for planned in block.chunks:
                begin = base + planned.at
                yield Chunk(planned.byte_range, planned.start, ring.tensor()[begin : begin + planned.nbytes], planned.last, held)

    @property
    def held_blocks(self) -> int:
        """The number of blocks with chunks that the consumer holds or has not taken yet."""
        with self._lock:
            return self.blocks - len(self._free) - (self._next_read - self._next_given)

    @property
    def stats(self) -> ReaderStats:
        reasons = [file.fallback_reason for file in self._files.values() if file.fallback_reason]
        more = f" So are {len(reasons) - 1} more files." if len(reasons) > 1 else ""
        with self._lock:
            return ReaderStats(
                bytes_read=self._bytes_read,
                direct=not reasons,
                fallback_reason=reasons[0] + more if reasons else None,
                unpinned_reason=self._unpinned_reason,
                waited_s=self._waited_s,
            )

    def _filled_block(self, index: int) -> int:
        """Wait for a block of the plan. Returns its block of the ring; raises the error of its reads."""
        with self._lock:
            since = time.monotonic()
            self._filled.wait_for(lambda: index in self._results)
            self._waited_s += time.monotonic() - since
            result = self._results.pop(index)
            if isinstance(result, BaseException):
                raise result
            self._next_given += 1
            return result

    def _release(self, held: _HeldBlock) -> None:
        with self._lock:
            held.chunks_left -= 1
            if held.chunks_left == 0:
                self._free.append(held.ring_block)
                self._freed.notify()

    def _work(self) -> None:
        """The loop of one thread. It takes the next block and a free part of the ring together, so that earlier blocks are always ahead."""
        while (task := self._take()) is not None:
            index, ring_block = task
            result: int | BaseException = ring_block
            try:
                self._fill(index, ring_block)
            except BaseException as raised:  # noqa: BLE001 - raised again where its chunk is due
                traceback.clear_frames(raised.__traceback__)  # they hold views, which would keep a closed ring's memory
                result = raised
            with self._lock:
                if isinstance(result, BaseException):
                    self._ended = True
                    self._freed.notify_all()
                self._results[index] = result
                self._filled.notify()

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            self._freed.wait_for(lambda: self._nothing_left() or bool(self._free))
            if self._nothing_left():
                return None
            index = self._next_read
            self._next_read += 1
            if self._next_read == len(self._plan):
                self._freed.notify_all()
            return index, self._free.pop()

    def _nothing_left(self) -> bool:
        return self._ended or self._next_read == len(self._plan)

    def _fill(self, index: int, ring_block: int) -> None:
        ring = self._ring
        if ring is None:
            return
        memory = ring.memory(ring_block)
        for read in self._plan[index].reads:
            count = read.file.read(memory[read.at : read.at + read.length], read.offset, read.wanted)
            with self._lock:
                self._bytes_read += count


class PlannedChunk(NamedTuple):
    """A chunk before it is read: the range's bytes from `start` on will be at the block's byte `at`."""

    byte_range: ByteRange
    start: int
    at: int
    nbytes: int
    last: bool


@dataclass(slots=True)
class Read:
    """One read from the file's byte `offset` to the block's byte `at`. It is complete after `wanted` bytes; the block has `room` bytes."""

    file: SourceFile
    offset: int
    at: int
    room: int
    wanted: int = 0

    @property
    def length(self) -> int:
        """The bytes to request from the file: a multiple of ALIGNMENT, which may exceed the file's end."""
        return -(-self.wanted // ALIGNMENT) * ALIGNMENT


class Block(NamedTuple):
    """The reads that fill one block of the ring, and the chunks of ranges in it."""

    reads: list[Read]
    chunks: list[PlannedChunk]


def plan_blocks(ranges: Sequence[ByteRange], files: Mapping[str, SourceFile], block_bytes: int) -> list[Block]:
    """The blocks for these ranges, in their order. A range that fits a block is never cut.

    A range that begins at most GAP_BYTES after the one before joins its read; any other range gets a separate read, in the rest of the
    block where that suffices. Raises CheckpointError for a range that ends beyond its file.
    """
    blocks: list[Block] = []
    read: Read | None = None
    for byte_range in ranges:
        file = files[byte_range.path]
        position, end = byte_range.offset, byte_range.offset + byte_range.nbytes
        if end > file.size_bytes:
            raise CheckpointError(f"the file ends at byte {file.size_bytes}, before byte {end}", file=file.path, cure=_AGAIN)
        if position == end:
            if not blocks:
                blocks.append(Block([], []))
            blocks[-1].chunks.append(PlannedChunk(byte_range, 0, 0, 0, True))
            continue
        whole = end - position // ALIGNMENT * ALIGNMENT <= block_bytes
        while position < end:
            if read is None or not _takes(read, file, position, end if whole else position + 1):
                read = _next_read(blocks, read, file, position, end, block_bytes)
            stop = min(end, read.offset + read.room)
            read.wanted = max(read.wanted, stop - read.offset)
            blocks[-1].chunks.append(
                PlannedChunk(byte_range, position - byte_range.offset, read.at + position - read.offset, stop - position, stop == end)
            )
            position = stop
    return blocks


def _takes(read: Read, file: SourceFile, position: int, end: int) -> bool:
    """Whether the bytes from `position` to `end` can be part of `read`."""
    return read.file is file and read.offset <= position <= read.offset + read.wanted + GAP_BYTES and end <= read.offset + read.room


def _next_read(blocks: list[Block], before: Read | None, file: SourceFile, position: int, end: int, block_bytes: int) -> Read:
    """A read that begins at `position`: after the last read where the block has room for all of it, else in a new block."""
    offset = position // ALIGNMENT * ALIGNMENT
    at = 0 if before is None else -(-(before.at + before.length) // ALIGNMENT) * ALIGNMENT
    if before is None or at + end - offset > block_bytes:
        blocks.append(Block([], []))
        at = 0
    read = Read(file, offset, at, block_bytes - at)
    blocks[-1].reads.append(read)
    return read


class SourceFile:
    """A file of a checkpoint, whose errors are CheckpointErrors. Safe for several threads.

    Raises CheckpointError when the file is not there or is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            facts = os.stat(path)
        except OSError as error:
            raise _unreadable(path, "the file cannot be read", error) from error
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError("this is not a regular file", file=path, cure="Name a checkpoint whose shards are files")
        self.size_bytes = facts.st_size
        self._file = DirectFile(path)

    @property
    def fallback_reason(self) -> str | None:
        reason = self._file.fallback_reason
        return reason and f"{self.path} is read through the page cache, which is dropped behind every block: {reason}."

    def read(self, buffer: memoryview, offset: int, wanted: int) -> int:
        """Fill `buffer` with the file's bytes from `offset` on, at least `wanted`; returns the number read. Raises CheckpointError."""
        try:
            count = self._file.read(buffer, offset, wanted)
        except OSError as error:
            traceback.clear_frames(error.__traceback__)  # they hold views of `buffer`
            raise _unreadable(self.path, f"{len(buffer)} bytes at {offset} cannot be read", error) from error
        if count < wanted:
            problem = f"the file ends at byte {offset + count}, before byte {offset + wanted}"
            raise CheckpointError(problem, file=self.path, cure=_AGAIN)
        return count

    def close(self) -> None:
        """Close the file. No thread may be reading."""
        self._file.close()


def _unreadable(path: str, what: str, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOENT:
        return CheckpointError("the file is missing", file=path, cure=_AGAIN)
    if error.errno == errno.EACCES:
        return CheckpointError(f"{what}: permission denied", file=path, cure="Make it readable for the user that sparkd runs as")
    cure = "Look for disk errors in the kernel's log, then download the file again" if error.errno == errno.EIO else None
    return CheckpointError(f"{what}: {error.strerror or error}", file=path, cure=cure)
