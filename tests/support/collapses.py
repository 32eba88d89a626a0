"""Recorded and reported courses of memory on DGX Sparks, as functions of time, and a node that lives through one look by look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from workers.guard.memory_sampler import MemorySample, MemorySampler, Trend
from workers.guard.policy import Decision, GuardedEngine, GuardState, decide, pace_s
from workers.host.memory_limits import GIB, MemoryLimits

TOTAL = 127_535_272 * 1024
Course = Callable[[float], float]


@dataclass
class Story:
    """available, free: GiB at a time in seconds; scanned, swapped: pages since boot."""

    available: Course
    end_s: float
    free: Course | None = None
    scanned: Course = lambda t: 0.0
    swapped: Course = lambda t: 0.0


@dataclass
class Lived:
    """What the guard did: each decision that differs from the one before, the kills, and the least that was available until the first."""

    levels: list[str] = field(default_factory=list)
    kills: list[tuple[float, float, str, str]] = field(default_factory=list)
    drops: int = 0

    @property
    def victims(self) -> list[str]:
        return [rank_id for _, _, rank_id, _ in self.kills]


def live(story: Story, engines: Sequence[GuardedEngine], *, base_s: float = 0.5, unified: bool = True) -> Lived:
    """Until the end of the story. A victim's memory comes back within a second, as that of a killed process on a Spark at best."""
    # Long stories in larger steps: what they tell does not depend on them.
    base_s *= 5 if story.end_s > 1000 else 1
    sampler, state, limits, lived = MemorySampler(Path("/nowhere")), GuardState(), MemoryLimits.of(TOTAL), Lived()
    living, back, now_s = list(engines), [], 0.0
    while now_s <= story.end_s:
        returned = sum(held * min(1.0, now_s - at_s) for at_s, held in back)
        available = max(0.0, story.available(now_s) * GIB + returned)
        free = story.free(now_s) * GIB if story.free else available * 0.6
        look = MemorySample(
            now_s, TOTAL, int(available), int(free), 0, 0, scanned=int(story.scanned(now_s)), swapped=int(story.swapped(now_s))
        )
        sampler.add(look)
        trend = sampler.trend()
        decision, state = decide(look, trend, living, limits, state, unified=unified)
        _note(lived, decision, now_s, available)
        if decision.kill:
            victim = next(one for one in living if one.rank_id == decision.kill)
            living.remove(victim)
            back.append((now_s, victim.held or 0))
            sampler.forget()
        now_s += pace_s(look, trend, limits, base_s)
    return lived


def _note(lived: Lived, decision: Decision, now_s: float, available: float) -> None:
    if not lived.levels or lived.levels[-1] != decision.level:
        lived.levels.append(decision.level)
    if decision.kill:
        lived.kills.append((now_s, available / GIB, decision.kill, decision.why))
    lived.drops += decision.drop


def line(*points: tuple[float, float]) -> Course:
    """Straight between the points (seconds, GiB), level before and after."""

    def at(t: float) -> float:
        if t <= points[0][0]:
            return points[0][1]
        for (t0, a0), (t1, a1) in pairwise(points):
            if t <= t1:
                return a0 + (a1 - a0) * (t - t0) / (t1 - t0)
        return points[-1][1]

    return at


STILL = Trend()
