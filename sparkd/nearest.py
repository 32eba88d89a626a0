"""The word of a list that a mistyped one was most likely meant for."""

from __future__ import annotations

from collections.abc import Iterable

CUTOFF = 0.6


def nearest(word: str, words: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """None where none is alike. cutoff: of difflib's ratio, from 0 (anything) to 1 (the word itself)."""
    import difflib  # only who made a mistake waits for it

    return next(iter(difflib.get_close_matches(word, list(words), 1, cutoff)), None)
