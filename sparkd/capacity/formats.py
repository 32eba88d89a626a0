"""The formats that a model may get: single ones, best first, and mixes for `quantize: best`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from sparkd.capacity.weights import Inventory, inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.errors import CheckpointError, ConfigError
from workers.quantization.best_wish import BestWish, best_of
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


def open_recipes(model: Inventory, quantize: object, ranks: int = 1) -> Iterator[QuantizationRecipe]:
    """The recipes that `auto` or `best` may become, best first.

    ranks: of tensor parallelism.

    Raises ConfigError where no mix is as small as `best` asks for.
    """
    wish = best_of(quantize)
    if wish is None:
        yield from (recipe for _, recipe in recipes(model, None))
    with suppress(CheckpointError):  # the engine says why, with the tensor's name
        yield from mixes_below(model, FORMATS, ranks) if wish is None else mixes_of(model, wish, ranks)


def quality_of(name: str) -> int:
    """The less the better: 0 of what is stored."""
    return FORMATS.index(name) + 1 if name in FORMATS else 0


def mixes_of(model: Inventory, wish: BestWish, ranks: int = 1) -> tuple[QuantizationRecipe, ...]:
    """Plain recipes, best first; with a size in the wish one.

    ranks: of tensor parallelism, each of which gets whole groups.

    Raises ConfigError where no mix is as small as the wish, CheckpointError as QuantizationRecipe.assign.
    """
    return _once(model, (wish, ranks), lambda: _made(model, wish, ranks))


def mixes_below(model: Inventory, formats: Iterable[str], ranks: int = 1) -> tuple[QuantizationRecipe, ...]:
    """The mixes that are smaller than the model in each one of these formats, best first; those that some of its weights cannot have do
    not count. None of a model that cannot be quantized again. Raises CheckpointError as QuantizationRecipe.assign."""
    spellings = tuple(formats)
    return _once(model, (spellings, ranks), lambda: _made_below(model, spellings, ranks))


def _once(model: Inventory, key: object, make: Callable[[], Iterable[QuantizationRecipe]]) -> tuple[QuantizationRecipe, ...]:
    if key not in model.mixes:
        model.mixes[key] = tuple(make())
    return model.mixes[key]


def _is_settled(model: Inventory) -> bool:
    """Whether the checkpoint is quantized in a way that stays."""
    source = model.checkpoint.quantization
    return source is not None and not source.requantizable


def _made_below(model: Inventory, formats: Iterable[str], ranks: int) -> Iterator[QuantizationRecipe]:
    if _is_settled(model):
        return
    listed = unit_list(model, ranks)
    sizes = [
        listed.nbytes({unit.key: spelling for unit in listed.units})
        for spelling in formats
        if all(spelling in unit.nbytes for unit in listed.units)
    ]
    least = min(sizes, default=listed.stored_bytes)
    yield from _chosen(listed, [budget for budget in _ladder(listed) if budget < least])


def _made(model: Inventory, wish: BestWish, ranks: int) -> Iterator[QuantizationRecipe]:
    if _is_settled(model):
        yield AS_IT_IS
        return
    listed = unit_list(model, ranks)
    yield from _chosen(listed, _ladder(listed) if wish.budget is None else [wish.budget])


def _chosen(listed: UnitList, budgets: Iterable[int]) -> Iterator[QuantizationRecipe]:
    seen: set[QuantizationRecipe] = set()
    for budget in budgets:
        recipe = AS_IT_IS
        if budget < listed.stored_bytes:
            recipe = QuantizationRecipe.parse(recipe_of(listed, select(listed, budget)))
        if recipe not in seen:
            seen.add(recipe)
            yield recipe


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
