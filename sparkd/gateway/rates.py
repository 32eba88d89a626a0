"""Computes tokens per second, latencies and ratios over the last seconds from the counters of an engine."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

# Counters are compared over the shorter time. Latencies need requests that have ended, so they look further back.
RATE_S, LATENCY_S = 10.0, 30.0
# A counter that is asked for more often than that is not kept.
LEAST_S = 0.9

_COUNTERS = (
    *("prompt_tokens_total", "generation_tokens_total", "iteration_tokens_total_sum", "num_preemptions_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
)
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
_DRAFTS, _ACCEPTED = "spec_decode_num_drafts_total", "spec_decode_num_accepted_tokens_per_pos_total"
_NAMES = "|".join((*_COUNTERS, *_GAUGES, *(f"{name}_bucket" for name in _HISTOGRAMS), _DRAFTS, _ACCEPTED))
_SAMPLE = re.compile(rf"\nvllm:({_NAMES})(?:\{{(.*)\}})? ([^ \n]+)")
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Rates:
    """One engine now. None where that is unknown: no request has ended lately, the engine has no such counter, or it was seen only once.

    kv_usage: the fullest of its caches, 0 to 1.
    prefix_hit_ratio: of the prompt tokens that were looked up.
    *_p50_s, *_p95_s: interpolated within a bucket, as Prometheus does.
    acceptance: of the drafts, by position.
    """

    prompt_tokens_per_s: float | None = None
    generation_tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_hit_ratio: float | None = None
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    itl_p50_s: float | None = None
    itl_p95_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p95_s: float | None = None
    acceptance: tuple[float, ...] | None = None


@dataclass(slots=True)
class Sample:
    """The numbers of one page, added up over the engine's ranks.

    buckets: by histogram, upper bound -> how many were at most that.
    """

    at_s: float
    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)
    accepted: dict[int, float] = field(default_factory=dict)

    def is_before(self, later: Sample) -> bool:
        """Whether no counter has gone back since, as it does when an engine begins anew."""
        return all(later.values.get(name, 0.0) >= value for name, value in self.values.items() if name not in _GAUGES)


class EngineRates:
    """The samples of one engine of the last LATENCY_S, some kilobytes each."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def take(self, sample: Sample) -> None:
        at_s = sample.at_s
        if self._samples and not self._samples[-1].is_before(sample):
            self._samples.clear()
        if len(self._samples) > 1 and at_s - self._samples[-2].at_s < LEAST_S:
            self._samples.pop()
        self._samples.append(sample)
        while self._samples[0].at_s < at_s - LATENCY_S - LEAST_S:
            self._samples.popleft()

    def figures(self) -> Rates:
        if not self._samples:
            return Rates()
        last, earlier = self._samples[-1], self._samples[0]
        recent = next((sample for sample in self._samples if sample.at_s >= last.at_s - RATE_S - LEAST_S), last)
        values = last.values
        ttft, itl, e2e = (_grown(earlier.buckets.get(name, {}), last.buckets.get(name, {})) for name in _HISTOGRAMS)
        return Rates(
            prompt_tokens_per_s=_per_s(recent, last, "prompt_tokens_total"),
            generation_tokens_per_s=_per_s(recent, last, "generation_tokens_total"),
            running=values.get("num_requests_running"),
            waiting=values.get("num_requests_waiting"),
            kv_usage=values.get("kv_cache_usage_perc"),
            prefix_hit_ratio=_hit_ratio(earlier, last),
            ttft_p50_s=quantile(ttft, 0.5),
            ttft_p95_s=quantile(ttft, 0.95),
            itl_p50_s=quantile(itl, 0.5),
            itl_p95_s=quantile(itl, 0.95),
            e2e_p50_s=quantile(e2e, 0.5),
            e2e_p95_s=quantile(e2e, 0.95),
            acceptance=_acceptance(earlier, last),
        )


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """The value that this share of the observations does not exceed; None without any.

    buckets: (upper bound, how many are at most that), by bound. Linear within a bucket, and the last finite bound beyond it, as
        Prometheus's histogram_quantile.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    for (below, before), (bound, count) in pairwise([(0.0, 0.0), *buckets]):
        if count >= rank:
            if math.isinf(bound):
                return below if len(buckets) > 1 else None
            return bound if count == before else below + (bound - below) * (rank - before) / (count - before)
    return None


def sample_of(page: str, at_s: float) -> Sample:
    """The numbers of an engine's page that sparkd computes with; about a millisecond. at_s: monotonic seconds."""
    sample = Sample(at_s)
    for name, label_text, value_text in _SAMPLE.findall(f"\n{page}"):
        value = float(value_text)
        labels = dict(_LABEL.findall(label_text))
        if name.endswith("_bucket"):
            buckets = sample.buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float(labels["le"])
            buckets[bound] = buckets.get(bound, 0.0) + value
        elif name == _ACCEPTED:
            position = int(labels["position"])
            sample.accepted[position] = sample.accepted.get(position, 0.0) + value
        elif name == "kv_cache_usage_perc":
            sample.values[name] = max(value, sample.values.get(name, 0.0))
        else:
            sample.values[name] = value + sample.values.get(name, 0.0)
    return sample


def _growth(earlier: Sample, last: Sample, name: str) -> float | None:
    if earlier is last or name not in earlier.values or name not in last.values:
        return None
    return last.values[name] - earlier.values[name]


def _per_s(earlier: Sample, last: Sample, name: str) -> float | None:
    growth = _growth(earlier, last, name)
    return None if growth is None or last.at_s <= earlier.at_s else growth / (last.at_s - earlier.at_s)


def _hit_ratio(earlier: Sample, last: Sample) -> float | None:
    hits, queries = (_growth(earlier, last, f"prefix_cache_{name}_total") for name in ("hits", "queries"))
    return None if hits is None or not queries else hits / queries


def _grown(earlier: Mapping[float, float], last: Mapping[float, float]) -> list[tuple[float, float]]:
    return [(bound, max(0.0, count - earlier.get(bound, 0.0))) for bound, count in sorted(last.items())]


def _acceptance(earlier: Sample, last: Sample) -> tuple[float, ...] | None:
    drafts = _growth(earlier, last, _DRAFTS)
    if not drafts or not last.accepted:
        return None
    return tuple((last.accepted[position] - earlier.accepted.get(position, 0.0)) / drafts for position in sorted(last.accepted))
