"""Owns how a test reads a sentence of sparkd's: by the names and numbers in it, never by its wording."""

from __future__ import annotations

import re

# 'quoted' or `quoted` as one, else what stands between blanks, commas, semicolons and brackets.
_TERM = re.compile(r"""(?<!\w)'((?:[^'\\]|\\.)*)'(?!\w)|`([^`]*)`|([^\s(),;"]+)""")
# A number, a key with an underscore, a path, a pattern, an option, a name with a dot or a colon inside, or a value of Python's.
_NAMED = re.compile(r"[\d_/*=]|^--?\w|\w[.:]\w|^(True|False|None)$")


def facts(sentence: object) -> str:
    """Of an error, or a text: `One of 32,768 tokens needs 1.50 GiB: set max_model_len.` -> `32768 1.50 max_model_len`."""
    without_thousands = re.sub(r"(?<=\d),(?=\d{3}\b)", "", str(sentence))
    return " ".join(fact for match in _TERM.finditer(without_thousands) if (fact := _fact(match)) is not None)


def _fact(match: re.Match[str]) -> str | None:
    quoted, ticked, word = match.groups()
    if word is None:
        return quoted if quoted is not None else ticked
    word = word.rstrip(".:?!")
    word = word.lstrip("[")
    if "[" not in word:
        word = word.rstrip("]")
    return word if _NAMED.search(word) else None


def lacking(sentence: str | None, *facts: str) -> list[str]:
    """The facts that do not stand in the sentence as whole words: "5 GiB" is neither in "15 GiB" nor in "1.5 GiB", and "5" not in "5.0"."""
    return [fact for fact in facts if not re.search(_before(fact) + re.escape(fact) + _behind(fact), sentence or "")]


def _before(fact: str) -> str:
    return r"(?<!\w)(?<!\d[.,])" if re.match(r"\w", fact) else ""


def _behind(fact: str) -> str:
    return r"(?!\w)(?![.,]\d)" if re.search(r"\w$", fact) else ""
