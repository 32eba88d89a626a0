"""A sentence about one argument or environment variable of vLLM."""

from __future__ import annotations


class FlagNote(str):
    """The sentence as people read it, `--seed: this vLLM has no such flag.`, and what it is about.

    name: of the flag without its dashes, or of the variable.
    reason: the sentence without its beginning.
    shown: that beginning, where it is not the flag as it is written in full.
    """

    __slots__ = ("name", "reason")

    name: str
    reason: str

    def __new__(cls, name: str, reason: str, shown: str | None = None) -> FlagNote:
        self = super().__new__(cls, f"{f'--{name}' if shown is None else shown}: {reason}")
        self.name = name
        self.reason = reason
        return self
