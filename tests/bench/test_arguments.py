"""What the command line of every bench refuses."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable

import pytest

from tests.bench import arguments
from tests.bench.arguments import Parser


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (arguments.folder, "no/such/folder"),
        (arguments.model, "tests"),
        (arguments.new, "no/such/folder/file"),
        (arguments.pattern, "("),
        (arguments.formats, "int4,no-such-format"),
        (arguments.count, "0"),
        (arguments.amount, "nan"),
    ],
)
def test_a_wrong_value_is_refused(kind: Callable[[str], object], text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        kind(text)


def test_a_pattern_that_matches_nothing_ends_the_bench() -> None:
    parser = Parser("tests.bench.x", None)
    assert parser.chosen(["stock", "best"], "^b") == ["best"]
    with pytest.raises(SystemExit):
        parser.chosen(["stock", "best"], "worst")


def test_smallest_overrides_what_else_is_given() -> None:
    parser = Parser("tests.bench.x", None, rounds=1)
    parser.add_argument("--rounds", type=arguments.count, default=20)
    parser.add_argument("--seed", type=int, default=1)
    before = signal.getsignal(signal.SIGTERM)
    try:
        given = parser.parse_args(["--smallest", "--rounds", "5", "--seed", "2"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (given.rounds, given.seed) == (1, 2)
