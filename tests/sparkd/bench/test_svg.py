from __future__ import annotations

from itertools import pairwise

import pytest

from sparkd.bench.report.svg import linear_ticks, log_ticks, runs, spread_out, thinned


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 248, [0, 50, 100, 150, 200, 250]),
        (37.8, 40.1, [37.5, 38, 38.5, 39, 39.5, 40, 40.5]),
        (5, 5, [5, 6]),
        (-3, 3, [-4, -2, 0, 2, 4]),
    ],
)
def test_ticks_are_round_and_hold_the_values(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.6, 9.9, [0.5, 1, 2, 5, 10]),
        (3, 40_000, [3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000]),
        (1, 1, [1, 2]),
    ],
)
def test_logarithmic_ticks(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high, 10) == pytest.approx(ticks)


@pytest.mark.parametrize("wanted", [[10, 11, 12, 90], [99, 100, 98], []])
def test_labels_stay_apart_in_order_and_inside(wanted: list[float]) -> None:
    places = spread_out(wanted, 14, 0, 100)

    ranked = sorted(places)
    assert all(second - first >= 13.99 for first, second in pairwise(ranked))
    assert all(0 <= place <= 100 for place in places)
    assert [places.index(place) for place in ranked] == sorted(range(len(wanted)), key=lambda index: wanted[index])


def test_a_curve_has_gaps_and_keeps_its_peaks_when_it_is_thinned() -> None:
    assert runs([(0, 1.0), (1, None), (2, 3.0), (3, 4.0), (4, None)]) == [[(0, 1.0)], [(2, 3.0), (3, 4.0)]]
    values = [(float(index), 1000.0 if index == 777 else float(index % 7)) for index in range(5000)]
    kept = thinned(values, 200)
    assert len(kept) <= 201
    assert (777.0, 1000.0) in kept
    assert kept == sorted(kept)
