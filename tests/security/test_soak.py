"""The soak's program at its smallest."""

from __future__ import annotations

import sys

import pytest

from tests.bench import soak


def test_a_small_soak_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", "--aborts", "60", "--subscribers", "20", "--parsers-s", "0.4"])
    monkeypatch.setattr(soak, "SILENCE_BAR_S", 5.0)  # a test asserts no time
    assert soak.main() == 0
