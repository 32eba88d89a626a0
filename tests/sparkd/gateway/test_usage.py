"""The tokens at the end of an answer, in the words of every API that vLLM serves."""

from __future__ import annotations

import json

import pytest

from sparkd.gateway.exchange import Tokens
from sparkd.gateway.relay import tokens_of
from tests.stub import answers

DETAILS = b'{"prompt_tokens":7,"total_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}'


@pytest.mark.parametrize(
    ("tail", "tokens"),
    [
        (b'data: {"choices":[],"usage":' + DETAILS + b"}\n\ndata: [DONE]\n\n", Tokens(7, 4, 5)),
        (b'{"id":"x","usage":' + DETAILS + b',"prompt_logprobs":null}', Tokens(7, 4, 5)),
        (answers.chat("m", 7, 5, "stop"), Tokens(7, None, 5)),
        (answers.chat_stream("m", 7, 5, "stop", with_usage=True).tail, Tokens(7, None, 5)),
        (answers.message_stream("m", 7, 5, "stop").tail, Tokens(7, None, 5)),
        (answers.dump(answers.response("m", 7, 5, status="completed", background=False)), Tokens(7, 0, 5)),
        (
            b'{"data":[],"usage":{"prompt_tokens":3,"total_tokens":3,"completion_tokens":0,"prompt_tokens_details":null}}',
            Tokens(3, None, 0),
        ),
        (b'"usage":{"input_tokens":9,"cache_read_input_tokens":8,"output_tokens":2}}', Tokens(9, 8, 2)),
        (b'"usage":{"prompt_tokens":1}, "x": "usage", "usage":{"prompt_tokens":2}', Tokens(2, None, None)),
        (answers.chat_stream("m", 7, 5, "stop", with_usage=False).tail, None),
        (b'data: {"usage":null}\n\ndata: [DONE]\n\n', None),
        (b'{"usage":{"prompt_tokens":"7","completion_tokens":-1}}', None),
        (b"", None),
    ],
)
def test_what_is_found(tail: bytes, tokens: Tokens | None) -> None:
    assert tokens_of(tail) == tokens


def test_a_text_that_looks_like_it_is_no_usage() -> None:
    text = 'say "usage":{"prompt_tokens":999,"completion_tokens":999}'
    event = json.dumps({"choices": [{"delta": {"content": text}}]}, separators=(",", ":")).encode()
    assert tokens_of(b"data: " + event + b"\n\ndata: [DONE]\n\n") is None
    assert tokens_of(b'data: {"usage":' + DETAILS + b"}\n\ndata: " + event + b"\n\n") == Tokens(7, 4, 5)
