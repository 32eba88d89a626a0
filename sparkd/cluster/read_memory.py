"""Turns what an agent sampled into a Reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkd.state.nouns import Reading
from sparkd.state.rows import noun_of
from workers.guard.policy import LEVELS


def reading(node_id: str, sample: Mapping[str, Any], node_now_s: float) -> Reading:
    """`node_now_s` is the node's own clock at the moment of answering: the difference is the reading's age, whatever our clock says.

    Raises ValueError for one of another release that cannot be used.
    """
    if not isinstance(sample, Mapping) or not isinstance(sample.get("at_s"), int | float):
        raise ValueError("it has no time")
    if sample.get("level", LEVELS[0]) not in LEVELS:
        raise ValueError(f"its memory level is unknown to this release: {str(sample['level'])[:40]}")
    return noun_of(Reading, {**sample, "node_id": node_id, "age_s": max(0.0, node_now_s - sample["at_s"])})
