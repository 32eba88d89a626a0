"""KL is 0 for equal distributions, the textbook's value for whole ones, and finite for a token that the other did not say."""

from __future__ import annotations

import math

import pytest

from sparkd.bench.divergence import divergences, losses


def likely(*shares: float) -> dict[str, float]:
    return {str(token): math.log(share) for token, share in enumerate(shares)}


def test_kl_of_whole_vocabularies() -> None:
    p, q = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
    expected = sum(mine * math.log(mine / other) for mine, other in zip(p, q, strict=True))
    assert divergences([likely(*p)], [likely(*q)], 3) == [pytest.approx(expected)]
    assert divergences([likely(*p)], [likely(*p)], 3) == [pytest.approx(0, abs=1e-12)]


def test_a_token_that_the_other_lacks_counts_with_its_smallest() -> None:
    (value,) = divergences([likely(0.5, 0.5)], [{"0": math.log(0.9)}], 2)
    assert math.isfinite(value)


def test_the_loss_of_even_odds() -> None:
    assert losses([7, 0, 1], [likely(0.5, 0.5), likely(0.5, 0.5)]) == pytest.approx([math.log(2)] * 2)
