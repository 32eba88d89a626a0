"""No module takes a sentence of ours apart: code compares classes, reasons and numbers."""

from __future__ import annotations

import ast

import pytest

from tests.bench.shape import functions_of, modules
from tests.support.sentences import OTHERS_WORDS, parsers_of

EVERY = {full: node for full, _, _, node in functions_of(modules())}


def test_no_function_parses_a_sentence_of_ours() -> None:
    assert parsers_of(EVERY.items()) == {}


def test_each_exemption_is_of_a_function_that_reads_others_words() -> None:
    read = {full.removesuffix("!") for full in parsers_of((f"{name}!", node) for name, node in EVERY.items())}
    assert OTHERS_WORDS.keys() <= read


@pytest.mark.parametrize(
    ("line", "parses"),
    [
        ("error.message.partition(': ')", True),
        ("str(error).startswith('x')", True),
        ("(reason or '').rstrip('.')", True),
        ("re.search('x', told)", True),
        ("view['message'].endswith('x')", True),
        ("'x' in reason", True),
        ("'x' in reasons", False),
        ("reason in REASONS", False),
        ("name.partition(':')", False),
    ],
)
def test_what_counts(line: str, parses: bool) -> None:
    assert bool(parsers_of([("f", ast.parse(line))])) is parses
