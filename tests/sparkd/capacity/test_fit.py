"""The choice: which ways are tried, which fit, which is best, why the others are not; and the floor of vLLM's own setting."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkd.capacity.evidence import MeasuredPeaks
from sparkd.capacity.fit import CONTEXT_STEP, DEFAULT_CONTEXT, FitResult, Option, choose, floor, format_notes, smallest
from sparkd.capacity.footprint import FitRequest
from sparkd.capacity.formats import AS_STORED, FORMATS
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory
from sparkd.hardware import SPARK, Hardware
from sparkd.units import GIB
from tests.support.accounts import kv_cost
from tests.support.checkpoints import Tensor, dense, mixture
from tests.support.facts import lacking
from tests.support.inventories import known, models
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

ALL = (AS_STORED, *FORMATS)
# Larger than what a load needs beside the weights, so that serving is what counts.
MARGIN = GIB


def machine(size: int) -> Hardware:
    """With so many bytes beside what the system holds."""
    return replace(SPARK, memory_bytes=SPARK.system_bytes + size)


def chosen(inventory: Inventory, hardware: Hardware = SPARK, quantize: Any = None, **wish: Any) -> FitResult:
    return choose(inventory, hardware, FitRequest(**wish, quantize=None if quantize is None else QuantizationRecipe.parse(quantize)))


def plain(**more: Any) -> Inventory:
    config = dense(**more)
    return known(config, tensors_of(config))


def names(found: FitResult) -> list[str]:
    return [option.format for option in found.options]


def room_for(inventory: Inventory, name: str, tokens: int, more: int = 0) -> Hardware:
    """Just as much memory as a format needs at a length with MARGIN, and `more`."""
    (option,) = (one for one in chosen(inventory, max_model_len=tokens).options if one.format == name)
    assert option.footprint is not None
    return machine(option.footprint.total + option.footprint.upper_bytes + MARGIN + more)


def test_every_format_at_every_way_over_the_nodes() -> None:
    found = chosen(plain(), nodes=3)

    ways = {(1, 1), (2, 1), (1, 2), (3, 1), (1, 3)}
    assert {(one.format, one.tensor, one.pipeline) for one in found.options} == {(name, *way) for name in ALL for way in ways}
    assert found.best == found.options[0]


def test_quality_goes_before_nodes_and_fewer_nodes_before_a_pipeline() -> None:
    one = chosen(plain())
    assert names(one) == list(ALL) and one.best is not None and one.best.format == AS_STORED

    options = chosen(plain(), nodes=2).options
    assert [(option.format, option.tensor, option.pipeline) for option in options] == [
        (name, *ways) for name in ALL for ways in ((1, 1), (2, 1), (1, 2))
    ]


def test_a_plan_with_nvfp4_names_the_format_for_long_prompts() -> None:
    assert list(format_notes(chosen(plain(), quantize="nvfp4").best))
    assert not list(format_notes(chosen(plain(), quantize="mxfp4").best))
    assert not list(format_notes(None))


def test_a_format_is_what_was_asked_for() -> None:
    assert names(chosen(plain(), quantize="int4-g64")) == ["int4-g64"]
    assert names(chosen(plain(), quantize="bf16")) == [AS_STORED]
    assert names(chosen(plain(), quantize={"format": "mxfp4", "keep": ["o_proj"]})) == ["as configured"]


def test_what_is_quantized_already_is_served_so() -> None:
    awq = known(dense(quantization_config={"quant_method": "awq"}), [("model.layers.0.mlp.up_proj.qweight", (512, 128), "I32")])
    stored = [tensor._replace(dtype="F8_E4M3") for tensor in tensors_of(dense())]
    fp8 = known(dense(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}), stored)

    assert names(chosen(awq)) == [AS_STORED]
    assert names(chosen(fp8)) == [AS_STORED, *(name for name in FORMATS if name != "fp8")]


def test_without_rails_there_is_no_tensor_parallelism() -> None:
    found = chosen(plain(), nodes=4, unlinked={2: "cable 1 is down", 4: "cable 2 is down"})

    assert {one.reason for one in found.options if (one.tensor, one.pipeline) == (2, 1)} == {"cable 1 is down"}
    assert {one.reason for one in found.options if (one.tensor, one.pipeline) in ((2, 2), (4, 1))} == {"cable 2 is down"}
    assert all(one.fits for one in found.options if one.tensor == 1)


def test_a_length_beyond_the_models_own_is_refused() -> None:
    found = chosen(plain(), max_model_len=8193)

    assert found.best is None
    assert [lacking(reason, "8,193 tokens", "8,192") for reason in {one.reason for one in found.options}] == [[]]
    assert chosen(plain(), max_model_len=8192).best is not None


def test_the_number_that_breaks_it_is_told() -> None:
    inventory = plain()
    tight = room_for(inventory, AS_STORED, 8192, more=-1)
    first = next(one for one in chosen(inventory, tight, max_model_len=8192, margin_bytes=MARGIN).options if one.format == AS_STORED)

    assert first.footprint is not None and first.footprint.free_bytes == -1 and first.longest == 7 * CONTEXT_STEP
    assert first.reason is not None and lacking(first.reason, "7,168 tokens") == []
    assert re.search(r"0\.3 GiB CUDA context \+ 3\.0 GiB processes \+ 4\.0 GiB system .* \d\.\d GiB", first.reason)
    none = chosen(inventory, machine(GIB), max_model_len=8192)
    assert none.best is None
    for one in none.options:
        # The numbers are the whole sum: what the weights need while they come, beside a cache of nothing.
        told = re.fullmatch(r"(.*) are (.*) GiB more than the available 5\.0 GiB, before any KV cache", one.reason or "")
        assert told is not None and told[1].endswith("0.3 GiB CUDA context + 3.0 GiB processes + 4.0 GiB system"), one.reason
        assert sum(float(part.split()[0]) for part in told[1].split(" + ")) - 5 == pytest.approx(float(told[2]), abs=0.3)


def test_a_smaller_format_is_chosen_where_a_larger_one_does_not_fit() -> None:
    config = mixture(num_experts=64, num_hidden_layers=8)
    inventory = known(config, tensors_of(config))
    found = chosen(inventory, room_for(inventory, "nvfp4", 8192, more=1 << 20), max_model_len=8192, margin_bytes=MARGIN)

    assert found.best is not None and found.best.format == "nvfp4"
    assert [one.format for one in found.options if not one.fits] == [AS_STORED, "fp8"]


def test_without_a_length_an_option_has_as_much_as_fits() -> None:
    inventory = plain()
    best = chosen(inventory).best
    assert best is not None and (best.serving.max_model_len, best.longest) == (8192, 8192)

    config = mixture(num_experts=64, num_hidden_layers=8)
    inventory = known(config, tensors_of(config))
    tight = room_for(inventory, AS_STORED, 5000)
    first = next(one for one in chosen(inventory, tight, margin_bytes=MARGIN).options if one.format == AS_STORED)
    # Shorter than the model's own length, and than DEFAULT_CONTEXT, nobody wants it unasked.
    assert not first.fits and 4096 <= first.longest < 8192 and lacking(first.reason, f"{first.longest:,} tokens") == []
    found = chosen(inventory, tight, margin_bytes=MARGIN)
    assert found.best is not None and found.best.longest == 8192 and found.best.format != AS_STORED


@pytest.mark.parametrize("length", [700, 1024, 100_000])
def test_a_models_own_length_need_be_no_whole_number_of_steps(length: int) -> None:
    best = chosen(plain(max_position_embeddings=length)).best

    assert best is not None and best.serving.max_model_len == best.longest == length


def test_what_was_learned_is_used_on_one_node() -> None:
    def learned(recipe: QuantizationRecipe, serving: Serving) -> MeasuredPeaks | None:
        alone = serving.tensor_parallel == serving.pipeline_parallel == 1
        return MeasuredPeaks(peak=7 * GIB, graphs=1) if alone and recipe.default.spelling == "nvfp4" else None

    found = choose(plain(), SPARK, FitRequest(nodes=2, learned=learned))
    peaks = {(one.format, one.nodes): one.footprint.parts["peak"] for one in found.options if one.footprint is not None}

    assert peaks["nvfp4", 1] == 7 * GIB and max(size for way, size in peaks.items() if way != ("nvfp4", 1)) < GIB


def test_a_recipe_that_cannot_be_is_a_reason() -> None:
    packed: list[Tensor] = [("model.layers.0.mlp.experts.down_proj", (8, 512, 256), "F8_E4M3")]
    found = chosen(known(mixture(), packed), quantize="nvfp4")

    assert found.best is None and lacking(found.options[0].reason, "experts", "FP8") == []


def test_the_floor_is_where_one_request_fits() -> None:
    hardware = machine(12 * GIB)
    best = chosen(plain(), hardware, max_model_len=8192).best
    assert best is not None and best.footprint is not None
    share = smallest(best, hardware)
    assert share is not None

    held = sum(best.footprint.parts[name] for name in ("weights", "context", "peak", "graphs"))
    rows = floor(best, hardware, [step / 100 for step in range(1, 100)])
    assert all(left == allowed - held and allowed == int(step * hardware.memory_bytes) for step, allowed, left in rows)
    assert [left >= best.footprint.kv.least for _, _, left in rows] == [step >= share for step, _, _ in rows]
    lefts = [left for _, _, left in rows]
    assert lefts == sorted(lefts)


LENGTHS = st.one_of(st.none(), st.integers(1, 8192))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(models(), st.integers(3 * GIB, 6 * GIB), LENGTHS, st.integers(1, 64), st.integers(1, 2))
def test_a_choice_fits_its_own_arithmetic(inventory: Inventory, size: int, tokens: int | None, requests: int, nodes: int) -> None:
    hardware = machine(size)
    found = chosen(inventory, hardware, max_model_len=tokens, requests=requests, nodes=nodes)

    assert [one.fits for one in found.options] == sorted((one.fits for one in found.options), reverse=True)
    for option in found.options:
        assert option.fits == (option.footprint is not None and option.footprint.fits)
        if option.footprint is None:
            continue
        assert option.fits or tokens is not None or option.longest < min(inventory.shape.max_len, DEFAULT_CONTEXT)
        check_longest(option, inventory, requests)
    if found.best is not None and found.best.footprint is not None:
        parts, best = found.best.footprint.parts, found.best.footprint
        assert sum(parts.values()) + best.margin_bytes + best.system_bytes <= hardware.memory_bytes
        assert tokens in (None, found.best.serving.max_model_len)


def check_longest(option: Option, inventory: Inventory, requests: int) -> None:
    """`longest` fits beside everything else, and a step more does not."""
    assert option.footprint is not None
    room = option.footprint.room

    def need(length: int) -> int:
        cost = kv_cost(inventory.shape, replace(option.serving, max_model_len=length))
        return requests * cost.per_request + cost.block_bytes

    if option.longest:
        assert need(option.longest) <= room
    if option.longest < inventory.shape.max_len and option.footprint.load_free_bytes >= 0:
        assert need(min(option.longest + CONTEXT_STEP, inventory.shape.max_len)) > room
