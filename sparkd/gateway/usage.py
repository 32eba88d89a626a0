"""Finds the token counts that an engine wrote at the end of its answer, or at its beginning."""

from __future__ import annotations

import re
from typing import NamedTuple

# With the names of its parts, an object `usage` of vLLM has some 300 bytes.
USAGE_BYTES = 1024
_COUNT = re.compile(rb'"(prompt|input|completion|output|cached|cache_read_input)_tokens"\s*:\s*(\d{1,12})')


class Tokens(NamedTuple):
    """Token counts of one request, as its engine reported them; None for a count that the response lacks."""

    prompt: int | None
    cached: int | None
    completion: int | None


def tokens_of(tail: bytes) -> Tokens | None:
    """The tokens in the last `usage` of an answer's last or first bytes (vLLM's answer of /rerank has it before the results).

    Quotes in a text are escaped in JSON, so a text never holds what is searched for.
    """
    at = tail.rfind(b'"usage":')
    if at < 0:
        return None
    counts: dict[bytes, int] = {}
    for match in _COUNT.finditer(tail, at, at + USAGE_BYTES):
        counts.setdefault(match[1], int(match[2]))
    if not counts:
        return None
    return Tokens(
        counts.get(b"prompt", counts.get(b"input")),
        counts.get(b"cached", counts.get(b"cache_read_input")),
        counts.get(b"completion", counts.get(b"output")),
    )
