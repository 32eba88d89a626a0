from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.facts import facts
from workers.host.memory_limits import spare
from workers.kv.arithmetic import GIB, CacheCosts, CacheDoesNotFit, Demand, Reserved, SizeBounds, pool, too_little
from workers.kv.memory import MemoryReading, host
from workers.kv.request import CacheRequest
from workers.kv.settings import BLOCKS_FLAG, CacheSettings

NEED = CacheCosts(per_request=4 * GIB, least=4 * GIB + GIB // 64, max_model_len=32768)
# Weights are in memory already when room is read; they are here for the sentence.
SPARK = Demand(graphs=2 * GIB, peak=6 * GIB, reusable=2 * GIB, weights=60 * GIB)


# A GiB of graphs and four for the largest batch.
DEMAND = Demand(graphs=GIB, peak=4 * GIB, reusable=GIB * 4 // 5)
FIXTURES = Path(__file__).parents[2] / "fixtures" / "meminfo"


def spark(folder: Path, capture: str) -> MemoryReading:
    """As the worker reads it: on a GB10 the driver's free memory is MemFree."""
    (folder / "self").mkdir()
    (folder / "meminfo").write_text((FIXTURES / f"{capture}.txt").read_text())
    alone = host(folder)
    return replace(alone, device_free=alone.free, device_total=alone.total, integrated=True)


@pytest.mark.parametrize(
    ("room", "demand", "margin", "asked", "at_most", "expected"),
    [
        (40 * GIB, SPARK, GIB, None, None, 32 * GIB),  # 40 - 2 graphs - (6 - 2) * 1.25 - 1
        (40 * GIB, Demand(peak=GIB, reusable=2 * GIB), GIB, None, None, 39 * GIB),  # already paid for
        (40 * GIB, SPARK, GIB, None, 10 * GIB, 10 * GIB),
        (40 * GIB, SPARK, GIB, None, 100 * GIB, 32 * GIB),
        (40 * GIB, SPARK, GIB, 32 * GIB, None, 32 * GIB),
    ],
)
def test_the_cache_is_what_is_left(room, demand, margin, asked, at_most, expected):
    made = pool(room, demand, margin, NEED, SizeBounds(asked, at_most))
    assert made.bytes == expected
    assert made.bytes + made.demand.ahead + made.margin + made.spare == room
    assert made.expected_slack == room - expected - demand.graphs + demand.reusable
    assert made.spare >= 0


def refused(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> str:
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(room, demand, margin, need, bounds)
    return str(raised.value)


# The numbers of SPARK in a sentence: graphs, the largest batch, the margin, weights.
AHEAD = "2.00 5.00 1.00 60.0"
FREES = "nvfp4 43.1"


@pytest.mark.parametrize(
    ("room", "bounds", "says"),
    [
        (10, SizeBounds(), f"32768 4.02 2.00 10.0 {AHEAD} 2.02 {FREES}"),
        (2, SizeBounds(), f"32768 4.02 0.00 2.00 {AHEAD} 10.0 {FREES}"),
        (10, SizeBounds(13 * GIB), f"13.0 2.00 10.0 {AHEAD} 11.0 {FREES}"),
        # More would be allowed and is not there.
        (10, SizeBounds(at_most=GIB), f"32768 4.02 2.00 10.0 {AHEAD} 2.02 {FREES}"),
    ],
)
def test_what_does_not_fit_is_said_with_the_arithmetic_what_is_missing_and_one_lever(room, bounds, says):
    assert facts(refused(room * GIB, SPARK, GIB, NEED, bounds)) == f"{says} sparkd plan"


STATE = replace(NEED, of=lambda tokens: 4 * GIB)


@pytest.mark.parametrize(
    ("demand", "need", "lever"),
    [
        (replace(SPARK, weights=0, graphs=3 * GIB), NEED, "max_num_batched_tokens max_num_seqs 5.00"),
        (Demand(graphs=6 * GIB, weights=2 * GIB), NEED, "enforce_eager 6.00"),
        (Demand(weights=2 * GIB), NEED, "max_model_len 3.98"),
        # A state is as large for a short request as for a long one.
        (Demand(weights=6 * GIB), STATE, "nvfp4 4.31"),
        (Demand(weights=60 * GIB), replace(NEED, weight_bits=8), "nvfp4 26.2"),
    ],
)
def test_the_lever_is_the_setting_that_frees_most(demand, need, lever):
    assert facts(refused(demand.ahead + 2 * GIB, demand, GIB, need)).endswith(f" {lever} sparkd plan")


def test_no_setting_is_named_where_none_alone_frees_enough():
    assert facts(refused(GIB, Demand(weights=2 * GIB), GIB, STATE)) == "32768 4.02 0.00 1.00 1.00 2.00 4.02"


@pytest.mark.parametrize(
    ("room", "bounds", "number"),
    [
        (20, SizeBounds(13 * GIB), 12288),
        (20, SizeBounds(1000 * NEED.per_block, by_blocks=True), 768),
        (40, SizeBounds(GIB), 4112),
        (40, SizeBounds(at_most=GIB), 4112),
        (40, SizeBounds(100 * NEED.per_block, by_blocks=True), 257),
    ],
)
def test_the_size_that_is_named_fits_and_no_further_one_does(room, bounds, number):
    """MiB, or vLLM's blocks."""
    sentence = refused(room * GIB, SPARK, GIB, NEED, bounds)
    unit, beyond = (NEED.per_block if bounds.by_blocks else 1 << 20), (1 if room == 20 else -1)
    assert re.findall("[0-9]+", sentence)[-1] == str(number)
    assert (BLOCKS_FLAG in sentence) is bounds.by_blocks
    assert pool(room * GIB, SPARK, GIB, NEED, SizeBounds(number * unit)).bytes == number * unit
    refused(room * GIB, SPARK, GIB, NEED, SizeBounds((number + beyond) * unit))


@pytest.mark.parametrize(
    ("reserved", "says", "fits_gib"),
    [
        (Reserved(70 * GIB, 61 * GIB), "32768 4.02 memory_gib 2.00 70 61.0 2.00 5.00", 72.1),
        (Reserved(80 * GIB, 62 * GIB, 2), "32768 4.02 memory_gib 2.00 80 62.0 2.00 5.00 2", 84.1),
    ],
    ids=["one rank", "two ranks"],
)
def test_a_reservation_that_is_too_small_is_said_with_its_sum_and_what_would_fit(reserved, says, fits_gib):
    assert facts(refused(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=reserved))) == f"{says} memory_gib {fits_gib}"
    larger = replace(reserved, bytes=int(fits_gib * GIB))
    assert pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=larger)).bytes >= NEED.least


def test_nothing_is_tried_under_the_floor_and_what_is_missing_is_said():
    assert facts(too_little(GIB // 4, GIB // 2, NEED, 33 * GIB)) == "0.50 0.25 33.0 0.25 nvfp4 23.7 sparkd plan"


@pytest.mark.parametrize(
    ("capture", "gib"),
    [("page-cache-flood", 74.57), ("three-models-resident", 7.90), ("tight-pool", None)],
)
def test_the_cache_on_a_real_spark(tmp_path, capture, gib):
    """Its readings, less what the demand needs and what stays free; weights are what the captures already hold."""
    reading = spark(tmp_path, capture)
    margin = CacheRequest(CacheSettings(), lambda: 0).margin(reading)
    assert margin == spare(reading.total)
    if gib is None:
        assert facts(refused(reading.room, DEMAND, margin, NEED)).startswith("32768 4.02 0.00 7.13 1.00 4.00 7.00 ")
        return
    made = pool(reading.room, DEMAND, margin, NEED)
    assert made.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert made.bytes == reading.room - 5 * GIB - margin
