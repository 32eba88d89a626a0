"""The virtual quantized checkpoint: the tensors that vLLM will receive, and the bytes of the real checkpoint from which each is made.

A checkpoint is cut into units. A unit is the least that must be in memory at once: one tensor that passes through, one weight to quantize,
or several weights that share a scale because vLLM fuses them (NVFP4's global scale over q/k/v and gate/up). Units are in the order of their
bytes on disk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sparkd.checkpoint import Checkpoint, TensorRef
from sparkd.errors import CheckpointError
from workers.load.formats import quantizer
from workers.load.formats.fp8_source import refuse_scale
from workers.quantization.fusion import FUSED
from workers.quantization.outcome import LEAVE_OUT, Outcome, outcome_of
from workers.quantization.packed import Packed, PackedWeight, packed_of, packed_weights
from workers.quantization.packed_scale import PackedScale, refuse_codes, scale_of, scale_of_weight
from workers.quantization.recipe import Format

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
SCALE_SUFFIXES = ("weight_scale_inv", "weight_scale", "scale")
_LEADER = {name: group[0] for group in FUSED for name in group}


class MatrixRegion(NamedTuple):
    """Rows [row_start, row_stop) and columns [col_start, col_stop) of a matrix."""

    row_start: int
    row_stop: int
    col_start: int
    col_stop: int

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def cols(self) -> int:
        return self.col_stop - self.col_start

    def is_whole(self, shape: tuple[int, int]) -> bool:
        return (self.row_start, self.row_stop, self.col_start, self.col_stop) == (0, shape[0], 0, shape[1])


@dataclass(frozen=True, slots=True)
class SourceMatrix:
    """The place of a 2-D weight: `rows` x `cols` elements from byte `offset` of the tensor's file, row after row.

    transposed: the file holds [K, N] where vLLM's format needs [N, K]. row_start, row_count select rows of the result (gate or up of one
    packed expert).
    """

    ref: TensorRef
    offset: int
    rows: int
    cols: int
    transposed: bool = False
    row_start: int = 0
    row_count: int | None = None

    @property
    def nbytes(self) -> int:
        return self.rows * self.cols * DTYPES[self.ref.dtype].itemsize

    @property
    def shape(self) -> tuple[int, int]:
        n, k = (self.cols, self.rows) if self.transposed else (self.rows, self.cols)
        return (n if self.row_count is None else self.row_count), k


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight to quantize: received under `module`, made from `source` (and from `scale` where the source is FP8).

    scaled: the matrix to which `scale` belongs, where that is not the weight itself.
    joint: the text between `module` and a part's suffix.
    """

    module: str
    format: Format
    source: SourceMatrix
    scale: TensorRef | None = None
    scaled: PackedScale | None = None
    joint: str = "."

    @property
    def made_from(self) -> tuple[TensorRef, ...]:
        return (self.source.ref,) if self.scale is None else (self.source.ref, self.scale)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """[N, K] of the matrix to which `scale` belongs."""
        return self.source.shape if self.scaled is None else self.scaled.shape

    def scale_origin(self, need: MatrixRegion) -> tuple[int, int]:
        """(row, column) of the scaled matrix at which the needed region begins."""
        return need.row_start + (0 if self.scaled is None else self.scaled.first), need.col_start

    def parts(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Suffix -> (dtype, shape) of the tensors that vLLM receives. An int4 weight under a name of vLLM's own has no shape tensor."""
        parts = parts_of(self.format, *self.source.shape)
        return {suffix: form for suffix, form in parts.items() if self.joint == "." or suffix != "weight_shape"}


class Unit(NamedTuple):
    """Either one tensor that passes through (`plain`), or the weights that are quantized together."""

    plain: TensorRef | None = None
    weights: tuple[Weight, ...] = ()

    @property
    def name(self) -> str:
        return self.plain.name if self.plain is not None else ", ".join(weight.module for weight in self.weights)


class OutputTensor(NamedTuple):
    """One tensor that vLLM receives: its unit, and for a quantized one the weight and the part (`suffix`).

    A tuple, like Unit and ByteRange, because one is made for each of 190,000 tensors, in a fifth of the time of a frozen dataclass.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: int
    weight: int | None = None
    suffix: str = ""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@functools.lru_cache(maxsize=4096)
def parts_of(form: Format, n: int, k: int) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The parts of a format for a shape, cached because thousands of experts have one shape."""
    return quantizer(form).parts(n, k)


@dataclass(slots=True)
class VirtualCheckpoint:
    """Every unit of a checkpoint under one assignment of formats; `formats` maps module paths to the format of their weight.

    keep: selects the tensors that count.
    input_scale: the divisor of the input of a module whose format rounds activations.

    Raises CheckpointError for a weight whose shape does not suit its format.
    """

    checkpoint: Checkpoint
    formats: Mapping[str, Format]
    keep: Callable[[str], bool] = lambda _name: True
    input_scale: Callable[[str], float] = lambda _module: 1.0
    units: list[Unit] = field(init=False)
    _outputs: list[OutputTensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.units = _in_file_order(self.checkpoint, _units(self.checkpoint, self.formats, self.keep))

    @property
    def rounded_inputs(self) -> Iterator[str]:
        """The modules whose format rounds activations, each expert by itself."""
        return (weight.module for unit in self.units for weight in unit.weights if weight.format.rounds_activations)

    def outputs(self) -> Sequence[OutputTensor]:
        """The tensors that vLLM will see, unit by unit."""
        if self._outputs is None:
            self._outputs = self._all_outputs()
        return self._outputs

    def _all_outputs(self) -> list[OutputTensor]:
        outputs: list[OutputTensor] = []
        for index, unit in enumerate(self.units):
            if unit.plain is not None:
                outputs.append(OutputTensor(unit.plain.name, unit.plain.shape, dtype_of(unit.plain), index))
            for number, weight in enumerate(unit.weights):
                for suffix, (dtype, shape) in weight.parts().items():
                    outputs.append(OutputTensor(f"{weight.module}{weight.joint}{suffix}", shape, dtype, index, number, suffix))
        return outputs

    @property
    def output_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs())


def dtype_of(ref: TensorRef) -> torch.dtype:
    """torch's dtype of a tensor. Raises CheckpointError for a dtype that this torch does not have."""
    dtype = DTYPES.get(ref.dtype)
    if dtype is None:
        raise CheckpointError(
            f"its dtype {ref.dtype} is not one that can be loaded", file=ref.path, tensor=ref.name, cure="Convert it first"
        )
    return dtype


def _units(checkpoint: Checkpoint, formats: Mapping[str, Format], keep: Callable[[str], bool]) -> list[Unit]:
    groups: dict[str, list[Weight]] = {}
    plain: list[Unit] = []
    for name, ref in checkpoint.tensors.items():
        if not keep(name):
            continue
        outcome = outcome_of(name, formats, checkpoint)
        if outcome is None:
            plain.append(Unit(plain=ref))
        elif not outcome.is_scale:
            for weight in _weights(checkpoint, ref, outcome):
                groups.setdefault(_group(weight), []).append(weight)
    return [Unit(weights=tuple(group)) for group in groups.values()] + plain


def _group(weight: Weight) -> str:
    """The key of a weight's unit. Fused modules share one second-level scale, and the halves of a packed expert are read together."""
    if not weight.format.family.has_divisor and weight.source.row_count is None:
        return weight.module
    parent, _, last = weight.module.rpartition(".")
    return f"{parent}.{_LEADER.get(last, last)}"


def _weights(checkpoint: Checkpoint, ref: TensorRef, outcome: Outcome) -> list[Weight]:
    module, form = outcome.module, outcome.format
    if len(ref.shape) == 3 and (packed := packed_of(ref.name)):
        return _packed(ref, packed, form, checkpoint)
    if len(ref.shape) != 2 or ref.dtype not in ("BF16", "F16", "F32", "F8_E4M3"):
        raise CheckpointError(
            f"a {ref.dtype} tensor of shape {list(ref.shape)} cannot be {_made(form)}",
            file=ref.path,
            tensor=ref.name,
            cure=LEAVE_OUT if form.keeps else f"Keep it as it is: add {module!r} to `keep`",
        )
    form.check(ref.name, *ref.shape, file=ref.path)
    scale = _scale(checkpoint, module) if ref.dtype == "F8_E4M3" else None
    if scale is not None:
        refuse_codes(scale)
        refuse_scale(scale.shape, *ref.shape, file=scale.path, tensor=scale.name)
    elif ref.dtype == "F8_E4M3":
        raise CheckpointError(
            "an FP8 weight has no scale",
            file=ref.path,
            tensor=ref.name,
            cure=f"{module}.weight_scale_inv or .weight_scale is expected",
        )
    return [Weight(module, form, SourceMatrix(ref, ref.offset, *ref.shape), scale)]


def _made(form: Format) -> str:
    return "dequantized here" if form.keeps else f"quantized to {form.spelling}"


def _scale(checkpoint: Checkpoint, module: str) -> TensorRef | None:
    return next((checkpoint.tensors[name] for suffix in SCALE_SUFFIXES if (name := f"{module}.{suffix}") in checkpoint.tensors), None)


def _packed(ref: TensorRef, packed: Packed, form: Format, checkpoint: Checkpoint) -> list[Weight]:
    """Experts stored as one tensor [experts, ., .]: one weight for each expert and projection, see packed.py and packed_scale.py."""
    _, rows, cols = ref.shape
    size = rows * cols * DTYPES[ref.dtype].itemsize
    scale = scale_of(ref, packed.module, checkpoint.tensors) if ref.dtype == "F8_E4M3" else None

    def weight_of(packed_weight: PackedWeight) -> Weight:
        source = SourceMatrix(
            ref,
            ref.offset + packed_weight.expert * size,
            rows,
            cols,
            packed_weight.transposed,
            packed_weight.row_start,
            row_count=packed_weight.row_count,
        )
        if scale is None:
            return Weight(packed_weight.module, form, source, joint=packed_weight.joint)
        scaled = scale_of_weight(ref, packed_weight, scale)
        return Weight(packed_weight.module, form, source, scaled.ref, scaled, packed_weight.joint)

    weights = [weight_of(packed_weight) for packed_weight in packed_weights(ref, packed, checkpoint)]
    for weight in weights[:2]:
        form.check(weight.module, *weight.source.shape, file=ref.path)
    return weights


def _in_file_order(checkpoint: Checkpoint, units: Sequence[Unit]) -> list[Unit]:
    shard = {file.path: number for number, file in enumerate(checkpoint.shards)}

    def place(unit: Unit) -> tuple[int, int]:
        if unit.plain is not None:
            return shard[unit.plain.path], unit.plain.offset
        return min((shard[weight.source.ref.path], weight.source.offset) for weight in unit.weights)

    return sorted(units, key=place)
