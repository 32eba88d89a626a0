"""Defines a condition: a reason that code compares, and a message that people read."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Condition:
    """A state worth knowing.

    reason: a CamelCase word, the same for all cases of a kind.
    message: sentences for the operator.
    node: the one node that it is about; None where it is about the daemon, a model, several nodes or the whole cluster.
    """

    reason: str
    message: str
    node: str | None = None

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"
