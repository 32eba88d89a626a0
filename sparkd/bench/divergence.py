"""How far two engines' next-token distributions are apart, from what each said about the same prompt. Never runs an engine."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

Likely = Sequence[Mapping[str, float]]  # one {token id: log-probability} for each position, as JSON brings it


def mean_kl(reference: Likely, other: Likely, top: int) -> float:
    """Mean over positions of `divergences`."""
    return statistics.fmean(divergences(reference, other, top))


def divergences(reference: Likely, other: Likely, top: int) -> list[float]:
    """KL(reference || other) at each position, nats.

    Taken over the reference's `top` tokens, each looked up in all that `other` said; one that it did not say counts with the smallest it
    said, which is too much for it. All other tokens are one event. Both make the value smaller, unless whole vocabularies are given.
    """
    return [_kl(mine, theirs, top) for mine, theirs in zip(reference, other, strict=True)]


def median_gap(reference: Likely, other: Likely, top: int) -> float:
    """Median over positions of the largest difference of log-probability among the reference's `top` tokens."""
    gaps: list[float] = []
    for mine, theirs in zip(reference, other, strict=True):
        floor = min(theirs.values())
        gaps.append(max(abs(value - theirs.get(token, floor)) for token, value in _best(mine, top)))
    return statistics.median(gaps)


def perplexity(ids: Sequence[int], likely: Likely) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    return math.exp(-statistics.fmean(position[str(token)] for token, position in zip(ids[1:], likely, strict=True)))


def _best(position: Mapping[str, float], top: int) -> list[tuple[str, float]]:
    return sorted(position.items(), key=lambda item: -item[1])[:top]


def _kl(mine: Mapping[str, float], theirs: Mapping[str, float], top: int) -> float:
    floor = min(theirs.values())
    total, seen, seen_theirs = 0.0, 0.0, 0.0
    for token, value in _best(mine, top):
        other = theirs.get(token, floor)
        total += math.exp(value) * (value - other)
        seen += math.exp(value)
        seen_theirs += math.exp(other)
    rest, rest_theirs = max(1.0 - seen, 0.0), max(1.0 - seen_theirs, 1e-12)
    return total + (rest * math.log(rest / rest_theirs) if rest > 1e-9 else 0.0)
