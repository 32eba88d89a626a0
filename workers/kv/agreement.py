"""Lets the ranks of one engine agree whether to rehearse, because dummy runs contain collectives.

Each rank has its own profiles and memory, perhaps on another node. A rank that rehearsed alone would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

V = TypeVar("V")
# Gives every rank the values of all ranks, in the order of ranks.
Gather = Callable[[V], Sequence[V]]


@dataclass(frozen=True, slots=True)
class Vote:
    """The state of one rank before the rehearsal. One without a cache follows the others.

    learned: whether it has a profile of this engine.
    plenty: whether this rank needs no rehearsal.
    setbacks: its last rehearsals in a row that ran out of memory.
    refusal: why it cannot begin, a sentence for the user.
    missing: why it cannot rehearse.
    """

    rank: int
    learned: bool = True
    plenty: bool = True
    setbacks: int = 0
    refusal: str = ""
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """The decision that all ranks follow.

    source: profile, limit (of the entry, so low that nothing need be measured) or rehearsal.
    setbacks: failed rehearsals before it.
    why: a clause that names the ranks that decided; None if all agree.
    refusal, missing: of the rank that has one.
    """

    source: str
    setbacks: int = 0
    why: str | None = None
    refusal: str = ""
    missing: str = ""


def course_of(votes: Sequence[Vote], own: int = 0) -> Course:
    """The course of all ranks, from their votes. Pure, and equal on all ranks except for the names in its messages.

    own: this rank; messages name every other rank.
    """
    deciding = [vote for vote in votes if vote.refusal] or [vote for vote in votes if vote.missing]
    if deciding:
        first = next((vote for vote in deciding if vote.rank == own), deciding[0])
        name = "" if first.rank == own else f"rank {first.rank}: "
        return Course("rehearsal", refusal=name + first.refusal) if first.refusal else Course("rehearsal", missing=name + first.missing)
    worst = max(votes, key=lambda vote: vote.setbacks)
    if worst.setbacks:
        alike = all(vote.setbacks == worst.setbacks for vote in votes)
        why = None if alike else f"rank {worst.rank} ran out of memory {worst.setbacks} times before"
        return Course("rehearsal", worst.setbacks, why)
    if all(vote.learned for vote in votes):
        return Course("profile")
    unlearned = _some(votes, [vote for vote in votes if not vote.learned], "no profile of this engine")
    if all(vote.plenty for vote in votes):
        return Course("limit", why=unlearned)
    return Course("rehearsal", why=unlearned or _some(votes, [vote for vote in votes if not vote.plenty], "no memory to spare"))


def alone(mine: V) -> Sequence[V]:
    """The Gather of an engine with one rank."""
    return [mine]


def _some(votes: Sequence[Vote], those: Sequence[Vote], what: str) -> str | None:
    """A clause about the ranks that lack something; None where none or all do."""
    if not those or len(those) == len(votes):
        return None
    names = " and ".join(str(vote.rank) for vote in those[:4])
    return f"rank {names} has {what}" if len(those) == 1 else f"ranks {names} have {what}"
