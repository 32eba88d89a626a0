"""`quantize: best` as capacity sees it: which mixes there are, and which one an entry gets in the memory that it may take."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.entry_faults import format_fault
from sparkd.capacity.fit import Option, candidates_of, choose, fitted, source_of
from sparkd.capacity.footprint import room_of
from sparkd.capacity.formats import FORMATS, mixes_of, unit_list
from sparkd.capacity.headers import headers_here
from sparkd.config.config import load_config, parse_model
from sparkd.config.engine_args import EngineArgs, engine_args
from sparkd.errors import ConfigError, LoadRefused
from sparkd.hardware import SPARK, machine
from sparkd.units import GIB
from tests.support.accounts import refuse_unloadable
from tests.support.checkpoints import dense, mixture, write
from tests.support.facts import facts
from tests.support.inventories import known, packed_tensors
from tests.support.plans import planned
from tests.support.published_tensors import tensors_of
from workers.quantization.best_wish import BestWish
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

LARGE = dense(num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
MODELS = {"dense": (LARGE, False), "mixture": (mixture(num_hidden_layers=4), False), "packed": (mixture(num_hidden_layers=4), True)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("best") / "m", LARGE, tensors_of(LARGE))


def asked(folder: Path, quantize: Any, **keys: Any) -> EngineArgs:
    entry = {"model": str(folder), "max_model_len": 4096, "quantize": quantize, **keys}
    return engine_args(parse_model("m", entry, over_admin=False), {})


def chosen(folder: Path, gib: float, quantize: Any = "best") -> tuple[QuantizationRecipe, int]:
    """(recipe, bytes of the weights) in a Spark with so much memory free."""
    one = best(asked(folder, quantize), int(gib * GIB))
    assert one.args.recipe is not None
    return one.args.recipe, one.headers.model.formatted(one.args.recipe).weights().bytes


def best(args: EngineArgs, free_bytes: int) -> Option:
    headers, node = headers_here(args), machine("cuda", 121 * GIB, 121 * GIB - free_bytes)
    assert headers is not None
    return choose(candidates_of(source_of(args, headers, node)), node)


@pytest.mark.parametrize("name", MODELS)
def test_the_mixes_of_a_model_are_from_as_stored_to_the_smallest(name: str) -> None:
    config, packed = MODELS[name]
    model = known(config, packed_tensors(config) if packed else tensors_of(config))
    listed = unit_list(model)
    recipes = mixes_of(model, BestWish())
    sizes = [model.formatted(recipe).weights().disk_bytes for recipe in recipes]
    assert recipes[0] == AS_IT_IS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == pytest.approx(listed.least_bytes, rel=0.01)
    assert not any(model.formatted(recipe).notes for recipe in recipes)
    gaps = [larger / smaller for larger, smaller in pairwise(sizes)]
    assert max(gaps) < (1.06 if name == "dense" else 1.2)  # which has more units


@pytest.mark.parametrize("gib", [5.0, 12.0])
def test_a_mix_of_a_given_size_has_it(folder: Path, gib: float) -> None:
    recipe, size = chosen(folder, 100, {"format": "best", "gib": gib})
    assert recipe.quantizes
    assert 0.98 * gib < size / GIB <= gib * 1.001


def test_a_size_below_the_smallest_mix_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantize\.gib"):
        chosen(folder, 100, {"format": "best", "gib": 1})
    refused = format_fault(asked(folder, {"format": "best", "gib": 1}))
    assert refused is not None
    least = float(facts(refused).split()[1])
    assert format_fault(asked(folder, {"format": "best", "gib": least})) is None, "the size that the refusal names is enough"
    assert format_fault(asked(folder, "best")) is None


def test_a_size_is_judged_with_the_layers_that_draft(tmp_path: Path) -> None:
    """A check that counted less than a start would let it be tried again and again."""
    config = dense(num_nextn_predict_layers=1)
    own, ahead = tensors_of(config), ("model.layers.4.mlp.down_proj.weight", (8192, 8192), "BF16")
    folder = write(tmp_path / "m", config, [*own, ("model.layers.4.eh_proj.weight", (512, 1024), "BF16"), ahead])
    mtp = {"extra_args": ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}']}
    plain, drafted = (asked(folder, {"format": "best", "gib": 0.001}, **keys) for keys in ({}, mtp))
    least, with_draft = (float(facts(format_fault(args) or "").split()[1]) for args in (plain, drafted))
    assert with_draft > least
    entry = {"model": str(folder), "max_model_len": 4096, "quantize": {"format": "best", "gib": least}, **mtp}
    config = load_config(None, flags={"models": {"m": entry}}, environ={})
    with pytest.raises(LoadRefused):  # which is not tried again
        refuse_unloadable(config.models["m"], config)
    enough = asked(folder, {"format": "best", "gib": with_draft}, **mtp)
    headers = headers_here(enough)
    assert headers is not None and len(candidates_of(source_of(enough, headers, SPARK))) == 1
    assert format_fault(enough) is None


def test_more_memory_gives_a_larger_mix_and_enough_the_stored_model(folder: Path) -> None:
    sizes = [chosen(folder, gib)[1] for gib in (16, 19, 21, 23, 60)]
    assert sizes == sorted(set(sizes))
    assert chosen(folder, 60)[0] == AS_IT_IS


def test_a_little_more_memory_gives_the_same_mix(folder: Path) -> None:
    """So the next start finds it in the quantized cache: steps of 5 % are wider than what free memory moves by."""
    assert len({chosen(folder, 19 + step / 100)[0] for step in range(4)}) <= 2


def test_auto_takes_a_mix_where_no_single_format_fits(folder: Path) -> None:
    args, hardware = asked(folder, "auto"), machine("cuda", 121 * GIB, 0)
    headers = headers_here(args)
    assert headers is not None
    candidates = candidates_of(source_of(args, headers, hardware))
    bytes_of = {id(one): headers.model.formatted(one.recipe).weights().bytes for one in candidates}
    singles = {QuantizationRecipe.parse(spelling) for spelling in FORMATS} | {AS_IT_IS}
    mixes = [one for one in candidates if one.recipe not in singles]
    single = min((one for one in candidates if one.recipe in singles), key=lambda one: bytes_of[id(one)])
    assert mixes and candidates[-len(mixes) :] == mixes and all(bytes_of[id(one)] < bytes_of[id(single)] for one in mixes)
    below = mixes_of(headers.model, None)
    assert mixes_of(headers.model, None) is below, "a model that waits for room is asked about again and again"
    needed, held = (fitted(one, hardware).footprint for one in (single, mixes[-1]))
    assert needed is not None and held is not None and held.least < needed.least
    free = (needed.least + held.least) // 2 + 121 * GIB - room_of(args, hardware)
    chosen = best(args, free)
    assert chosen.fits and chosen.args.recipe == mixes[-1].recipe


def test_a_model_whose_weights_can_have_no_mix_is_planned_as_it_is_stored(tmp_path: Path) -> None:
    packed = ("model.layers.0.mlp.experts.down_proj", (8, 512, 256), "F8_E4M3")
    path = write(tmp_path / "m", mixture(num_hidden_layers=1), [packed, ("model.embed_tokens.weight", (512, 512), "BF16")])
    found = planned(path, quantize="best", max_model_len=4096)
    assert found["choice"]["format"] == "as stored" and [one["fits"] for one in found["options"]][:2] == [True, False]


def test_a_model_without_an_entry_is_planned_with_the_mix_that_fits(folder: Path) -> None:
    def plan(gib: int) -> dict[str, Any]:
        return planned(folder, replace(SPARK, memory_bytes=gib * GIB), max_model_len=4096, quantize="best")

    chosen = [plan(gib)["choice"] for gib in (22, 100)]
    assert [one["format"] for one in chosen] == ["best", "as stored"]
    assert json.dumps(chosen)
