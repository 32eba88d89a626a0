from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

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


def test_what_does_not_fit_is_said_with_the_arithmetic_and_what_would_fit():
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, SPARK, GIB, NEED)
    assert str(raised.value) == (
        "One request of 32,768 tokens needs a KV cache of 4.02 GiB and 2.00 GiB are left: 10.0 GiB are free, less 2.00 GiB for CUDA "
        "graphs, 5.00 GiB for the largest batch, 1.00 GiB of margin. The weights take 60.0 GiB. To make it fit: a shorter context "
        "(max_model_len 16,128 would fit), or a smaller batch (max_num_batched_tokens, max_num_seqs), or 4-bit weights (quantize: nvfp4 "
        "frees up to 43.1 GiB of 16-bit ones), or ending other programs that use memory."
    )


def test_the_batch_that_is_said_to_fit_fits():
    need = replace(NEED, batch_tokens=8192)
    with pytest.raises(CacheDoesNotFit, match=r"a smaller batch \(max_num_batched_tokens (\d,\d{3}) would about fit\)") as raised:
        pool(10 * GIB, SPARK, GIB, need)
    tokens = int(re.search(r"tokens (\d,\d{3}) would", str(raised.value))[1].replace(",", ""))
    assert pool(10 * GIB, replace(SPARK, peak=SPARK.peak * tokens // 8192), GIB, need).bytes >= need.least
    assert smaller_batch(SPARK, 8 * GIB, need) == {}


@pytest.mark.parametrize(
    ("prefill", "decoding", "sequences", "says"),
    [
        (6, 6, 512, "max_num_batched_tokens 5,888 and max_num_seqs 374"),
        (3, 6, 512, "max_num_seqs 374"),
        (6, 3, 512, "max_num_batched_tokens 5,888"),
        (6, 5, 512, "max_num_batched_tokens 5,888 and max_num_seqs 449"),
        (6, 3, 8192, "max_num_batched_tokens 5,888 and max_num_seqs 5,888"),  # vLLM wants a token for each
        (6, 6, 1, "max_num_batched_tokens, max_num_seqs"),  # one sequence is as few as can be
    ],
)
def test_the_sequences_that_are_said_to_fit_fit(prefill, decoding, sequences, says):
    need = replace(NEED, batch_tokens=8192, sequences=sequences)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(prefill * GIB, decoding * GIB)
    assert demand.peak == 6 * GIB
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(8 * GIB, demand, GIB, need)
    would = f"{says} would about fit" if any(word.isdecimal() for word in says.replace(",", "").split()) else says
    assert f"a smaller batch ({would})" in str(raised.value)
    fits = {name: int(count.replace(",", "")) for name, count in re.findall(r"(max_num_\w+) ([\d,]+\d)", str(raised.value))}
    if fits:
        tokens, seqs = fits.get("max_num_batched_tokens", 8192), fits.get("max_num_seqs", sequences)
        smaller = demand.with_peaks(prefill * GIB * tokens // 8192, decoding * GIB * seqs // sequences)
        assert pool(8 * GIB, smaller, GIB, need).bytes >= need.least
        assert seqs <= tokens


@pytest.mark.parametrize(
    ("chunked", "says"), [(True, "max_num_batched_tokens 5,888"), (False, "max_num_batched_tokens 5,888 and max_model_len 5,888")]
)
def test_a_batch_that_is_said_to_fit_is_one_that_vllm_takes(chunked, says):
    """Without chunked prefill it refuses a batch that is smaller than the longest prompt."""
    need = replace(NEED, batch_tokens=8192, sequences=16, chunked=chunked)
    demand = Demand(reusable=2 * GIB, weights=60 * GIB).with_peaks(6 * GIB, 3 * GIB)
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(8 * GIB, demand, GIB, need)
    assert f"a smaller batch ({says} would about fit)" in str(raised.value)


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
    assert "To make it fit: ending other programs that use memory." in str(raised.value)


@pytest.mark.parametrize(
    ("room", "asked", "at_most", "says"),
    [
        (20 * GIB, 13 * GIB, None, "The requested KV cache needs 13.0 GiB and 12.0 GiB are left"),
        (
            20 * GIB,
            13 * GIB,
            None,
            "fit: a smaller cache (up to 12.0 GiB would fit, which is 2 of 32,768 tokens), or a smaller batch",
        ),
        (
            10 * GIB,
            13 * GIB,
            None,
            "fit: a smaller cache with a shorter context (up to 2.00 GiB and max_model_len 16,128 would fit), or 4-bit weights",
        ),
        (2 * GIB, None, None, "and 0.00 GiB are left"),
        (
            40 * GIB,
            None,
            GIB,
            "at most 1.00 GiB were allowed for it. To make it fit: a larger cache (kv_cache; up to 32.0 GiB would fit), or a shorter "
            "context "
            "(max_model_len 7,936 would fit).",
        ),
        (40 * GIB, None, 0, "at most 0.00 GiB were allowed for it. To make it fit: a larger cache (kv_cache; up to 32.0 GiB would fit)."),
        (
            40 * GIB,
            None,
            GIB // 64,
            "at most 0.02 GiB were allowed for it. To make it fit: a larger cache (kv_cache; up to 32.0 GiB would fit).",
        ),
        # More would be allowed and is not there.
        (10 * GIB, None, GIB, "and 2.00 GiB are left: 10.0 GiB are free, less 2.00 GiB for CUDA graphs, 5.00 GiB for the largest batch, "),
        (10 * GIB, None, GIB, "To make it fit: a shorter context (max_model_len 7,936 would fit), or "),
    ],
)
def test_other_sentences(room, asked, at_most, says):
    with pytest.raises(CacheDoesNotFit, match=r".") as raised:
        pool(room, SPARK, GIB, NEED, SizeBounds(asked, at_most))
    assert says in str(raised.value)


ASKED = "The requested KV cache is 1.00 GiB, and one request of 32,768 tokens needs 4.02 GiB. To make it fit: "


@pytest.mark.parametrize("demand", [Demand(), SPARK], ids=["not rehearsed", "rehearsed"])
@pytest.mark.parametrize(
    ("left", "asked", "says"),
    [
        (30 * GIB, GIB, f"{ASKED}a larger cache (kv_cache), or a shorter context (max_model_len 7,936 would fit)."),
        (30 * GIB, GIB // 64, "needs 4.02 GiB. To make it fit: a larger cache (kv_cache)."),
        (2 * GIB, GIB, f"{ASKED}a shorter context (max_model_len 7,936 would fit)."),
        (GIB // 2, GIB, f"{ASKED}a smaller cache with a shorter context (up to 0.50 GiB and max_model_len 3,840 would fit)."),
        (0, GIB, "The requested KV cache needs 1.00 GiB and 0.00 GiB are left: "),
    ],
)
def test_a_size_below_one_request_is_said_to_be_one(demand, left, asked, says):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(left + demand.ahead + GIB, demand, GIB, NEED, SizeBounds(asked))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("sequences", "says"),
    [
        (None, "To make it fit: a smaller cache with a shorter context (up to 3.00 GiB and max_model_len 24,320 would fit), or ending"),
        (4, "To make it fit: a smaller cache with a shorter context (up to 3.00 GiB and max_model_len 24,320 would fit), or ending"),
        (1, "To make it fit: a shorter context (max_model_len 24,320 would fit), or ending"),
    ],
    ids=["bytes", "four requests", "one request"],
)
def test_a_shorter_context_alone_is_advised_where_what_was_asked_for_shrinks_with_it(sequences, says):
    def asked(need: CacheCosts) -> int:
        return 17 * GIB if sequences is None else sequences * need.per_request + need.per_block

    with pytest.raises(CacheDoesNotFit) as raised:
        pool(4 * GIB, Demand(), GIB, NEED, SizeBounds(asked(NEED), again=asked))
    assert says in str(raised.value)
    if sequences == 1:
        shorter = NEED.shortened(24_320)
        assert pool(4 * GIB, Demand(), GIB, shorter, SizeBounds(asked(shorter), again=asked)).bytes == asked(shorter)


RESERVED = (
    "One request of 32,768 tokens needs a KV cache of 4.02 GiB, and at most {} GiB were allowed for it. memory_gib is {}, less {} GiB "
)


@pytest.mark.parametrize(
    ("reserved", "says", "fits_gib"),
    [
        (Reserved(70 * GIB, 61 * GIB), RESERVED.format("2.00", "70", "61.0"), "72.1"),
        (Reserved(64 * GIB, 61 * GIB), RESERVED.format("0.00", "64", "61.0"), "72.1"),
        (Reserved(80 * GIB, 62 * GIB, 2), RESERVED.format("2.00", "80", "62.0"), "84.1"),
    ],
    ids=["room for half a request", "room for nothing", "two ranks"],
)
def test_a_reservation_that_is_too_small_is_said_with_its_sum_and_what_would_fit(reserved, says, fits_gib):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=reserved))
    said = str(raised.value)
    assert f"{says}that the engine holds, 2.00 GiB for CUDA graphs, 5.00 GiB for the largest batch." in said
    assert ("The 2 ranks here share that." in said) is (reserved.ranks == 2)
    assert f"a larger memory_gib ({fits_gib} would fit)" in said
    larger = replace(reserved, bytes=int(float(fits_gib) * GIB))
    assert pool(40 * GIB, SPARK, GIB, NEED, SizeBounds(reserved=larger)).bytes >= NEED.least
    assert "4-bit weights (quantize: nvfp4 frees up to 43.1 GiB" in said
    # Of a batch that takes 5 GiB not all can come that is missing.
    assert ("a smaller batch" in said) is (larger.bytes - reserved.bytes < 5 * GIB)


@pytest.mark.parametrize(
    ("bits", "weights", "says"),
    [
        (16, 60, "4-bit weights (quantize: nvfp4 frees up to 43.1 GiB of 16-bit ones)"),
        (8, 60, "4-bit weights (quantize: nvfp4 frees up to 26.2 GiB of 8-bit ones)"),
        (8, 4, ""),
        (4, 60, ""),
    ],
)
def test_narrower_weights_are_advised_where_they_can_be_and_would_do(bits, weights, says):
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, replace(SPARK, weights=weights * GIB), GIB, replace(NEED, weight_bits=bits))
    assert says in str(raised.value)
    assert ("4-bit" in str(raised.value)) is bool(says)


def test_a_start_without_graphs_is_advised_where_it_would_do():
    with pytest.raises(CacheDoesNotFit, match=r"no CUDA graphs \(enforce_eager: true frees 3\.00 GiB\)"):
        pool(10 * GIB, replace(SPARK, graphs=3 * GIB), 0, NEED)
    assert pool(10 * GIB, replace(SPARK, graphs=0), 0, NEED).bytes >= NEED.least
    with pytest.raises(CacheDoesNotFit) as raised:
        pool(10 * GIB, SPARK, GIB, NEED)
    assert "enforce_eager" not in str(raised.value)


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
    assert "max_model_len" not in said, "no context is so short"
    assert "4-bit weights (quantize: nvfp4 frees up to 23.7 GiB of 16-bit ones)" in said


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
