"""Texts are cut into bounded passages without loss, refused by name, and answers are compared up to their first difference."""

from __future__ import annotations

import pytest

from sparkd.bench import passages
from sparkd.errors import BadRequest


@pytest.mark.parametrize("text", ["word " * 3000, "字" * 5000])
def test_passages_are_bounded_and_lose_nothing(text: str) -> None:
    pieces = passages.passages(text)
    assert max(len(piece.encode()) for piece in pieces) <= passages.PASSAGE_BYTES
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_the_shipped_text_is_one_passage_and_the_prompts_are_32() -> None:
    assert len(passages.passages(passages.shipped_text())) == 1
    assert len({*passages.prompts()}) == 32 and all(passages.prompts())


@pytest.mark.parametrize("text", ["one two", "word " * 4000])
def test_a_text_that_measures_nothing_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadRequest, match=r"mine\.txt"):
        passages.checked("mine.txt", text)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({0: [1, 2, 9, 4], 1: [5, 6]}, 0.75),  # what is equal after a difference does not count
        ({0: [9, 2, 3, 4], 1: [5]}, 0.25),
        ({}, 0.0),
    ],
)
def test_agreement_ends_at_the_first_difference(other: dict[int, list[int]], expected: float) -> None:
    assert passages.agreement({0: [1, 2, 3, 4], 1: [5, 6]}, other) == expected
