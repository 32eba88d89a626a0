"""Turns what an agent sampled into a Reading. Never reads /proc itself, never acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from sparkd.state import Reading

GIB = 1 << 30
_NAMES = {field.name for field in fields(Reading)}


def reading(node_id: str, sample: Mapping[str, float], node_now_s: float) -> Reading:
    """`node_now_s` is the node's own clock at the moment of answering: the difference is the reading's age, whatever our clock says."""
    values = {name: value for name, value in sample.items() if name in _NAMES}
    return Reading(node_id=node_id, age_s=max(0.0, node_now_s - sample["at_s"]), **values)  # type: ignore[arg-type]
