from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.kv.advice import OTHER_PROGRAMS
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
    assert str(raised.value) == (
        "One request of 32,768 tokens needs a KV cache of 4.02 GiB and 2.00 GiB are left: 10.0 GiB are free, less 2.00 GiB for CUDA "
        "graphs, 5.00 GiB for the largest batch, 1.00 GiB of margin. The weights take 60.0 GiB. To make it fit: set max_model_len: 16128, "
        "or set a smaller max_num_batched_tokens or max_num_seqs, or set quantize: nvfp4 (frees up to 43.1 GiB of 16-bit weights), or end "
        "other programs that use memory."
    )


def test_the_batch_that_is_said_to_fit_fits():
    need = replace(NEED, batch_tokens=8192)
    batch = next(settings for settings in settings_of(10 * GIB, SPARK, GIB, need) if "max_num_batched_tokens" in settings)
    tokens = batch["max_num_batched_tokens"]
    assert pool(10 * GIB, replace(SPARK, peak=SPARK.peak * tokens // 8192), GIB, need).bytes >= need.least
    assert smaller_batch(SPARK, 8 * GIB, need) == {}


@pytest.mark.parametrize(
    ("prefill", "decoding", "sequences", "batch"),
    [
        (6, 6, 512, {"max_num_batched_tokens": 5888, "max_num_seqs": 374}),
        (3, 6, 512, {"max_num_seqs": 374}),
        (6, 3, 512, {"max_num_batched_tokens": 5888}),
        (6, 5, 512, {"max_num_batched_tokens": 5888, "max_num_seqs": 449}),
        (6, 3, 8192, {"max_num_batched_tokens": 5888, "max_num_seqs": 5888}),  # vLLM wants a token for each
        (6, 6, 1, None),  # one sequence is as few as can be
    ],
)
def test_the_sequences_that_are_said_to_fit_fit(prefill, decoding, sequences, batch):
    need = replace(NEED, batch_tokens=8192, sequences=sequences)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(prefill * GIB, decoding * GIB)
    assert demand.peak == 6 * GIB
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(8 * GIB, demand, GIB, need)
    deeds = [cure.deed for cure in raised.value.cures if "max_num_seqs" in cure.deed]
    assert bool(deeds) is (batch is None)
    if batch is not None:
        assert batch in settings_of(8 * GIB, demand, GIB, need)
        tokens, seqs = batch.get("max_num_batched_tokens", 8192), batch.get("max_num_seqs", sequences)
        smaller = demand.with_peaks(prefill * GIB * tokens // 8192, decoding * GIB * seqs // sequences)
        assert pool(8 * GIB, smaller, GIB, need).bytes >= need.least
        assert seqs <= tokens


@pytest.mark.parametrize(("chunked", "more"), [(True, {}), (False, {"max_model_len": 5888})])
def test_a_batch_that_is_said_to_fit_is_one_that_vllm_takes(chunked, more):
    """Without chunked prefill it refuses a batch that is smaller than the longest prompt."""
    need = replace(NEED, batch_tokens=8192, sequences=16, chunked=chunked)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(6 * GIB, 3 * GIB)
    assert {"max_num_batched_tokens": 5888, **more} in settings_of(8 * GIB, demand, GIB, need)


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
    assert [cure.deed for cure in raised.value.cures] == [OTHER_PROGRAMS]


def size(gib: float) -> dict[str, Any]:
    return {"kv_cache": {"bytes": int(gib * GIB)}}


NARROWER = {"quantize": "nvfp4"}


@pytest.mark.parametrize(
    ("room", "asked", "at_most", "says", "settings"),
    [
        (20 * GIB, 13 * GIB, None, "The requested KV cache needs 13.0 GiB and 12.0 GiB are", [size(12), {"enforce_eager": True}, NARROWER]),
        (10 * GIB, 13 * GIB, None, "and 2.00 GiB are left", [size(2) | {"max_model_len": 16128}, NARROWER]),
        (2 * GIB, None, None, "and 0.00 GiB are left", [NARROWER]),
        (40 * GIB, None, GIB, "at most 1.00 GiB were allowed for it.", [size(4.1), {"max_model_len": 7936}]),
        (40 * GIB, None, 0, "at most 0.00 GiB were allowed for it.", [size(4.1)]),
        (40 * GIB, None, GIB // 64, "at most 0.02 GiB were allowed for it.", [size(4.1)]),
        # More would be allowed and is not there.
        (
            10 * GIB,
            None,
            GIB,
            "and 2.00 GiB are left: 10.0 GiB are free, less 2.00 GiB for CUDA graphs, 5.00 GiB for the largest batch, ",
            [{"max_model_len": 7936}, NARROWER | size(4.1)],
        ),
    ],
)
def test_other_limits(room, asked, at_most, says, settings):
    bounds = SizeBounds(asked, at_most)
    with pytest.raises(CacheDoesNotFit, match=r".") as raised:
        pool(room, SPARK, GIB, NEED, bounds)
    assert says in str(raised.value)
    assert settings_of(room, SPARK, GIB, NEED, bounds) == settings


OWN = {"kv_cache", "max_model_len"}


@pytest.mark.parametrize("demand", [Demand(), SPARK], ids=["not rehearsed", "rehearsed"])
@pytest.mark.parametrize(
    ("left", "asked", "settings"),
    [
        (30 * GIB, GIB, [size(4.1), {"max_model_len": 7936}]),
        (30 * GIB, GIB // 64, [size(4.1)]),
        (2 * GIB, GIB, [{"max_model_len": 7936}]),
        (GIB // 2, GIB, [size(0.5) | {"max_model_len": 3840}]),
        (0, GIB, []),
    ],
)
def test_a_size_below_one_request(demand, left, asked, settings):
    assert [each for each in settings_of(left + demand.ahead + GIB, demand, GIB, NEED, SizeBounds(asked)) if each.keys() <= OWN] == settings


@pytest.mark.parametrize("sequences", [None, 4, 1], ids=["bytes", "four requests", "one request"])
def test_a_shorter_context_alone_is_advised_where_what_was_asked_for_shrinks_with_it(sequences):
    def asked(need: CacheCosts) -> int:
        return 17 * GIB if sequences is None else sequences * need.per_request + need.per_block

    shorter = {"max_model_len": 24_320}
    bounds = SizeBounds(asked(NEED), again=asked)
    assert settings_of(4 * GIB, Demand(), GIB, NEED, bounds) == [shorter if sequences == 1 else size(3) | shorter]
    if sequences == 1:
        need = NEED.shortened(24_320)
        assert pool(4 * GIB, Demand(), GIB, need, SizeBounds(asked(need), again=asked)).bytes == asked(need)


RESERVED = (
    "One request of 32,768 tokens needs a KV cache of 4.02 GiB, and at most {} GiB were allowed for it. memory_gib is {}, less {} GiB "
)


@pytest.mark.parametrize(
    ("reserved", "says", "fits_gib"),
    [
        (Reserved(70 * GIB, 61 * GIB), RESERVED.format("2.00", "70", "61.0"), 72.1),
        (Reserved(64 * GIB, 61 * GIB), RESERVED.format("0.00", "64", "61.0"), 72.1),
        (Reserved(80 * GIB, 62 * GIB, 2), RESERVED.format("2.00", "80", "62.0"), 84.1),
    ],
    ids=["room for half a request", "room for nothing", "two ranks"],
)
def test_a_reservation_that_is_too_small_is_said_with_its_sum_and_what_would_fit(reserved, says, fits_gib):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=reserved))
    said, settings = str(raised.value), [cure.settings for cure in raised.value.cures]
    assert f"{says}that the engine holds, 2.00 GiB for CUDA graphs, 5.00 GiB for the largest batch." in said
    assert ("The 2 ranks here share that." in said) is (reserved.ranks == 2)
    assert {"memory_gib": fits_gib} in settings
    larger = replace(reserved, bytes=int(fits_gib * GIB))
    assert pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=larger)).bytes >= NEED.least
    assert NARROWER in settings
    # Of a batch that takes 5 GiB not all can come that is missing.
    assert any("max_num_seqs" in cure.deed for cure in raised.value.cures) is (larger.bytes - reserved.bytes < 5 * GIB)


@pytest.mark.parametrize(("bits", "weights", "frees"), [(16, 60, "43.1 GiB of 16"), (8, 60, "26.2 GiB of 8"), (8, 4, ""), (4, 60, "")])
def test_narrower_weights_are_advised_where_they_can_be_and_would_do(bits, weights, frees):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, replace(SPARK, weights=weights * GIB), GIB, replace(NEED, weight_bits=bits))
    effects = [cure.effect for cure in raised.value.cures if cure.settings == NARROWER]
    assert effects == ([f"frees up to {frees}-bit weights"] if frees else [])


def test_a_start_without_graphs_is_advised_where_it_would_do():
    assert {"enforce_eager": True} in settings_of(10 * GIB, replace(SPARK, graphs=3 * GIB), 0, NEED)
    assert pool(10 * GIB, replace(SPARK, graphs=0), 0, NEED).bytes >= NEED.least
    assert {"enforce_eager": True} not in settings_of(10 * GIB, SPARK, GIB, NEED)


@pytest.mark.parametrize("learned", [None, SPARK])
def test_nothing_is_tried_under_the_floor_and_the_sum_is_said(learned):
    said = too_little(GIB // 4, GIB // 2, GIB, NEED, 33 * GIB, learned)
    begin = (
        "At least 0.50 GiB must be free before the KV cache can be sized. One request of 32,768 tokens needs a KV cache of 4.02 GiB and "
        "0.00 GiB are left: 0.25 GiB are "
    )
    known = "free, less 2.00 GiB for CUDA graphs, 5.00 GiB for the largest batch, 1.00 GiB of margin. "
    unknown = "free, less 1.00 GiB of margin; CUDA graphs and the largest batch, which are not known yet, come on top. "
    assert said.startswith(
        begin + (unknown if learned is None else known) + "The engine, its weights included, holds 33.0 GiB. To make it fit: "
    )
    # No context is so short, and no batch so small, that more is free before it.
    assert said.endswith(": set quantize: nvfp4 (frees up to 23.7 GiB of 16-bit weights), or end other programs that use memory.")


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
        with pytest.raises(CacheDoesNotFit, match=r"7\.13 GiB are free, less 1\.00 GiB for CUDA graphs, 4\.00 GiB for the largest"):
            pool(reading.room, DEMAND, margin, NEED)
        return
    made = pool(reading.room, DEMAND, margin, NEED)
    assert made.bytes / GIB == pytest.approx(gib, abs=0.01)
    assert made.bytes == reading.room - 5 * GIB - margin
