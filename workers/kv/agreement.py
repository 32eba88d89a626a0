"""Lets the ranks of one engine agree whether to rehearse, because dummy runs contain collectives.

Each rank has its own profiles and memory, perhaps on another node. A rank that rehearsed alone would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

V = TypeVar("V")
_LACKS = {"unlearned": "no profile of this engine", "scarce": "no memory to spare"}
# Gives every rank the values of all ranks, in the order of ranks.
Gather = Callable[[V], Sequence[V]]


@dataclass(frozen=True, slots=True)
class Vote:
    """The state of one rank before the rehearsal.

    engine: a key of all that must be equal on every rank; empty if the rank has no cache and follows the others.
    plenty: whether this rank needs no rehearsal.
    setbacks: its last rehearsals in a row that ran out of memory.
    refusal: why it cannot begin, a sentence for the user.
    missing: why it cannot rehearse.
    """

    rank: int
    engine: str = ""
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
    reason: the state of some ranks that decided (setbacks, unlearned, settings or scarce); empty if all ranks agree.
    why: `reason` as a sentence that names the ranks; None if all agree.
    refusal, missing: of the rank that has one.
    """

    source: str
    setbacks: int = 0
    reason: str = ""
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
        if alike:
            return Course("rehearsal", worst.setbacks)
        return Course("rehearsal", worst.setbacks, "setbacks", f"rank {worst.rank} ran out of memory {worst.setbacks} times before")
    without = [vote for vote in votes if not vote.learned]
    others = sorted({vote.engine for vote in votes if vote.engine})
    if not without and len(others) <= 1:
        return Course("profile")
    if all(vote.plenty for vote in votes):
        return _mixed("limit", "unlearned", votes, without) or Course("limit")
    scarce = [vote for vote in votes if not vote.plenty]
    if len(others) > 1:
        return Course("rehearsal", reason="settings", why="the ranks were not started with the same settings")
    mixed = _mixed("rehearsal", "unlearned", votes, without) or _mixed("rehearsal", "scarce", votes, scarce)
    return mixed or Course("rehearsal")


def alone(mine: V) -> Sequence[V]:
    """The Gather of an engine with one rank."""
    return [mine]


def _mixed(source: str, reason: str, votes: Sequence[Vote], those: Sequence[Vote]) -> Course | None:
    """The course where `reason` holds for some ranks only; None where it holds for none or all."""
    if not those or len(those) == len(votes):
        return None
    names = " and ".join(str(vote.rank) for vote in those[:4])
    subject = f"rank {names} has" if len(those) == 1 else f"ranks {names} have"
    return Course(source, reason=reason, why=f"{subject} {_LACKS[reason]}")
