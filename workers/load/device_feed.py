"""Copies the bytes of the reader to the device, and returns blocks of the ring as soon as their copies have ended."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from workers.load.read_plan import TensorRead
from workers.load.reader import Chunk, Reader
from workers.load.trace import NotAView, Phantom
from workers.load.virtual import OutputTensor

EVENT_BYTES = 4 * 2**20  # one CUDA event for about so many copied bytes: an event for every small tensor would cost more than its copy
EVENT_CHUNKS = 64


@dataclass(slots=True)
class _Lane:
    """The copies of one stream in their order: chunks without an event yet, and chunks that wait for one."""

    copied: list[Chunk] = field(default_factory=list)
    copied_bytes: int = 0
    waiting: deque[tuple[torch.cuda.Event, list[Chunk]]] = field(default_factory=deque)


@dataclass(slots=True)
class _Stage:
    """One of two alternating buffers. used: the event after the device's last work on its contents."""

    memory: torch.Tensor | None = None
    used: torch.cuda.Event | None = None


class DeviceFeed:
    """Takes reads in exactly the order in which their byte ranges were given to `reader`.

    On the CPU a read in one chunk is returned as a view into the ring, valid until `release`; any other read is copied once.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._chunks: Iterator[Chunk] = iter(reader)
        self._device = device
        self._cuda = device.type == "cuda"
        self._lent: list[Chunk] = []
        self._lane, self._other = _Lane(), _Lane()
        self._aside: torch.cuda.Stream | None = None
        self._stages = (_Stage(), _Stage())
        # The disk keeps the rest of the ring while the device processes the copied part.
        self._most_held = max(1, reader.blocks // 2)

    def take(self, read: TensorRead, *, keep: bool = False) -> torch.Tensor:
        """uint8 [nbytes] on the device. keep: it must outlive `release`."""
        chunks = self._of(read)
        first = next(chunks, None)
        if first is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if first.view.numel() == read.nbytes and not keep and self._may_lend(first):
            self._lent.append(first)
            return first.view
        tensor = torch.empty(read.nbytes, dtype=torch.uint8, device=self._device)
        self._copy(itertools.chain((first,), chunks), tensor)
        return tensor

    def fill(self, read: TensorRead, into: torch.Tensor) -> None:
        """Its bytes into uint8 [nbytes] on the device."""
        self._copy(self._of(read), into)

    def place(self, read: TensorRead, memory: torch.Tensor) -> None:
        """Like `fill`, into memory that existed before the pass and that only this copy writes to."""
        with self._beside():
            self.fill(read, memory)

    @contextlib.contextmanager
    def staged(self, fills: Sequence[tuple[TensorRead, int]], nbytes: int) -> Iterator[torch.Tensor]:
        """uint8 [nbytes] on the device with each read at its offset, valid within the `with`; the one after the next overwrites it.

        So the next batch crosses the bus while the device works on one batch.
        """
        stage = self._stages[0]
        self._stages = self._stages[::-1]
        if stage.memory is None or stage.memory.numel() < nbytes:
            stage.memory, stage.used = torch.empty(nbytes, dtype=torch.uint8, device=self._device), None
        memory = stage.memory
        with self._beside(stage.used, fresh=stage.used is None):
            for read, at in fills:
                self.fill(read, memory[at : at + read.nbytes])
        yield memory[:nbytes]
        if self._cuda:
            stage.used = torch.cuda.Event()
            stage.used.record()

    @contextlib.contextmanager
    def _beside(self, after: torch.cuda.Event | None = None, *, fresh: bool = False) -> Iterator[None]:
        """A context in which copies use a GPU's second stream: they do not queue behind kernels, and the ring's blocks return at the speed
        of the bus. Later work on the current stream waits for the copies.

        after: an event that the copies wait for.
        fresh: the target memory is newly allocated, and the current stream may still use its former contents.
        """
        if not self._cuda:
            yield
            return
        current = torch.cuda.current_stream(self._device)
        if self._aside is None:
            self._aside = torch.cuda.Stream(self._device)
            fresh = True  # whatever the parameters were made with
        if fresh:
            self._aside.wait_stream(current)
        if after is not None:
            self._aside.wait_event(after)
        self._mark(self._lane)
        self._lane, self._other = self._other, self._lane
        with torch.cuda.stream(self._aside):
            yield
            self._mark(self._lane)
        self._lane, self._other = self._other, self._lane
        current.wait_stream(self._aside)

    def views(self, read: TensorRead) -> Iterator[torch.Tensor]:
        """Its bytes in host memory, chunk by chunk as they arrive. Each view is valid until the next one is requested, or, on a GPU,
        for every copy queued until then."""
        for chunk in self._of(read):
            yield chunk.view
            self._done(chunk)

    def release(self) -> None:
        """Return the ring's chunks that `take` has lent."""
        for chunk in self._lent:
            chunk.release()
        self._lent.clear()

    def finish(self) -> None:
        """Wait for the last copies; afterwards the ring may be freed."""
        self.release()
        self._mark(self._lane)
        for lane in (self._other, self._lane):
            while lane.waiting:
                self._collect(lane, wait=True)

    def _copy(self, chunks: Iterable[Chunk], into: torch.Tensor) -> None:
        at = 0
        for chunk in chunks:
            size = chunk.view.numel()
            into[at : at + size].copy_(chunk.view, non_blocking=True)
            at += size
            self._done(chunk)

    def _may_lend(self, chunk: Chunk) -> bool:
        return not self._cuda and chunk.view.data_ptr() % 16 == 0 and self._reader.held_blocks <= self._most_held

    def _of(self, read: TensorRead) -> Iterator[Chunk]:
        left = read.nbytes
        for byte_range in read.ranges:
            while True:
                chunk = next(self._chunks)
                if chunk.byte_range is not byte_range and chunk.byte_range != byte_range:
                    raise RuntimeError(f"the reader gave {chunk.byte_range.key!r} where {byte_range.key!r} was due")
                left -= chunk.view.numel()
                yield chunk
                if chunk.last:
                    break
        if left:
            raise RuntimeError(f"{left} bytes of {read.ranges[0].key!r} did not come")

    def _done(self, chunk: Chunk) -> None:
        if not self._cuda:
            chunk.release()
            return
        lane = self._lane
        lane.copied.append(chunk)
        lane.copied_bytes += chunk.view.numel()
        crowded = self._reader.held_blocks > self._most_held
        if crowded or lane.copied_bytes >= EVENT_BYTES or len(lane.copied) >= EVENT_CHUNKS:
            self._mark(lane)
        self._collect(lane, wait=False)
        self._collect(self._other, wait=False)
        while (lane.waiting or self._other.waiting) and self._reader.held_blocks > self._most_held:
            self._collect(lane if lane.waiting else self._other, wait=True)

    def _mark(self, lane: _Lane) -> None:
        """Record an event after the lane's copies, on the current stream, which is the lane's."""
        if not lane.copied:
            return
        event = torch.cuda.Event()
        event.record()
        lane.waiting.append((event, lane.copied))
        lane.copied, lane.copied_bytes = [], 0

    def _collect(self, lane: _Lane, *, wait: bool) -> None:
        """Return the chunks whose copies have ended; with `wait`, wait for the lane's oldest copies."""
        while lane.waiting:
            event, chunks = lane.waiting[0]
            if wait:
                event.synchronize()
                wait = False
            elif not event.query():
                return
            lane.waiting.popleft()
            for chunk in chunks:
                chunk.release()


class Passthrough:
    """A stand-in for a tensor that is never whole in memory: when it is copied into its parameter, its bytes go there from the disk."""

    def __init__(
        self,
        output: OutputTensor,
        first_row: int,
        read: TensorRead,
        feed: DeviceFeed,
        sink: Callable[[str, int, torch.Tensor], None] | None,
        look: Callable[[torch.Tensor], None],
    ) -> None:
        """sink: takes the name, the first byte and the bytes (uint8) of each chunk that is read, for the quantized cache.

        look: called with the copied tensor, or with each chunk that passes the model.
        """
        self._look = look
        self._output = output
        self._first_byte = first_row * self._row_bytes()
        self._read = read
        self._feed = feed
        self._sink = sink
        self._is_read = False

    def copy(self, target: torch.Tensor, phantom: Phantom) -> None:
        """Copy the bytes from the disk to `target`. Raises NotAView for a second copy, because the trace saw only one."""
        if self._is_read:
            raise NotAView(self._output.name)
        self._is_read = True
        shape = self._output.shape
        is_plain = phantom.dims == tuple(range(len(shape))) and phantom.region[1:] == tuple((0, size) for size in shape[1:])
        if is_plain and target.is_contiguous() and target.dtype == self._output.dtype:
            low, high = (edge * self._row_bytes() for edge in phantom.region[0])
            self._pass(target.detach().view(-1).view(torch.uint8), low, high)
            self._look(target.detach())
            return
        rows = self._read.nbytes // self._row_bytes()
        raw = self._feed.take(self._read, keep=True)
        if self._sink is not None:
            self._sink(self._output.name, 0, raw)
        whole = raw.view(self._output.dtype).view(rows, *shape[1:])
        first = self._first_byte // self._row_bytes()
        region = tuple(
            slice(start - (first if dim == 0 else 0), stop - (first if dim == 0 else 0)) for dim, (start, stop) in enumerate(phantom.region)
        )
        part = whole[region]
        self._look(part)
        left = [dim for dim in phantom.dims if dim is not None]
        target.copy_(part.permute([*left, *(dim for dim in range(len(shape)) if dim not in left)]).reshape(target.shape))

    def drain(self) -> None:
        """Take the tensor's bytes past the model, where it has not copied it."""
        if not self._is_read:
            self._pass(None, 0, 0)

    def _pass(self, target: torch.Tensor | None, low: int, high: int) -> None:
        at = self._first_byte
        size = self._output.dtype.itemsize
        for view in self._feed.views(self._read):
            if target is None and not (view.storage_offset() % size or view.numel() % size):
                self._look(view.view(self._output.dtype))
            start, stop = max(low, at), min(high, at + view.numel())
            if target is not None and start < stop:
                target[start - low : stop - low].copy_(view[start - at : stop - at], non_blocking=True)
            if self._sink is not None:
                self._sink(self._output.name, at - self._first_byte, view)
            at += view.numel()

    def _row_bytes(self) -> int:
        return max(1, math.prod(self._output.shape[1:]) * self._output.dtype.itemsize)
