from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.facts import facts
from workers.kv.arithmetic import (
    GIB,
    CacheCosts,
    CacheDoesNotFit,
    Demand,
    Reserved,
    SizeBounds,
    longest,
    margin_of,
    pool,
    smaller_batch,
    too_little,
)
from workers.kv.memory import MemoryReading, host

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
    alone = host(folder, folder)
    return replace(alone, device_free=alone.free, device_total=alone.total, integrated=True)


@pytest.mark.parametrize(
    ("room", "demand", "margin", "asked", "at_most", "expected"),
    [
        (40 * GIB, SPARK, GIB, None, None, 32 * GIB),  # 40 - 2 graphs - (6 - 2) * 1.25 - 1
        (40 * GIB, SPARK, 0, None, None, 33 * GIB),
        (40 * GIB, Demand(), GIB, None, None, 39 * GIB),
        (40 * GIB, Demand(peak=GIB, reusable=2 * GIB), GIB, None, None, 39 * GIB),  # already paid for
        (40 * GIB, SPARK, GIB, None, 10 * GIB, 10 * GIB),
        (40 * GIB, SPARK, GIB, None, 100 * GIB, 32 * GIB),
        (40 * GIB, SPARK, GIB, 5 * GIB, None, 5 * GIB),
        (40 * GIB, SPARK, GIB, 32 * GIB, None, 32 * GIB),
    ],
)
def test_the_cache_is_what_is_left(room, demand, margin, asked, at_most, expected):
    made = pool(room, demand, margin, NEED, SizeBounds(asked, at_most))
    assert made.bytes == expected
    assert made.bytes + made.demand.ahead + made.margin + made.spare == room
    assert made.expected_slack == room - expected - demand.graphs + demand.reusable
    assert made.spare >= 0


@pytest.mark.parametrize(
    ("size", "asked", "expected"),
    [(24 * GIB, None, GIB), (121 * GIB, None, int(121 * GIB * 0.03)), (121 * GIB, 0, 0), (24 * GIB, 5 * GIB, 5 * GIB)],
)
def test_the_margin_is_a_gibibyte_or_three_percent(size, asked, expected):
    assert margin_of(size, asked) == expected


def settings_of(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> list[dict[str, Any]]:
    """Those that are advised, in their order."""
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(room, demand, margin, need, bounds)
    return [dict(cure.settings) for cure in raised.value.cures if not cure.deed]


def test_what_does_not_fit_is_said_with_the_arithmetic_and_what_would_fit():
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, SPARK, GIB, NEED)
    assert facts(raised.value) == (
        "32768 4.02 2.00 10.0 2.00 5.00 1.00 60.0 max_model_len 16128 max_num_batched_tokens max_num_seqs 4-bit nvfp4 43.1 16-bit"
    )


def test_the_batch_that_is_said_to_fit_fits():
    need = replace(NEED, batch_tokens=8192)
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, SPARK, GIB, need)
    tokens = int(re.search(r"max_num_batched_tokens (\d+)", facts(raised.value))[1])
    assert pool(10 * GIB, replace(SPARK, peak=SPARK.peak * tokens // 8192), GIB, need).bytes >= need.least
    assert smaller_batch(SPARK, 8 * GIB, need) == {}


@pytest.mark.parametrize(
    ("prefill", "decoding", "sequences", "batch"),
    [
        (6, 6, 512, "max_num_batched_tokens 5888 max_num_seqs 374"),
        (3, 6, 512, "max_num_seqs 374"),
        (6, 3, 512, "max_num_batched_tokens 5888"),
        (6, 5, 512, "max_num_batched_tokens 5888 max_num_seqs 449"),
        (6, 3, 8192, "max_num_batched_tokens 5888 max_num_seqs 5888"),  # vLLM wants a token for each
        (6, 6, 1, "max_num_batched_tokens max_num_seqs"),  # one sequence is as few as can be
    ],
)
def test_the_sequences_that_are_said_to_fit_fit(prefill, decoding, sequences, batch):
    need = replace(NEED, batch_tokens=8192, sequences=sequences)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(prefill * GIB, decoding * GIB)
    assert demand.peak == 6 * GIB
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(8 * GIB, demand, GIB, need)
    assert f"max_model_len 16128 {says} 4-bit" in facts(raised.value)
    fits = {name: int(count) for name, count in re.findall(r"(max_num_\w+) (\d+)", says)}
    if fits:
        tokens, seqs = fits.get("max_num_batched_tokens", 8192), fits.get("max_num_seqs", sequences)
        smaller = demand.with_peaks(prefill * GIB * tokens // 8192, decoding * GIB * seqs // sequences)
        assert pool(8 * GIB, smaller, GIB, need).bytes >= need.least
        assert seqs <= tokens


@pytest.mark.parametrize(
    ("chunked", "says"), [(True, "max_num_batched_tokens 5888"), (False, "max_num_batched_tokens 5888 max_model_len 5888")]
)
def test_a_batch_that_is_said_to_fit_is_one_that_vllm_takes(chunked, says):
    """Without chunked prefill it refuses a batch that is smaller than the longest prompt."""
    need = replace(NEED, batch_tokens=8192, sequences=16, chunked=chunked)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(6 * GIB, 3 * GIB)
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(8 * GIB, demand, GIB, need)
    assert f"max_model_len 16128 {says} 4-bit" in facts(raised.value)


def test_the_context_that_is_said_to_fit_fits():
    left = 2 * GIB
    tokens = longest(left, NEED)
    smaller = CacheCosts(int(NEED.per_token * tokens), int(NEED.per_token * tokens) + GIB // 64, tokens)
    assert pool(left, Demand(), 0, smaller).bytes == left
    with pytest.raises(CacheDoesNotFit):
        pool(left, Demand(), 0, CacheCosts(NEED.per_request, NEED.least, NEED.max_model_len))


def test_a_context_that_is_said_to_fit_fits_beside_a_state():
    """A quarter of the request is a state, of whatever length it is."""
    need = replace(NEED, of=lambda tokens: GIB + 3 * GIB * tokens // 32768)
    assert longest(2 * GIB + need.per_block, need) == 10_752
    assert longest(GIB, need) == 0
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(GIB, Demand(), 0, need)
    assert facts(raised.value) == "32768 4.02 1.00 1.00 0.00"


AHEAD = "2.00 5.00 1.00 60.0"  # graphs, the largest batch, the margin, the weights
NARROW = "4-bit nvfp4 43.1 16-bit"
LARGER = "kv_cache 4.02"


@pytest.mark.parametrize(
    ("room", "asked", "at_most", "says", "settings"),
    [
        (
            20 * GIB,
            13 * GIB,
            None,
            f"13.0 12.0 20.0 {AHEAD} 12.0 2 32768 max_num_batched_tokens max_num_seqs enforce_eager 2.00 {NARROW}",
        ),
        (10 * GIB, 13 * GIB, None, f"13.0 2.00 10.0 {AHEAD} 2.00 max_model_len 16128 {NARROW}"),
        (2 * GIB, None, None, f"32768 4.02 0.00 2.00 {AHEAD} {NARROW}"),
        (40 * GIB, None, GIB, "32768 4.02 1.00 kv_cache 32.0 max_model_len 7936"),
        (40 * GIB, None, 0, "32768 4.02 0.00 kv_cache 32.0"),
        (40 * GIB, None, GIB // 64, "32768 4.02 0.02 kv_cache 32.0"),
        # More would be allowed and is not there.
        (
            10 * GIB,
            None,
            GIB,
            f"32768 4.02 2.00 10.0 {AHEAD} max_model_len 7936 max_num_batched_tokens max_num_seqs {LARGER} {NARROW} {LARGER} {LARGER}",
        ),
    ],
)
def test_each_limit_has_its_sum_and_its_cures(room, asked, at_most, says):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(room, SPARK, GIB, NEED, SizeBounds(asked, at_most))
    assert facts(raised.value) == says


@pytest.mark.parametrize("demand", [Demand(), SPARK], ids=["not rehearsed", "rehearsed"])
@pytest.mark.parametrize(
    ("left", "asked", "settings"),
    [
        (30 * GIB, GIB, "1.00 32768 4.02 kv_cache max_model_len 7936"),
        (30 * GIB, GIB // 64, "0.02 32768 4.02 kv_cache"),
        (2 * GIB, GIB, "1.00 32768 4.02 max_model_len 7936"),
        (GIB // 2, GIB, "1.00 32768 4.02 0.50 max_model_len 3840"),
        (0, GIB, None),
    ],
)
def test_a_size_below_one_request_is_said_to_be_one(demand, left, asked, says):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(left + demand.ahead + GIB, demand, GIB, NEED, SizeBounds(asked))
    if says is None:  # too little for any request is said first
        assert facts(raised.value).startswith("1.00 0.00 8.00 2.00 5.00 1.00 " if demand.peak else "1.00 0.00 1.00 1.00 ")
        assert facts(raised.value).endswith(LARGER)
    else:
        assert facts(raised.value) == says


@pytest.mark.parametrize(
    ("sequences", "says"),
    [
        (None, "17.0 3.00 4.00 1.00 3.00 max_model_len 24320"),
        (4, "16.0 3.00 4.00 1.00 3.00 max_model_len 24320"),
        (1, "4.02 3.00 4.00 1.00 max_model_len 24320"),
    ],
    ids=["bytes", "four requests", "one request"],
)
def test_a_shorter_context_alone_is_advised_where_what_was_asked_for_shrinks_with_it(sequences, says):
    def asked(need: CacheCosts) -> int:
        return 17 * GIB if sequences is None else sequences * need.per_request + need.per_block

    with pytest.raises(CacheDoesNotFit) as raised:
        pool(4 * GIB, Demand(), GIB, NEED, SizeBounds(asked(NEED), again=asked))
    assert facts(raised.value) == says
    if sequences == 1:
        need = NEED.shortened(24_320)
        assert pool(4 * GIB, Demand(), GIB, need, SizeBounds(asked(need), again=asked)).bytes == asked(need)


@pytest.mark.parametrize(
    ("reserved", "says", "fits_gib"),
    [
        (Reserved(70 * GIB, 61 * GIB), "32768 4.02 2.00 memory_gib 70 61.0 2.00 5.00 memory_gib", "72.1"),
        (Reserved(64 * GIB, 61 * GIB), "32768 4.02 0.00 memory_gib 64 61.0 2.00 5.00 memory_gib", "72.1"),
        (Reserved(80 * GIB, 62 * GIB, 2), "32768 4.02 2.00 memory_gib 80 62.0 2.00 5.00 2 memory_gib", "84.1"),  # 2 ranks share it
    ],
    ids=["room for half a request", "room for nothing", "two ranks"],
)
def test_a_reservation_that_is_too_small_is_said_with_its_sum_and_what_would_fit(reserved, says, fits_gib):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=reserved))
    said = facts(raised.value)
    assert said.startswith(f"{says} {fits_gib} ")
    larger = replace(reserved, bytes=int(float(fits_gib) * GIB))
    assert pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=larger)).bytes >= NEED.least
    assert said.endswith(NARROW)
    # Of a batch that takes 5 GiB not all can come that is missing.
    assert ("max_num_batched_tokens" in said) is (larger.bytes - reserved.bytes < 5 * GIB)


@pytest.mark.parametrize(
    ("bits", "weights", "says"),
    [(16, 60, "4-bit nvfp4 43.1 16-bit"), (8, 60, "4-bit nvfp4 26.2 8-bit"), (8, 4, ""), (4, 60, "")],
)
def test_narrower_weights_are_advised_where_they_can_be_and_would_do(bits, weights, says):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, replace(SPARK, weights=weights * GIB), GIB, replace(NEED, weight_bits=bits))
    assert facts(raised.value).partition("max_num_seqs")[2].strip() == says


def test_a_start_without_graphs_is_advised_where_it_would_do():
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, replace(SPARK, graphs=3 * GIB), 0, NEED)
    assert "enforce_eager 3.00 " in facts(raised.value)
    assert pool(10 * GIB, replace(SPARK, graphs=0), 0, NEED).bytes >= NEED.least
    assert {"enforce_eager": True} not in settings_of(10 * GIB, SPARK, GIB, NEED)


@pytest.mark.parametrize(("learned", "sum_of"), [(None, "1.00"), (SPARK, "2.00 5.00 1.00")])
def test_nothing_is_tried_under_the_floor_and_the_sum_is_said(learned, sum_of):
    said = facts(too_little(GIB // 4, GIB // 2, GIB, NEED, 33 * GIB, learned))
    assert said == f"0.50 32768 4.02 0.00 0.25 {sum_of} 33.0 4-bit nvfp4 23.7 16-bit", "no context is so short"


def test_no_batch_is_advised_where_none_was_rehearsed():
    assert smaller_batch(Demand(), -GIB, NEED) == {}


@pytest.mark.parametrize(
    ("capture", "gib"),
    [("idle", 101.6), ("page-cache-flood", 77.93), ("one-model-swap-off", 60.75), ("three-models-resident", 11.26), ("tight-pool", None)],
)
def test_the_cache_on_a_real_spark(tmp_path, capture, gib):
    """Its readings, less what the demand needs and 3 %; weights are what the captures already hold."""
    reading = spark(tmp_path, capture)
    margin = margin_of(reading.size, None)
    assert margin == int(0.03 * reading.total)
    if gib is None:
        with pytest.raises(CacheDoesNotFit) as raised:
            pool(reading.room, DEMAND, margin, NEED)
        assert facts(raised.value) == "32768 4.02 0.00 7.13 1.00 4.00 3.65"
        return
    made = pool(reading.room, DEMAND, margin, NEED)
    assert made.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert made.bytes == reading.room - 5 * GIB - margin
