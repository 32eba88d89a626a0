"""Owns which parts of a virtual checkpoint are read and processed together: a unit, a batch of like units, a run of neighbours. Never
reads a byte.

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
from workers.load.reader import Piece
from workers.load.trace import Region, Target
from workers.load.virtual import DTYPES, Emitted, MatrixRegion, Stored, Unit, Weight, dtype_of, parts_of
from workers.quantization.formats import Format

BATCH_BYTES = 16 * 2**20  # bytes of the checkpoint that a GPU quantizes at once; the device holds twice that, and the results
SHORTEST_READ_BYTES = 128 * 2**10  # for shorter runs of a row the whole rows are read instead
RUN_BYTES = 64 * 2**20  # the largest copy: the load reports its progress, and can be cancelled, between copies


class Input(NamedTuple):
    """One matrix or tensor of a unit in the file's layout: its pieces, and the sum of their bytes."""

    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The part to read for one weight of a unit. number: its place in `unit.weights`; box: the part of the file's matrix to read for
    `need`.

    slot, scale_slot: the plan's inputs with that box and with an FP8 source's scales, None without scales. restated: the new format keeps
    the source's own codes and scales, without rounding.
    """

    number: int
    need: MatrixRegion
    box: MatrixRegion
    slot: int
    scale_slot: int | None = None
    restated: bool = False


@dataclass(slots=True)
class Plan:
    """The parts to read for one unit. rows: (first row, number of rows) of a tensor that passes through."""

    index: int
    unit: Unit
    inputs: list[Input] = field(default_factory=list)
    weights: list[WeightPlan] = field(default_factory=list)
    rows: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.inputs)

    @property
    def plans(self) -> list[Plan]:
        return [self]

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for source in self.inputs for piece in source.pieces)


@dataclass(frozen=True, slots=True)
class Batch:
    """Units that are quantized together. alike: the units of each shape and format, in the order of `plans`."""

    plans: list[Plan]
    inputs: list[tuple[Input, ...]]  # for each plan: its matrices one behind the other, and likewise the scales of an FP8 source
    alike: dict[object, list[Plan]]

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for inputs in self.inputs for source in inputs)

    @property
    def pieces(self) -> Iterator[Piece]:
        return (piece for inputs in self.inputs for source in inputs for piece in source.pieces)


@dataclass(frozen=True, slots=True)
class Run:
    """Tensors that pass through and are adjacent both in the file and in their target memory, uint8 [nbytes]."""

    plans: list[Plan]
    source: Input
    memory: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.source.nbytes

    @property
    def pieces(self) -> Iterator[Piece]:
        return iter(self.source.pieces)


def plan_of(index: int, unit: Unit, regions: Mapping[str, Region | None] | None, emitted: Sequence[Emitted]) -> Plan | None:
    """The read plan of a unit; None where no part of it is needed. regions: see Needed; emitted: the unit's emitted tensors."""
    if unit.plain is not None:
        region = None if regions is None else regions.get(unit.plain.name)
        if regions is not None and region is None:
            return None
        piece, first, rows = plain_piece(index, unit.plain, region)
        return Plan(index, unit, [Input((piece,), piece.nbytes)], [], (first, rows))
    plan = Plan(index, unit)
    # Blocks of one packed tensor are read once. Two shards have their own tensors at the same offset.
    seen: dict[tuple[str, int, MatrixRegion], int] = {}
    for number, weight in enumerate(unit.weights):
        need = _need(number, weight, regions, emitted)
        if need is None:
            continue
        pieces, box = stored_pieces(index, weight.stored, need)
        place = (weight.stored.ref.path, weight.stored.offset, box)
        if (slot := seen.get(place)) is None:
            slot = seen[place] = len(plan.inputs)
            plan.inputs.append(Input(tuple(pieces), sum(piece.nbytes for piece in pieces)))
        scale_slot = None
        if weight.scale is not None:
            scale_slot = len(plan.inputs)
            plan.inputs.append(Input((Piece(index, weight.scale.path, weight.scale.offset, weight.scale.nbytes),), weight.scale.nbytes))
        plan.weights.append(WeightPlan(number, need, box, slot, scale_slot, _is_restated(weight)))
    return plan if plan.weights else None


def _need(number: int, weight: Weight, regions: Mapping[str, Region | None] | None, emitted: Sequence[Emitted]) -> MatrixRegion | None:
    if regions is None:
        n, k = weight.stored.shape
        return MatrixRegion(0, n, 0, k)
    return need_of(weight, ((tensor.suffix, regions.get(tensor.name)) for tensor in emitted if tensor.weight == number))


def need_of(weight: Weight, regions: Iterable[tuple[str, Region | None]]) -> MatrixRegion | None:
    """The box of a weight that covers the regions of its parts, widened to whole groups. None where no part is needed.

    regions: (suffix, region of that part); a part without rows and columns (a global scale) does not count.
    """
    return _covering(weight.format, *weight.stored.shape, tuple(regions))


@functools.lru_cache(maxsize=4096)
def _covering(form: Format, n: int, k: int, regions: tuple[tuple[str, Region | None], ...]) -> MatrixRegion | None:
    """`need_of`, cached because thousands of experts have equal arguments."""
    parts = parts_of(form, n, k)
    boxes: list[MatrixRegion] = []
    for suffix, region in regions:
        shape = parts[suffix][1]
        if region is None or len(shape) != 2 or math.prod(shape) <= 2:
            continue
        (r0, r1), (c0, c1) = region
        down, across = -(-n // shape[0]), -(-k // shape[1])
        boxes.append(MatrixRegion(r0 * down, min(n, r1 * down), c0 * across, min(k, c1 * across)))
    if not boxes:
        return None
    row_step, col_step = granularity(form)
    r0, r1 = min(box.row_start for box in boxes), max(box.row_stop for box in boxes)
    c0, c1 = min(box.col_start for box in boxes), max(box.col_stop for box in boxes)
    return MatrixRegion(
        r0 // row_step * row_step, min(n, -(-r1 // row_step) * row_step), c0 // col_step * col_step, min(k, -(-c1 // col_step) * col_step)
    )


def granularity(form: Format) -> tuple[int, int]:
    """Rows and columns that share a scale, and so must be quantized together (compressed-tensors' group and block sizes)."""
    return (128, 128) if form.name == "fp8_block" else (1, form.group or 1)


def plain_piece(key: object, ref: TensorRef, region: Region | None) -> tuple[Piece, int, int]:
    """The bytes of a tensor that passes through: whole leading rows only. (piece, first row, rows); a scalar is one row."""
    if not ref.shape or region is None:
        return Piece(key, ref.path, ref.offset, ref.nbytes), 0, ref.shape[0] if ref.shape else 1
    start, stop = region[0]
    row_bytes = ref.nbytes // max(1, ref.shape[0])
    return Piece(key, ref.path, ref.offset + start * row_bytes, (stop - start) * row_bytes), start, stop - start


def stored_pieces(key: object, stored: Stored, need: MatrixRegion) -> tuple[list[Piece], MatrixRegion]:
    """(byte runs, their region of the file's matrix) with the needed part of a weight, in as few bytes as runs of at least
    SHORTEST_READ_BYTES allow."""
    size = DTYPES[stored.ref.dtype].itemsize
    first, last = stored.row_start + need.row_start, stored.row_start + need.row_stop
    box = MatrixRegion(need.col_start, need.col_stop, first, last) if stored.transposed else need._replace(row_start=first, row_stop=last)
    if box.cols == stored.cols or box.cols * size < SHORTEST_READ_BYTES:
        box = box._replace(col_start=0, col_stop=stored.cols)
        return [Piece(key, stored.ref.path, stored.offset + box.row_start * stored.cols * size, box.rows * stored.cols * size)], box
    starts = range(box.row_start, box.row_stop)
    return [Piece(key, stored.ref.path, stored.offset + (row * stored.cols + box.col_start) * size, box.cols * size) for row in starts], box


def cut(matrix: torch.Tensor, stored: Stored, box: MatrixRegion, need: MatrixRegion) -> torch.Tensor:
    """The needed rows and columns, cut from the part of the file's matrix that was read ([box.rows, box.cols])."""
    if not stored.transposed and (box.rows, box.cols) == (need.rows, need.cols):
        return matrix  # the usual case, 20,000 times: two slices of a tensor cost more than a kernel's launch
    row_at, col_at = box.row_start, box.col_start
    if stored.transposed:
        matrix = matrix.t()
        row_at, col_at = col_at, row_at
    first = stored.row_start + need.row_start - row_at
    return matrix[first : first + need.rows, need.col_start - col_at : need.col_stop - col_at]


def _is_restated(weight: Weight) -> bool:
    if weight.scale is None:
        return False
    shape = weight.scale.shape[::-1] if weight.stored.transposed else weight.scale.shape
    return holds_codes(weight.format, shape, weight.scale_shape, 0 if weight.scaled is None else weight.scaled.first)


def kind_of(plan: Plan) -> object | None:
    """A key that is equal for units that can be quantized as one tensor [units, weights, N, K]; None for any other unit.

    Such a unit has matrices of one shape and format, stored in the needed form, all with scales of one shape (FP8) or all without.
    """
    if plan.unit.plain is not None:
        return None
    kinds = set()
    each = len(plan.inputs) // len(plan.weights)
    for number, planned in enumerate(plan.weights):
        weight, need, box = plan.unit.weights[planned.number], planned.need, planned.box
        stored, scale = weight.stored, weight.scale
        as_needed = (box.rows, box.cols) == (need.rows, need.cols)
        if planned.slot != number * each or stored.transposed or not as_needed:
            return None
        scaled = None if scale is None else (scale.dtype, scale.shape, weight.scale_shape, weight.scale_origin(need))
        kinds.add((weight.format, box.rows, box.cols, stored.ref.dtype, scaled, planned.restated))
    return (len(plan.weights), *kinds) if len(kinds) == 1 else None


def memory_of(plan: Plan, straight: Mapping[str, Target]) -> torch.Tensor | None:
    """The parameter's memory for a tensor that can be copied to it unchanged: contiguous and of its dtype; else None."""
    ref = plan.unit.plain
    if ref is None or plan.rows is None or (target := straight.get(ref.name)) is None:
        return None
    first, rows = plan.rows
    box = ((first, first + rows), *((0, size) for size in ref.shape[1:])) if ref.shape else ()
    order = [dim for dim in target.dims if dim is not None]
    memory = target.memory
    if target.region != box or order != sorted(order) or memory.dtype != dtype_of(ref) or not memory.is_contiguous():
        return None
    return memory if memory.numel() * memory.element_size() == plan.nbytes else None


def steps(plans: Iterable[Plan], batch_bytes: int, straight: Mapping[str, Target]) -> Iterator[Plan | Batch | Run]:
    """The units in the same order, joined to batches and runs where possible. batch_bytes: 0 for no batches. straight: targets by name."""
    waiting: list[Plan] = []
    kinds: list[object] = []
    waiting_bytes = 0  # on the device, where an FP8 weight also has its dequantized 16-bit form
    run: list[tuple[Plan, torch.Tensor]] = []
    for plan in plans:
        memory = memory_of(plan, straight)
        kind = kind_of(plan) if batch_bytes else None
        if run and (memory is None or not _follows(run, plan, memory)):
            yield _run(run)
            run = []
        nbytes = plan.nbytes * (3 if plan.weights and plan.weights[0].scale_slot is not None else 1)
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


def _follows(run: list[tuple[Plan, torch.Tensor]], plan: Plan, memory: torch.Tensor) -> bool:
    last, before = run[-1]
    here, there = plan.inputs[0].pieces[0], last.inputs[0].pieces[0]
    return (
        (here.path, here.offset) == (there.path, there.offset + there.nbytes)
        and memory.dtype == before.dtype
        and memory.data_ptr() == before.data_ptr() + last.nbytes
        and memory.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and here.offset + here.nbytes - run[0][0].inputs[0].pieces[0].offset <= RUN_BYTES
    )


def _run(run: list[tuple[Plan, torch.Tensor]]) -> Run:
    first, memory = run[0]
    piece = first.inputs[0].pieces[0]
    nbytes = sum(plan.nbytes for plan, _ in run)
    flat = memory.as_strided((nbytes // memory.element_size(),), (1,)).view(torch.uint8)
    return Run([plan for plan, _ in run], Input((Piece(piece.key, piece.path, piece.offset, nbytes),), nbytes), flat)


def _batch(plans: list[Plan], kinds: list[object]) -> Plan | Batch:
    if len(plans) == 1:
        return plans[0]
    alike: dict[object, list[Plan]] = {}
    for plan, kind in zip(plans, kinds, strict=True):
        alike.setdefault(kind, []).append(plan)
    return Batch(plans, [_joined(plan) for plan in plans], alike)


def _joined(plan: Plan) -> tuple[Input, ...]:
    scales = [plan.inputs[planned.scale_slot] for planned in plan.weights if planned.scale_slot is not None]
    matrices = _one([plan.inputs[planned.slot] for planned in plan.weights])
    return (matrices, _one(scales)) if scales else (matrices,)


def _one(inputs: Sequence[Input]) -> Input:
    """The inputs joined to one, with adjacent pieces of a file as one piece."""
    pieces: list[Piece] = []
    for piece in (piece for source in inputs for piece in source.pieces):
        last = pieces[-1] if pieces else None
        if last is not None and (last.path, last.offset + last.nbytes) == (piece.path, piece.offset):
            pieces[-1] = Piece(last.key, last.path, last.offset, last.nbytes + piece.nbytes)
        else:
            pieces.append(piece)
    return Input(tuple(pieces), sum(source.nbytes for source in inputs))


def one_behind_the_other(inputs: Sequence[Input]) -> Iterator[tuple[Input, int]]:
    """(input, its offset in bytes) of inputs that are joined one after the other."""
    at = 0
    for source in inputs:
        yield source, at
        at += source.nbytes


def matrices_of(plan: Plan, raw: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | Parts:
    """[matrices, N, K] from the joined inputs (uint8 [bytes] each) of units like `plan`, dequantized to `dtype` for an FP8 source; or the
    finished parts of all units where they are restated."""
    first = plan.weights[0]
    weight = plan.unit.weights[first.number]
    matrices = raw[0].view(DTYPES[weight.stored.ref.dtype]).view(-1, first.box.rows, first.box.cols)
    if weight.scale is None:
        return matrices
    scales = raw[1].view(dtype_of(weight.scale)).view(-1, *weight.scale.shape)
    return undone(weight, first, matrices, scales, dtype)


def undone(weight: Weight, planned: WeightPlan, part: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | Parts:
    """Dequantize or restate a part of an FP8 weight. part: [.., rows, columns]; scales: those of the whole weight, in its orientation."""
    shape, origin = weight.scale_shape, weight.scale_origin(planned.need)
    if planned.restated:
        return restated_fp8(part, scales, shape, weight.format, origin)
    return dequantize_fp8(part, scales, shape, origin, dtype=dtype)
