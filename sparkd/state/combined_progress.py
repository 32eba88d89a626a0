"""Owns how far a model is whose ranks each tell of themselves: one progress for all. Never reads a log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from sparkd.state.nouns import Progress, RankFact
from workers.rank.kv_report import GIB, over_nodes

PHASES = ("starting", "loading", "warming", "sizing", "serving")

N = TypeVar("N", int, float)


def progress_of(ranks: Iterable[RankFact]) -> Progress | None:
    """The progress of the ranks of one start: bytes, units and rates add up, the phase is the slowest rank's, the ETA the latest; None
    without ranks.

    Rank 0 alone serves. The smallest rank tells of the KV cache, since it decides for all; sizes in GiB stay those of one rank.
    """
    told = [fact.progress for fact in sorted(ranks, key=lambda fact: fact.handle.rank)]
    if not told:
        return None
    first, *others = told
    if not others:
        return first
    kv = over_nodes([one.kv for one in told if one.kv])
    etas = [one.eta_s for one in told]
    fractions = [one.fraction for one in told if one.fraction is not None]
    return replace(
        first,
        phase=first.phase if first.server_up else min((one.phase for one in told), key=_order),
        fraction=min(fractions) if len(fractions) == len(told) else None,
        bytes_done=_sum([one.bytes_done for one in told]),
        bytes_total=_sum([one.bytes_total for one in told]),
        eta_s=None if None in etas else max(eta for eta in etas if eta is not None),
        units_done=_sum([one.units_done for one in told]),
        units_total=_sum([one.units_total for one in told]),
        bytes_per_s=_sum([one.bytes_per_s for one in told]),
        read_bytes=_sum([one.read_bytes for one in told]),
        weights_s=max((one.weights_s for one in told if one.weights_s is not None), default=None),
        last_error=next((one.last_error for one in told if one.last_error), None),
        failure=next((one.failure for one in told if one.failure), None),
        failure_lasts=any(one.failure_lasts for one in told),
        kv=kv or None,
        kv_gib=kv["pool_bytes"] / GIB if kv.get("pool_bytes") is not None else first.kv_gib,
        line_at_s=max((one.line_at_s for one in told if one.line_at_s is not None), default=None),
    )


def _order(phase: str) -> int:
    return PHASES.index(phase) if phase in PHASES else 0


def _sum(values: Sequence[N | None]) -> N | None:
    """None unless each has said it: a part would look like the whole."""
    known = [one for one in values if one is not None]
    return sum(known[1:], known[0]) if known and len(known) == len(values) else None
