"""The facts of a sentence, and whether one stands in it as a whole word or number."""

from __future__ import annotations

import pytest

from tests.support.facts import facts, lacking


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("One request of 32,768 tokens needs 1.50 GiB, or 4-bit weights.", "32768 1.50 4-bit"),
        ("Set max_model_len (7,936 would fit) or --margin.", "max_model_len 7936 --margin"),
        ("/m/a.safetensors: model.layers.0.o_proj.weight: it holds I16.", "/m/a.safetensors model.layers.0.o_proj.weight I16"),
        ("It has the shapes [4, 32] and [8].", "4 32 8"),
        ("quantize.layers[0].match: 'a b' is no pattern, `keep` is; vLLM's own is ''.", "quantize.layers[0].match a b keep "),
        ("This sentence says nothing that a test could compare.", ""),
    ],
)
def test_the_words_between_are_left_out(sentence: str, expected: str) -> None:
    assert facts(sentence) == expected
    assert facts(ValueError(sentence)) == expected


@pytest.mark.parametrize(
    ("sentence", "fact", "stands"),
    [
        ("It needs 5 GiB.", "5 GiB", True),
        ("It needs 15 GiB.", "5 GiB", False),
        ("It needs 1.5 GiB.", "5 GiB", False),
        ("It needs 5.0 GiB.", "5", False),
        ("It needs 5,000 bytes.", "5", False),
        ("It needs 5, or 6.", "5", True),
        ("Or quick?", "quick", True),
        ("Or quickly?", "quick", False),
        ("--nodes 0: less than 1.", "--nodes 0", True),
        ("layers[0]: unknown", "layers[0]", True),
        (None, "5", False),
    ],
)
def test_what_stands_in_a_sentence(sentence: str | None, fact: str, stands: bool) -> None:
    assert lacking(sentence, fact) == ([] if stands else [fact])
