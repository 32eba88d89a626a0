"""The facts of a sentence, and whether one stands in it as a whole word or number."""

from __future__ import annotations

from tests.support.facts import facts, lacking


def test_the_words_between_are_left_out() -> None:
    sentences = {
        "One request of 32,768 tokens needs 1.50 GiB, or 4-bit weights.": "32768 1.50 4-bit",
        "Set max_model_len (7,936 would fit) or --margin.": "max_model_len 7936 --margin",
        "/m/a.safetensors: model.layers.0.o_proj.weight: it holds I16.": "/m/a.safetensors model.layers.0.o_proj.weight I16",
        "quantize.layers[0].match: 'a b' is no pattern, `keep` is; vLLM's own is ''.": "quantize.layers[0].match a b keep ",
        "This sentence says nothing that a test could compare.": "",
    }
    assert {sentence: facts(sentence) for sentence in sentences} == sentences
    assert facts(ValueError("It has the shapes [4, 32] and [8].")) == "4 32 8"


def test_what_stands_in_a_sentence() -> None:
    stands = (("It needs 5 GiB.", "5 GiB"), ("It needs 5, or 6.", "5"), ("Or quick?", "quick"), ("--nodes 0: less than 1.", "--nodes 0"))
    lacks = (("It needs 15 GiB.", "5 GiB"), ("It needs 1.5 GiB.", "5 GiB"), ("It needs 5.0 GiB.", "5"), ("It needs 5,000 bytes.", "5"))
    assert [lacking(sentence, fact) for sentence, fact in stands] == [[]] * len(stands)
    assert [lacking(sentence, fact) for sentence, fact in (*lacks, ("Or quickly?", "quick"), (None, "5"))] == [
        [fact] for _, fact in (*lacks, ("", "quick"), ("", "5"))
    ]
