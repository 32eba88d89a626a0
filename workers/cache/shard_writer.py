"""Writes tensors to their places in a laid-out checkpoint, from threads and through one bounded ring. `put` waits for room in it.

The ring gathers bytes in blocks with the file's layout, so that a full block bypasses the page cache in one write, even with small tensors;
a block that has to make room before it is full is written through the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sparkd.errors import CheckpointError
from workers.cache.layout import ShardLayout, Slot
from workers.files.direct_file import DirectFile
from workers.load.ring import Ring

MIB = 1 << 20
LOOK_S = 1.0  # between two reports of one wait


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a shard that is being gathered. at: the number of its block in the ring; ranges: the [start, stop) that have arrived."""

    shard: int
    number: int
    at: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    filled: int = 0
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None

    def add(self, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], stop)
        else:
            self.ranges.append((start, stop))
        self.filled += stop - start


@dataclass(frozen=True, slots=True)
class Staging:
    """The writer's memory. staging_bytes: the ring, pinned if `pin`, in blocks of block_bytes. threads: the number of writing threads,
    because several writes in flight keep the disk busy."""

    staging_bytes: int = 16 * MIB
    block_bytes: int = MIB
    pin: bool = False
    threads: int = 1


class ShardWriter:
    """Makes the files of `shards` in `folder` at once, so that a full disk shows before the first byte. One thread calls its methods.

    waits: called about once a second while `put` waits, with the seconds that it has waited so far. bytes_written: bytes in the files;
    waited_s: of all calls of `put`. The constructor raises OSError, `put` and `settle` the error that ended the writing.
    """

    def __init__(
        self,
        folder: str,
        shards: Sequence[ShardLayout],
        staging: Staging | None = None,
        waits: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        staging = staging or Staging()
        self.slots = {slot.name: slot for shard in shards for slot in shard.slots}
        self.bytes_total = sum(shard.size_bytes for shard in shards)
        self.bytes_written = 0
        self.waited_s = 0.0
        self._shards = shards
        self._waits = waits
        self._block_bytes = staging.block_bytes
        self._left = {name: slot.nbytes for name, slot in self.slots.items()}
        blocks = staging.staging_bytes // staging.block_bytes
        self._ring = Ring(staging.block_bytes, blocks, pin=staging.pin)
        self._changed = threading.Condition()
        self._free = list(range(blocks))
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()  # the one that was filled last is the last
        self._jobs: deque[_Block] = deque()
        self._busy = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._files: list[DirectFile] = []
        self._threads: list[threading.Thread] = []
        try:
            for shard in shards:
                file = DirectFile(os.path.join(folder, shard.name), size_bytes=shard.size_bytes)
                self._files.append(file)
                file.reserve()
                header = mmap.mmap(-1, len(shard.header))  # aligned, as a write past the page cache needs it
                header.write(shard.header)
                file.write(0, memoryview(header))
                self.bytes_written += len(shard.header)
        except BaseException:
            self.close()
            raise
        for number in range(staging.threads):
            self._threads.append(threading.Thread(target=self._work, name=f"stream-write-{number}", daemon=True))
            self._threads[-1].start()

    def put(self, slots: Sequence[Slot], view: torch.Tensor, start: int = 0) -> None:
        """Take the bytes (uint8, 1-D) of tensors that are adjacent in a file, or, from byte `start` on, a part of one.

        They may change as soon as this returns, on a GPU in stream order.
        """
        shard, begin = slots[0].shard, slots[0].offset + start
        at, stop = begin, begin + view.numel()
        while at < stop:
            number = at // self._block_bytes
            low, end = number * self._block_bytes, min(stop, (number + 1) * self._block_bytes)
            block = self._open(shard, number)
            self._copy(block, at - low, view[at - begin : end - begin])
            with self._changed:
                block.add(at - low, end - low)
                if block.filled == self._bytes_of(shard, number):
                    self._submit(block)
            at = end
        for slot in slots:
            self._left[slot.name] -= view.numel() if len(slots) == 1 else slot.nbytes

    def flush(self) -> None:
        """Wait until all taken bytes are in the files. Raises the error that ended the writing."""
        with self._changed:
            for block in list(self._blocks.values()):
                self._submit(block)
            self._changed.wait_for(lambda: self._error is not None or not self._busy)
            self._raise()

    def settle(self) -> None:
        """Sync the files to the disk and end the threads. Raises CheckpointError for a tensor that has not come whole."""
        self.flush()
        if (missing := next((name for name, left in self._left.items() if left), None)) is not None:
            raise CheckpointError("it was never handed over", tensor=missing)
        for file in self._files:
            file.settle()
        self.close()

    def close(self) -> None:
        """End the threads and free the memory; bytes not written by now are lost. A second call has no effect."""
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files:
            file.close()
        self._ring.close()
        self._error = None  # its traceback holds the ring's memory and the tensor that was taken

    def _open(self, shard: int, number: int) -> _Block:
        """The block to gather into, after a wait for a free one."""
        with self._changed:
            self._raise()
            if (block := self._blocks.get((shard, number))) is None:
                if not self._free:
                    self._wait_for_room()
                block = self._blocks[(shard, number)] = _Block(shard, number, self._free.pop())
            self._blocks.move_to_end((shard, number))
            return block

    def _wait_for_room(self) -> None:
        before_s, began_s = self.waited_s, time.monotonic()
        while not self._free:
            if not self._busy:  # all blocks wait for tensors that are still to come
                self._submit(next(iter(self._blocks.values())))
            self._changed.wait(LOOK_S)
            self._raise()
            self.waited_s = before_s + time.monotonic() - began_s
            self._waits(self.waited_s)

    def _bytes_of(self, shard: int, number: int) -> int:
        """The bytes of tensors in this block of the file."""
        layout, low = self._shards[shard], number * self._block_bytes
        return min(low + self._block_bytes, layout.size_bytes) - max(low, len(layout.header))

    def _copy(self, block: _Block, at: int, view: torch.Tensor) -> None:
        """Copy into the ring; from a GPU in stream order, without waiting."""
        at += block.at * self._block_bytes
        target = self._ring.tensor()[at : at + view.numel()]
        if view.is_cuda:
            target.copy_(view, non_blocking=True)
            block.stream = torch.cuda.current_stream(view.device)
        else:
            # torch would use every core and wait for the slowest, although one core saturates the memory bandwidth of one stream.
            ctypes.memmove(target.data_ptr(), view.data_ptr(), view.numel())

    def _submit(self, block: _Block) -> None:
        """Queue a block for the threads."""
        del self._blocks[(block.shard, block.number)]
        if block.stream is not None:
            block.event = block.stream.record_event()
        self._busy += 1
        self._jobs.append(block)
        self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """A thread's work. The first error ends the writing."""
        try:
            while (block := self._next()) is not None:
                self._write(block)
                with self._changed:
                    self.bytes_written += block.filled
                    self._free.append(block.at)
                    self._busy -= 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `put` and `settle` raise it
            with self._changed:
                self._error = self._error or error
                self._jobs.clear()
                self._changed.notify_all()

    def _next(self) -> _Block | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping or self._error is not None)
            return self._jobs.popleft() if self._jobs else None

    def _write(self, block: _Block) -> None:
        if block.event is not None:
            block.event.synchronize()
        memory, low = self._ring.memory(block.at), block.number * self._block_bytes
        for start, stop in [(0, self._block_bytes)] if block.filled == self._block_bytes else block.ranges:
            self._files[block.shard].write(low + start, memory[start:stop])
