"""The formats that a model may get: single ones, best first, and mixes for `quantize: best`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from sparkd.capacity.weights import Inventory, inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.errors import CheckpointError, ConfigError
from workers.quantization.best_wish import BestWish
from workers.quantization.formats import FORMATS as ALL_FORMATS
from workers.quantization.mix import recipe_of, select
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe
from workers.quantization.units import UnitList, units_of

AS_STORED = "as stored"
# The name of a recipe with rules.
CONFIGURED = "as configured"
# Best first, by what they cost a small model's answers.
_LOSSES = {spelling: kl for spelling, form in ALL_FORMATS.items() if (kl := form.family.kl.get(form.group_size)) is not None}
FORMATS = tuple(sorted(_LOSSES, key=_LOSSES.__getitem__))
_RECIPES = {spelling: QuantizationRecipe.parse(spelling) for spelling in FORMATS}
# Between the model as stored and its smallest mix, in equal ratios: from 16 to 4 bits a step is less than 5 %. Steps and not the exact
# room, so that a little more or less of free memory at the next start makes the same mix, which the quantized cache has.
_RUNGS = 32


def recipes(inventory: Inventory, requested: QuantizationRecipe | None) -> Iterator[tuple[str, QuantizationRecipe]]:
    """(name, recipe) of each, best first: the one that was requested, or any of FORMATS."""
    source = inventory.checkpoint.quantization
    if (recipe := requested) is not None:
        yield (recipe.default.spelling if not recipe.rules else CONFIGURED) if recipe.quantizes else AS_STORED, recipe
        return
    yield AS_STORED, AS_IT_IS
    if source is None or source.requantizable:
        # FP8 weights are not quantized to FP8 again.
        yield from ((spelling, recipe) for spelling, recipe in _RECIPES.items() if spelling != "fp8" or source is None)


def open_recipes(model: Inventory, wish: BestWish | None, ranks: int = 1) -> Iterator[QuantizationRecipe]:
    """The recipes that `auto` or `best` may become, best first.

    wish: for `best`, None for `auto`.
    ranks: of tensor parallelism.

    Raises ConfigError where no mix is as small as `best` asks for.
    """
    if wish is None:
        yield from (recipe for _, recipe in recipes(model, None))
    with suppress(CheckpointError):  # the engine says why, with the tensor's name
        yield from mixes_of(model, wish, ranks)


def quality_loss_of(name: str) -> int:
    """0 of what is stored; the worse the format, the more."""
    return FORMATS.index(name) + 1 if name in FORMATS else 0


def mixes_of(model: Inventory, wish: BestWish | None, ranks: int = 1) -> tuple[QuantizationRecipe, ...]:
    """The mixes of a model, best first, made once.

    wish: with a size only the mix of that; None for those that are smaller than the model in each one of FORMATS.
    ranks: of tensor parallelism, each of which gets whole groups.

    Raises ConfigError where no mix is as small as the wish, CheckpointError as QuantizationRecipe.assign.
    """
    key = wish, ranks
    if key not in model.mixes:
        model.mixes[key] = tuple(dict.fromkeys(_mixes(model, wish, ranks)))
    return model.mixes[key]


def _mixes(model: Inventory, wish: BestWish | None, ranks: int) -> Iterator[QuantizationRecipe]:
    source = model.checkpoint.quantization
    if source is not None and not source.requantizable:
        yield from () if wish is None else (AS_IT_IS,)
        return
    listed = unit_list(model, ranks)
    budgets = list(_ladder(listed)) if wish is None or wish.budget is None else [wish.budget]
    if wish is None:
        # A format that some weights cannot have is none for the model.
        shared = (spelling for spelling in FORMATS if all(spelling in unit.nbytes for unit in listed.units))
        sizes = (listed.nbytes({unit.key: spelling for unit in listed.units}) for spelling in shared)
        least = min(sizes, default=listed.stored_bytes)
        budgets = [budget for budget in budgets if budget < least]
    for budget in budgets:
        is_mixed = budget < listed.stored_bytes
        yield recipe_of(listed, select(listed, budget)) if is_mixed else AS_IT_IS


def mix_of(checkpoint: Checkpoint, wish: BestWish) -> QuantizationRecipe:
    """The mix of the size in the wish, for a listing of layers. Raises ConfigError without a size, else as mixes_of."""
    if wish.gib is None:
        size = "give a size, {format: best, gib: 60}, or ask `sparkd plan`"
        raise ConfigError(f"`best` depends on the memory that is free for the model: {size}.", param="quantize")
    model = inventory(checkpoint, shape_of(checkpoint.config))
    return mixes_of(model, wish)[0]


def unit_list(model: Inventory, ranks: int = 1) -> UnitList:
    counts = {part.tensor.name: part.count for part in model.parts}
    return units_of(model.checkpoint, count=counts.__getitem__, ranks=ranks)


def _ladder(listed: UnitList) -> Iterator[int]:
    ratio = listed.least_bytes / listed.stored_bytes
    for rung in range(_RUNGS):
        yield int(listed.stored_bytes * ratio ** (rung / _RUNGS))
    yield listed.least_bytes
