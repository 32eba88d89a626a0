"""Reads an engine's answers for a quality bench: log-probabilities of a prompt, position by position, and tokens."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from sparkd.errors import EngineError

_POSITIONS = re.compile(r'"prompt_logprobs"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
_DECODER = json.JSONDecoder()
_UNREADABLE = "The engine's answer has no log-probabilities of the prompt that can be read: `sparkd bench --quality` needs vLLM's."


@dataclass(frozen=True, slots=True)
class ReadPassage:
    """
    ids: of the passage's tokens.
    likely: {token id: log-probability} for each but the first.
    """

    ids: list[int]
    likely: list[dict[str, float]]


def read_passage(answer: bytes) -> ReadPassage:
    """Read a completion with `prompt_logprobs` and `return_token_ids`. Blocks for a second where it is large, so it runs on a thread.

    It decodes one position at a time, because json.loads of the whole would hold Python's lock all the while. Raises EngineError.
    """
    try:
        text = answer.decode()
        match = _POSITIONS.search(text)
        if match is None:
            raise EngineError(_UNREADABLE)
        likely, place = list[dict[str, float]](), _BETWEEN.match(text, match.end()).end()  # type: ignore[union-attr]
        while text[place] != "]":
            position, place = _DECODER.raw_decode(text, place)
            if position is not None:
                likely.append({token: float(one["logprob"]) for token, one in position.items()})
            place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        rest = json.loads(f"{text[: match.end()]}{text[place:]}")
        ids = [int(token) for token in rest["choices"][0]["prompt_token_ids"]]
    except (LookupError, TypeError, ValueError, AttributeError):
        raise EngineError(_UNREADABLE) from None
    if len(ids) != len(likely) + 1 or not likely:
        raise EngineError(_UNREADABLE)
    return ReadPassage(ids, likely)


def read_tokens(answer: bytes) -> dict[int, list[int]]:
    """By prompt, the tokens of a completion with `return_token_ids`. Raises EngineError."""
    try:
        choices: list[dict[str, Any]] = json.loads(answer)["choices"]
        return {int(choice["index"]): [int(token) for token in choice["token_ids"]] for choice in choices}
    except (LookupError, TypeError, ValueError):
        raise EngineError("The engine's answer has no token ids that can be read: `sparkd bench --quality` needs vLLM's.") from None
