"""Reads byte ranges of files ahead, by a few threads into one bounded ring, and yields them in order. Never copies or interprets a byte."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.files.direct_file import ALIGNMENT
from workers.load.block_plan import Block, Piece, Span, plan_blocks
from workers.load.ring import Ring
from workers.load.source_file import SourceFile

__all__ = ["Chunk", "Piece", "Reader", "ReaderClosed", "ReaderStats", "RingExhausted"]

MIB = 2**20
# Seconds that `close` waits for the threads; a thread that is in a longer read (a dead network file system) ends after that read.
_JOIN_S = 10.0
# Measured: every other part of 1 GiB (one of two ranks needs the rows of a row-parallel weight like that), on a disk that reads 1.5 GB/s
# with four threads and O_DIRECT. Parts of 8, 16, 32, 64 and 128 KiB take 5.0 to 6.8, 2.4 to 3.7, 1.3 to 2.6, 0.8 to 1.5 and 0.6 to 0.7 s if
# the gaps are skipped, and 0.6 to 1.1 s with them. A smaller limit would cost time; a larger one would read bytes that half of an NVFP4
# cache does not need.
GAP_BYTES = 32 * 1024


class ReaderClosed(RuntimeError):
    """The reader was closed before or during the request for the next chunk."""


class RingExhausted(RuntimeError):
    """The consumer requested the next chunk while it holds every block, so that none can become free."""


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """bytes_read: bytes read from files so far, aligned; bytes_planned: the same at the end; bytes_wanted: the sum of the pieces.

    direct: every file so far was read with O_DIRECT; fallback_reason: a sentence for the log, where not. unpinned_reason: why the ring
    could not be pinned.
    seconds: from the start to the last block, or until now; waited_s: the part of it in which the consumer waited for a block.
    """

    bytes_read: int
    bytes_planned: int
    bytes_wanted: int
    direct: bool
    fallback_reason: str | None
    unpinned_reason: str | None
    seconds: float
    waited_s: float


class Chunk:
    """A part of a piece: `view` (uint8, 1-D, contiguous, in the ring) holds the piece's bytes from `start` on; `last` ends the piece.

    The view's address is congruent to its offset in the file modulo 4096, hence aligned to a dtype only where the file is. It may be
    read until `release`.
    """

    __slots__ = ("_held", "last", "piece", "start", "view")

    def __init__(self, piece: Piece, start: int, view: torch.Tensor, last: bool, held: _Held) -> None:
        self.piece = piece
        self.start = start
        self.view = view
        self.last = last
        self._held: _Held | None = held

    def release(self) -> None:
        """Release the chunk; its block is free once all its chunks are. From any thread, in any order; a second call has no effect."""
        held = self._held
        if held is not None:
            held.reader._release(self, held)


class _Held:
    """A block that the consumer holds, and the number of its chunks that are not released yet."""

    __slots__ = ("left", "reader", "slot")

    def __init__(self, reader: Reader, slot: int, left: int) -> None:
        self.reader = reader
        self.slot = slot
        self.left = left


class Reader:
    """An iterator of chunks, in the order of `pieces`, and a context manager that ends the threads and frees the ring.

    A piece comes in one chunk if a block can hold it, with the bytes before it down to a multiple of the alignment; otherwise in several.
    An empty piece comes as one empty chunk. Small pieces share a block, which is free again when all their chunks are released.

    The consumer may request the next chunk while it holds fewer than `blocks` blocks (`held_blocks`); with half of them or fewer the disk
    stays busy. If it holds all of them it would wait for itself: RingExhausted.

    pin: registers the ring with CUDA; stats.unpinned_reason says why where that fails. direct: None falls back to buffered reads, file by
    file, where the file system has no O_DIRECT; True raises there; False always reads buffered.

    Raises CheckpointError for a file that is missing, unreadable or too short: at once where the file system shows it, otherwise with the
    chunk.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        *,
        block_bytes: int = 8 * MIB,
        blocks: int = 8,
        threads: int = 4,
        pin: bool,
        direct: bool | None = None,
    ) -> None:
        if block_bytes <= 0 or block_bytes % ALIGNMENT or blocks < 2 or threads < 1:
            raise ValueError(
                f"A ring needs two blocks of a multiple of {ALIGNMENT} bytes and one thread: {blocks} of {block_bytes}, {threads} threads."
            )
        self.blocks = blocks
        self.ring_bytes = block_bytes * blocks
        self._files = {path: SourceFile(path, direct=direct) for path in {piece.path: None for piece in pieces}}
        self._plan: list[Block] = plan_blocks(pieces, self._files, block_bytes, GAP_BYTES)
        self._bytes_wanted = sum(piece.nbytes for piece in pieces)
        self._bytes_planned = 0
        for block in self._plan:
            for read in block.reads:
                read.file.expect(1)
                self._bytes_planned += min(read.length, read.file.size_bytes - read.offset)
        self._block_bytes = block_bytes
        self._pin = pin
        self._ring: Ring | None = None
        self._tensor: torch.Tensor | None = None
        self._threads = [threading.Thread(target=self._work, name=f"stream-read-{number}", daemon=True) for number in range(threads)]
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._filled = threading.Condition(self._lock)
        self._free = list(range(blocks))
        self._next_read = 0
        self._next_given = 0
        self._results: dict[int, int | BaseException] = {}
        self._working = 0
        self._failed = False
        self._closed = False
        self._bytes_read = 0
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self._waited_s = 0.0
        self._unpinned_reason: str | None = None
        self._spans: Iterator[Span] = iter(())
        self._held: _Held | None = None
        self._base = 0

    def __enter__(self) -> Reader:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Reader:
        self._start()
        return self

    def __next__(self) -> Chunk:
        if self._closed:
            raise ReaderClosed("The reader is closed.")
        span = next(self._spans, None)
        if span is None:
            self._next_block()
            span = next(self._spans)
        held, tensor = self._held, self._tensor
        if held is None or tensor is None:
            raise ReaderClosed("The reader is closed.")
        begin = self._base + span.at
        return Chunk(span.piece, span.start, tensor[begin : begin + span.nbytes], span.last, held)

    @property
    def held_blocks(self) -> int:
        """The number of blocks with chunks that the consumer holds or has not taken yet."""
        with self._lock:
            return self.blocks - len(self._free) - (self._next_read - self._next_given)

    @property
    def stats(self) -> ReaderStats:
        reasons = [file.fallback_reason for file in self._files.values() if file.fallback_reason]
        more = f" So are {len(reasons) - 1} more files." if len(reasons) > 1 else ""
        now = time.monotonic()
        with self._lock:
            return ReaderStats(
                bytes_read=self._bytes_read,
                bytes_planned=self._bytes_planned,
                bytes_wanted=self._bytes_wanted,
                direct=not reasons,
                fallback_reason=reasons[0] + more if reasons else None,
                unpinned_reason=self._unpinned_reason,
                seconds=(self._ended_s or now) - self._started_s if self._started_s is not None else 0.0,
                waited_s=self._waited_s,
            )

    def close(self) -> None:
        """End the reads, join the threads and free the ring. From any thread; a second call has no effect."""
        with self._lock:
            self._closed = True
            self._ended_s = self._ended_s or time.monotonic()
            ring, self._ring = self._ring, None
            self._tensor = None
            self._held = None
            self._results.clear()
            self._freed.notify_all()
            self._filled.notify_all()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        if ring is not None:
            ring.close()

    def _start(self) -> None:
        if self._closed:
            raise ReaderClosed("The reader is closed.")
        if self._ring is not None:
            return
        self._ring = Ring(self._block_bytes, self.blocks, pin=self._pin)
        self._tensor = self._ring.tensor()
        self._unpinned_reason = self._ring.unpinned_reason
        self._started_s = time.monotonic()
        for thread in self._threads:
            with self._lock:
                self._working += 1
            try:
                thread.start()
            except BaseException:
                self._leave()
                self.close()
                raise

    def _next_block(self) -> None:
        """Wait for the next block. Raises StopIteration after the last."""
        with self._lock:
            index = self._next_given
            if index == len(self._plan):
                self._ended_s = self._ended_s or time.monotonic()
                raise StopIteration
            if index not in self._results:
                since = time.monotonic()
                self._filled.wait_for(lambda: self._closed or index in self._results or self._waits_for_itself(index))
                self._waited_s += time.monotonic() - since
            if self._closed:
                raise ReaderClosed("The reader was closed while the next chunk was awaited.")
            if index not in self._results:
                raise RingExhausted(
                    f"All {self.blocks} blocks of the ring are held by unreleased chunks: release some before asking for the next."
                )
            result = self._results[index]
            if isinstance(result, BaseException):
                raise result
            del self._results[index]
            self._next_given += 1
            block = self._plan[index]
            self._held = _Held(self, result, len(block.spans))
            self._base = result * self._block_bytes
            self._spans = iter(block.spans)

    def _waits_for_itself(self, index: int) -> bool:
        return self._next_read == index and not self._free

    def _release(self, chunk: Chunk, held: _Held) -> None:
        with self._lock:
            if chunk._held is None:
                return
            chunk._held = None
            held.left -= 1
            if held.left == 0:
                self._free.append(held.slot)
                self._freed.notify()

    def _work(self) -> None:
        """The loop of one thread. It takes the next block and a free part of the ring together, so that earlier blocks are always ahead."""
        try:
            while (task := self._take()) is not None:
                index, slot = task
                try:
                    result: int | BaseException = slot if self._fill(index, slot) else ReaderClosed("The reader is closed.")
                except BaseException as raised:  # noqa: BLE001 - raised again where its chunk is due
                    traceback.clear_frames(raised.__traceback__)  # they hold views, which would keep a closed ring's memory
                    result = raised
                with self._lock:
                    if isinstance(result, BaseException):
                        self._failed = True
                        self._freed.notify_all()
                    self._results[index] = result
                    self._filled.notify()
        finally:
            self._leave()

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
        return self._closed or self._failed or self._next_read == len(self._plan)

    def _fill(self, index: int, slot: int) -> bool:
        ring = self._ring
        if ring is None:
            return False
        memory = ring.memory(slot)
        for read in self._plan[index].reads:
            if self._closed:
                return False
            count = read.file.read(memory[read.at : read.at + read.length], read.offset, read.wanted)
            read.file.finished()
            with self._lock:
                self._bytes_read += count
        return True

    def _leave(self) -> None:
        """End one thread. The last one closes the open files, even where `close` has not waited for it."""
        with self._lock:
            self._working -= 1
            last = self._working == 0
        if last:
            for file in self._files.values():
                file.close()
