"""How far two engines' next-token distributions are apart, from what each said about the same prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Likely = Sequence[Mapping[str, float]]  # one {token id: log-probability} for each position, as JSON brings it


def divergences(reference: Likely, other: Likely, top: int) -> list[float]:
    """KL(reference || other) at each position, nats.

    Taken over the reference's `top` tokens, each looked up in all that `other` said; one that it did not say counts with the smallest it
    said, which is too much for it. All other tokens are one event. Both make the value smaller, unless whole vocabularies are given.
    """
    return [_kl(mine, theirs, top) for mine, theirs in zip(reference, other, strict=True)]


def losses(ids: Sequence[int], likely: Likely) -> list[float]:
    """The negative log-probability of every token but the first, nats."""
    return [-position[str(token)] for token, position in zip(ids[1:], likely, strict=True)]


def _kl(mine: Mapping[str, float], theirs: Mapping[str, float], top: int) -> float:
    floor = min(theirs.values())
    total, seen, seen_theirs = 0.0, 0.0, 0.0
    for token, value in sorted(mine.items(), key=lambda item: -item[1])[:top]:
        other = theirs.get(token, floor)
        total += math.exp(value) * (value - other)
        seen += math.exp(value)
        seen_theirs += math.exp(other)
    rest, rest_theirs = max(1.0 - seen, 0.0), max(1.0 - seen_theirs, 1e-12)
    return total + (rest * math.log(rest / rest_theirs) if rest > 1e-9 else 0.0)
