"""Joules: the integral of the power, above idle, over the phases of a cell."""

from __future__ import annotations

import pytest

from sparkd.bench.power import energy, joules


def test_a_constant_power_is_watts_times_seconds() -> None:
    points = [(float(at), 50.0) for at in range(11)]
    assert joules(points, [(2.5, 7.5)]) == pytest.approx(250)
    assert joules(points, [(1.0, 2.0), (4.0, 6.0)], idle_w=20.0) == pytest.approx(90)


def test_a_slope_is_linear_between_samples() -> None:
    assert joules([(0.0, 0.0), (10.0, 100.0)], [(2.0, 4.0)]) == pytest.approx(60)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0), (30.0, 1.0)]])
def test_times_without_samples_are_unknown(points: list[tuple[float, float]]) -> None:
    assert joules(points, [(1.0, 2.0)]) is None
    assert energy(points, (1.0, 2.0), [], [], (1, 1), 0.0) is None


def test_prompts_and_answers_are_apart_and_idle_is_subtracted() -> None:
    points = [(at / 2, 300.0 if at < 20 else 150.0) for at in range(61)]
    found = energy(points, (0.0, 30.0), [(0.0, 9.0)], [(0.0, 9.0), (10.0, 30.0)], (1000, 500), 100.0)
    assert found is not None
    assert found.peak_w == 300.0
    assert found.joules_per_prompt_token == pytest.approx(200 * 9 / 1000)
    assert found.joules_per_output_token == pytest.approx(50 * 20 / 500)
    assert found.mean_w == pytest.approx(found.joules / 30)
