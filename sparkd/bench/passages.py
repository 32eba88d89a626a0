"""The text and the prompts of a quality bench, and how a text is cut into passages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sparkd.errors import BadRequest

TEXT = Path(__file__).with_name("quality.txt")
PROMPTS = Path(__file__).with_name("quality_prompts.txt")
# KL is taken over the TOP tokens of the reference, each looked up in the LOOKED_UP of the format.
TOP, LOOKED_UP = 64, 512
# Tokens of a greedy answer that are compared.
GREEDY_TOKENS = 32
SHIPPED = "sparkd's text"
MOST_TEXT_BYTES = 16_384
LEAST_WORDS = 20
# An answer with LOOKED_UP log-probabilities a token has about 35 kB for each, so a passage is some 25 MB.
PASSAGE_BYTES = 3_000
# A text without blanks is cut after so many characters at the latest.
_WORD = re.compile(r"\s*\S{1,200}")


def passages(text: str) -> list[str]:
    """The text in pieces of at most PASSAGE_BYTES, cut between words. The first token of each is not measured."""
    pieces, last = list[str](), ""
    for word in _WORD.findall(text):
        if last and len((last + word).encode()) > PASSAGE_BYTES:
            pieces.append(last)
            last = word.lstrip()
        else:
            last += word
    return [*pieces, last] if last else pieces


def checked(name: str, text: str) -> str:
    """The text without blanks at its ends. Raises BadRequest where it is too short or too long."""
    stripped = text.strip()
    size = len(stripped.encode())
    if size > MOST_TEXT_BYTES:
        raise BadRequest(f"The text {name} has {size:,} bytes, and at most {MOST_TEXT_BYTES:,} are read: shorten it.", param="text")
    if len(_WORD.findall(stripped)) < LEAST_WORDS:
        raise BadRequest(f"The text {name} has fewer than {LEAST_WORDS} words, which measure nothing: give a longer one.", param="text")
    return stripped


def shipped_text() -> str:
    return TEXT.read_text(encoding="utf-8").strip()


def prompts() -> tuple[str, ...]:
    """One a line."""
    return tuple(PROMPTS.read_text(encoding="utf-8").split("\n")[:-1])


def agreement(reference: Mapping[int, list[int]], other: Mapping[int, list[int]]) -> float:
    """Mean over prompts of the share of the reference's tokens before the first that differs."""
    shares = []
    for prompt, expected in reference.items():
        equal = 0
        for mine, theirs in zip(expected, other.get(prompt, []), strict=False):
            if mine != theirs:
                break
            equal += 1
        shares.append(equal / len(expected))
    return sum(shares) / len(shares)
