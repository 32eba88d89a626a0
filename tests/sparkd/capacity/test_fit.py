"""The choice: which ways are tried, which fit, which is best, and why the others are not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.capacity.evidence import Evidence, Ways
from sparkd.capacity.fit import CONTEXT_STEP, DEFAULT_CONTEXT, Option
from sparkd.capacity.formats import AS_STORED, FORMATS
from sparkd.capacity.headers import Headers
from sparkd.capacity.weights import Inventory
from sparkd.config.engine_args import EngineArgs
from sparkd.hardware import SPARK, Hardware
from sparkd.units import GIB
from tests.support.accounts import kv_cost, options
from tests.support.checkpoints import Tensor, dense, mixture
from tests.support.facts import lacking
from tests.support.inventories import known, models
from tests.support.published_tensors import tensors_of
from workers.kv.arithmetic import Demand

ALL = (AS_STORED, *FORMATS)
# Larger than what a load needs beside the weights, so that serving is what counts.
MARGIN = GIB


def machine(size: int) -> Hardware:
    """With so many bytes beside what the system holds."""
    return replace(SPARK, memory_bytes=SPARK.system_bytes + size)


def plain(**more: Any) -> Inventory:
    config = dense(**more)
    return known(config, tensors_of(config))


def names(found: list[Option]) -> list[str]:
    return [option.format for option in found]


def room_for(inventory: Inventory, name: str, tokens: int, more: int = 0) -> Hardware:
    """Just as much memory as a format needs at a length with MARGIN, and `more`."""
    (option,) = (one for one in options(inventory, max_model_len=tokens) if one.format == name)
    assert option.footprint is not None
    return machine(option.footprint.total + option.footprint.upper_bytes + MARGIN + more)


def test_every_format_at_every_way_over_the_nodes() -> None:
    found = options(plain(), nodes=3)

    ways = {(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)}
    assert {(one.format, *one.ways) for one in found} == {(name, *way) for name in ALL for way in ways}
    assert found[0].fits


def test_quality_goes_before_nodes_and_fewer_nodes_before_a_pipeline() -> None:
    one = options(plain())
    assert names(one) == list(ALL) and one[0].fits

    assert [(option.format, *option.ways) for option in options(plain(), nodes=2)] == [
        (name, *ways) for name in ALL for ways in ((1, 1), (2, 1), (1, 2))
    ]


def test_a_format_is_what_was_asked_for() -> None:
    assert names(options(plain(), quantize="int4-g64")) == ["int4-g64"]
    assert names(options(plain(), quantize="bf16")) == [AS_STORED]
    assert names(options(plain(), quantize={"format": "mxfp4", "keep": ["o_proj"]})) == ["as configured"]


def test_what_is_quantized_already_is_served_so() -> None:
    awq = known(dense(quantization_config={"quant_method": "awq"}), [("model.layers.0.mlp.up_proj.qweight", (512, 128), "I32")])
    stored = [tensor._replace(dtype="F8_E4M3") for tensor in tensors_of(dense())]
    fp8 = known(dense(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}), stored)

    assert names(options(awq)) == [AS_STORED]
    assert names(options(fp8)) == [AS_STORED, *(name for name in FORMATS if name != "fp8")]


def test_without_rails_there_is_no_tensor_parallelism() -> None:
    found = options(plain(), nodes=4, unlinked={2: "cable 1 is down", 4: "cable 2 is down"})

    assert {one.reason for one in found if one.ways == (2, 1)} == {"cable 1 is down"}
    assert {one.reason for one in found if one.ways in ((2, 2), (4, 1))} == {"cable 2 is down"}
    assert all(one.fits for one in found if one.ways[0] == 1)


def test_a_length_beyond_the_models_own_is_refused() -> None:
    found = options(plain(), max_model_len=8193)

    assert not found[0].fits
    assert [lacking(reason, "8,193 tokens", "8,192") for reason in {one.reason for one in found}] == [[]]
    assert options(plain(), max_model_len=8192)[0].fits


def test_the_number_that_breaks_it_is_told() -> None:
    inventory = plain()
    tight = room_for(inventory, AS_STORED, 8192, more=-1)
    first = next(one for one in options(inventory, tight, max_model_len=8192, kv_margin_gib=MARGIN / GIB) if one.format == AS_STORED)

    assert first.footprint is not None and first.footprint.free_bytes == -1 and first.longest == 7 * CONTEXT_STEP
    assert lacking(first.reason, "7,168 tokens", "4.0 GiB system", "1.0 GiB margin") == []
    none = options(inventory, machine(GIB), max_model_len=8192)
    assert not none[0].fits
    for one in none:
        told = re.match(r"it needs at least (.*) GiB: (.*); a node has 5.0 GiB, less 4.0 GiB system and 1.0 GiB margin", one.reason or "")
        assert told is not None, one.reason
        # The numbers are the whole sum.
        assert sum(map(float, re.findall(r"([0-9.]+) GiB", told[2]))) == pytest.approx(float(told[1]), abs=1e-9)


def test_a_smaller_format_is_chosen_where_a_larger_one_does_not_fit() -> None:
    config = mixture(num_experts=64, num_hidden_layers=8)
    inventory = known(config, tensors_of(config))
    found = options(inventory, room_for(inventory, "nvfp4", 8192, more=1 << 20), max_model_len=8192, kv_margin_gib=MARGIN / GIB)

    assert found[0].fits and found[0].format == "nvfp4"
    assert [one.format for one in found if not one.fits] == [AS_STORED, "fp8"]


def test_without_a_length_an_option_has_as_much_as_fits() -> None:
    inventory = plain()
    best = options(inventory)[0]
    assert best.fits and (best.serving.max_model_len, best.longest) == (8192, 8192)

    config = mixture(num_experts=64, num_hidden_layers=8)
    inventory = known(config, tensors_of(config))
    tight = room_for(inventory, AS_STORED, 5000)
    first = next(one for one in options(inventory, tight, kv_margin_gib=MARGIN / GIB) if one.format == AS_STORED)
    # Shorter than the model's own length, and than DEFAULT_CONTEXT, nobody wants it unasked.
    assert not first.fits and 4096 <= first.longest < 8192 and lacking(first.reason, f"{first.longest:,} tokens") == []
    found = options(inventory, tight, kv_margin_gib=MARGIN / GIB)
    assert found[0].fits and found[0].longest == 8192 and found[0].format != AS_STORED


@pytest.mark.parametrize("length", [700, 1024, 100_000])
def test_a_models_own_length_need_be_no_whole_number_of_steps(length: int) -> None:
    best = options(plain(max_position_embeddings=length))[0]

    assert best.fits and best.serving.max_model_len == best.longest == length


def test_what_was_learned_is_used_on_one_node() -> None:
    class Learned(Evidence):
        def learned(self, args: EngineArgs, headers: Headers, ways: Ways, hardware: Hardware) -> Demand | None:
            is_it = ways == (1, 1) and args.recipe is not None and args.recipe.default.spelling == "nvfp4"
            return Demand(peak=7 * GIB, graphs=1) if is_it else None

    found = options(plain(), nodes=2, evidence=Learned())
    peaks = {(one.format, one.nodes): one.footprint.parts["peak"] for one in found if one.footprint is not None}

    assert peaks["nvfp4", 1] == 7 * GIB and max(size for way, size in peaks.items() if way != ("nvfp4", 1)) < GIB


def test_a_recipe_that_cannot_be_is_a_reason() -> None:
    packed: list[Tensor] = [("model.layers.0.mlp.experts.down_proj", (8, 512, 256), "F8_E4M3")]
    found = options(known(mixture(), packed), quantize="nvfp4")

    assert not found[0].fits and lacking(found[0].reason, "experts", "FP8") == []


LENGTHS = st.one_of(st.none(), st.integers(1, 8192))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(models(), st.integers(3 * GIB, 6 * GIB), LENGTHS, st.integers(1, 64), st.integers(1, 2))
def test_a_choice_fits_its_own_arithmetic(inventory: Inventory, size: int, tokens: int | None, requests: int, nodes: int) -> None:
    hardware = machine(size)
    found = options(inventory, hardware, max_model_len=tokens or "auto", kv_cache={"sequences": requests}, nodes=nodes)

    assert [one.fits for one in found] == sorted((one.fits for one in found), reverse=True)
    for option in found:
        assert option.fits == (option.footprint is not None and option.footprint.fits)
        if option.footprint is None:
            continue
        assert option.fits or tokens is not None or option.longest < min(inventory.shape.max_len, DEFAULT_CONTEXT)
        check_longest(option, inventory, requests, tokens or inventory.shape.max_len)
    if found[0].fits and found[0].footprint is not None:
        best = found[0].footprint
        assert best.total + best.margin_bytes + best.system_bytes <= hardware.memory_bytes
        assert tokens in (None, found[0].serving.max_model_len)


def check_longest(option: Option, inventory: Inventory, requests: int, most: int) -> None:
    """`longest` fits beside everything else, and a step more does not."""
    assert option.footprint is not None
    room = option.footprint.room

    def need(length: int) -> int:
        cost = kv_cost(inventory.shape, replace(option.serving, max_model_len=length))
        return requests * cost.per_request + cost.block_bytes

    if option.longest:
        assert need(option.longest) <= room
    if option.longest < most and option.footprint.load_free_bytes >= 0:
        assert need(min(option.longest + CONTEXT_STEP, most)) > room
