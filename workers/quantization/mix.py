"""Chooses `quantize: best`: a format for each unit within a budget of bytes, at the least error, as a plain recipe.

The error of a unit in a format is the sensitivity of its class times the squared relative error of that format. Every unit begins in its
smallest format. Then the move to a larger one that saves most error for its bytes is made, again and again, as long as one fits into the
budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush

from workers.quantization.formats import ERRORS, FORMATS, refused
from workers.quantization.recipe import FormatRule, QuantizationRecipe
from workers.quantization.units import BF16, FormatUnit, UnitList

# Each kind of format is a set of kernels that the engine compiles and captures.
MOST_KINDS = 4
_GIB = 1 << 30
# KL to BF16 (nats) for each unit of squared relative error: the median of each class over SmolLM2-135M. Medians, because the first and
# the last layers are much more sensitive: means choose worse. Experts stand for a whole MLP.
SENSITIVITIES: Mapping[str, float] = {"q_proj": 0.30, "o_proj": 0.054, "gate_proj": 0.24, "down_proj": 0.14}


def cost(unit: FormatUnit, spelling: str) -> float:
    """The expected KL of a model with this unit alone in a format: the error of Gaussian weights, times the sensitivity of its class."""
    if spelling == BF16:
        return 0.0
    return ERRORS[spelling] ** 2 * (FORMATS[spelling].family.error_cost or 0.0) * _sensitivity(unit)


def _sensitivity(unit: FormatUnit) -> float:
    if unit.kind == "expert":
        return SENSITIVITIES["gate_proj"] + SENSITIVITIES["down_proj"]
    leaf = unit.key.rpartition(".")[2]
    return SENSITIVITIES.get(leaf, sum(SENSITIVITIES.values()) / len(SENSITIVITIES))


def select(listed: UnitList, budget: int) -> dict[str, str]:
    """The spelling of each unit's format, by its key; bytes in all at most `budget`. Raises ConfigError where nothing is small enough."""
    if listed.least_bytes > budget:
        least = _gib(listed.least_bytes)
        sizes = f"the smallest has {least} GiB, of which {_gib(listed.kept_bytes)} GiB are never quantized"
        raise refused("quantize.gib", f"no mix of formats has {budget / _GIB:.4g} GiB or less; {sizes}: write gib: {least} or more")
    listed = _no_worse(listed, budget)
    kinds = {spelling for unit in listed.units for spelling in unit.nbytes} - {BF16}
    choice = _within(listed, budget, kinds)
    while len(used := set(choice.values()) - {BF16}) > MOST_KINDS:
        without = [_within(listed, budget, used - {spelling}) for spelling in sorted(used)]
        fitting = [choice for choice in without if listed.nbytes(choice) <= budget]
        if not fitting:
            break  # units whose columns suit no common format
        choice = min(fitting, key=lambda choice: total_cost(listed, choice))
    return choice


def _no_worse(listed: UnitList, budget: int) -> UnitList:
    """The units without formats that err more than the best single one within the budget. Classes alone do not tell which unit can bear
    less than that (KL 1.18 of the single format's at its own bytes). The most sensitive ones get the bytes that the single format leaves.
    """
    common = set.intersection(*(set(unit.nbytes) for unit in listed.units)) if listed.units else set()
    singles = [{unit.key: spelling for unit in listed.units} for spelling in common]
    fitting = [single for single in singles if listed.nbytes(single) <= budget]
    if not fitting:
        return listed
    best = min(fitting, key=lambda single: total_cost(listed, single))
    units = []
    for unit in listed.units:
        most = cost(unit, best[unit.key])
        units.append(replace(unit, nbytes={spelling: size for spelling, size in unit.nbytes.items() if cost(unit, spelling) <= most}))
    return replace(listed, units=tuple(units))


def total_cost(listed: UnitList, choice: Mapping[str, str]) -> float:
    return sum(cost(unit, choice[unit.key]) for unit in listed.units)


def recipe_of(listed: UnitList, choice: Mapping[str, str]) -> QuantizationRecipe:
    """The recipe that gives each unit its format: the commonest as the default, and globs for the classes of units and the
    layers that have another one."""
    counts = Counter(choice.values())
    default = max(counts, key=lambda spelling: (counts[spelling], spelling), default=BF16)
    classes: dict[str, dict[str, list[str]]] = {}
    for unit in listed.units:
        for glob in _globs(unit):
            classes.setdefault(glob, {}).setdefault(choice[unit.key], []).append(unit.layer)
    rules = list[FormatRule]()
    for glob, layers in classes.items():
        # Where most of the class has another format, a rule says so first: of two that are equally specific the later one holds.
        most = max(layers, key=lambda spelling: len(layers[spelling]))
        if most != default:
            rules.append(FormatRule(glob.replace("#", "*"), FORMATS[most]))
        others = [(part, spelling) for spelling, numbers in layers.items() if spelling != most for part in _parts(numbers)]
        rules += [FormatRule(glob.replace("#", part), FORMATS[spelling]) for part, spelling in others]
    return QuantizationRecipe(FORMATS[default], tuple(rules))


def _within(listed: UnitList, budget: int, kinds: Collection[str]) -> dict[str, str]:
    """The choice among these kinds and bf16; above the budget where even the smallest is."""
    choice = {unit.key: min((size, cost(unit, name), name) for name, size in _sizes(unit, kinds))[2] for unit in listed.units}
    left = budget - listed.nbytes(choice)
    moves = [move for number, unit in enumerate(listed.units) if (move := _move(number, unit, choice[unit.key], kinds))]
    heapify(moves)
    while moves:
        _, number, size, spelling = heappop(moves)
        if size > left:
            continue  # the unit stays in its format, and smaller ones may still move
        unit = listed.units[number]
        choice[unit.key] = spelling
        left -= size
        if move := _move(number, unit, spelling, kinds):
            heappush(moves, move)
    return choice


def _move(number: int, unit: FormatUnit, spelling: str, kinds: Collection[str]) -> tuple[float, int, int, str] | None:
    """(change of the cost for a byte, number, more bytes, format): the move to a larger format that saves most for its bytes, if any."""
    size, now = unit.nbytes[spelling], cost(unit, spelling)
    larger = [(more - size, cost(unit, name) - now, name) for name, more in _sizes(unit, kinds) if more > size]
    return min(((change / more, number, more, name) for more, change, name in larger if change < 0), default=None)


def _sizes(unit: FormatUnit, kinds: Collection[str]) -> list[tuple[str, int]]:
    return [(spelling, size) for spelling, size in unit.nbytes.items() if spelling in kinds or spelling == BF16]


def _globs(unit: FormatUnit) -> list[str]:
    """The paths of a unit's modules with `#` in place of its layer's number; one for all experts of a layer."""
    stem, mark, _ = unit.key.partition(".experts")
    paths = [f"{stem}.experts"] if unit.kind == "expert" and mark else unit.modules
    return [path.replace(f".{unit.layer}.", ".#.", 1) if unit.layer else path for path in paths]


def _parts(numbers: Iterable[str]) -> Iterator[str]:
    """Globs that match these numbers of layers alone: `7`, `1[035]`."""
    digits: dict[str, str] = {}
    for number in numbers:
        digits[number[:-1]] = digits.get(number[:-1], "") + number[-1:]
    for start, ends in digits.items():
        yield f"{start}[{ends}]" if len(ends) > 1 else f"{start}{ends}"


def _gib(size: int) -> str:
    """Rounded up, so that the size that a message names is enough."""
    return f"{math.ceil(size / _GIB * 1000) / 1000:.3f}"
