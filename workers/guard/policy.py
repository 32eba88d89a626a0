"""The guard's decision, a pure function of a memory sample, its trend and the engines. Never reads, kills, waits or reads the clock.

A DGX Spark that runs out of memory freezes within seconds, without an OOM kill. Recorded collapses: 9.9 to 2.4 GiB in 3 s, 29 to 2.5
GiB in 9 s. Recorded mistakes: a guard of 2 GiB that killed during compilation, which then started again for ever; a floor on MemAvailable
alone that killed a healthy model with a large mapped table after 15 hours. So limits depend on the phase, and a low number alone is no
reason to kill: memory must also shrink, or the kernel must reclaim (the thresholds in pages per minute are from that model's owner).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.guard.memory_sampler import MemorySample, Trend
from workers.host.memory_limits import GIB, RISE, MemoryLimits

OK, TIGHT, PRESSED, CRITICAL = LEVELS = ("ok", "tight", "pressed", "critical")
LOAD, CAPTURE, SERVE = "load", "capture", "serve"
PHASES = {"starting": LOAD, "loading": LOAD, "warming": CAPTURE, "sizing": CAPTURE, "serving": SERVE}

SCANNED_PER_S = 51_200 / 60
SWAPPED_PER_S = 12_800 / 60
# Looks in a row, so that a short dip does not count. Capturing graphs dips for two.
LOOKS = {LOAD: 2, CAPTURE: 3, SERVE: 2}
# A fall counts as a collapse if it reaches the floor within this time. A load takes memory on purpose, up to 4 GB/s, and ends.
HORIZON_S = {LOAD: 1.0, CAPTURE: 1.0, SERVE: 2.0}
REACH = {LOAD: 4.0, CAPTURE: 4.0, SERVE: 6.0}  # times the floor: a fall above that may still end
FAST_SHARE_PER_S = 0.002  # of all memory: a slower fall is no collapse
SLOW_HORIZON_S = 30.0
CREEP_SHARE = 0.0002
CALM_S = 10.0
PRESSED_S = 3.0
# After a kill memory comes back late, and the next look may still show the old state.
SETTLE_S = 1.5
GONE_S = 5.0
DROP_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class GuardedEngine:
    """One engine's rank on this node.

    held: bytes that its end frees, None if unknown.
    growth: bytes that it may still take within plan.

    in_flight is None without a report from the daemon; the engine then counts as busy. A higher priority is killed later.
    """

    rank_id: str
    model: str
    phase: str = SERVE
    held: int | None = None
    growth: int = 0
    in_flight: int | None = None
    priority: int = 50
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class GuardState:
    """The guard's memory between two samples. Times are those of the samples."""

    level: str = OK
    low_looks: int = 0
    floor_looks: int = 0
    fast_looks: int = 0
    quarter_looks: int = 0
    pressed_since_s: float | None = None
    calm_since_s: float | None = None
    killed_at_s: float = float("-inf")
    dropped_at_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Decision:
    """kill: the rank to kill now; why: the reason in one clause. drop: whether to drop the page cache."""

    level: str
    kill: str | None = None
    why: str = ""
    drop: bool = False


def decide(
    look: MemorySample,
    trend: Trend,
    engines: Sequence[GuardedEngine],
    limits: MemoryLimits,
    state: GuardState,
    *,
    unified: bool = True,
    dying: bool = False,
) -> tuple[Decision, GuardState]:
    """The decision for one look, with at most one victim, and none until the last victim's memory had time to come back.

    dying: a rank that was killed still has processes.
    """
    phase = _phase(engines)
    reclaiming = trend.scanned_per_s >= SCANNED_PER_S or trend.swapped_per_s >= SWAPPED_PER_S
    left_s = trend.seconds_to(look.available, limits.floor)
    planned = sum(engine.growth for engine in engines)
    fast = (
        # The first full batches of engines that were sized take what was left for them, and end above soft.
        trend.dropped > planned
        # The last step must fall too: memory that fell and then stays is no collapse.
        and max(trend.short, trend.last) <= -FAST_SHARE_PER_S * look.total
        and left_s is not None
        and left_s <= HORIZON_S[phase]
        and look.available <= REACH[phase] * limits.floor
    )
    state = replace(
        state,
        fast_looks=state.fast_looks + 1 if fast else 0,
        low_looks=state.low_looks + 1 if look.available < hard_in(limits, phase) else 0,
        floor_looks=state.floor_looks + 1 if look.available < limits.floor else 0,
        quarter_looks=state.quarter_looks + 1 if look.available < limits.floor // 4 else 0,
    )
    falling = left_s is not None and left_s <= SLOW_HORIZON_S and trend.middle <= -CREEP_SHARE * look.total / SLOW_HORIZON_S
    why = _reason(look, trend, limits, state, phase, reclaiming=reclaiming, falling=falling, left_s=left_s)
    creeping = look.available < limits.hard and trend.fell >= CREEP_SHARE * look.total
    state = _levelled(look, limits, state, critical=bool(why), corroborated=reclaiming or falling or creeping)
    settled = look.at_s - state.killed_at_s >= (GONE_S if dying else SETTLE_S)
    if why and settled and (victim := choose_victim(engines, _needed(look, trend, limits))):
        state = replace(state, killed_at_s=look.at_s, fast_looks=0, low_looks=0, floor_looks=0, quarter_looks=0)
        return Decision(CRITICAL, victim.rank_id, why), state
    flooded = unified and phase != SERVE and look.free < limits.hard and look.available - look.free > 2 * limits.soft
    if flooded and look.at_s - state.dropped_at_s >= DROP_EVERY_S:
        return Decision(state.level, drop=True), replace(state, dropped_at_s=look.at_s)
    return Decision(state.level, why=why), state


def choose_victim(engines: Sequence[GuardedEngine], needed: int) -> GuardedEngine | None:
    """The engine to kill, among those that hold at least `needed` bytes.

    Idle ones come first, then unpinned ones, low priority, those that start, and the largest.
    """
    sufficient = [engine for engine in engines if engine.held is None or engine.held >= needed]
    largest = max((engine.held or 0 for engine in engines), default=0)
    # If no engine alone is enough, killing a small one would only lose time.
    candidates = sufficient or [engine for engine in engines if (engine.held or 0) * 2 >= largest]

    def order(engine: GuardedEngine) -> tuple[bool, bool, int, bool, int, str]:
        return (engine.in_flight != 0, engine.pinned, engine.priority, engine.phase == SERVE, -(engine.held or 0), engine.rank_id)

    return min(candidates, key=order, default=None)


def pace_s(look: MemorySample, trend: Trend, limits: MemoryLimits, base_s: float) -> float:
    """Seconds to the next look: a fifth of base_s while memory falls fast or little is left."""
    hurried = look.available < limits.soft or trend.short <= -FAST_SHARE_PER_S * look.total
    return base_s / 5 if hurried else base_s


def hard_in(limits: MemoryLimits, phase: str) -> int:
    """The hard limit in bytes. Before SERVE it is half-way to the floor: capturing graphs dips to 4 GiB and then frees 36."""
    return limits.hard if phase == SERVE else (limits.hard + limits.floor) // 2


def _phase(engines: Sequence[GuardedEngine]) -> str:
    """The most patient phase among the engines. Only one engine of a node starts at a time."""
    phases = {engine.phase for engine in engines}
    return CAPTURE if CAPTURE in phases else LOAD if LOAD in phases else SERVE


def _reason(
    look: MemorySample,
    trend: Trend,
    limits: MemoryLimits,
    state: GuardState,
    phase: str,
    *,
    reclaiming: bool,
    falling: bool,
    left_s: float | None,
) -> str:
    """Why an engine must be killed now; empty if none must."""
    available, looks = f"{look.available / GIB:.2f} GiB available", LOOKS[phase]
    if state.fast_looks >= 2:
        rate, floor = -trend.short / GIB, limits.floor / GIB
        return f"{available}, {rate:.2f} GiB less each second: the floor of {floor:.2f} GiB is {left_s:.1f} s away"
    if state.quarter_looks >= 2:
        return f"{available}, a quarter of the floor"
    crept = trend.fell >= CREEP_SHARE * look.total
    if state.floor_looks >= looks and (reclaiming or crept):
        return f"{available}, below the floor of {limits.floor / GIB:.2f} GiB, {_proof(trend, reclaiming)}"
    if state.low_looks >= looks and (reclaiming or falling):
        return f"{available}, below the limit of {hard_in(limits, phase) / GIB:.2f} GiB ({phase}), {_proof(trend, reclaiming)}"
    return ""


def _proof(trend: Trend, reclaiming: bool) -> str:
    if reclaiming:
        return f"and the kernel reclaims ({trend.scanned_per_s:.0f} pages/s looked through, {trend.swapped_per_s:.0f} swapped)"
    return f"and going: {trend.fell / GIB:.2f} GiB within a minute"


def _needed(look: MemorySample, trend: Trend, limits: MemoryLimits) -> int:
    """The bytes that must come back to end the fall above the hard limit, with the fall during a kill counted in."""
    return max(0, int(limits.hard - look.available - min(trend.short, 0.0) * SETTLE_S))


def _levelled(look: MemorySample, limits: MemoryLimits, state: GuardState, *, critical: bool, corroborated: bool) -> GuardState:
    """The next level: worse at once, or after PRESSED_S; better by one step, after CALM_S well above the limit."""
    now_s = look.at_s
    if critical:
        return replace(state, level=CRITICAL, calm_since_s=None, pressed_since_s=state.pressed_since_s or now_s)
    if look.available < limits.soft:
        since_s = (now_s if state.pressed_since_s is None else state.pressed_since_s) if corroborated else None
        level = PRESSED if since_s is not None and now_s - since_s >= PRESSED_S else TIGHT
        return replace(state, level=level, pressed_since_s=since_s, calm_since_s=None)
    if state.level == OK:
        return replace(state, pressed_since_s=None)
    if look.available < RISE * limits.soft:
        return replace(state, level=TIGHT, pressed_since_s=None, calm_since_s=None)
    since_s = state.calm_since_s if state.calm_since_s is not None else now_s
    level = OK if now_s - since_s >= CALM_S else TIGHT
    return replace(state, level=level, calm_since_s=since_s, pressed_since_s=None)
