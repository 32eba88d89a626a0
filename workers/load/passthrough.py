"""Copies a tensor that passes through unchanged, chunk by chunk from the disk to its parameter, never whole in memory. Never quantizes,
never knows vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch

from workers.load.device_feed import Feed
from workers.load.read_plan import Input
from workers.load.trace import NotAView, Phantom
from workers.load.virtual import Emitted


class ChunkSink(Protocol):
    """Takes the bytes that are read of a tensor as they arrive, for the quantized cache."""

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None: ...


class Passing:
    """A stand-in for a tensor that is never whole in memory: when it is copied into its parameter, its bytes go there from the disk."""

    def __init__(
        self, emitted: Emitted, first_row: int, source: Input, feed: Feed, sink: ChunkSink | None, look: Callable[[torch.Tensor], None]
    ) -> None:
        """look: called with the copied tensor, or with each part that passes the model."""
        self._look = look
        self._emitted = emitted
        self._first_byte = first_row * self._row_bytes()
        self._source = source
        self._feed = feed
        self._sink = sink
        self._read = False

    def copy(self, target: torch.Tensor, phantom: Phantom) -> None:
        """Copy the bytes from the disk to `target`. Raises NotAView for a second copy, because the trace saw only one."""
        if self._read:
            raise NotAView(self._emitted.name)
        self._read = True
        shape = self._emitted.shape
        straight = phantom.dims == tuple(range(len(shape))) and phantom.region[1:] == tuple((0, size) for size in shape[1:])
        if straight and target.is_contiguous() and target.dtype == self._emitted.dtype:
            low, high = (edge * self._row_bytes() for edge in phantom.region[0])
            self._pass(target.detach().view(-1).view(torch.uint8), low, high)
            self._look(target.detach())
            return
        rows = self._source.nbytes // self._row_bytes()
        raw = self._feed.take(self._source, keep=True)
        if self._sink is not None:
            self._sink.add_chunk(self._emitted.name, 0, raw)
        whole = raw.view(self._emitted.dtype).view(rows, *shape[1:])
        first = self._first_byte // self._row_bytes()
        box = tuple(
            slice(start - (first if dim == 0 else 0), stop - (first if dim == 0 else 0)) for dim, (start, stop) in enumerate(phantom.region)
        )
        part = whole[box]
        self._look(part)
        left = [dim for dim in phantom.dims if dim is not None]
        target.copy_(part.permute([*left, *(dim for dim in range(len(shape)) if dim not in left)]).reshape(target.shape))

    def drain(self) -> None:
        """Take the tensor's bytes past the model, where it has not copied it."""
        if not self._read:
            self._pass(None, 0, 0)

    def _pass(self, target: torch.Tensor | None, low: int, high: int) -> None:
        at = self._first_byte
        size = self._emitted.dtype.itemsize
        for part in self._feed.parts(self._source):
            if target is None and not (part.storage_offset() % size or part.numel() % size):
                self._look(part.view(self._emitted.dtype))
            start, stop = max(low, at), min(high, at + part.numel())
            if target is not None and start < stop:
                target[start - low : stop - low].copy_(part[start - at : stop - at], non_blocking=True)
            if self._sink is not None:
                self._sink.add_chunk(self._emitted.name, at - self._first_byte, part)
            at += part.numel()

    def _row_bytes(self) -> int:
        return max(1, math.prod(self._emitted.shape[1:]) * self._emitted.dtype.itemsize)
