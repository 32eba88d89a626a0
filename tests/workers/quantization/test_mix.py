"""The choice of `quantize: best`: within its budget, no worse than what could be chosen by hand, as a plain recipe."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.errors import ConfigError
from tests.support.checkpoints import checkpoint_of, layered
from workers.quantization.best_wish import BestWish, best_of
from workers.quantization.mix import MOST_KINDS, UNMEASURED, MixErrors, recipe_of, select, total_cost
from workers.quantization.recipe import MAX_RULES, QuantizationRecipe
from workers.quantization.units import BF16, FormatUnit, UnitList, units_of

SHAPES = {
    "self_attn.q_proj.weight": (256, 256),
    "self_attn.k_proj.weight": (128, 256),
    "self_attn.v_proj.weight": (128, 256),
    "self_attn.o_proj.weight": (256, 256),
    "mlp.gate_proj.weight": (512, 256),
    "mlp.up_proj.weight": (512, 256),
    "mlp.down_proj.weight": (256, 512),
}
EXPERTS = {f"mlp.experts.{expert}.{name}_proj.weight": (256, 256) for expert in range(2) for name in ("gate", "up", "down")}
LAYERS = 100


def unit(key: str, nbytes: dict[str, int]) -> FormatUnit:
    return FormatUnit(f"model.layers.{key}", "mlp", (f"model.layers.{key}",), 1000, nbytes)


def two(sensitive: float) -> tuple[UnitList, MixErrors]:
    """Two units of 1000 weights; the first is `sensitive` times as sensitive."""
    sizes = {BF16: 2000, "fp8": 1000, "nvfp4": 560, "mxfp4": 530}
    units = (unit("0.a", sizes), unit("1.a", sizes))
    errors = {one.key: {"fp8": 1.0, "nvfp4": 8.0, "mxfp4": 10.0} for one in units}
    return UnitList(units, 100), MixErrors(errors, {units[0].key: sensitive, units[1].key: 1.0})


def test_the_sensitive_unit_gets_the_bytes() -> None:
    listed, measured = two(5.0)
    choice = select(listed, measured, 100 + 560 + 1000)
    assert list(choice.values()) == ["fp8", "nvfp4"]


def test_a_budget_of_the_stored_bytes_keeps_everything() -> None:
    listed, measured = two(1.0)
    assert set(select(listed, measured, listed.stored_bytes).values()) == {BF16}


def test_a_budget_below_the_smallest_mix_names_both() -> None:
    listed, measured = two(1.0)
    with pytest.raises(ConfigError) as caught:
        select(listed, measured, listed.least_bytes - 1)
    assert caught.value.param == "quantize"
    assert str(caught.value).count("GiB") == 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[UnitList, MixErrors, int]:
    """Three units with up to three formats besides bf16, and a budget that holds the smallest mix."""
    units, errors = [], {}
    for number in range(3):
        spellings = draw(st.lists(st.sampled_from(["fp8", "nvfp4", "mxfp4", "int4-g64"]), min_size=1, max_size=3, unique=True))
        sizes = {BF16: 2000} | {spelling: draw(st.integers(400, 1900)) for spelling in spellings}
        units.append(unit(f"{number}.a", sizes))
        errors[units[-1].key] = {spelling: draw(st.integers(1, 1000)) / 10 for spelling in spellings}
    listed = UnitList(tuple(units), 10)
    return (
        listed,
        MixErrors(errors, {one.key: draw(st.integers(1, 50)) / 10 for one in units}),
        draw(st.integers(listed.least_bytes, listed.stored_bytes)),
    )


@settings(max_examples=40)
@given(problems())
def test_the_choice_is_within_the_budget_and_as_good_as_a_convex_one_can_be(problem: tuple[UnitList, MixErrors, int]) -> None:
    """The budget that remains is smaller than one step, so the error is at most that of the best choice plus the steepest step."""
    listed, measured, budget = problem
    choice = select(listed, measured, budget)
    assert listed.nbytes(choice) <= budget
    every = [
        dict(zip((one.key for one in listed.units), spellings, strict=True)) for spellings in product(*(one.nbytes for one in listed.units))
    ]
    best = min(total_cost(listed, measured, one) for one in every if listed.nbytes(one) <= budget)
    largest = max(measured.cost(one, spelling) for one in listed.units for spelling in one.nbytes)
    assert best <= total_cost(listed, measured, choice) <= best + largest


def test_a_model_has_few_kinds_of_formats() -> None:
    listed = units_of(checkpoint_of(layered(LAYERS, SHAPES)))
    sizes = (1e-2, 7e-3, 5e-3, 9e-3, 3e-3, 1e-3, 2e-3)
    spread = {one.key: dict(zip(sorted(one.nbytes), sizes, strict=False)) for one in listed.units}
    sensitivities = {one.key: 1.0 + number % 37 for number, one in enumerate(listed.units)}
    for share in (0.3, 0.35, 0.4, 0.6):
        choice = select(listed, MixErrors(spread, sensitivities), int(listed.stored_bytes * share))
        assert len(set(choice.values()) - {BF16}) <= MOST_KINDS


def test_the_recipe_gives_each_unit_its_format_and_nothing_is_told() -> None:
    """A hundred layers with any assignment stay within the limits of rules."""
    checkpoint = checkpoint_of({**layered(LAYERS, SHAPES), **layered(LAYERS, EXPERTS, "model.more")})
    listed = units_of(checkpoint)
    spellings = ("nvfp4", "fp8", "int4-g64", "mxfp4", BF16)
    choice = {one.key: spellings[(7 * number + number // 5) % 5] for number, one in enumerate(listed.units)}
    recipe = QuantizationRecipe.parse(recipe_of(listed, choice))
    assert len(recipe.rules) < MAX_RULES
    formats = recipe.assign(checkpoint)
    assert not formats.adjustments
    for one in listed.units:
        for module in one.modules:
            chosen = formats.get(module)
            assert (BF16 if chosen is None else chosen.spelling) == choice[one.key], module


def test_without_a_measurement_the_class_and_the_format_tell_the_error() -> None:
    listed = units_of(checkpoint_of(layered(1, SHAPES)))
    units = {one.key.rpartition(".")[2]: one for one in listed.units}
    assert UNMEASURED.cost(units["q_proj"], "nvfp4") > UNMEASURED.cost(units["o_proj"], "nvfp4") > UNMEASURED.cost(units["o_proj"], "fp8")


def test_without_a_measurement_no_unit_is_worse_off_than_in_the_best_single_format() -> None:
    listed = units_of(checkpoint_of(layered(4, SHAPES)))
    single = {one.key: "nvfp4" for one in listed.units}
    for more in (0, 20_000, 200_000):
        choice = select(listed, UNMEASURED, listed.nbytes(single) + more)
        for one in listed.units:
            assert UNMEASURED.cost(one, choice[one.key]) <= UNMEASURED.cost(one, "nvfp4"), one.key
    assert set(choice.values()) - {"nvfp4"}


def test_best_is_read_with_its_size_in_gib() -> None:
    wish = best_of({"format": "best", "gib": 60})
    assert wish is not None and (wish.budget, wish.canonical()) == (60 << 30, {"format": "best", "gib": 60.0})
    assert best_of("best") == BestWish() and best_of("nvfp4") is None


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"format": "best", "layers": {"o_proj": "fp8"}}, "quantize.layers"),
        ({"format": "best", "gib": 0}, "quantize.gib"),
    ],
)
def test_a_wrong_key_or_size_is_named(value: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        best_of(value)
