"""Power integrated over time: joules of a cell, of its prompts and of its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from sparkd.bench.result import Energy

# A phase of which fewer seconds were seen cannot be told from one sample to the next.
LEAST_S = 2.0
# Samples that lie further apart say nothing about the time between them.
GAP_S = 10.0

Point = tuple[float, float]  # seconds, watts
Span = tuple[float, float]


def joules(points: Sequence[Point], spans: Iterable[Span], idle_w: float = 0.0) -> float | None:
    """The integral of the power above idle_w over `spans`, linear between samples; None where the samples do not cover them.

    points: by time. spans: none overlaps another.
    """
    total = 0.0
    for begin, end in spans:
        part = _integral(points, begin, end)
        if part is None:
            return None
        total += part - idle_w * (end - begin)
    return total


def energy(
    points: Sequence[Point], cell: Span, prompts: Sequence[Span], running: Sequence[Span], tokens: tuple[int, int], idle_w: float | None
) -> Energy | None:
    """The energy of a cell. None without samples of the power over the whole cell.

    prompts: the times in which a request had no token yet.
    running: those in which a request ran, `prompts` among them.
    tokens: of the prompts that were computed, and of the answers.
    """
    whole = joules(points, [cell])
    if whole is None:
        return None
    mean_w = whole / (cell[1] - cell[0])
    inside = [watts for at, watts in points if cell[0] <= at <= cell[1]]
    prompt = joules(points, prompts, idle_w) if idle_w is not None else None
    ran = joules(points, running, idle_w) if idle_w is not None else None
    output = None if prompt is None or ran is None else ran - prompt
    prompt = prompt if _seconds(prompts) >= LEAST_S else None
    output = output if _seconds(running) - _seconds(prompts) >= LEAST_S else None
    return Energy(
        mean_w=mean_w,
        peak_w=max(inside, default=mean_w),
        joules=whole,
        joules_per_prompt_token=prompt / tokens[0] if prompt is not None and tokens[0] else None,
        joules_per_output_token=output / tokens[1] if output is not None and tokens[1] else None,
    )


def _seconds(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def _integral(points: Sequence[Point], begin: float, end: float) -> float | None:
    """Watts at a time between two samples are on the line between them; before the first and after the last as these, for GAP_S at most."""
    if not points or end <= begin or points[0][0] > begin + GAP_S or points[-1][0] < end - GAP_S:
        return None
    padded = [(min(begin, points[0][0]), points[0][1]), *points, (max(end, points[-1][0]), points[-1][1])]
    total = 0.0
    for (at, watts), (later, watts_later) in pairwise(padded):
        left, right = max(at, begin), min(later, end)
        if right <= left:
            continue
        if later - at > GAP_S:
            return None
        slope = (watts_later - watts) / (later - at)
        total += (right - left) * (watts + slope * ((left + right) / 2 - at))
    return total
