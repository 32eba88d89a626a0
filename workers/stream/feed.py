"""From the reader's ring to the device: chunks become whole inputs there, and ring blocks go back as soon as nothing reads them. Never
decides what is read."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from workers.stream.plan import Input
from workers.stream.reader import Chunk, Reader

EVENT_BYTES = 4 * 2**20  # one CUDA event for about so many copied bytes: an event for every small tensor would cost more than its copy
EVENT_CHUNKS = 64


class Feed:
    """Takes inputs in exactly the order in which their pieces were given to `reader`.

    On the CPU an input that lies in one chunk is handed out as a view into the ring, valid until `release`; everywhere else it is
    copied once.
    """

    def __init__(self, reader: Reader, device: torch.device) -> None:
        self._reader = reader
        self._chunks: Iterator[Chunk] = iter(reader)
        self._device = device
        self._cuda = device.type == "cuda"
        self._lent: list[Chunk] = []
        self._copied: list[Chunk] = []
        self._copied_bytes = 0
        self._waiting: deque[tuple[torch.cuda.Event, list[Chunk]]] = deque()
        # The rest of the ring stays with the disk while the device works off what was copied.
        self._most_held = max(1, reader.blocks // 2)

    def take(self, source: Input, *, keep: bool = False) -> torch.Tensor:
        """uint8 [nbytes] on the device. keep: it must outlive `release`."""
        chunks = self._of(source)
        first = next(chunks, None)
        if first is None:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        if first.view.numel() == source.nbytes and not keep and self._may_lend(first):
            self._lent.append(first)
            return first.view
        made = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device)
        self._copy(itertools.chain((first,), chunks), made)
        return made

    def fill(self, source: Input, into: torch.Tensor) -> None:
        """The input's bytes into uint8 [nbytes] on the device."""
        self._copy(self._of(source), into)

    def parts(self, source: Input) -> Iterator[torch.Tensor]:
        """The input's bytes in host memory as they come; each is valid until the next is asked for, or, on a GPU, for every copy queued
        until then."""
        for chunk in self._of(source):
            yield chunk.view
            self._done(chunk)

    def release(self) -> None:
        """Ends what `take` lent out of the ring."""
        for chunk in self._lent:
            chunk.release()
        self._lent.clear()

    def finish(self) -> None:
        """Waits for the last copies; afterwards the ring may go."""
        self.release()
        self._mark()
        while self._waiting:
            self._collect(wait=True)

    def _copy(self, chunks: Iterable[Chunk], into: torch.Tensor) -> None:
        at = 0
        for chunk in chunks:
            size = chunk.view.numel()
            into[at : at + size].copy_(chunk.view, non_blocking=True)
            at += size
            self._done(chunk)

    def _may_lend(self, chunk: Chunk) -> bool:
        return not self._cuda and chunk.view.data_ptr() % 16 == 0 and self._reader.held_blocks <= self._most_held

    def _of(self, source: Input) -> Iterator[Chunk]:
        left = source.nbytes
        for piece in source.pieces:
            while True:
                chunk = next(self._chunks)
                if chunk.piece is not piece and chunk.piece != piece:
                    raise RuntimeError(f"the reader gave {chunk.piece.key!r} where {piece.key!r} was due")
                left -= chunk.view.numel()
                yield chunk
                if chunk.last:
                    break
        if left:
            raise RuntimeError(f"{left} bytes of {source.pieces[0].key!r} did not come")

    def _done(self, chunk: Chunk) -> None:
        if not self._cuda:
            chunk.release()
            return
        self._copied.append(chunk)
        self._copied_bytes += chunk.view.numel()
        crowded = self._reader.held_blocks > self._most_held
        if crowded or self._copied_bytes >= EVENT_BYTES or len(self._copied) >= EVENT_CHUNKS:
            self._mark()
        self._collect(wait=False)
        while self._waiting and self._reader.held_blocks > self._most_held:
            self._collect(wait=True)

    def _mark(self) -> None:
        if not self._copied:
            return
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((event, self._copied))
        self._copied, self._copied_bytes = [], 0

    def _collect(self, *, wait: bool) -> None:
        """Gives back what was copied; with `wait` the oldest copies are waited for."""
        while self._waiting:
            event, chunks = self._waiting[0]
            if wait:
                event.synchronize()
                wait = False
            elif not event.query():
                return
            self._waiting.popleft()
            for chunk in chunks:
                chunk.release()
