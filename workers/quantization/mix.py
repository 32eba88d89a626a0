"""Owns the choice of `quantize: best`: a format for each unit within a budget of bytes, at the least error, as a plain recipe.

The error of a unit in a format is its sensitivity times the squared relative error of its weights in that format. Sensitivities add up,
because each is measured with the rest of the model unchanged and small. The choice is that of a Lagrangian over bytes: each unit moves
along the convex hull of its formats, the move that saves most error for its bytes first; what is left of the budget goes to the moves that
still fit.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from workers.quantization.expression import MAX_CHARACTERS
from workers.quantization.formats import ERRORS, refused
from workers.quantization.units import BF16, FormatUnit, UnitList

# Each kind of format is a set of kernels that the engine compiles and captures.
MOST_KINDS = 4
_GIB = 1 << 30
# KL to BF16 (nats) for each unit of squared relative error: the median of each class over SmolLM2-135M. They stand where a model cannot
# be run before it is loaded. Medians, because the first and the last layers are much more sensitive: means choose worse. Experts stand
# for a whole MLP.
SENSITIVITIES: Mapping[str, float] = {"q_proj": 0.30, "o_proj": 0.054, "gate_proj": 0.24, "down_proj": 0.14}


# KL to BF16 for each unit of squared relative error, nvfp4 = 1: the same model wholly in each format. Where channels were not weighted,
# relative error alone would take int4-g32 for as good as nvfp4.
ERROR_WEIGHTS: Mapping[str, float] = {"nvfp4": 1.0, "nf4": 1.0, "int4": 1.4, "mxfp4": 1.2, "fp8": 0.65}


@dataclass(frozen=True, slots=True)
class MixErrors:
    """The measurement of one checkpoint. errors: squared relative error by the key of a unit and the spelling of a format;
    sensitivities: KL for each unit of that, by key, empty where the model was not run."""

    errors: Mapping[str, Mapping[str, float]]
    sensitivities: Mapping[str, float]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.errors, self.sensitivities], sort_keys=True).encode()).hexdigest()

    def cost(self, unit: FormatUnit, spelling: str) -> float:
        """Without a measurement: the error of Gaussian weights, and the sensitivity of the unit's class."""
        if spelling == BF16:
            return 0.0
        error = self.errors.get(unit.key, {}).get(spelling, ERRORS[spelling] ** 2)
        if unit.key in self.sensitivities:
            return error * self.sensitivities[unit.key]
        return error * ERROR_WEIGHTS[spelling.partition("-")[0]] * class_sensitivity(unit)


UNMEASURED = MixErrors({}, {})


def class_sensitivity(unit: FormatUnit) -> float:
    if unit.kind == "expert":
        return SENSITIVITIES["gate_proj"] + SENSITIVITIES["down_proj"]
    leaf = unit.key.rpartition(".")[2]
    return SENSITIVITIES.get(leaf, sum(SENSITIVITIES.values()) / len(SENSITIVITIES))


def select(listed: UnitList, measured: MixErrors, budget: int) -> dict[str, str]:
    """The spelling of each unit's format, by its key; bytes in all at most `budget`. Raises ConfigError where nothing is small enough."""
    if listed.least_bytes > budget:
        least = _gib(listed.least_bytes)
        sizes = f"the smallest has {least} GiB, of which {_gib(listed.kept_bytes)} GiB are never quantized"
        raise refused("quantize.gib", f"no mix of formats has {budget / _GIB:.4g} GiB or less; {sizes}: write gib: {least} or more")
    if not measured.sensitivities:
        listed = _no_worse(listed, measured, budget)
    kinds = {spelling for unit in listed.units for spelling in unit.nbytes} - {BF16}
    choice = _within(listed, measured, budget, kinds)
    while len(used := set(choice.values()) - {BF16}) > MOST_KINDS:
        without = [_within(listed, measured, budget, used - {spelling}) for spelling in sorted(used)]
        fitting = [one for one in without if listed.nbytes(one) <= budget]
        if not fitting:
            break  # units whose columns suit no common format
        choice = min(fitting, key=lambda one: total_cost(listed, measured, one))
    return choice


def _no_worse(listed: UnitList, measured: MixErrors, budget: int) -> UnitList:
    """The units without formats that err more than the best single one within the budget. Classes alone do not tell which unit can bear
    less than that (KL 1.18 of the single format's at its own bytes). The most sensitive ones get the bytes that the single format leaves.
    """
    common = set.intersection(*(set(unit.nbytes) for unit in listed.units)) if listed.units else set()
    singles = [{unit.key: spelling for unit in listed.units} for spelling in common]
    fitting = [single for single in singles if listed.nbytes(single) <= budget]
    if not fitting:
        return listed
    best = min(fitting, key=lambda single: total_cost(listed, measured, single))
    units = []
    for unit in listed.units:
        most = measured.cost(unit, best[unit.key])
        units.append(
            replace(unit, nbytes={spelling: size for spelling, size in unit.nbytes.items() if measured.cost(unit, spelling) <= most})
        )
    return replace(listed, units=tuple(units))


def total_cost(listed: UnitList, measured: MixErrors, choice: Mapping[str, str]) -> float:
    return sum(measured.cost(unit, choice[unit.key]) for unit in listed.units)


def recipe_of(listed: UnitList, choice: Mapping[str, str]) -> dict[str, Any]:
    """The value of `quantize` that gives each unit its format: the commonest as the default, and an expression for each class of units
    and other format."""
    counts: dict[str, int] = {}
    for unit in listed.units:
        counts[choice[unit.key]] = counts.get(choice[unit.key], 0) + 1
    default = max(counts, key=lambda spelling: (counts[spelling], spelling), default=BF16)
    layers: dict[tuple[str, str], list[str]] = {}
    for unit in listed.units:
        if choice[unit.key] != default:
            layers.setdefault((_shape_of(unit), choice[unit.key]), []).append(unit.layer)
    rules = [
        {"match": pattern, "format": spelling} for (shape, spelling), numbers in layers.items() for pattern in _patterns(shape, numbers)
    ]
    return {"format": default, "layers": rules}


def _within(listed: UnitList, measured: MixErrors, budget: int, kinds: Collection[str]) -> dict[str, str]:
    """The choice among these kinds and bf16; above the budget where even the smallest is."""
    steps: list[tuple[float, int, int, FormatUnit, str]] = []
    choice: dict[str, str] = {}
    for unit in listed.units:
        hull = list(_hull(unit, measured, kinds))
        choice[unit.key] = hull[0][2]
        for number, (low, high) in enumerate(pairwise(hull)):
            steps.append(((high[1] - low[1]) / (high[0] - low[0]), number, high[0] - low[0], unit, high[2]))
    left = budget - listed.nbytes(choice)
    stopped: set[str] = set()
    for _, _, size, unit, spelling in sorted(steps, key=lambda step: step[:2]):
        if unit.key in stopped or size > left:
            stopped.add(unit.key)
            continue
        choice[unit.key] = spelling
        left -= size
    return choice


def _hull(unit: FormatUnit, measured: MixErrors, kinds: Collection[str]) -> Iterator[tuple[int, float, str]]:
    """(bytes, cost, spelling) on the lower convex hull, smallest first."""
    points = sorted(
        (size, measured.cost(unit, spelling), spelling) for spelling, size in unit.nbytes.items() if spelling in kinds or spelling == BF16
    )
    hull: list[tuple[int, float, str]] = []
    for point in points:
        if hull and point[1] >= hull[-1][1]:
            continue  # larger and no better
        while hull and (hull[-1][0] == point[0] or (len(hull) > 1 and _is_above(hull[-2], hull[-1], point))):
            hull.pop()
        hull.append(point)
    yield from hull


def _is_above(first: tuple[int, float, str], middle: tuple[int, float, str], last: tuple[int, float, str]) -> bool:
    """Whether the middle point lies on or above the line between the others."""
    return (middle[1] - first[1]) * (last[0] - first[0]) >= (last[1] - first[1]) * (middle[0] - first[0])


def _shape_of(unit: FormatUnit) -> str:
    """The expression of a unit's modules with `#` in place of its layer's number."""
    stem, mark, _ = unit.key.partition(".experts")
    if unit.kind == "expert" and mark:
        return _numbered(f"{stem}.experts", unit.layer) + r"\."
    parent = unit.modules[0].rpartition(".")[0]
    leaves = "|".join(re.escape(module.rpartition(".")[2]) for module in unit.modules)
    prefix = _numbered(f"{parent}.", unit.layer) if parent else ""
    return f"{prefix}(?:{leaves})$"


def _numbered(path: str, layer: str) -> str:
    before, mark, after = path.partition(f".{layer}.") if layer else (path, "", "")
    return rf"{re.escape(before)}\.#\.{re.escape(after)}" if mark else re.escape(path)


def _patterns(shape: str, numbers: Sequence[str]) -> Iterator[str]:
    """`re:` patterns of at most MAX_CHARACTERS each."""
    if "#" not in shape:
        yield f"re:^{shape}"
        return
    room = MAX_CHARACTERS - len(shape) - 10
    rest = list(numbers)
    while rest:
        taken = 0
        while taken < len(rest) and len("|".join(rest[: taken + 1])) <= room:
            taken += 1
        alternatives = "|".join(rest[:taken])
        yield f"re:^{shape.replace('#', f'(?:{alternatives})')}"
        rest = rest[taken:]


def _gib(size: int) -> str:
    """Rounded up, so that the size that a message names is enough."""
    return f"{math.ceil(size / _GIB * 1000) / 1000:.3f}"
