"""One pass over a virtual checkpoint: bytes come off the disk, go to the device, are quantized there and handed on unit by unit. Never
knows vLLM.

Reading runs ahead in the reader's threads; on a GPU the copy to the device and the quantizing are queued on one stream, so that disk,
bus and kernels overlap while
memory holds the ring and one unit. A ring block is given back when the event behind its copy has passed, never by waiting for the device.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from sparkd.errors import CheckpointError
from workers.stream.feed import Feed
from workers.stream.formats import amax, global_scale, quantizer
from workers.stream.reader import Piece, Reader
from workers.stream.trace import NotAView, Phantom, Region, Taken, streamed
from workers.stream.virtual import (
    DTYPES,
    Box,
    Emitted,
    Need,
    Unit,
    VirtualCheckpoint,
    Weight,
    cut,
    dtype_of,
    need_of,
    plain_pieces,
    stored_pieces,
)

logger = logging.getLogger("vllm.sparkd.stream")

STREAMED_BYTES = (
    32 * 2**20
)  # a tensor that passes through and is larger goes into its parameter chunk by chunk instead of being built first
SHAPE = "weight_shape"  # a checkpoint's note that no kernel reads: for the cache only, because copying it to a GPU would wait for the GPU
CHECKED_UNITS = 512  # one look at the device's NaN flags for so many units: each look waits for the device


class Sink(Protocol):
    """Takes what was made, for the quantized cache. `add` must return at once and may take a tensor or refuse it."""

    def add(self, name: str, tensor: torch.Tensor) -> None: ...

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None: ...


class Watcher(Protocol):
    """Is told how far the pass is."""

    def advance(self, bytes_done: int, units_done: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Input:
    """One matrix or tensor of a unit as it lies in the file: its pieces, and how many bytes they are together."""

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(slots=True)
class _Plan:
    """What is read for one unit. For a weight: (its number, what is needed of it, box that was read, which input, which input holds its
    scales)."""

    index: int
    unit: Unit
    inputs: list[_Input] = field(default_factory=list)
    weights: list[tuple[int, Need, Box, int, int | None]] = field(default_factory=list)
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.inputs)


@dataclass(frozen=True, slots=True)
class Handed:
    """What a sink gets of one emitted tensor: a tensor of this shape, which stands at `at` in the whole. plain: its bytes are the
    source's own."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    at: tuple[int, ...]
    plain: bool

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole


class Pipeline:
    """`tensors()` yields (name, tensor on `device`) for everything that is needed of `virtual`, ready for a model's `load_weights`.

    regions: for each emitted name the part that this rank takes (trace.py), None for a name that it does not take; without `regions`
    all is needed.
    A tensor of which only a part is needed has its whole shape, and undefined values elsewhere. reader: makes the Reader for a list of
    pieces.
    """

    def __init__(
        self,
        virtual: VirtualCheckpoint,
        device: torch.device,
        reader: Callable[[Sequence[Piece]], Reader],
        *,
        regions: Mapping[str, Region | None] | None = None,
        once: Container[str] = (),
        dtype: torch.dtype = torch.bfloat16,
        only: Container[int] | None = None,
        sink: Sink | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._virtual = virtual
        self._device = device
        self._make_reader = reader
        self._dtype = dtype
        self.sink = sink
        self._watcher = watcher
        self._emitted: dict[int, list[Emitted]] = {}
        for one in virtual.emitted():
            self._emitted.setdefault(one.unit, []).append(one)
        self._regions = regions
        self._once = once
        self._plans = [
            plan
            for index, unit in enumerate(virtual.units)
            if (only is None or index in only) and (plan := self._plan(index, unit)) is not None
        ]
        self.bytes_total = sum(plan.nbytes for plan in self._plans)
        self.units_total = len(self._plans)
        self.bytes_read = 0
        self.waited_s = 0.0
        self.direct: bool | None = None
        self.fallback_reason: str | None = None
        self.unpinned_reason: str | None = None
        self._largest: list[tuple[str, str, torch.Tensor]] = []

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Raises CheckpointError for a truncated file or weights that are not finite; the message names file and tensor."""
        pieces = [piece for plan in self._plans for one in plan.inputs for piece in one.pieces]
        done = 0
        with self._make_reader(pieces) as reader:
            feed = Feed(reader, self._device)
            for number, plan in enumerate(self._plans):
                yield from self._unit(plan, feed)
                done += plan.nbytes
                if self._watcher is not None:
                    self._watcher.advance(done, number + 1)
                if len(self._largest) >= CHECKED_UNITS:
                    self._check_finite()
            feed.finish()
            self._check_finite()
            stats = reader.stats
            self.bytes_read = stats.bytes_read
            self.waited_s = stats.waited_s
            self.direct = stats.direct
            self.fallback_reason = stats.fallback_reason
            self.unpinned_reason = stats.unpinned_reason

    def handed(self) -> dict[str, Handed]:
        """Everything that a sink is given, before anything is read."""
        found: dict[str, Handed] = {}
        for plan in self._plans:
            if plan.rows is not None:
                (one,) = self._emitted[plan.index]
                first, rows = plan.rows
                shape = (rows, *one.shape[1:]) if one.shape else ()
                found[one.name] = Handed(one.dtype, shape, one.shape, (first, *(0 for _ in one.shape[1:])) if one.shape else (), plain=True)
            for number, need, *_ in plan.weights:
                weight = plan.unit.weights[number]
                parts = quantizer(weight.format).parts(need.row_stop - need.row_start, need.col_stop - need.col_start)
                for one in self._emitted[plan.index]:
                    if one.weight == number:
                        shape = one.shape if one.suffix == SHAPE else tuple(parts[one.suffix][1])
                        found[one.name] = Handed(
                            one.dtype, shape, one.shape, _place(one, weight, need) if shape != one.shape else (0, 0), plain=False
                        )
        return found

    def again(self, names: Collection[str], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """What a sink gets of the units that emit `names`, made once more on `device` in one pass; from any thread, without the model."""
        wanted = {index for index, emitted in self._emitted.items() if any(one.name in names for one in emitted)}
        made: list[tuple[str, torch.Tensor]] = []

        class Keep:
            def add(self, name: str, tensor: torch.Tensor) -> None:
                made.append((name, tensor))

            def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
                raise RuntimeError(f"{name} is not streamed here")

        alone = Pipeline(self._virtual, device, self._make_reader, regions=self._regions, dtype=self._dtype, sink=Keep(), only=wanted)
        for _ in alone.tensors():
            yield from ((name, tensor) for name, tensor in made if name in names)
            made.clear()
        yield from ((name, tensor) for name, tensor in made if name in names)

    def _plan(self, index: int, unit: Unit) -> _Plan | None:
        plan = _Plan(index, unit)
        if unit.plain is not None:
            region = self._region(unit.plain.name)
            if self._regions is not None and region is None:
                return None
            pieces, first, rows = plain_pieces(index, unit.plain, region)
            plan.inputs.append(_Input(tuple(pieces), sum(piece.nbytes for piece in pieces)))
            plan.rows = (first, rows)
            return plan
        seen: dict[tuple[int, Box], int] = {}
        for number, weight in enumerate(unit.weights):
            need = self._need(index, number, weight)
            if need is None:
                continue
            pieces, box = stored_pieces(index, weight.stored, need)
            if (slot := seen.get((weight.stored.offset, box))) is None:
                slot = seen[(weight.stored.offset, box)] = len(plan.inputs)
                plan.inputs.append(_Input(tuple(pieces), sum(piece.nbytes for piece in pieces)))
            scale = None
            if weight.scale is not None:
                scale = len(plan.inputs)
                plan.inputs.append(
                    _Input((Piece(index, weight.scale.path, weight.scale.offset, weight.scale.nbytes),), weight.scale.nbytes)
                )
            plan.weights.append((number, need, box, slot, scale))
        return plan if plan.weights else None

    def _region(self, name: str) -> Region | None:
        return None if self._regions is None else self._regions.get(name)

    def _need(self, index: int, number: int, weight: Weight) -> Need | None:
        if self._regions is None:
            n, k = weight.stored.shape
            return Need(0, n, 0, k)
        return need_of(weight, ((one.suffix, self._region(one.name)) for one in self._emitted[index] if one.weight == number))

    def _unit(self, plan: _Plan, feed: Feed) -> Iterator[tuple[str, torch.Tensor]]:
        unit = plan.unit
        if unit.plain is None:
            yield from self._quantized(plan, feed)
            return
        dtype = dtype_of(unit.plain)
        (emitted,) = self._emitted[plan.index]
        first, rows = plan.rows or (0, 1)
        if plan.nbytes > STREAMED_BYTES and emitted.name in self._once:
            stream = _Stream(emitted, first, plan.inputs[0], feed, self.sink)
            yield emitted.name, streamed(Taken(emitted.shape), dtype, self._device, stream.copy)
            stream.drain()
            return
        loaded = feed.take(plan.inputs[0], keep=True).view(dtype)
        part = loaded.view(rows, *emitted.shape[1:]) if emitted.shape else loaded.view(())
        made = part
        if tuple(part.shape) != emitted.shape:
            made = torch.empty(emitted.shape, dtype=dtype, device=self._device)
            made[first : first + rows] = part
        yield from self._hand_on([(emitted, made, part)])

    def _quantized(self, plan: _Plan, feed: Feed) -> Iterator[tuple[str, torch.Tensor]]:
        raw = [feed.take(one) for one in plan.inputs]
        needed: list[tuple[Weight, int, Need, torch.Tensor]] = []
        for number, need, box, slot, scale in plan.weights:
            weight = plan.unit.weights[number]
            matrix = raw[slot].view(DTYPES[weight.stored.ref.dtype]).view(box.rows, box.cols)
            part = cut(matrix, weight.stored, box, need)
            if weight.scale is not None and scale is not None:
                scales = raw[scale].view(dtype_of(weight.scale)).view(weight.scale.shape)
                from workers.stream.formats.source import dequantize_fp8

                part = dequantize_fp8(part, scales, weight.stored.shape, (need.row_start, need.col_start), dtype=self._dtype)
            needed.append((weight, number, need, part))
        largest = [amax(part) for *_, part in needed]
        shared = None
        if needed[0][0].format.name == "nvfp4":  # its second-level scale stands for all that vLLM multiplies as one
            shared = global_scale(largest[0] if len(largest) == 1 else torch.stack(largest).amax())
        for (weight, number, need, part), most in zip(needed, largest, strict=True):
            self._largest.append((weight.stored.ref.path, weight.stored.ref.name, most))
            form = quantizer(weight.format)
            parts = form.quantize(part, global_scale=shared) if shared is not None else form.quantize(part)
            made = [(one, parts[one.suffix]) for one in self._emitted[plan.index] if one.weight == number]
            yield from self._hand_on([(one, _placed(one, weight, need, tensor), tensor) for one, tensor in made])
        feed.release()

    def _hand_on(self, made: Sequence[tuple[Emitted, torch.Tensor, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for emitted, whole, part in made:
            if self.sink is not None:
                self.sink.add(emitted.name, whole if emitted.suffix == SHAPE else part)
            if emitted.suffix != SHAPE:
                yield emitted.name, whole

    def _check_finite(self) -> None:
        seen, self._largest = self._largest, []
        if not seen:
            return
        bad = torch.stack([most.reshape(()) for *_, most in seen]).isfinite().logical_not().nonzero().flatten().tolist()
        if bad:
            path, name, _ = seen[bad[0]]
            more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
            raise CheckpointError(f"the weights hold NaN or Inf{more}", file=path, tensor=name, cure="The file is damaged: fetch it again")


def _placed(one: Emitted, weight: Weight, need: Need, part: torch.Tensor) -> torch.Tensor:
    """The part in a tensor of the whole shape, for a weight loader that narrows it to this rank by itself."""
    if one.suffix == SHAPE:
        return torch.tensor(weight.stored.shape, dtype=part.dtype)
    if tuple(part.shape) == one.shape or math.prod(one.shape) <= 1 or need.is_whole(weight.stored.shape):
        return part.view(one.shape)
    row, col = _place(one, weight, need)
    whole = torch.empty(one.shape, dtype=part.dtype, device=part.device)
    whole[row : row + part.shape[0], col : col + part.shape[1]] = part
    return whole


def _place(one: Emitted, weight: Weight, need: Need) -> tuple[int, int]:
    """Row and column of a part of a weight at which what is needed of it begins."""
    n, k = weight.stored.shape
    return need.row_start // -(-n // one.shape[0]), need.col_start // -(-k // one.shape[1])


class _Stream:
    """A tensor that is never whole in memory: when it is copied into its parameter, its bytes go there as they come off the disk."""

    def __init__(self, emitted: Emitted, first_row: int, source: _Input, feed: Feed, sink: Sink | None) -> None:
        self._emitted = emitted
        self._first_byte = first_row * self._row_bytes()
        self._source = source
        self._feed = feed
        self._sink = sink
        self._read = False

    def copy(self, target: torch.Tensor, phantom: Phantom) -> None:
        """Raises NotAView for a second copy: the trace saw one."""
        if self._read:
            raise NotAView(self._emitted.name)
        self._read = True
        shape = self._emitted.shape
        straight = phantom.dims == tuple(range(len(shape))) and phantom.region[1:] == tuple((0, size) for size in shape[1:])
        if straight and target.is_contiguous() and target.dtype == self._emitted.dtype:
            low, high = (edge * self._row_bytes() for edge in phantom.region[0])
            self._pass(target.detach().view(-1).view(torch.uint8), low, high)
            return
        rows = self._source.nbytes // self._row_bytes()
        whole = self._feed.take(self._source, keep=True).view(self._emitted.dtype).view(rows, *shape[1:])
        first = self._first_byte // self._row_bytes()
        box = tuple(
            slice(start - (first if dim == 0 else 0), stop - (first if dim == 0 else 0)) for dim, (start, stop) in enumerate(phantom.region)
        )
        part = whole[box]
        left = [dim for dim in phantom.dims if dim is not None]
        target.copy_(part.permute([*left, *(dim for dim in range(len(shape)) if dim not in left)]).reshape(target.shape))

    def drain(self) -> None:
        """Reads past the tensor where nothing was copied after all."""
        if not self._read:
            self._pass(None, 0, 0)

    def _pass(self, target: torch.Tensor | None, low: int, high: int) -> None:
        at = self._first_byte
        for part in self._feed.parts(self._source):
            start, stop = max(low, at), min(high, at + part.numel())
            if target is not None and start < stop:
                target[start - low : stop - low].copy_(part[start - at : stop - at], non_blocking=True)
            if self._sink is not None:
                self._sink.add_chunk(self._emitted.name, at, part)
            at += part.numel()

    def _row_bytes(self) -> int:
        return max(1, math.prod(self._emitted.shape[1:]) * self._emitted.dtype.itemsize)
