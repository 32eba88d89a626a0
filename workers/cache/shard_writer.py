"""Writes tensors to their places in a laid-out checkpoint, from a thread and through one bounded ring. Never makes its caller wait.

The ring gathers bytes in blocks with the file's layout, so that a full block bypasses the page cache in one write, even with small tensors;
an incomplete block is written through the page cache. The writer refuses a tensor for which the ring has no room, and `gaps` lists the
missing bytes later.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from workers.cache.layout import ShardLayout, Slot
from workers.files.direct_target import TargetFile
from workers.load.ring import Ring

MIB = 1 << 20


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a shard that is being gathered. at: the number of its block in the ring; ranges: the [start, stop) that have arrived."""

    shard: int
    number: int
    at: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    filled: int = 0
    event: torch.cuda.Event | None = None
    stream: torch.cuda.Stream | None = None


@dataclass(slots=True)
class _Held:
    """A copy of a tensor of more than half the ring."""

    slot: Slot
    start: int
    copy: torch.Tensor
    event: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class Staging:
    """The writer's memory. staging_bytes: the ring, pinned if `pin`, in blocks of block_bytes. hold_bytes: limit for extra copies (on the
    tensor's own device) of single tensors of more than half the ring. threads: the number of writing threads."""

    staging_bytes: int = 16 * MIB
    block_bytes: int = MIB
    hold_bytes: int = 0
    pin: bool = False
    threads: int = 1


class ShardWriter:
    """One thread at a time calls `put`. The files appear in the folder that `prepare` returns; the writing thread calls it first.

    ended: the writing thread calls it with the error that ended the writing (a full disk), once the files are closed; not without one.
    bytes_written: bytes in the files so far.
    """

    def __init__(
        self,
        shards: Sequence[ShardLayout],
        prepare: Callable[[], str],
        ended: Callable[[BaseException], None] = lambda _error: None,
        staging: Staging | None = None,
        *,
        direct: bool = True,
    ) -> None:
        staging = staging or Staging()
        self.slots = {slot.name: slot for shard in shards for slot in shard.slots}
        self.bytes_total = sum(shard.size_bytes for shard in shards)
        self.bytes_written = 0
        self.fallback_reason: str | None = None
        self._shards = shards
        self._prepare = prepare
        self._ended = ended
        self._direct = direct
        self._block_bytes = staging.block_bytes
        self._staging_bytes = staging.staging_bytes
        self._hold_bytes = staging.hold_bytes
        # The thread has one block for its own copies.
        blocks = staging.staging_bytes // staging.block_bytes
        self._ring = Ring(staging.block_bytes, blocks + 1, pin=staging.pin)
        self._changed = threading.Condition()
        self._free = list(range(1, blocks + 1))
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()
        self._left: dict[tuple[int, int], int] = {}
        self._jobs: deque[_Block] = deque()
        self._large: deque[_Held] = deque()
        self._awaited: list[_Block] = []  # a thread waits for the copies of these blocks from the device
        self._busy = 0
        self._held = 0
        self._taken: dict[str, list[tuple[int, int]]] = {}
        self._error: BaseException | None = None
        self._files: list[TargetFile] = []
        self._stopping = False
        self._threads = [threading.Thread(target=self._work, name="stream-write-0", daemon=True)]
        # The other threads wait until the first has made the files. Several writes in flight keep the disk busy, as several reads do.
        self._ready = False
        self._threads += [threading.Thread(target=self._help, name=f"stream-write-{n}", daemon=True) for n in range(1, staging.threads)]
        for thread in self._threads:
            thread.start()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the writing; `put` refuses every tensor afterwards."""
        return self._error

    def put(self, slot: Slot, start: int, view: torch.Tensor, *, wait: bool = False, behind: Sequence[Slot] = ()) -> bool:
        """Take the bytes of a tensor from `start` on (uint8, 1-D); they may change as soon as this returns, or, on a GPU, in stream order.

        behind: the next tensors in the file, whose bytes the view has too. wait: wait for room. Returns False for a refusal: there is no
        room, or, with `wait`, the writing has ended.
        """
        size = view.numel()
        begin = slot.offset + start
        if not wait and not self._has_room(slot, begin, size):
            return not size or (size > self._staging_bytes // 2 and self._hold(slot, start, view, behind))
        for number, low, high in self._spans(begin, size):
            block = self._open(slot.shard, number)
            if block is None:
                return False
            at = number * self._block_bytes
            base = block.at * self._block_bytes - at
            self._copy(base + low, view[low - begin : high - begin])
            with self._changed:
                if self._error is not None:
                    return False
                if view.is_cuda:
                    block.stream = torch.cuda.current_stream(view.device)
                self._fill(block, low - at, high - at)
        self._take(slot, start, size, behind)
        return True

    def flush(self) -> None:
        """Wait until all taken bytes are in the files. Raises the error that ended the writing."""
        with self._changed:
            for block in list(self._blocks.values()):
                self._submit(block)
            self._changed.wait_for(lambda: self._error is not None or not self._busy)
        self._raise()

    def leave_device(self) -> None:
        """Wait for the copies from the device. Afterwards the threads do not use it, and `put` accepts host memory only.

        While an engine captures CUDA graphs, no other thread may wait for its device: that would break the capture.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._held)
            streams = {block.stream for block in (*self._blocks.values(), *self._jobs, *self._awaited) if block.stream is not None}
            for stream in streams:
                stream.synchronize()
            for block in (*self._blocks.values(), *self._jobs):
                block.event = block.stream = None
            self._changed.wait_for(lambda: self._error is not None or not self._awaited)
        self._ring.unpin()

    def gaps(self) -> Iterator[tuple[Slot, int, int]]:
        """(slot, start, stop) of the bytes that were not taken, in the order of the files."""
        for slot in self.slots.values():
            at = 0
            for start, stop in [*sorted(self._taken.get(slot.name, ())), (slot.nbytes, slot.nbytes)]:
                if start > at:
                    yield slot, at, start
                at = max(at, stop)

    def settle(self) -> None:
        """Sync the files to the disk and end the threads. Raises the error that ended the writing, or OSError."""
        self.flush()
        self._stop()
        for file in self._files:
            file.settle()

    def close(self) -> None:
        """End the threads and free the memory; bytes not written by now are lost. A second call has no effect."""
        with self._changed:
            self._error = self._error or RuntimeError("The writer is closed.")
            self._jobs.clear()
            self._large.clear()
            self._blocks.clear()
            self._changed.notify_all()
        self._stop()
        for file in self._files:
            file.close()
        self._ring.close()

    def _spans(self, begin: int, size: int) -> Iterator[tuple[int, int, int]]:
        """(block number, first byte, end byte) of each block of the file that these bytes touch."""
        at = begin
        while at < begin + size:
            number = at // self._block_bytes
            stop = min(begin + size, (number + 1) * self._block_bytes)
            yield number, at, stop
            at = stop

    def _has_room(self, slot: Slot, begin: int, size: int) -> bool:
        """Whether blocks are free for all these bytes now. Otherwise a block that waits for them in vain is written incomplete."""
        with self._changed:
            if self._error is not None:
                return False
            missing = sum((slot.shard, number) not in self._blocks for number, _, _ in self._spans(begin, size))
            if missing <= len(self._free):
                return True
            if size <= self._staging_bytes // 2 and (waiting := self._blocks.get((slot.shard, begin // self._block_bytes))) is not None:
                self._submit(waiting)
            elif not self._busy and self._blocks:
                self._submit(next(iter(self._blocks.values())))
            return False

    def _open(self, shard: int, number: int) -> _Block | None:
        """The block to gather into, after a wait for a free one. None where the writing has ended."""
        with self._changed:
            while self._error is None:
                block = self._blocks.get((shard, number))
                if block is not None:
                    self._blocks.move_to_end((shard, number))
                    return block
                if self._free:
                    block = self._blocks[(shard, number)] = _Block(shard, number, self._free.pop())
                    return block
                if not self._busy:
                    self._submit(next(iter(self._blocks.values())))
                self._changed.wait()
        return None

    def _fill(self, block: _Block, start: int, stop: int) -> None:
        if block.ranges and block.ranges[-1][1] == start:
            block.ranges[-1] = (block.ranges[-1][0], stop)
        else:
            block.ranges.append((start, stop))
        block.filled += stop - start
        if block.filled >= self._left_of(block.shard, block.number):
            self._submit(block)

    def _submit(self, block: _Block) -> None:
        """Queue a block for the threads."""
        key = (block.shard, block.number)
        if self._blocks.pop(key, None) is None:  # the writing ended meanwhile
            return
        self._left[key] = self._left_of(*key) - block.filled
        if block.stream is not None:
            block.event = block.stream.record_event()
        self._busy += 1
        self._jobs.append(block)
        self._changed.notify_all()

    def _left_of(self, shard: int, number: int) -> int:
        """Bytes of tensors in this part of the file that have not arrived yet."""
        left = self._left.get((shard, number))
        if left is not None:
            return left
        layout = self._shards[shard]
        low, high = number * self._block_bytes, (number + 1) * self._block_bytes
        return min(high, layout.size_bytes) - max(low, len(layout.header))

    def _hold(self, slot: Slot, start: int, view: torch.Tensor, behind: Sequence[Slot]) -> bool:
        """Keep a copy of a large tensor; the first thread writes it piece by piece."""
        size = view.numel()
        with self._changed:
            if self._error is not None or self._held + size > self._hold_bytes:
                return False
            self._held += size
            self._busy += 1
        event = None
        copy = view.clone()
        if view.is_cuda:
            event = torch.cuda.current_stream(view.device).record_event()
        with self._changed:
            self._large.append(_Held(slot, start, copy, event))
            self._changed.notify_all()
        self._take(slot, start, size, behind)
        return True

    def _copy(self, at: int, view: torch.Tensor) -> None:
        """Copy into the ring; from a GPU in stream order, without waiting."""
        target = self._ring.tensor()[at : at + view.numel()]
        if view.is_cuda:
            target.copy_(view, non_blocking=True)
        else:
            # torch would use every core and wait for the slowest, although one core saturates the memory bandwidth of one stream.
            ctypes.memmove(target.data_ptr(), view.data_ptr(), view.numel())

    def _take(self, slot: Slot, start: int, size: int, behind: Sequence[Slot]) -> None:
        self._taken.setdefault(slot.name, []).append((start, start + size - sum(later.nbytes for later in behind)))
        for later in behind:
            self._taken.setdefault(later.name, []).append((0, later.nbytes))

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # The threads

    def _work(self) -> None:
        try:
            folder = self._prepare()
            for shard in self._shards:
                file = TargetFile(os.path.join(folder, shard.name), shard.size_bytes, direct=self._direct)
                self._files.append(file)
                file.write(0, memoryview(shard.header))
                self.bytes_written += len(shard.header)
            with self._changed:
                self._ready = True
                self._changed.notify_all()
            while (job := self._next(large=True)) is not None:
                self._write_held(job) if isinstance(job, _Held) else self._write_block(job)
                self._finished()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._failed(error)

    def _help(self) -> None:
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._stopping or self._error is not None)
            while isinstance(job := self._next(large=False), _Block):
                self._write_block(job)
                self._finished()
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
            self._failed(error)

    def _next(self, *, large: bool) -> _Block | _Held | None:
        """The next job; None at the end. large: also those that need the thread's own block, which only the first thread has."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or (large and self._large) or self._stopping or self._error is not None)
            if large and self._large:
                return self._large.popleft()
            block = self._jobs.popleft() if self._jobs else None
            if block is not None and block.event is not None:
                self._awaited.append(block)
            return block

    def _finished(self) -> None:
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def _failed(self, error: BaseException) -> None:
        """The first failure ends the writing, for every thread."""
        with self._changed:
            if self._error is not None:
                return
            self._error = error
            self._jobs.clear()
            self._large.clear()
            self._blocks.clear()
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for file in self._files:
            file.close()
        self._ended(error)

    def _write_block(self, block: _Block) -> None:
        if block.event is not None:
            block.event.synchronize()
            with self._changed:
                self._awaited.remove(block)
                self._changed.notify_all()
        memory = self._ring.memory(block.at)
        for start, stop in [(0, self._block_bytes)] if block.filled == self._block_bytes else block.ranges:
            self._write(block.shard, block.number * self._block_bytes + start, memory[start:stop])
        with self._changed:
            self._free.append(block.at)

    def _write_held(self, held: _Held) -> None:
        if held.event is not None:
            held.event.synchronize()
        begin, shard = held.slot.offset + held.start, held.slot.shard
        # A separate stream, so that this copy does not wait for other work on the device.
        stream = torch.cuda.Stream(held.copy.device) if held.event is not None else None
        memory = self._ring.memory(0)
        for number, low, high in self._spans(begin, held.copy.numel()):
            at = low - number * self._block_bytes
            with torch.cuda.stream(stream):
                self._copy(at, held.copy[low - begin : high - begin])
            if stream is not None:
                stream.synchronize()
            self._write(shard, low, memory[at : at + high - low])
            with self._changed:
                self._left[(shard, number)] = self._left_of(shard, number) - (high - low)
                waiting = self._blocks.get((shard, number))
                if waiting is not None and waiting.filled >= self._left[(shard, number)]:
                    self._submit(waiting)
        with self._changed:
            self._held -= held.copy.numel()
            self._changed.notify_all()

    def _write(self, shard: int, offset: int, data: memoryview) -> None:
        file = self._files[shard]
        file.write(offset, data)
        with self._changed:
            self.bytes_written += len(data)
            self.fallback_reason = self.fallback_reason or file.fallback_reason
