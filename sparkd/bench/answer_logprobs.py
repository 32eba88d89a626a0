"""Reads an engine's answers for a quality bench: log-probabilities of a prompt, position by position, and tokens."""

from __future__ import annotations

import msgspec

from sparkd.errors import EngineError


class ReadPassage(msgspec.Struct):
    """
    ids: of the passage's tokens.
    likely: {token id: log-probability} for each but the first.
    """

    ids: list[int]
    likely: list[dict[str, float]]


class _Token(msgspec.Struct):
    logprob: float


class _Prompt(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Token] | None]
    prompt_token_ids: list[int]


class _Completion(msgspec.Struct):
    index: int
    token_ids: list[int]


class _Prompts(msgspec.Struct):
    choices: list[_Prompt]


class _Completions(msgspec.Struct):
    choices: list[_Completion]


def read_passage(answer: bytes) -> ReadPassage:
    """Read a completion with `prompt_logprobs` and `return_token_ids`. Raises EngineError."""
    try:
        (choice,) = msgspec.json.decode(answer, type=_Prompts).choices
    except ValueError:
        raise _unreadable("log-probabilities of the prompt") from None
    positions = filter(None, choice.prompt_logprobs)
    likely = [{token: known.logprob for token, known in position.items()} for position in positions]
    if len(choice.prompt_token_ids) != len(likely) + 1 or not likely:
        raise _unreadable("log-probabilities of the prompt")
    return ReadPassage(choice.prompt_token_ids, likely)


def read_tokens(answer: bytes) -> dict[int, list[int]]:
    """By prompt, the tokens of a completion with `return_token_ids`. Raises EngineError."""
    try:
        return {choice.index: choice.token_ids for choice in msgspec.json.decode(answer, type=_Completions).choices}
    except ValueError:
        raise _unreadable("token ids") from None


def _unreadable(what: str) -> EngineError:
    return EngineError(f"The engine's answer has no {what} that can be read: `sparkd bench --quality` needs vLLM's.")
