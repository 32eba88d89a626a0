"""Combines the progress of a model's ranks into one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from sparkd.state.nouns import Progress, RankFact, by_cause
from sparkd.units import GIB
from workers.rank.report import over_nodes

PHASES = ("starting", "loading", "warming", "sizing", "serving")

N = TypeVar("N", int, float)


def progress_of(ranks: Iterable[RankFact]) -> Progress | None:
    """The progress of the ranks of one start: bytes, units and rates add up, the phase is the slowest rank's, the ETA the latest; None
    without ranks.

    Rank 0 alone serves. The first error is told, whichever rank's. The smallest rank tells of the KV cache, since it decides for all; sizes
    in GiB stay those of one rank.
    """
    facts = sorted(ranks, key=lambda fact: fact.handle.rank)
    progresses = [fact.progress for fact in facts]
    if not progresses:
        return None
    first, *others = progresses
    if not others:
        return first
    kv = over_nodes([progress.kv for progress in progresses if progress.kv])
    in_order = [fact.progress for fact in by_cause(facts)]
    etas = [progress.eta_s for progress in progresses]
    fractions = [progress.fraction for progress in progresses if progress.fraction is not None]
    return replace(
        first,
        phase=first.phase if first.server_up else min((progress.phase for progress in progresses), key=_order),
        fraction=min(fractions) if len(fractions) == len(progresses) else None,
        bytes_done=_sum([progress.bytes_done for progress in progresses]),
        bytes_total=_sum([progress.bytes_total for progress in progresses]),
        eta_s=None if None in etas else max(eta for eta in etas if eta is not None),
        units_done=_sum([progress.units_done for progress in progresses]),
        units_total=_sum([progress.units_total for progress in progresses]),
        bytes_per_s=_sum([progress.bytes_per_s for progress in progresses]),
        read_bytes=_sum([progress.read_bytes for progress in progresses]),
        last_error=next((progress.last_error for progress in in_order if progress.last_error), None),
        failure=next((progress.failure for progress in in_order if progress.failure), None),
        failure_lasts=any(progress.failure_lasts for progress in progresses),
        kv=kv or None,
        kv_gib=kv["pool_bytes"] / GIB if kv.get("pool_bytes") is not None else first.kv_gib,
        line_at_s=max((progress.line_at_s for progress in progresses if progress.line_at_s is not None), default=None),
    )


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else 0


def _sum(values: Sequence[N | None]) -> N | None:
    """None unless each has said it: a part would look like the whole."""
    present = [value for value in values if value is not None]
    return sum(present[1:], present[0]) if present and len(present) == len(values) else None
