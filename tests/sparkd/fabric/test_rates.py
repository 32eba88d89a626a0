"""A measured rate beside what is normal."""

from __future__ import annotations

import pytest

from sparkd.fabric.rates import NCCL, Rate, finding
from tests.support.facts import lacking


@pytest.mark.parametrize(
    ("measured", "rails", "lan", "verdict", "normal"),
    [
        (20.52, 2, False, "ok", ["2 rails", "20 to 24"]),
        (13.9, 2, False, "warn", ["2 rails", "20 to 24", "30% is lost"]),
        (13.89, 1, False, "ok", ["1 rail", "13.9"]),
        (1.0, 0, False, "fail", ["sockets", "ConnectX-7", "2.1"]),
        (1.0, 0, True, "ok", ["sockets", "10GbE", "1"]),
    ],
)
def test_a_rate_stands_beside_what_is_normal(measured: float, rails: int, lan: bool, verdict: str, normal: list[str]) -> None:
    judged = finding(Rate("a", "b", measured, NCCL, "IB" if rails else "Socket", rails, (), lan, True, 1, 0.0))

    assert (judged.verdict, lacking(judged.evidence, f"{measured:.1f} GB/s", *normal)) == (verdict, [])
    assert bool(judged.cure) == (verdict != "ok")
