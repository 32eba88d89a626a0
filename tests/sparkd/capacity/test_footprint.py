"""What a node must hold: the parts and their sum, on each kind of machine; and the bounds of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.estimate import CONTEXT_BYTES, GRAPH_LAYER_BYTES, NCCL_BYTES, PROCESS_BYTES, cache_doubt
from sparkd.capacity.evidence import NO_ANSWER, Exact
from sparkd.capacity.footprint import Footprint, footprint
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory
from sparkd.config.config import parse_model
from sparkd.config.engine_args import engine_args
from sparkd.hardware import H200, SPARK
from sparkd.units import GIB
from tests.support.accounts import kv_cost
from tests.support.checkpoints import dense
from tests.support.inventories import known
from tests.support.published_tensors import tensors_of
from workers.host.memory_limits import spare
from workers.kv.arithmetic import Demand
from workers.quantization.recipe import QuantizationRecipe

BF16, NVFP4 = QuantizationRecipe.parse("bf16"), QuantizationRecipe.parse("nvfp4")
CPU = replace(SPARK, name="desk", platform="cpu")


def plain() -> Inventory:
    return known(dense(), tensors_of(dense()))


def of(
    recipe: QuantizationRecipe = BF16,
    hardware: Any = SPARK,
    serving: Serving | None = None,
    inventory: Inventory | None = None,
    exact: Exact = NO_ANSWER,
    measured: Demand | None = None,
    **keys: Any,
) -> Footprint:
    args = engine_args(parse_model("m", {"model": "/m", **keys}, over_admin=False), {})
    return footprint((inventory or plain()).formatted(recipe), serving or Serving(4096), hardware, args, exact, measured)


def test_vllms_total_of_the_weights_is_divided_as_the_formula_divides_it() -> None:
    formula = plain().formatted(BF16).weights()
    found = of(exact=Exact(weight_bytes=2 * formula.bytes))

    assert found.parts["weights"] == found.weights.bytes == 2 * formula.bytes
    assert found.weights.by_kind == {kind: 2 * size for kind, size in formula.by_kind.items()}
    assert found.weights.active_bytes == 2 * formula.active_bytes and of().weights == formula


def test_the_parts_are_the_whole() -> None:
    inventory = plain()
    found = of(inventory=inventory, kv_cache={"sequences": 3})

    cost = kv_cost(inventory.shape, Serving(4096))
    assert found.parts["weights"] == inventory.formatted(BF16).weights().bytes
    assert found.parts["kv"] == 3 * cost.per_request + cost.block_bytes
    assert found.total + found.upper_bytes == sum(found.parts.values()) + found.upper_bytes == found.fixed + found.parts["kv"]
    assert found.free_bytes == SPARK.memory_bytes - SPARK.system_bytes - found.margin_bytes - found.total - found.upper_bytes
    assert found.room == found.free_bytes + found.parts["kv"]
    assert found.margin_bytes == spare(SPARK.memory_bytes) and of(kv_margin_gib=5).margin_bytes == 5 * GIB
    assert of(hardware=replace(SPARK, memory_bytes=9 * GIB)).margin_bytes == GIB


@pytest.mark.parametrize("size", ["auto", {"sequences": 3}, {"tokens": 20_000}])
def test_a_guess_doubts_a_cache_whose_bytes_follow_from_it(size: Any) -> None:
    doubt = cache_doubt(kv_cost(plain().shape, Serving(4096)).least)
    assert doubt > 0 and of(kv_cache=size).upper_cache_bytes == doubt
    assert of(kv_cache={"bytes": GIB}).upper_cache_bytes == 0


def test_what_each_kind_of_machine_adds() -> None:
    graphs = GRAPH_LAYER_BYTES * 51 * 4
    spark, gpu, desk = of(), of(hardware=H200), of(hardware=CPU, serving=Serving(4096, platform="cpu"))

    def added(found: Footprint) -> list[int]:
        return [found.parts[name] for name in ("graphs", "context", "processes")]

    assert added(spark) == [graphs, CONTEXT_BYTES, PROCESS_BYTES["cuda"]]
    # On a discrete GPU the processes are in another memory.
    assert added(gpu) == [graphs, CONTEXT_BYTES, 0]
    assert added(desk) == [0, 0, PROCESS_BYTES["cpu"]]
    assert added(of(enforce_eager=True)) == [0, *added(spark)[1:]]
    pair = of(serving=Serving(4096, tensor_parallel=2))
    assert pair.parts["context"] == CONTEXT_BYTES + NCCL_BYTES and pair.parts["graphs"] == graphs
    assert of(serving=Serving(4096, pipeline_parallel=2)).parts["graphs"] == graphs // 2


def test_what_was_learned_goes_before_what_is_reckoned() -> None:
    found = of(measured=Demand(peak=123, graphs=45))

    assert (found.parts["peak"], found.parts["graphs"]) == (123, 45)


def test_a_model_fits_where_it_can_be_loaded_and_served() -> None:
    found = of()
    least = SPARK.memory_bytes - found.free_bytes
    tight = replace(SPARK, memory_bytes=least)

    def at(size: int) -> Footprint:
        return of(hardware=replace(tight, memory_bytes=size), kv_margin_gib=found.margin_bytes / GIB)

    assert (at(least).fits, at(least).free_bytes, at(least - 1).fits, at(least - 1).free_bytes) == (True, 0, False, -1)
    loading = SPARK.system_bytes + found.load_peak_bytes + found.parts["processes"] + found.parts["context"]
    assert (at(loading).load_free_bytes, at(loading - 1).load_free_bytes) == (0, -1)


def test_how_long_a_load_takes_at_most_of_the_disk() -> None:
    inventory = plain()
    stored = sum(part.tensor.nbytes for part in inventory.parts)
    as_is, quantized = of(inventory=inventory), of(NVFP4, inventory=inventory)

    assert as_is.first_load_s == as_is.next_load_s == stored / SPARK.disk_bytes_s
    assert quantized.first_load_s >= as_is.first_load_s > quantized.next_load_s
    assert quantized.next_load_s == quantized.weights.disk_bytes / SPARK.disk_bytes_s
    assert of(serving=Serving(4096, tensor_parallel=2)).first_load_s == as_is.first_load_s / 2
    assert quantized.load_peak_bytes - quantized.parts["weights"] > as_is.load_peak_bytes - as_is.parts["weights"]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (2, 1), (1, 2)])
def test_a_token_takes_as_long_as_reading_what_it_uses(ranks: int, stages: int) -> None:
    inventory = plain()
    found = of(inventory=inventory, serving=Serving(4096, tensor_parallel=ranks, pipeline_parallel=stages))

    active = inventory.formatted(BF16).weights(ranks, stages).active_bytes
    sums = 2 * 4 * (SPARK.link_latency_s + 512 * 2 / SPARK.link_bytes_s) if ranks > 1 else 0.0
    hops = SPARK.link_latency_s if stages > 1 else 0.0
    assert 1 / found.decode_tokens_s == pytest.approx(active / SPARK.bandwidth_bytes_s + sums + hops)


def test_a_cpu_that_decodes_weights_has_no_rate() -> None:
    cpu = replace(SPARK, platform="cpu")
    assert of(hardware=cpu).decode_tokens_s
    assert of(QuantizationRecipe.parse("nvfp4"), hardware=cpu).decode_tokens_s is None
