"""The figures of a format's line: bits and error of its weights, and how far its answers are from stock vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.admin import quality_bench
from sparkd.errors import SparkdError
from tests.bench import quality
from tests.support.architectures import PRESETS, write_qwen3_moe

ANSWERS = {"ids": [1, 2], "likely": [{"2": -0.7, "3": -0.7}], "tokens": [[5, 6], [7, 8]], "chat": "Paris."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("quality") / "model"
    write_qwen3_moe(made, **PRESETS["smallest"])
    return made


def test_bits_and_error_are_those_of_the_format(folder: Path) -> None:
    bits, error = quality.weight_figures(folder, "int4-g32")
    assert bits.startswith("4.5") and 0.06 < float(error) < 0.1
    assert quality.weight_figures(folder, "bf16") == ["", ""]


def test_a_format_that_does_not_suit_the_columns_is_refused(folder: Path) -> None:
    with pytest.raises(SparkdError, match="512"):
        quality.weight_figures(folder, "nf4-g512")


def test_equal_answers_are_not_apart() -> None:
    kl, p99, perplexity, agreement = quality.answer_figures(ANSWERS, ANSWERS)
    assert (float(kl), float(p99), float(perplexity), float(agreement)) == (0, 0, pytest.approx(2.01), 1)


def test_answers_that_differ_agree_up_to_the_first_difference() -> None:
    other = {**ANSWERS, "tokens": [[5, 9], [7, 8]]}
    assert quality.answer_figures(ANSWERS, other)[3] == "0.75"
    assert quality.answer_figures(None, other)[3] == ""


def test_as_many_tokens_as_the_daemon_compares() -> None:
    assert quality.GREEDY_TOKENS == quality_bench.GREEDY_TOKENS
