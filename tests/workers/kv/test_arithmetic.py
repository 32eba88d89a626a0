from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.facts import facts
from workers.host.memory_limits import spare
from workers.kv.advice import OTHER_PROGRAMS, advised
from workers.kv.arithmetic import (
    GIB,
    CacheCosts,
    CacheDoesNotFit,
    Demand,
    Reserved,
    SizeBounds,
    longest,
    pool,
    smaller_batch,
    too_little,
)
from workers.kv.memory import MemoryReading, host
from workers.kv.request import CacheRequest
from workers.kv.settings import CacheSettings

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


def refused(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> CacheDoesNotFit:
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(room, demand, margin, need, bounds)
    return raised.value


def settings_of(error: CacheDoesNotFit) -> list[dict[str, Any]]:
    """Those that are advised, in their order."""
    return [dict(cure.settings) for cure in error.cures if not cure.deed]


def sum_of(error: CacheDoesNotFit) -> str:
    """The facts of the sentence before its advice, which is the words of the cures."""
    reason, separator, advice = str(error).rpartition(advised(error.cures))
    assert (bool(separator), advice) == (True, ".")
    return facts(reason)


FEWER = "max_num_batched_tokens max_num_seqs"
NARROWER = {"quantize": "nvfp4"}
# The numbers of SPARK in a sentence: graphs, the largest batch, the margin, weights.
AHEAD = "2.00 5.00 1.00 60.0"


def test_what_does_not_fit_is_said_with_the_arithmetic_and_what_would_fit():
    error = refused(10 * GIB, SPARK, GIB, NEED)
    assert sum_of(error) == f"32768 4.02 2.00 10.0 {AHEAD}"
    assert settings_of(error) == [{"max_model_len": 16128}, NARROWER]
    assert [facts(cure.deed) or cure.deed for cure in error.cures if cure.deed] == [FEWER, OTHER_PROGRAMS]


def test_the_batch_that_is_said_to_fit_fits():
    need = replace(NEED, batch_tokens=8192)
    batch = next(settings for settings in settings_of(refused(10 * GIB, SPARK, GIB, need)) if "max_num_batched_tokens" in settings)
    tokens = batch["max_num_batched_tokens"]
    assert pool(10 * GIB, replace(SPARK, peak=SPARK.peak * tokens // 8192), GIB, need).bytes >= need.least
    assert smaller_batch(SPARK, 8 * GIB, need) == {}


@pytest.mark.parametrize(
    ("prefill", "decoding", "sequences", "batch"),
    [
        (6, 6, 512, {"max_num_batched_tokens": 5888, "max_num_seqs": 374}),
        (3, 6, 512, {"max_num_seqs": 374}),
        (6, 5, 512, {"max_num_batched_tokens": 5888, "max_num_seqs": 449}),
        (6, 3, 8192, {"max_num_batched_tokens": 5888, "max_num_seqs": 5888}),  # vLLM wants a token for each
        (6, 6, 1, None),  # one sequence is as few as can be
    ],
)
def test_the_sequences_that_are_said_to_fit_fit(prefill, decoding, sequences, batch):
    need = replace(NEED, batch_tokens=8192, sequences=sequences)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(prefill * GIB, decoding * GIB)
    assert demand.peak == 6 * GIB
    error = refused(8 * GIB, demand, GIB, need)
    assert (FEWER in [facts(cure.deed) for cure in error.cures]) is (batch is None)
    if batch is not None:
        assert batch in settings_of(error)
        tokens, seqs = batch.get("max_num_batched_tokens", 8192), batch.get("max_num_seqs", sequences)
        smaller = demand.with_peaks(prefill * GIB * tokens // 8192, decoding * GIB * seqs // sequences)
        assert pool(8 * GIB, smaller, GIB, need).bytes >= need.least
        assert seqs <= tokens


@pytest.mark.parametrize(("chunked", "more"), [(True, {}), (False, {"max_model_len": 5888})])
def test_a_batch_that_is_said_to_fit_is_one_that_vllm_takes(chunked, more):
    """Without chunked prefill it refuses a batch that is smaller than the longest prompt."""
    need = replace(NEED, batch_tokens=8192, sequences=16, chunked=chunked)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(6 * GIB, 3 * GIB)
    assert {"max_num_batched_tokens": 5888, **more} in settings_of(refused(8 * GIB, demand, GIB, need))


def test_the_context_that_is_said_to_fit_fits():
    left = 2 * GIB
    tokens = longest(left, NEED)
    smaller = CacheCosts(int(NEED.per_token * tokens), int(NEED.per_token * tokens) + GIB // 64, tokens)
    assert pool(left, Demand(), 0, smaller).bytes == left
    refused(left, Demand(), 0, CacheCosts(NEED.per_request, NEED.least, NEED.max_model_len))


def test_a_context_that_is_said_to_fit_fits_beside_a_state():
    """A quarter of the request is a state, of whatever length it is."""
    need = replace(NEED, of=lambda tokens: GIB + 3 * GIB * tokens // 32768)
    assert longest(2 * GIB + need.per_block, need) == 10_752
    assert longest(GIB, need) == 0
    assert [cure.deed for cure in refused(GIB, Demand(), 0, need).cures] == [OTHER_PROGRAMS]


def size(gib: float) -> dict[str, Any]:
    return {"kv_cache": {"bytes": int(gib * GIB)}}


@pytest.mark.parametrize(
    ("room", "asked", "at_most", "said", "settings"),
    [
        (20 * GIB, 13 * GIB, None, f"13.0 12.0 20.0 {AHEAD}", [size(12), {"enforce_eager": True}, NARROWER]),
        (2 * GIB, None, None, f"32768 4.02 0.00 2.00 {AHEAD}", [NARROWER]),
        (40 * GIB, None, GIB, "32768 4.02 1.00", [size(4.1), {"max_model_len": 7936}]),
        # More would be allowed and is not there.
        (10 * GIB, None, GIB, f"32768 4.02 2.00 10.0 {AHEAD}", [{"max_model_len": 7936}, NARROWER | size(4.1)]),
    ],
)
def test_other_limits(room, asked, at_most, said, settings):
    error = refused(room, SPARK, GIB, NEED, SizeBounds(asked, at_most))
    assert sum_of(error) == said
    assert settings_of(error) == settings


@pytest.mark.parametrize("sequences", [None, 1], ids=["bytes", "one request"])
def test_a_shorter_context_alone_is_advised_where_what_was_asked_for_shrinks_with_it(sequences):
    def asked(need: CacheCosts) -> int:
        return 17 * GIB if sequences is None else sequences * need.per_request + need.per_block

    shorter = {"max_model_len": 24_320}
    bounds = SizeBounds(asked(NEED), again=asked)
    assert settings_of(refused(4 * GIB, Demand(), GIB, NEED, bounds)) == [shorter if sequences == 1 else size(3) | shorter]
    if sequences == 1:
        need = NEED.shortened(24_320)
        assert pool(4 * GIB, Demand(), GIB, need, SizeBounds(asked(need), again=asked)).bytes == asked(need)


@pytest.mark.parametrize(
    ("reserved", "said", "fits_gib"),
    [
        (Reserved(70 * GIB, 61 * GIB), "32768 4.02 2.00 memory_gib 70 61.0 2.00 5.00", 72.1),
        (Reserved(80 * GIB, 62 * GIB, 2), "32768 4.02 2.00 memory_gib 80 62.0 2.00 5.00 2", 84.1),
    ],
    ids=["one rank", "two ranks"],
)
def test_a_reservation_that_is_too_small_is_said_with_its_sum_and_what_would_fit(reserved, said, fits_gib):
    error = refused(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=reserved))
    assert sum_of(error) == said
    assert {"memory_gib": fits_gib} in settings_of(error)
    larger = replace(reserved, bytes=int(fits_gib * GIB))
    assert pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=larger)).bytes >= NEED.least
    assert NARROWER in settings_of(error)
    # Of a batch that takes 5 GiB not all can come that is missing.
    assert (FEWER in [facts(cure.deed) for cure in error.cures]) is (larger.bytes - reserved.bytes < 5 * GIB)


@pytest.mark.parametrize(("bits", "weights", "frees"), [(8, 60, ["26.2 8-bit"]), (8, 4, []), (4, 60, [])])
def test_narrower_weights_are_advised_where_they_can_be_and_would_do(bits, weights, frees):
    error = refused(10 * GIB, replace(SPARK, weights=weights * GIB), GIB, replace(NEED, weight_bits=bits))
    assert [facts(cure.effect) for cure in error.cures if cure.settings == NARROWER] == frees


@pytest.mark.parametrize(("learned", "ahead"), [(None, "1.00"), (SPARK, "2.00 5.00 1.00")])
def test_nothing_is_tried_under_the_floor_and_the_sum_is_said(learned, ahead):
    said = too_little(GIB // 4, GIB // 2, GIB, NEED, 33 * GIB, learned)
    # No context is so short, and no batch so small, that more is free before it.
    assert facts(said) == f"0.50 32768 4.02 0.00 0.25 {ahead} 33.0 nvfp4 23.7 16-bit"
    assert OTHER_PROGRAMS in said


def test_no_batch_is_advised_where_none_was_rehearsed():
    assert smaller_batch(Demand(), -GIB, NEED) == {}


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
        assert sum_of(refused(reading.room, DEMAND, margin, NEED)) == "32768 4.02 0.00 7.13 1.00 4.00 7.00"
        return
    made = pool(reading.room, DEMAND, margin, NEED)
    assert made.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert made.bytes == reading.room - 5 * GIB - margin
