"""What an engine's counters come to over the last seconds."""

from __future__ import annotations

import pytest

from sparkd.gateway.rates import LATENCY_S, EngineRates, Rates, quantile, sample_of

INF = float("inf")


def page(**values: float) -> str:
    """A page of one engine; `ttft=(counts by bound)` and `accepted=(by position)` have labels of their own."""
    lines = ["# HELP vllm:prompt_tokens_total x", "# TYPE vllm:prompt_tokens_total counter"]
    own = 'engine="0",model_name="a}b"'
    for name, value in values.items():
        if name == "ttft":
            lines += [
                f'vllm:time_to_first_token_seconds_bucket{{{own},le="{bound}"}} {count}'
                for bound, count in value.items()  # type: ignore[attr-defined]
            ]
        elif name == "accepted":
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{own},position="{place}"}} {count}'
                for place, count in enumerate(value)  # type: ignore[arg-type,var-annotated]
            ]
        else:
            lines.append(f"vllm:{name}{{{own}}} {value}")
    return "\n".join(lines) + "\n"


def after(*pages: tuple[float, str]) -> Rates:
    rates = EngineRates()
    for at_s, text in pages:
        rates.take(sample_of(text, at_s))
    return rates.figures()


def test_one_page_tells_what_is_and_not_how_fast() -> None:
    now = after((0.0, page(prompt_tokens_total=100, num_requests_running=2, num_requests_waiting=1, kv_cache_usage_perc=0.25)))
    assert (now.running, now.waiting, now.kv_usage, now.prompt_tokens_per_s, now.ttft_p50_s) == (2, 1, 0.25, None, None)


def test_tokens_per_second_over_the_last_seconds() -> None:
    pages = [(float(second), page(generation_tokens_total=1000 + 10 * second + (500 if second >= 5 else 0))) for second in range(31)]
    assert after(*pages).generation_tokens_per_s == pytest.approx(10.0), "the jump 25 s ago counts no more"
    assert after(*pages[:10]).generation_tokens_per_s == pytest.approx((90 + 500) / 9)


def test_an_engine_that_does_nothing_does_nothing() -> None:
    idle = after(
        (0.0, page(prompt_tokens_total=7, ttft={"0.5": 3, "+Inf": 3})), (5.0, page(prompt_tokens_total=7, ttft={"0.5": 3, "+Inf": 3}))
    )
    assert (idle.prompt_tokens_per_s, idle.ttft_p50_s) == (0.0, None)


def test_a_counter_that_begins_anew_is_not_a_rate() -> None:
    again = after((0.0, page(prompt_tokens_total=1000)), (5.0, page(prompt_tokens_total=10)))
    assert again.prompt_tokens_per_s is None
    then = after((0.0, page(prompt_tokens_total=1000)), (5.0, page(prompt_tokens_total=10)), (10.0, page(prompt_tokens_total=60)))
    assert then.prompt_tokens_per_s == 10.0


def test_latencies_are_of_the_requests_that_ended_lately() -> None:
    before, now = {"0.1": 100, "0.5": 100, "1.0": 100, "+Inf": 100}, {"0.1": 100, "0.5": 110, "1.0": 120, "+Inf": 120}
    rates = after((0.0, page(ttft=before)), (5.0, page(ttft=now)))
    assert rates.ttft_p50_s == pytest.approx(0.5)
    assert rates.ttft_p95_s == pytest.approx(0.95)
    assert rates.itl_p50_s is None


def test_what_is_older_than_the_window_counts_no_more() -> None:
    slow, fast = {"0.1": 0, "1.0": 50, "+Inf": 50}, {"0.1": 10, "1.0": 60, "+Inf": 60}
    empty = {"0.1": 0, "1.0": 0, "+Inf": 0}
    pages = [(0.0, page(ttft=empty)), (1.0, page(ttft=slow)), (LATENCY_S + 1.0, page(ttft=fast))]
    assert after(*pages).ttft_p95_s == pytest.approx(0.095)


def test_hits_and_acceptance_are_shares() -> None:
    rates = after(
        (0.0, page(prefix_cache_queries_total=100, prefix_cache_hits_total=50, spec_decode_num_drafts_total=10, accepted=(8, 4))),
        (5.0, page(prefix_cache_queries_total=200, prefix_cache_hits_total=125, spec_decode_num_drafts_total=20, accepted=(17, 9))),
    )
    assert rates.prefix_hit_ratio == 0.75
    assert rates.acceptance == (0.9, 0.5)
    assert after((0.0, page(prompt_tokens_total=1)), (5.0, page(prompt_tokens_total=2))).acceptance is None


def test_the_ranks_of_an_engine_count_together() -> None:
    two = 'vllm:num_requests_running{engine="0"} 2\nvllm:num_requests_running{engine="1"} 3\n'
    two += 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    rates = after((0.0, two))
    assert (rates.running, rates.kv_usage) == (5, 0.75)


@pytest.mark.parametrize("text", ["", "other:prompt_tokens_total 3\n"])
def test_what_the_page_lacks_is_unknown(text: str) -> None:
    assert after((0.0, text), (5.0, text)) == Rates()


@pytest.mark.parametrize(
    ("buckets", "share", "value"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (INF, 0.0)], 0.5, None),
        ([(1.0, 10.0), (INF, 10.0)], 0.5, 0.5),
        ([(1.0, 5.0), (2.0, 10.0), (INF, 10.0)], 0.75, 1.5),
        ([(1.0, 5.0), (INF, 10.0)], 0.95, 1.0),
        ([(INF, 10.0)], 0.5, None),
    ],
    ids=["none", "empty", "one bucket", "the second", "beyond the last bound", "no bound"],
)
def test_quantiles(buckets: list[tuple[float, float]], share: float, value: float | None) -> None:
    assert quantile(buckets, share) == value
