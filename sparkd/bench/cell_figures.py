"""The figures of a cell besides llama-benchy's, from an engine's counters before and after, and from what the nodes showed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sparkd.bench.result import EngineFigures, MachineFigures
from sparkd.gateway.rates import Sample

# llama-benchy counts the tokens of the pieces that it sees, which may be 1 % fewer than the engine made.
INEXACT = 0.05
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of a model's nodes.

    at_s: wall clock.
    power_w: of all their GPUs.
    memory_bytes: of the engine, host and device.
    kv_use: 0 to 1.
    power_at_s: when the meter of a single node said so.
    """

    at_s: float
    power_w: float | None = None
    celsius: float | None = None
    throttled: tuple[str, ...] = ()
    memory_bytes: int | None = None
    kv_use: float | None = None
    power_at_s: float | None = None


def power_points(moments: Sequence[Moment]) -> list[tuple[float, float]]:
    """(seconds of the wall clock, watts) by time, each reading once."""
    points: dict[float, float] = {}
    for moment in moments:
        if moment.power_w is not None:
            points[moment.at_s if moment.power_at_s is None else moment.power_at_s] = moment.power_w
    return sorted(points.items())


def machine_figures(moments: Sequence[Moment]) -> MachineFigures:
    return MachineFigures(
        celsius_peak=_most(moment.celsius for moment in moments),
        throttled=sorted({reason for moment in moments for reason in moment.throttled}),
        memory_peak_bytes=_most(moment.memory_bytes for moment in moments),
    )


def engine_figures(before: Sample | None, after: Sample | None, moments: Sequence[Moment]) -> EngineFigures:
    """Unknown where the engine was asked only once, or began anew in between."""
    peak = _most(moment.kv_use for moment in moments)
    if before is None or after is None or not before.is_before(after):
        return EngineFigures(kv_use_peak=peak)
    grown = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    drafts, queries = grown.get("spec_decode_num_drafts_total"), grown.get("prefix_cache_queries_total")
    accepted = [after.accepted[place] - before.accepted.get(place, 0.0) for place in sorted(after.accepted)]
    answered, answered_before = _answered(after), _answered(before)
    return EngineFigures(
        requests=None if answered is None else int(answered - (answered_before or 0)),
        prompt_tokens=_count(grown, "prompt_tokens_total"),
        output_tokens=_count(grown, "generation_tokens_total"),
        kv_use_peak=peak,
        prefix_hit_share=grown.get("prefix_cache_hits_total", 0.0) / queries if queries else None,
        preemptions=_count(grown, "num_preemptions_total"),
        drafted_tokens=None if not drafts else int(drafts) * len(accepted),
        accepted_share_by_position=[count / drafts for count in accepted] if drafts else None,
    )


def others_tokens(requests: int, prompt_tokens: int, output_tokens: int, figures: EngineFigures) -> int | None:
    """Tokens of others' requests, by the engine's counters, at least 1 where it answered one; None where it has no counters.

    requests, prompt_tokens, output_tokens: the tool's own counts.
    """
    if figures.prompt_tokens is None or figures.output_tokens is None:
        return None
    beyond = (figures.prompt_tokens - prompt_tokens, figures.output_tokens - output_tokens)
    answered_others = (figures.requests or 0) > requests
    # An answer to others that began before and ends later is seen by its tokens alone.
    ours = not answered_others and all(more <= INEXACT * own for more, own in zip(beyond, (prompt_tokens, output_tokens), strict=True))
    return 0 if ours else max(1, sum(max(0, more) for more in beyond))


def computed_prompt_tokens(tokens: int, figures: EngineFigures) -> int:
    """Those of the prompts' tokens that were not in the prefix cache."""
    return round(tokens * (1 - (figures.prefix_hit_share or 0.0)))


def _answered(sample: Sample) -> float | None:
    """Requests that have got a first token so far."""
    return sample.buckets.get("time_to_first_token_seconds", {}).get(math.inf)


def _count(grown: dict[str, float], name: str) -> int | None:
    return int(grown[name]) if name in grown else None


def _most(values: Iterable[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)
