"""The units of a checkpoint for a mix: weights that must have one format, with their bytes in each.

A unit is what `group_of` joins: the parts of a matrix that vLLM fuses, or all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkd.checkpoint import Checkpoint, towers_of
from sparkd.checkpoint import tensor_class as class_of_tensor
from workers.quantization.formats import FORMATS
from workers.quantization.fusion import group_of
from workers.quantization.outcome import outcome_of, shapes_of
from workers.quantization.recipe import QuantizationRecipe

BF16 = "bf16"
# fp8-block has the bytes and the error of fp8, and suits fewer weights; nvfp4-a4 has the bytes of nvfp4, and a larger error.
_CANDIDATES = {spelling: form for spelling, form in FORMATS.items() if form.family.error_cost is not None}
_EVERY = QuantizationRecipe.parse("fp8")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class FormatUnit:
    """Weights that must have one format.

    key: as `group_of` gives it.
    kind: their tensor_class.
    modules: their paths, without the numbers of experts above 0.
    nbytes: by the spelling of each format that it can have, bf16 (as stored) among them.
    """

    key: str
    kind: str
    modules: tuple[str, ...]
    nbytes: Mapping[str, int]

    @property
    def layer(self) -> str:
        """The first number of the key; empty where it has none."""
        number = _NUMBER.search(f"{self.key}.")
        return number[0] if number else ""


@dataclass(frozen=True, slots=True)
class UnitList:
    """units: in the order of the checkpoint; kept_bytes: of all tensors that no recipe for `best` changes."""

    units: tuple[FormatUnit, ...]
    kept_bytes: int

    def nbytes(self, choice: Mapping[str, str]) -> int:
        """Bytes of the model where the unit of each key has the format of this spelling."""
        return self.kept_bytes + sum(unit.nbytes[choice[unit.key]] for unit in self.units)

    @property
    def least_bytes(self) -> int:
        return self.kept_bytes + sum(min(unit.nbytes.values()) for unit in self.units)

    @property
    def stored_bytes(self) -> int:
        return self.kept_bytes + sum(unit.nbytes[BF16] for unit in self.units)


@dataclass(slots=True)
class _Sum:
    kind: str
    modules: dict[str, None]
    shapes: dict[tuple[int, int], int]
    stored: int = 0


def units_of(checkpoint: Checkpoint, *, count: Callable[[str], int] = lambda _name: 1, ranks: int = 1) -> UnitList:
    """The units of the weights that `quantize: fp8` would change.

    count: how many alike tensors the one of this name stands for.
    ranks: of tensor parallelism, each of which must get whole groups.

    Raises CheckpointError as QuantizationRecipe.assign.
    """
    formats = _EVERY.assign(checkpoint)
    towers = towers_of(checkpoint.config)
    sums: dict[str, _Sum] = {}
    kept_bytes = 0
    for name, tensor in checkpoint.tensors.items():
        outcome = outcome_of(name, formats, checkpoint)
        if outcome is None or outcome.format.keeps:
            kept_bytes += tensor.nbytes * count(name)
            continue
        module = outcome.module
        weight = checkpoint.tensors.get(f"{module}.weight") or checkpoint.tensors[module]
        kind = class_of_tensor(weight.name, weight.shape, towers)
        unit_sum = sums.setdefault(group_of(module, kind), _Sum(kind, {}, {}))
        unit_sum.stored += tensor.nbytes * count(name)
        if name != weight.name:
            continue
        unit_sum.modules[_numberless(module)] = None
        for shape, times in shapes_of(tensor, checkpoint).items():
            unit_sum.shapes[shape] = unit_sum.shapes.get(shape, 0) + times * count(name)
    return UnitList(tuple(FormatUnit(key, one.kind, tuple(one.modules), _sizes(one, ranks)) for key, one in sums.items()), kept_bytes)


def _numberless(module: str) -> str:
    """Expert 0 stands for all experts of its layer."""
    before, mark, after = module.partition(".experts.")
    number, _, rest = after.partition(".")
    return f"{before}.experts.0.{rest}" if mark and number.isdigit() else module


def _sizes(one: _Sum, ranks: int) -> dict[str, int]:
    fits = {spelling: form for spelling, form in _CANDIDATES.items() if all(k % ((form.group or 1) * ranks) == 0 for _, k in one.shapes)}
    sizes = {spelling: sum(times * form.nbytes(n, k) for (n, k), times in one.shapes.items()) for spelling, form in fits.items()}
    # A format that saves nothing of an FP8 source is none to choose.
    return {BF16: one.stored} | {spelling: size for spelling, size in sizes.items() if size < one.stored}
