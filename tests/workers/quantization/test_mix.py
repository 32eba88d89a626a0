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
from workers.quantization.mix import MOST_KINDS, cost, recipe_of, select, total_cost
from workers.quantization.recipe import MAX_RULES
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
    return FormatUnit(f"model.layers.{key}", "mlp", (f"model.layers.{key}",), nbytes)


# Two units of alike bytes, of which the first is more than twice as sensitive.
SIZES = {BF16: 2000, "fp8": 1000, "nvfp4": 560, "mxfp4": 530}
TWO = UnitList((unit("0.self_attn.q_proj", SIZES), unit("0.mlp.down_proj", SIZES)), 100)


def test_the_sensitive_unit_gets_the_bytes() -> None:
    assert list(select(TWO, 100 + 560 + 1000).values()) == ["fp8", "nvfp4"]


def test_a_budget_of_the_stored_bytes_keeps_everything() -> None:
    assert set(select(TWO, TWO.stored_bytes).values()) == {BF16}


def test_a_budget_below_the_smallest_mix_names_both() -> None:
    with pytest.raises(ConfigError) as caught:
        select(TWO, TWO.least_bytes - 1)
    assert caught.value.param == "quantize"
    assert str(caught.value).count("GiB") == 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[UnitList, int]:
    """Three units with up to three formats besides bf16, and a budget that holds the smallest mix."""
    units = []
    for number in range(3):
        spellings = draw(st.lists(st.sampled_from(["fp8", "nvfp4", "mxfp4", "int4-g64"]), min_size=1, max_size=3, unique=True))
        leaf = draw(st.sampled_from(["q_proj", "o_proj", "down_proj", "other"]))
        units.append(unit(f"{number}.{leaf}", {BF16: 2000} | {spelling: draw(st.integers(400, 1900)) for spelling in spellings}))
    listed = UnitList(tuple(units), 10)
    return listed, draw(st.integers(listed.least_bytes, listed.stored_bytes))


@settings(max_examples=40)
@given(problems())
def test_the_choice_is_within_the_budget_and_as_good_as_a_convex_one_can_be(problem: tuple[UnitList, int]) -> None:
    """The budget that remains is smaller than one step, so the error is at most that of the best choice plus the steepest step. No unit is
    worse off than in the best single format that fits."""
    listed, budget = problem
    choice = select(listed, budget)
    assert listed.nbytes(choice) <= budget
    every = [
        dict(zip((one.key for one in listed.units), spellings, strict=True)) for spellings in product(*(one.nbytes for one in listed.units))
    ]
    fitting = [one for one in every if listed.nbytes(one) <= budget]
    best = min(total_cost(listed, one) for one in fitting)
    largest = max(cost(one, spelling) for one in listed.units for spelling in one.nbytes)
    assert best <= total_cost(listed, choice) <= best + largest
    single = min((one for one in fitting if len(set(one.values())) == 1), key=lambda one: total_cost(listed, one), default=None)
    assert single is None or all(cost(one, choice[one.key]) <= cost(one, single[one.key]) for one in listed.units)


def test_a_model_has_few_kinds_of_formats() -> None:
    listed = units_of(checkpoint_of(layered(LAYERS, SHAPES)))
    for share in (0.28, 0.3, 0.35, 0.4, 0.6):
        choice = select(listed, int(listed.stored_bytes * share))
        assert len(set(choice.values()) - {BF16}) <= MOST_KINDS


@pytest.mark.parametrize("width", [1, 5], ids=["alternating", "by fives"])
def test_the_recipe_gives_each_unit_its_format_and_nothing_is_told(width: int) -> None:
    """A hundred layers, of which every second one or every second five have another format, stay within the limits of rules."""
    checkpoint = checkpoint_of({**layered(LAYERS, SHAPES), **layered(LAYERS, EXPERTS, "model.more")})
    listed = units_of(checkpoint)
    spellings = ("nvfp4", "fp8", BF16)
    choice = {one.key: spellings[int(one.layer) // width % 2 + ("down" in one.key)] for one in listed.units}
    recipe = recipe_of(listed, choice)
    assert len(recipe.rules) < MAX_RULES
    formats = recipe.assign(checkpoint)
    assert not formats.adjustments
    for one in listed.units:
        for module in one.modules:
            chosen = formats.get(module)
            assert (BF16 if chosen is None else chosen.spelling) == choice[one.key], module


def test_the_class_and_the_format_tell_the_error() -> None:
    listed = units_of(checkpoint_of(layered(1, SHAPES)))
    units = {one.key.rpartition(".")[2]: one for one in listed.units}
    assert cost(units["q_proj"], "nvfp4") > cost(units["o_proj"], "nvfp4") > cost(units["o_proj"], "fp8")


def test_at_the_bytes_of_a_single_format_and_above_no_unit_is_worse_off_than_in_it() -> None:
    listed = units_of(checkpoint_of(layered(4, SHAPES)))
    single = {one.key: "nvfp4" for one in listed.units}
    for more in (0, 20_000, 200_000):
        choice = select(listed, listed.nbytes(single) + more)
        for one in listed.units:
            assert cost(one, choice[one.key]) <= cost(one, "nvfp4"), one.key
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
