"""The bench of turns runs, and what it promises of them holds at its smallest."""

from __future__ import annotations

import json

import pytest

from tests.bench import swap


def test_it_runs_and_at_most_half_of_the_time_is_spent_on_loading(capsys: pytest.CaptureFixture[str]) -> None:
    assert swap.main(["--smallest", "--json"]) == 0
    share = {row["rule"]: row["loading_share"] for row in json.loads(capsys.readouterr().out)}
    assert share["today"] <= swap.BAR < share["at once"]


@pytest.mark.parametrize("words", [["--hours", "0"], ["--warm-s", "-1"], ["--pattern", "none"]])
def test_it_refuses_wrong_arguments_before_it_begins(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        swap.main(words)
