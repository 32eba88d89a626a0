"""Owns the agreement of one engine's ranks before any of them rehearses, since dummy runs hold collectives. Never measures, never runs one.

Each rank has profiles and memory of its own, perhaps on another node: one that rehearses alone would wait for the others for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from workers.kv.symbols import imported

V = TypeVar("V")
_LACKS = {"unlearned": "no profile of this engine", "scarce": "no memory to spare"}
# Every rank's finding is handed to every rank, in the order of ranks.
Gather = Callable[[V], Sequence[V]]


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's finding. engine: a key of what must be the same on all, empty where the rank has no cache and goes with the others.
    plenty: nothing has to be rehearsed for its sake. setbacks: rehearsals in a row that ran out of memory there. refusal: why it cannot
    begin, a sentence for the user; missing: why it cannot rehearse.
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
    """The way that all ranks take. source: profile, plenty or rehearsal. setbacks: after how many. reason: the finding of some ranks that
    decided (setbacks, unlearned, settings or scarce), empty where all found the same. why: it as a sentence with the ranks, None then.
    refusal, missing: of the rank that has one."""

    source: str
    setbacks: int = 0
    reason: str = ""
    why: str | None = None
    refusal: str = ""
    missing: str = ""


def course_of(votes: Sequence[Vote], own: int = 0) -> Course:
    """own: the rank that asks; what another one found is told with its name. Pure, and the same for all but for those names."""
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
        return _mixed("plenty", "unlearned", votes, without) or Course("plenty")
    scarce = [vote for vote in votes if not vote.plenty]
    if len(others) > 1:
        return Course("rehearsal", reason="settings", why="the ranks were not started with the same settings")
    mixed = _mixed("rehearsal", "unlearned", votes, without) or _mixed("rehearsal", "scarce", votes, scarce)
    return mixed or Course("rehearsal")


def alone(mine: V) -> Sequence[V]:
    """The gathering of an engine of one rank."""
    return [mine]


def over_world(mine: Any) -> Sequence[Any]:
    """Over the processes of the engine, by their CPU group. Blocks until each has spoken. Raises Missing.

    Importing vLLM.
    """
    world = imported("vllm.distributed.parallel_state", "get_world_group")()
    if world.world_size == 1:
        return [mine]
    import torch

    answers: list[Any] = [None] * world.world_size
    torch.distributed.all_gather_object(answers, mine, group=world.cpu_group)
    return answers


def _mixed(source: str, reason: str, votes: Sequence[Vote], those: Sequence[Vote]) -> Course | None:
    """The course for what some ranks lack and others have."""
    if not those or len(those) == len(votes):
        return None
    names = " and ".join(str(vote.rank) for vote in those[:4])
    subject = f"rank {names} has" if len(those) == 1 else f"ranks {names} have"
    return Course(source, reason=reason, why=f"{subject} {_LACKS[reason]}")
