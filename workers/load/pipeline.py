"""Reads a virtual checkpoint in one pass: bytes go from the disk to the device, are quantized there, and become tensors unit by unit.

The reader's threads read ahead. On a GPU the copies to the device and the quantizing use two streams, so that disk, bus and kernels overlap
while memory holds the ring and one unit, or one batch of like units. A ring block is returned when the event after its copy has passed,
never by waiting for the device.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch

from sparkd.checkpoint import TensorRef
from workers.load.device_feed import DeviceFeed, Passthrough
from workers.load.formats import amax, amax_each, global_scale, quantizer
from workers.load.formats.base import Parts
from workers.load.formats.nvfp4 import INPUT_SCALE
from workers.load.nonfinite import NonFiniteCheck
from workers.load.read_plan import BATCH_BYTES, Batch, ReadPlan, Run, WeightPlan, cut, matrices_of, plan_of, steps, undone, with_offsets
from workers.load.reader import Reader, ReaderStats
from workers.load.trace import Region, Target, TensorTrace, evenly_spaced, phantom_of, place, place_stacked, target_within
from workers.load.virtual import DTYPES, MatrixRegion, OutputTensor, VirtualCheckpoint, Weight, dtype_of

logger = logging.getLogger("vllm.sparkd.stream")

STREAMED_BYTES = 32 * 2**20  # a larger tensor that passes through is copied into its parameter chunk by chunk
STAGE_ALIGNMENT = 256  # of matrices in a device buffer: the least alignment of CUDA's own allocations (CUDA C++ Programming Guide)
SHAPE = "weight_shape"  # a tensor that no kernel reads: for the cache only, because copying it to a GPU would wait for the GPU


class CacheSink(Protocol):
    """Takes the finished tensors, for the quantized cache. The pass waits for it."""

    def add(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        """Tensors [names, ..]."""

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        """The bytes (uint8, 1-D) of a tensor from `start_byte` on."""


class Watcher(Protocol):
    """Receives the progress of the pass."""

    def advance(self, bytes_done: int, units_done: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SinkTensor:
    """One tensor as a sink takes it: the region of this shape that begins at `origin` of the whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    origin: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole_shape


@dataclass(frozen=True, slots=True)
class Needed:
    """The part of a checkpoint to read.

    regions: the region of each tensor that this rank takes (trace.py), None where it takes nothing; without `regions` everything is read.
    once: names that are copied once.
    for_model: the names that the model takes, where a sink takes more; None: all.
    """

    regions: Mapping[str, Region | None] | None = None
    once: Container[str] = ()
    for_model: Container[str] | None = None


@dataclass(frozen=True, slots=True)
class Receivers:
    """The receivers of the finished tensors. direct_targets: targets of tensors that the pipeline places itself; a used target is removed,
    because it holds memory."""

    sink: CacheSink | None = None
    watcher: Watcher | None = None
    direct_targets: dict[str, Target] = field(default_factory=dict)


class Pipeline:
    """`tensors()` yields (name, tensor on `device`) for every needed tensor of `virtual`, ready for a model's `load_weights`.

    A tensor of which only a part is needed has its whole shape, with undefined values elsewhere.

    trusted: tensors are not checked for NaN and infinities, because a quantized cache was checked when it was made.
    reader: makes the Reader for a list of byte ranges.
    batch_bytes: bytes quantized together (read_plan.py); None: chosen for the device.
    """

    stats: ReaderStats  # of the whole pass, once `tensors` has ended

    def __init__(
        self,
        virtual: VirtualCheckpoint,
        device: torch.device,
        reader: Callable[..., Reader],
        needed: Needed | None = None,
        receivers: Receivers | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch_bytes: int | None = None,
        trusted: bool = False,
    ) -> None:
        needed, receivers = needed or Needed(), receivers or Receivers()
        self.virtual = virtual
        self._device = device
        self._make_reader = reader
        self._dtype = dtype
        self.sink = receivers.sink
        self._watcher = receivers.watcher
        self._direct_targets = receivers.direct_targets
        self._batch_bytes = batch_bytes if batch_bytes is not None else BATCH_BYTES if device.type == "cuda" else 0
        self._outputs: dict[int, list[OutputTensor]] = {}
        for output in virtual.outputs():
            self._outputs.setdefault(output.unit, []).append(output)
        self._needed = needed
        self._trusted = trusted
        self._left_out = self._refs_left_out()
        self._nonfinite = NonFiniteCheck(device, weights_only=needed.regions is None and needed.for_model is None, left_out=self._left_out)

    @cached_property
    def _plans(self) -> list[ReadPlan]:
        """The read plans, made on first use, because a pass that a quantized cache replaces needs none."""
        return [
            plan
            for index, unit in enumerate(self.virtual.units)
            if (plan := plan_of(index, unit, self._needed.regions, self._outputs[index])) is not None
        ]

    def _refs_left_out(self) -> frozenset[str]:
        """The names of the checkpoint's tensors of which the model takes nothing."""
        if (for_model := self._needed.for_model) is None:
            return frozenset()
        refs: dict[bool, set[str]] = {False: set(), True: set()}
        for index, unit in enumerate(self.virtual.units):
            is_taken = any(tensor.name in for_model for tensor in self._outputs[index])
            refs[is_taken].update(ref.name for weight in unit.weights for ref in weight.made_from)
            if unit.plain is not None:
                refs[is_taken].add(unit.plain.name)
        return frozenset(refs[False] - refs[True])

    @property
    def damaged(self) -> Sequence[TensorRef]:
        """Tensors with a NaN or an infinity that the model does not take."""
        return self._nonfinite.damaged

    @cached_property
    def bytes_total(self) -> int:
        return sum(plan.nbytes for plan in self._plans)

    @property
    def units_total(self) -> int:
        return len(self._plans)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The finished tensors. Raises CheckpointError for a truncated file or weights that are not finite, naming file and tensor."""
        # A sink takes tensors one by one, so with a sink there are no runs.
        work = deque(steps(self._plans, self._batch_bytes, {} if self.sink is not None else self._direct_targets))
        done_bytes = done_units = 0
        with self._make_reader([byte_range for step in work for byte_range in step.ranges]) as reader:
            feed = DeviceFeed(reader, self._device)
            while work:
                step = work.popleft()
                if isinstance(step, ReadPlan):
                    yield from self._unit(step, feed)
                elif isinstance(step, Batch):
                    yield from self._batch(step, feed)
                else:
                    self._run(step, feed)
                done_bytes += step.nbytes
                done_units += len(step.plans)
                if self._watcher is not None:
                    self._watcher.advance(done_bytes, done_units)
                self._nonfinite.look_now_and_then()
            feed.finish()
            self._nonfinite.refuse()
            self.stats = reader.stats

    def sink_layout(self) -> dict[str, SinkTensor]:
        """The tensors that a sink will receive, known before the first read."""
        sink_layout: dict[str, SinkTensor] = {}
        for plan in self._plans:
            if plan.rows is not None:
                (output,) = self._outputs[plan.index]
                first, rows = plan.rows
                shape = (rows, *output.shape[1:]) if output.shape else ()
                at = (first, *(0 for _ in output.shape[1:])) if output.shape else ()
                sink_layout[output.name] = SinkTensor(output.dtype, shape, output.shape, at)
            for planned in plan.weights:
                weight, need = plan.unit.weights[planned.number], planned.need
                parts = quantizer(weight.format).parts(need.rows, need.cols)
                for output in self._outputs[plan.index]:
                    if output.weight == planned.number:
                        shape = output.shape if output.suffix == SHAPE else tuple(parts[output.suffix][1])
                        at = _place(output, weight, need) if shape != output.shape else (0, 0)
                        sink_layout[output.name] = SinkTensor(output.dtype, shape, output.shape, at)
        return sink_layout

    def _unit(self, plan: ReadPlan, feed: DeviceFeed) -> Iterator[tuple[str, torch.Tensor]]:
        unit = plan.unit
        if unit.plain is None:
            yield from self._quantized(plan, feed)
            return
        dtype = dtype_of(unit.plain)
        (output,) = self._outputs[plan.index]
        first, rows = plan.rows or (0, 1)
        left_out = output.name in self._left_out
        if plan.nbytes > STREAMED_BYTES and (left_out or output.name in self._needed.once):
            sink = None if self.sink is None else self.sink.add_chunk
            passing = Passthrough(output, first, plan.reads[0], feed, sink, partial(self._look, [unit.plain]))
            if not left_out:
                yield output.name, phantom_of(TensorTrace(output.shape), dtype, self._device, passing.copy)
            passing.drain()
            self._placed([output.name])
            return
        loaded = feed.take(plan.reads[0], keep=True).view(dtype)
        self._look([unit.plain], loaded)
        part = loaded.view(rows, *output.shape[1:]) if output.shape else loaded.view(())
        if self.sink is not None:
            self.sink.add([output.name], part.unsqueeze(0))
        tensor = part
        if tuple(part.shape) != output.shape:
            tensor = torch.empty(output.shape, dtype=dtype, device=self._device)
            tensor[first : first + rows] = part
        yield from self._emit(output.name, tensor)

    def _run(self, run: Run, feed: DeviceFeed) -> None:
        feed.place(run.read, run.memory)
        refs = [plan.unit.plain for plan in run.plans if plan.unit.plain is not None]
        self._look(refs, run.memory.view(dtype_of(refs[0])))
        self._placed([ref.name for ref in refs])

    def _batch(self, batch: Batch, feed: DeviceFeed) -> Iterator[tuple[str, torch.Tensor]]:
        joined = {id(plan): reads for plan, reads in zip(batch.plans, batch.reads, strict=True)}
        raw: dict[object, list[tuple[int, int]]] = {}
        into: dict[int, int] = {}
        end = 0
        for kind, plans in batch.alike.items():
            raw[kind] = []
            for reads in zip(*(joined[id(plan)] for plan in plans), strict=True):
                begin = -(-end // STAGE_ALIGNMENT) * STAGE_ALIGNMENT
                end = begin + sum(read.nbytes for read in reads)
                raw[kind].append((begin, end))
                into |= {id(read): begin + at for read, at in with_offsets(reads)}
        fills = [(read, into[id(read)]) for reads in batch.reads for read in reads]
        with feed.staged(fills, end) as memory:
            for kind, plans in batch.alike.items():
                yield from self._quantized_batch(plans, matrices_of(plans[0], [memory[begin:end] for begin, end in raw[kind]], self._dtype))

    def _quantized_batch(self, plans: Sequence[ReadPlan], matrices: torch.Tensor | Parts) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of units of one shape and format. matrices: [units * weights of one unit, N, K], or their parts for restated FP8."""
        weights = [plan.unit.weights[planned.number] for plan in plans for planned in plan.weights]
        parts = self._restated(weights, matrices) if isinstance(matrices, dict) else self._together(weights, matrices, len(plans))
        outputs = {(plan.index, output.weight, output.suffix): output for plan in plans for output in self._outputs[plan.index]}
        for suffix, tensor in parts.items():
            of_part = [
                (outputs[plan.index, planned.number, suffix], plan.unit.weights[planned.number], planned.need)
                for plan in plans
                for planned in plan.weights
            ]
            yield from self._stacked(of_part, tensor)

    def _together(self, weights: Sequence[Weight], matrices: torch.Tensor, units: int) -> Parts:
        largest = amax_each(matrices)
        self._nonfinite.note([weight.made_from for weight in weights], largest)
        form = quantizer(weights[0].format)
        if not weights[0].format.family.has_divisor:
            return form.quantize(matrices)
        shared = global_scale(largest.view(units, -1).amax(1, keepdim=True)).expand(-1, len(weights) // units)
        parts = form.quantize(matrices, global_scale=shared.reshape(-1))
        if INPUT_SCALE in parts:
            parts[INPUT_SCALE].copy_(torch.tensor([[self.virtual.input_scale(weight.module)] for weight in weights]))
        return parts

    def _restated(self, weights: Sequence[Weight], parts: Parts) -> Parts:
        for part, refs in zip(("weight", "weight_scale"), zip(*(weight.made_from for weight in weights), strict=True), strict=True):
            self._nonfinite.look(refs, parts[part])
        return parts

    def _stacked(
        self, outputs: Sequence[tuple[OutputTensor, Weight, MatrixRegion]], stacked: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same part of several weights, [weights, ..]; a run with evenly spaced targets is placed at once."""
        if outputs[0][0].suffix == SHAPE:
            if self.sink is not None:
                for output, weight, _ in outputs:
                    self.sink.add([output.name], torch.tensor([weight.source.shape], dtype=stacked.dtype))
            return
        if self.sink is not None:
            self.sink.add([output.name for output, *_ in outputs], stacked)
        targets = [self._target(output, weight, need, stacked.shape[1:]) for output, weight, need in outputs]
        for start, stop in evenly_spaced(targets):
            if targets[start] is not None:
                place_stacked([target for target in targets[start:stop] if target is not None], stacked[start:stop])
                self._placed([output.name for output, *_ in outputs[start:stop]])
                continue
            output, weight, need = outputs[start]
            yield from self._emit(output.name, _whole(output, weight, need, stacked[start]))

    def _target(self, output: OutputTensor, weight: Weight, need: MatrixRegion, shape: Sequence[int]) -> Target | None:
        """The target of a weight's part in its finished form, or None."""
        target = self._direct_targets.get(output.name)
        if target is None or tuple(shape) == output.shape:
            return target
        return target_within(target, _place(output, weight, need), shape)

    def _quantized(self, plan: ReadPlan, feed: DeviceFeed) -> Iterator[tuple[str, torch.Tensor]]:
        raw = [feed.take(read) for read in plan.reads]
        needed: list[tuple[WeightPlan, torch.Tensor]] = []
        for planned in plan.weights:
            weight, region = plan.unit.weights[planned.number], planned.file_region
            matrix = raw[planned.read].view(DTYPES[weight.source.ref.dtype]).view(region.rows, region.cols)
            part: torch.Tensor | Parts = cut(matrix, weight.source, region, planned.need)
            if weight.scale is not None and planned.scale_read is not None:
                scales = raw[planned.scale_read].view(dtype_of(weight.scale)).view(weight.scale.shape)
                part = undone(weight, planned, part, scales.t() if weight.source.transposed else scales, self._dtype)
            if isinstance(part, dict):
                yield from self._emit_parts(plan, planned, self._restated([weight], part))
            else:
                needed.append((planned, part))
        largest = [amax(part) for _, part in needed]
        shared = None
        if needed and plan.unit.weights[0].format.family.has_divisor:  # all weights that vLLM fuses share its second-level scale
            shared = global_scale(largest[0] if len(largest) == 1 else torch.stack(largest).amax())
        for (planned, part), most in zip(needed, largest, strict=True):
            weight = plan.unit.weights[planned.number]
            self._nonfinite.note([weight.made_from], most.reshape(1))
            form = quantizer(weight.format)
            parts = form.quantize(part) if shared is None else form.quantize(part, global_scale=shared)
            if INPUT_SCALE in parts:
                parts[INPUT_SCALE].fill_(self.virtual.input_scale(weight.module))
            yield from self._emit_parts(plan, planned, parts)
        feed.release()

    def _emit_parts(self, plan: ReadPlan, planned: WeightPlan, parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
        for output in self._outputs[plan.index]:
            if output.weight == planned.number:
                weight = (output, plan.unit.weights[planned.number], planned.need)
                yield from self._stacked([weight], parts[output.suffix].unsqueeze(0))

    def _emit(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if self._needed.for_model is not None and name not in self._needed.for_model:
            return
        target = self._direct_targets.get(name)
        if target is None:
            yield name, tensor
        else:
            place(target, tensor)
        self._placed([name])

    def _placed(self, names: Sequence[str]) -> None:
        for name in names:
            self._direct_targets.pop(name, None)

    def _look(self, refs: Sequence[TensorRef], tensor: torch.Tensor) -> None:
        if not self._trusted:
            self._nonfinite.look(refs, tensor)


def _whole(output: OutputTensor, weight: Weight, need: MatrixRegion, part: torch.Tensor) -> torch.Tensor:
    """The part within a tensor of the whole shape, for a weight loader of vLLM that narrows it to this rank."""
    if tuple(part.shape) == output.shape or math.prod(output.shape) <= 1 or need.is_whole(weight.source.shape):
        return part.view(output.shape)
    row, col = _place(output, weight, need)
    whole = torch.empty(output.shape, dtype=part.dtype, device=part.device)
    whole[row : row + part.shape[0], col : col + part.shape[1]] = part
    return whole


def _place(output: OutputTensor, weight: Weight, need: MatrixRegion) -> tuple[int, int]:
    """(row, column) at which the needed region of a weight begins in one of its parts."""
    n, k = weight.source.shape
    return need.row_start // -(-n // output.shape[0]), need.col_start // -(-k // output.shape[1])
