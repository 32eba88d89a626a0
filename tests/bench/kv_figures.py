"""What the KV cache bench makes of its starts: figures with their bars, tables. Never starts one."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30
SLACK_BYTES, SLACK_SHARE = GIB // 4, 0.01
FIRST_BAR, PROFILE_BAR = 1.25, 1.02
# Every request thrown out once and computed again: vLLM does twice the work.
STORM = 1.0
_REMARK = 110  # characters; the logs have the rest
SOURCES = {"first": "rehearsal", "profile": "profile"}
STOCK, RESERVED = "stock", "reserved"


@dataclass(frozen=True, slots=True)
class Start:
    """One engine, from its process's start to the end of its load. kind: `first` and `profile` are ours, `reserved` ours within a
    reservation, `stock` vLLM at the utilization. Bytes and seconds; None: it did not get so far.

    process_s: from the process's start to READY; engine_s: of it, the engine's constructor. free_*: of the device; on a CPU of the given
    machine. idle_ready: reserved by torch's allocator and in no use, so free to a batch. report: what the worker class told. failed: why
    it did not start, or not survive. reserved: what the whole engine was to stay within, 0 for nothing.
    """

    case: str
    kind: str
    free_before: int = 0
    process_s: float | None = None
    engine_s: float | None = None
    tokens: int | None = None
    free_ready: int | None = None
    idle_ready: int = 0
    free_lowest: int | None = None
    asked: int = 0
    finished: int = 0
    preempted: int = 0
    load_s: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    reserved: int = 0

    @property
    def held(self) -> int | None:
        """Of the memory, the most that the whole engine had under the load."""
        return None if self.free_lowest is None else self.free_before - self.free_lowest

    @property
    def survived(self) -> bool:
        return self.failed is None and self.process_s is not None and self.finished == self.asked

    @property
    def by_us(self) -> bool:
        """Whether the worker class sized the cache itself, and in the way that this start is about. On a CPU nothing is rehearsed."""
        return self.report.get("phase") == "ready" and self.report.get("source") in (SOURCES.get(self.kind), "limit")

    @property
    def expected_free(self) -> int | None:
        """What the worker class means to leave when the engine is ready: the margin, and the largest batch's room (arithmetic.py)."""
        known = [self.report.get(name) for name in ("room_bytes", "pool_bytes", "graphs_bytes")]
        return None if None in known else known[0] - known[1] - known[2]


@dataclass(frozen=True, slots=True)
class Figure:
    """met: None where there is no bar."""

    case: str
    what: str
    bar: str
    measured: str
    met: bool | None


def figures(starts: Sequence[Start], total: int) -> Iterator[Figure]:
    """Of every case, in the order in which they were run; only those that these starts can tell. total: bytes of the memory."""
    tolerance = max(SLACK_BYTES, int(SLACK_SHARE * total))
    for case in dict.fromkeys(one.case for one in starts):
        of_case = [one for one in starts if one.case == case]
        stock = [one for one in of_case if one.kind == STOCK]
        ours = [one for one in of_case if one.kind in SOURCES]
        if ours:
            sized = [one for one in ours if one.by_us]
            told = f"{len(sized)} of {len(ours)}" + "".join(f": {_otherwise(one)}" for one in ours if not one.by_us)
            yield Figure(case, "sized by rehearsal, then by profile", "every start", told, len(sized) == len(ours))
            yield from _tokens(case, sized, stock)
            yield from _left(case, sized, tolerance)
            yield from _load(case, ours)
            yield from _times(case, ours, stock)
        yield from _reserved(case, [one for one in of_case if one.kind == RESERVED], tolerance)


def table(rows: Sequence[Figure]) -> str:
    lines = [("case", "figure", "bar", "measured", "met")]
    lines += [(row.case, row.what, row.bar, row.measured, "-" if row.met is None else "yes" if row.met else "MISSED") for row in rows]
    return _columns(lines)


def starts_table(starts: Sequence[Start]) -> str:
    """Every start on a line."""
    lines = [("case", "start", "ready s", "engine s", "KV tokens", "free GiB", "lowest", "load s", "preempted", "remark")]
    for one in starts:
        lines.append(
            (
                one.case,
                one.kind,
                _number(one.process_s, 1),
                _number(one.engine_s, 1),
                "-" if one.tokens is None else f"{one.tokens:,}",
                _gib(one.free_ready),
                _gib(one.free_lowest),
                _number(one.load_s, 1),
                str(one.preempted) if one.asked else "-",
                one.failed or ", ".join(str(one.report[name]) for name in ("source", "why") if one.report.get(name)),
            )
        )
    return _columns(lines)


def _tokens(case: str, sized: Sequence[Start], stock: Sequence[Start]) -> Iterator[Figure]:
    ready = [one.tokens for one in sized if one.tokens]
    served = [one.tokens for one in stock if one.tokens and one.survived]
    if ready:
        beside = f"{min(ready) / max(served):.3f} of stock's {max(served):,}" if served else "stock fails"
        yield Figure(case, "KV tokens", "", f"{min(ready):,}, {beside}", None)


def _left(case: str, sized: Sequence[Start], tolerance: int) -> Iterator[Figure]:
    known = [(one, one.free_ready, one.expected_free) for one in sized]
    # A part of the batch's room may be with the allocator already.
    errors = [free + one.idle_ready - expected for one, free, expected in known if free is not None and expected is not None]
    if errors:
        worst = max(errors, key=abs)
        what = "free at READY, less margin and the batch's room"
        yield Figure(case, what, f"within {_gib(tolerance)} GiB", f"{worst / GIB:+.2f} GiB", abs(worst) <= tolerance)
    lows = [one.free_lowest - one.report["margin_bytes"] for one in sized if one.free_lowest is not None and one.asked]
    if lows:
        what = "lowest free under the load, less margin"
        yield Figure(case, what, f"at least -{_gib(tolerance)} GiB", f"{min(lows) / GIB:+.2f} GiB", min(lows) >= -tolerance)


def _load(case: str, ours: Sequence[Start]) -> Iterator[Figure]:
    survived = sum(one.survived for one in ours)
    told = f"{survived} of {len(ours)}" + "".join(f": {one.failed}" for one in ours if one.failed)
    yield Figure(case, "worst-case load", "no failure in any start", told, survived == len(ours))
    each = [one.preempted / one.asked for one in ours if one.asked]
    if each:
        yield Figure(case, "preemptions a request", f"at most {STORM:g}", f"{max(each):.2f}", max(each) <= STORM)


def _times(case: str, ours: Sequence[Start], stock: Sequence[Start]) -> Iterator[Figure]:
    """Medians until READY, of stock's."""
    theirs = [one.process_s for one in stock if one.process_s]
    for kind, what, bar in (("first", "first start", FIRST_BAR), ("profile", "start from a profile", PROFILE_BAR)):
        mine = [one.process_s for one in ours if one.kind == kind and one.by_us and one.process_s]
        if mine and theirs:
            ratio = statistics.median(mine) / statistics.median(theirs)
            yield Figure(case, f"{what}, of stock's time", f"at most {bar}", f"{ratio:.2f}", ratio <= bar)


def _reserved(case: str, reserved: Sequence[Start], tolerance: int) -> Iterator[Figure]:
    for one in reserved:
        served = "" if one.survived else f"; {one.failed}"
        told = f"{_gib(one.held)} of {_gib(one.reserved)} GiB, {one.tokens or 0:,} tokens{served}"
        within = one.held is not None and one.held <= one.reserved + tolerance
        what = f"held under the load, of a reservation (within {_gib(tolerance)} GiB)"
        yield Figure(case, what, "no more", told, within and one.survived)


def _otherwise(one: Start) -> str:
    """Why the worker class did not do what this start is about."""
    return str(one.report.get("why") or one.failed or f"a start that is {one.kind} was sized by {one.report.get('source', 'nobody')}")


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    cut = [[cell if len(cell) <= _REMARK else f"{cell[: _REMARK - 2]}.." for cell in line] for line in lines]
    widths = [max(len(line[index]) for line in cut) for index in range(len(cut[0]) - 1)]
    padded = [[*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]] for line in cut]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"
