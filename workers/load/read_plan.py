"""Plans which bytes of a virtual checkpoint are read and quantized together: a unit, a batch of like units, a run of neighbours.

A GPU processes a matrix quickly but each kernel launch costs time, and so does each of 18,000 copies of experts into one parameter. Units
of one shape become one tensor [units, ..] for the quantizer; tensors that are adjacent in the file and in a parameter become one copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sparkd.checkpoint import TensorRef
from workers.load.formats.base import Parts
from workers.load.formats.fp8_source import dequantize_fp8, holds_codes, restated_fp8
from workers.load.reader import ByteRange
from workers.load.trace import Region, Target
from workers.load.virtual import DTYPES, MatrixRegion, OutputTensor, SourceMatrix, Unit, Weight, dtype_of, parts_of
from workers.quantization.formats import Format

BATCH_BYTES = 16 * 2**20  # bytes of the checkpoint that a GPU quantizes at once; the device holds twice that, and the results
SHORTEST_READ_BYTES = 128 * 2**10  # for shorter runs of a row the whole rows are read instead
RUN_BYTES = 64 * 2**20  # the largest copy: the load reports its progress, and can be cancelled, between copies


class TensorRead(NamedTuple):
    """One matrix or tensor of a unit in the file's layout: its byte ranges, and the sum of their bytes."""

    ranges: tuple[ByteRange, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The reads of one weight of a unit.

    number: of the weight in `unit.weights`.
    need: the region that this rank needs.
    file_region: the region of the file's matrix to read.
    read, scale_read: the numbers of the plan's reads with that region and with an FP8 source's scales, None without scales.
    restated: the new format keeps the source's own codes and scales, without rounding.
    """

    number: int
    need: MatrixRegion
    file_region: MatrixRegion
    read: int
    scale_read: int | None = None
    restated: bool = False


@dataclass(slots=True)
class ReadPlan:
    """The reads of one unit. rows: (first row, number of rows) of a tensor that passes through."""

    index: int
    unit: Unit
    reads: list[TensorRead] = field(default_factory=list)
    weights: list[WeightPlan] = field(default_factory=list)
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for read in self.reads)

    @property
    def plans(self) -> list[ReadPlan]:
        return [self]

    @property
    def ranges(self) -> Iterator[ByteRange]:
        return (byte_range for read in self.reads for byte_range in read.ranges)


@dataclass(frozen=True, slots=True)
class Batch:
    """Units that are quantized together. alike: the units of each shape and format, in the order of `plans`."""

    plans: list[ReadPlan]
    reads: list[tuple[TensorRead, ...]]  # for each plan: its matrices one behind the other, and likewise the scales of an FP8 source
    alike: dict[object, list[ReadPlan]]

    @property
    def nbytes(self) -> int:
        return sum(read.nbytes for reads in self.reads for read in reads)

    @property
    def ranges(self) -> Iterator[ByteRange]:
        return (byte_range for reads in self.reads for read in reads for byte_range in read.ranges)


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors that pass through and are adjacent both in the file and in their target memory, uint8 [nbytes]."""

    plans: list[ReadPlan]
    read: TensorRead
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.read.nbytes

    @property
    def ranges(self) -> Iterator[ByteRange]:
        return iter(self.read.ranges)


def plan_of(index: int, unit: Unit, regions: Mapping[str, Region | None] | None, outputs: Sequence[OutputTensor]) -> ReadPlan | None:
    """The read plan of a unit; None where no part of it is needed.

    regions: see Needed.
    outputs: the unit's tensors that vLLM receives.
    """
    if unit.plain is not None:
        region = None if regions is None else regions.get(unit.plain.name)
        if regions is not None and region is None:
            return None
        byte_range, first, rows = rows_range(index, unit.plain, region)
        return ReadPlan(index, unit, [TensorRead((byte_range,), byte_range.nbytes)], [], (first, rows))
    plan = ReadPlan(index, unit)
    # The halves of a packed expert are read once. Two shards have their own tensors at the same offset.
    seen: dict[tuple[str, int, MatrixRegion], int] = {}
    for number, weight in enumerate(unit.weights):
        need = _needed_region(number, weight, regions, outputs)
        if need is None:
            continue
        ranges, file_region = matrix_ranges(index, weight.source, need)
        place = (weight.source.ref.path, weight.source.offset, file_region)
        if (read := seen.get(place)) is None:
            read = seen[place] = len(plan.reads)
            plan.reads.append(TensorRead(tuple(ranges), sum(byte_range.nbytes for byte_range in ranges)))
        scale_read = None
        if weight.scale is not None:
            scale_read = len(plan.reads)
            plan.reads.append(
                TensorRead((ByteRange(index, weight.scale.path, weight.scale.offset, weight.scale.nbytes),), weight.scale.nbytes)
            )
        plan.weights.append(WeightPlan(number, need, file_region, read, scale_read, _is_restated(weight)))
    return plan if plan.weights else None


def _needed_region(
    number: int, weight: Weight, regions: Mapping[str, Region | None] | None, outputs: Sequence[OutputTensor]
) -> MatrixRegion | None:
    """The region of a weight that covers the regions of its parts, widened to whole groups. None where no part is needed."""
    if regions is None:
        n, k = weight.source.shape
        return MatrixRegion(0, n, 0, k)
    of_parts = tuple((output.suffix, regions.get(output.name)) for output in outputs if output.weight == number)
    return _covering(weight.format, *weight.source.shape, of_parts)


@functools.lru_cache(maxsize=4096)
def _covering(form: Format, n: int, k: int, regions: tuple[tuple[str, Region | None], ...]) -> MatrixRegion | None:
    """`_needed_region`, cached because thousands of experts have equal arguments.

    regions: (suffix, region of that part); a part without rows and columns (a global scale) does not count.
    """
    parts = parts_of(form, n, k)
    covered: list[MatrixRegion] = []
    for suffix, region in regions:
        shape = parts[suffix][1]
        if region is None or len(shape) != 2 or math.prod(shape) <= 2:
            continue
        (r0, r1), (c0, c1) = region
        down, across = -(-n // shape[0]), -(-k // shape[1])
        covered.append(MatrixRegion(r0 * down, min(n, r1 * down), c0 * across, min(k, c1 * across)))
    if not covered:
        return None
    # Rows and columns that share a scale are quantized together (compressed-tensors' group and block sizes).
    row_step, col_step = form.scale_sides
    r0, r1 = min(region.row_start for region in covered), max(region.row_stop for region in covered)
    c0, c1 = min(region.col_start for region in covered), max(region.col_stop for region in covered)
    return MatrixRegion(
        r0 // row_step * row_step, min(n, -(-r1 // row_step) * row_step), c0 // col_step * col_step, min(k, -(-c1 // col_step) * col_step)
    )


def rows_range(key: object, ref: TensorRef, region: Region | None) -> tuple[ByteRange, int, int]:
    """The bytes of a tensor that passes through: whole leading rows only. (range, first row, rows); a scalar is one row."""
    if not ref.shape or region is None:
        return ByteRange(key, ref.path, ref.offset, ref.nbytes), 0, ref.shape[0] if ref.shape else 1
    start, stop = region[0]
    row_bytes = ref.nbytes // max(1, ref.shape[0])
    return ByteRange(key, ref.path, ref.offset + start * row_bytes, (stop - start) * row_bytes), start, stop - start


def matrix_ranges(key: object, source: SourceMatrix, need: MatrixRegion) -> tuple[list[ByteRange], MatrixRegion]:
    """The byte ranges with the needed region of a weight, and their region of the file's matrix.

    They have as few bytes as ranges of at least SHORTEST_READ_BYTES allow.
    """
    ref, size = source.ref, DTYPES[source.ref.dtype].itemsize
    first, last = source.row_start + need.row_start, source.row_start + need.row_stop
    region = (
        MatrixRegion(need.col_start, need.col_stop, first, last) if source.transposed else need._replace(row_start=first, row_stop=last)
    )
    if region.cols == source.cols or region.cols * size < SHORTEST_READ_BYTES:
        region = region._replace(col_start=0, col_stop=source.cols)
        start = source.offset + region.row_start * source.cols * size
        return [ByteRange(key, ref.path, start, region.rows * source.cols * size)], region
    starts = (source.offset + (row * source.cols + region.col_start) * size for row in range(region.row_start, region.row_stop))
    return [ByteRange(key, ref.path, start, region.cols * size) for start in starts], region


def cut(matrix: torch.Tensor, source: SourceMatrix, file_region: MatrixRegion, need: MatrixRegion) -> torch.Tensor:
    """The needed rows and columns, cut from the file_region of the file's matrix."""
    if not source.transposed and (file_region.rows, file_region.cols) == (need.rows, need.cols):
        return matrix  # the usual case, 20,000 times: two slices of a tensor cost more than a kernel's launch
    row_at, col_at = file_region.row_start, file_region.col_start
    if source.transposed:
        matrix = matrix.t()
        row_at, col_at = col_at, row_at
    first = source.row_start + need.row_start - row_at
    return matrix[first : first + need.rows, need.col_start - col_at : need.col_stop - col_at]


def _is_restated(weight: Weight) -> bool:
    if weight.scale is None:
        return False
    shape = weight.scale.shape[::-1] if weight.source.transposed else weight.scale.shape
    return holds_codes(weight.format, shape, weight.scale_shape, 0 if weight.scaled is None else weight.scaled.first)


def kind_of(plan: ReadPlan) -> object | None:
    """A key that is equal for units that can be quantized as one tensor [units, weights, N, K]; None for any other unit.

    Such a unit has matrices of one shape and format, stored in the needed form, all with scales of one shape (FP8) or all without.
    """
    if plan.unit.plain is not None:
        return None
    kinds = set()
    reads_each = len(plan.reads) // len(plan.weights)
    for number, planned in enumerate(plan.weights):
        weight, need, file_region = plan.unit.weights[planned.number], planned.need, planned.file_region
        source, scale = weight.source, weight.scale
        as_needed = (file_region.rows, file_region.cols) == (need.rows, need.cols)
        if planned.read != number * reads_each or source.transposed or not as_needed:
            return None
        scaled = None if scale is None else (scale.dtype, scale.shape, weight.scale_shape, weight.scale_origin(need))
        kinds.add((weight.format, file_region.rows, file_region.cols, source.ref.dtype, scaled, planned.restated))
    return (len(plan.weights), *kinds) if len(kinds) == 1 else None


def memory_of(plan: ReadPlan, direct_targets: Mapping[str, Target]) -> torch.Tensor | None:
    """The parameter's memory for a tensor that can be copied to it unchanged: contiguous and of its dtype; else None."""
    ref = plan.unit.plain
    if ref is None or plan.rows is None or (target := direct_targets.get(ref.name)) is None:
        return None
    first, rows = plan.rows
    region = ((first, first + rows), *((0, size) for size in ref.shape[1:])) if ref.shape else ()
    order = [dim for dim in target.dims if dim is not None]
    memory = target.memory
    if target.region != region or order != sorted(order) or memory.dtype != dtype_of(ref) or not memory.is_contiguous():
        return None
    return memory if memory.numel() * memory.element_size() == plan.nbytes else None


def steps(plans: Iterable[ReadPlan], batch_bytes: int, direct_targets: Mapping[str, Target]) -> Iterator[ReadPlan | Batch | Run]:
    """The units in the same order, joined to batches and runs where possible.

    batch_bytes: 0 for no batches.
    direct_targets: by name.
    """
    waiting: list[ReadPlan] = []
    kinds: list[object] = []
    waiting_bytes = 0  # on the device, where an FP8 weight also has its dequantized 16-bit form
    run: list[tuple[ReadPlan, torch.Tensor]] = []
    for plan in plans:
        memory = memory_of(plan, direct_targets)
        kind = kind_of(plan) if batch_bytes else None
        if run and (memory is None or not _follows(run, plan, memory)):
            yield _run(run)
            run = []
        nbytes = plan.nbytes * (3 if plan.weights and plan.weights[0].scale_read is not None else 1)
        if waiting and (kind is None or waiting_bytes + nbytes > batch_bytes):
            yield _batch(waiting, kinds)
            waiting, kinds, waiting_bytes = [], [], 0
        if memory is not None:
            run.append((plan, memory))
        elif kind is not None:
            waiting.append(plan)
            kinds.append(kind)
            waiting_bytes += nbytes
        else:
            yield plan
    if run:
        yield _run(run)
    if waiting:
        yield _batch(waiting, kinds)


def _follows(run: list[tuple[ReadPlan, torch.Tensor]], plan: ReadPlan, memory: torch.Tensor) -> bool:
    last, before = run[-1]
    byte_range, previous = plan.reads[0].ranges[0], last.reads[0].ranges[0]
    return (
        (byte_range.path, byte_range.offset) == (previous.path, previous.offset + previous.nbytes)
        and memory.dtype == before.dtype
        and memory.data_ptr() == before.data_ptr() + last.nbytes
        and memory.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and byte_range.offset + byte_range.nbytes - run[0][0].reads[0].ranges[0].offset <= RUN_BYTES
    )


def _run(run: list[tuple[ReadPlan, torch.Tensor]]) -> Run:
    first, memory = run[0]
    begin = first.reads[0].ranges[0]
    nbytes = sum(plan.nbytes for plan, _ in run)
    flat = memory.as_strided((nbytes // memory.element_size(),), (1,)).view(torch.uint8)
    return Run([plan for plan, _ in run], TensorRead((begin._replace(nbytes=nbytes),), nbytes), flat)


def _batch(plans: list[ReadPlan], kinds: list[object]) -> ReadPlan | Batch:
    if len(plans) == 1:
        return plans[0]
    alike: dict[object, list[ReadPlan]] = {}
    for plan, kind in zip(plans, kinds, strict=True):
        alike.setdefault(kind, []).append(plan)
    return Batch(plans, [_joined(plan) for plan in plans], alike)


def _joined(plan: ReadPlan) -> tuple[TensorRead, ...]:
    scales = [plan.reads[planned.scale_read] for planned in plan.weights if planned.scale_read is not None]
    matrices = _one([plan.reads[planned.read] for planned in plan.weights])
    return (matrices, _one(scales)) if scales else (matrices,)


def _one(reads: Sequence[TensorRead]) -> TensorRead:
    """The reads joined to one, with adjacent ranges of a file as one range."""
    ranges: list[ByteRange] = []
    for byte_range in (byte_range for read in reads for byte_range in read.ranges):
        last = ranges[-1] if ranges else None
        if last is not None and (last.path, last.offset + last.nbytes) == (byte_range.path, byte_range.offset):
            ranges[-1] = last._replace(nbytes=last.nbytes + byte_range.nbytes)
        else:
            ranges.append(byte_range)
    return TensorRead(tuple(ranges), sum(read.nbytes for read in reads))


def with_offsets(reads: Sequence[TensorRead]) -> Iterator[tuple[TensorRead, int]]:
    """Each read with its offset in bytes, where they lie one after the other."""
    at = 0
    for read in reads:
        yield read, at
        at += read.nbytes


def matrices_of(plan: ReadPlan, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | Parts:
    """[matrices, N, K] from the joined reads (uint8 [bytes] each) of units like `plan`, dequantized to `dtype` for an FP8 source; or the
    finished parts of all units where they are restated."""
    first = plan.weights[0]
    weight = plan.unit.weights[first.number]
    matrices = raw[0].view(DTYPES[weight.source.ref.dtype]).view(-1, first.file_region.rows, first.file_region.cols)
    if weight.scale is None:
        return matrices
    scales = raw[1].view(dtype_of(weight.scale)).view(-1, *weight.scale.shape)
    return undone(weight, first, matrices, scales, dtype)


def undone(weight: Weight, planned: WeightPlan, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | Parts:
    """Dequantize or restate an FP8 weight.

    codes: [.., rows, columns] of its needed region.
    scales: of all of it, in its orientation.
    """
    shape, origin = weight.scale_shape, weight.scale_origin(planned.need)
    if planned.restated:
        return restated_fp8(codes, scales, shape, weight.format, origin)
    return dequantize_fp8(codes, scales, shape, origin, dtype=dtype)
