"""Figures of a cell: growth of an engine's counters, and the most that the nodes showed."""

from __future__ import annotations

import pytest

from sparkd.bench.cell_figures import Moment, computed_prompt_tokens, engine_figures, machine_figures, others_tokens, power_points
from sparkd.bench.result import EngineFigures
from sparkd.gateway.rates import sample_of

BEFORE = """vllm:prompt_tokens_total{} 100
vllm:generation_tokens_total{} 10
vllm:num_preemptions_total{} 1
vllm:prefix_cache_queries_total{} 100
vllm:prefix_cache_hits_total{} 0
vllm:spec_decode_num_drafts_total{} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2
vllm:time_to_first_token_seconds_bucket{le="0.1"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2
"""
AFTER = """vllm:prompt_tokens_total{} 1100
vllm:generation_tokens_total{} 74
vllm:num_preemptions_total{} 3
vllm:prefix_cache_queries_total{} 1100
vllm:prefix_cache_hits_total{} 250
vllm:spec_decode_num_drafts_total{} 25
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 20
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 7
vllm:time_to_first_token_seconds_bucket{le="0.1"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf"} 6
"""


def test_counters_are_compared() -> None:
    found = engine_figures(sample_of(BEFORE, 1.0), sample_of(AFTER, 2.0), [Moment(1.0, kv_use=0.25), Moment(2.0)])
    assert (found.requests, found.prompt_tokens, found.output_tokens, found.preemptions, found.kv_use_peak) == (4, 1000, 64, 2, 0.25)
    assert (found.prefix_hit_share, found.drafted_tokens, found.accepted_share_by_position) == (0.25, 40, [0.8, 0.25])
    assert computed_prompt_tokens(1000, found) == 750


def test_an_engine_that_began_anew_or_said_nothing_has_no_figures() -> None:
    for before, after in ((sample_of(AFTER, 1.0), sample_of(BEFORE, 2.0)), (None, sample_of(AFTER, 1.0)), (sample_of(AFTER, 1.0), None)):
        found = engine_figures(before, after, [])
        assert (found.prompt_tokens, found.output_tokens, found.prefix_hit_share) == (None, None, None)


@pytest.mark.parametrize(
    ("engine", "others"),
    [
        ((4, 2048, 128), 0),
        ((4, 2060, 130), 0),
        ((3, 2060, 130), 0),
        ((5, 2060, 130), 14),
        ((5, 2048, 128), 1),
        ((None, 2048, 269), 141),
        ((4, 9000, 128), 6952),
        ((None, None, None), None),
    ],
    ids=[
        *("its own", "as the tool counts", "the first one counted late", "a short request beside it", "one whose tokens the tool counted"),
        *("an answer beside it", "a prompt beside it", "no counters"),
    ],
)
def test_others_requests_are_told_by_the_counters(engine: tuple[int | None, int | None, int | None], others: int | None) -> None:
    requests, prompt_tokens, output_tokens = engine
    figures = EngineFigures(requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    assert others_tokens(4, 2048, 128, figures) == others


def test_a_reading_of_the_meter_counts_once_and_at_its_own_time() -> None:
    moments = [Moment(10.0, 50.0, power_at_s=9.8), Moment(10.5, 50.0, power_at_s=9.8), Moment(11.0), Moment(11.5, 60.0)]
    assert power_points(moments) == [(9.8, 50.0), (11.5, 60.0)]


def test_the_most_that_was_seen() -> None:
    moments = [Moment(1.0, celsius=60.0, memory_bytes=5), Moment(2.0, throttled=("hw_slowdown",), memory_bytes=9)]
    moments.append(Moment(3.0, celsius=71.0))
    found = machine_figures(moments)
    assert (found.celsius_peak, found.throttled, found.memory_peak_bytes) == (71.0, ["hw_slowdown"], 9)
    assert machine_figures([]).celsius_peak is None
