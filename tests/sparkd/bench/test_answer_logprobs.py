"""Answers of vLLM are read; one without what is needed is an error that repeats nothing of it."""

from __future__ import annotations

import json

import pytest

from sparkd.bench.answer_logprobs import read_passage, read_tokens
from sparkd.errors import EngineError

POSITION = {"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}, "7": {"logprob": -1.5, "rank": 2}}
CHOICE = {"text": "", "prompt_logprobs": [None, POSITION], "prompt_token_ids": [3, 5], "index": 0}


def test_a_passage_is_read() -> None:
    read = read_passage(json.dumps({"choices": [CHOICE], "usage": {}}).encode())
    assert (read.ids, read.likely) == ([3, 5], [{"5": -0.5, "7": -1.5}])


@pytest.mark.parametrize(
    "choice",
    [
        {"prompt_logprobs": None},
        {"prompt_token_ids": [3, 5, 6]},
        {"prompt_logprobs": [None, {"5": "canary"}]},
    ],
)
def test_an_answer_without_them_is_an_error(choice: dict[str, object]) -> None:
    with pytest.raises(EngineError) as caught:
        read_passage(json.dumps({"choices": [CHOICE | choice]}).encode())
    assert "canary" not in caught.value.message


def test_tokens_are_read_by_prompt() -> None:
    choices = [{"index": 1, "token_ids": [4]}, {"index": 0, "token_ids": [2, 3]}]
    assert read_tokens(json.dumps({"choices": choices}).encode()) == {0: [2, 3], 1: [4]}
    with pytest.raises(EngineError):
        read_tokens(b'{"choices": [{"index": 0}]}')
