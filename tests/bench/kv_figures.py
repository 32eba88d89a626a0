"""What the KV cache bench makes of its starts: order, search for the best utilization, figures with their bars, table. Never starts one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 2**30
STEP = 0.005
TOKENS_BAR = 0.99
SLACK_BYTES, SLACK_SHARE = GIB // 4, 0.01
FIRST_BAR, PROFILE_BAR = 1.25, 1.02
# Every request thrown out once and computed again: vLLM does twice the work.
STORM = 1.0
_REMARK = 110  # characters; the records have the rest
SOURCES = {"first": "rehearsal", "profile": "profile"}
OURS = tuple(SOURCES)
# Ours too, and told on a line of its own: within a reservation.
RESERVED = "reserved"
BY_WORKER = (*OURS, RESERVED)


@dataclass(frozen=True, slots=True)
class Start:
    """One engine, from its process's start to the end of its load. kind: `first` and `profile` are ours, `stock` the fixed utilization,
    `tuned` a try of the search, `timed` stock beside ours for its time alone, `reserved` ours within a reservation. Bytes and
    seconds; None: it did not get so far.

    process_s: from the process's start to READY; engine_s: of it, the engine's constructor. free_*: of the device; on a CPU what was
    free before, less what the engine holds. idle_ready: reserved by torch's allocator and in no use, so free to a batch. report: what
    the worker class told. failed: why it did not start, or not survive. others_bytes: what other processes took meanwhile. reserved:
    what the whole engine was to stay within, 0 for nothing.
    """

    case: str
    kind: str
    utilization: float | None = None
    rep: int = 0
    free_before: int = 0
    process_s: float | None = None
    engine_s: float | None = None
    tokens: int | None = None
    bytes_per_token: float | None = None
    free_ready: int | None = None
    idle_ready: int = 0
    free_lowest: int | None = None
    asked: int = 0
    finished: int = 0
    preempted: int = 0
    load_s: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    failed: str | None = None
    others_bytes: int = 0
    ended_for_others: bool = False
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
        """Whether the worker class sized the cache itself, and in the way that this start is about."""
        return (self.report.get("phase"), self.report.get("source")) == ("ready", SOURCES.get(self.kind))

    @property
    def expected_free(self) -> int | None:
        """What the worker class means to leave when the engine is ready: the margin, and the largest batch's room (arithmetic.py)."""
        known = [self.report.get(name) for name in ("room_bytes", "pool_bytes", "graphs_bytes")]
        return None if None in known else known[0] - known[1] - known[2]


@dataclass(frozen=True, slots=True)
class Machine:
    """total: bytes of the memory that the cache is in. margin: bytes that ours was asked to leave. rounds: of the load."""

    name: str
    cuda: bool
    total: int
    margin: int
    rounds: int

    @property
    def tolerance(self) -> int:
        return max(SLACK_BYTES, int(SLACK_SHARE * self.total))


@dataclass(frozen=True, slots=True)
class Figure:
    """met: None where there is no bar."""

    case: str
    what: str
    bar: str
    measured: str
    met: bool | None


def largest(passes: Callable[[int], bool], guess: int, least: int, most: int) -> int | None:
    """The largest of least..most that passes, where all below it pass too; None where none does. Few tries if the guess is near."""
    good, bad, tries = least - 1, most + 1, 0
    at = min(most, max(least, guess))
    while bad - good > 1:
        if passes(at):
            good = at
        else:
            bad = at
        step = 1 << max(0, tries - 1)  # 1, 1, 2, 4, ..
        tries += 1
        if good < least:
            at = max(least, bad - step)
        elif bad > most:
            at = min(most, good + step)
        else:
            at = (good + bad) // 2
    return good if good >= least else None


def schedule(starts: int, reps: int) -> list[tuple[str, int]]:
    """(kind, rep) of `starts` starts of ours. The first `reps` first and second ones have stock between them: their times compare."""
    found: list[tuple[str, int]] = []
    left = starts
    for rep in range(starts):
        kinds = ("first", "timed", "profile") if rep < reps else ("profile",)
        for kind in kinds:
            if kind == "timed" or left > 0:
                found.append((kind, rep))
                left -= kind in OURS
        if left <= 0:
            break
    return found


def best(starts: Iterable[Start]) -> Start | None:
    """The hand-tuned start of the largest utilization that survived; None while the next larger one was not seen to fail."""
    tuned = [one for one in starts if one.kind == "tuned" and one.utilization is not None]
    found = max((one for one in tuned if one.survived), key=lambda one: one.utilization or 0, default=None)
    if found is None or found.utilization is None:
        return None
    above = round(found.utilization + STEP, 3)
    return found if above > 1 or any(one.utilization == above for one in tuned) else None


def figures(starts: Sequence[Start], machine: Machine) -> Iterator[Figure]:
    """Of every case, in the order in which they were run; only those that these starts can tell."""
    for case in dict.fromkeys(one.case for one in starts):
        yield from _of_case(case, [one for one in starts if one.case == case], machine)


def table(rows: Sequence[Figure]) -> str:
    lines = [("case", "figure", "bar", "measured", "met")]
    lines += [(row.case, row.what, row.bar, row.measured, "-" if row.met is None else "yes" if row.met else "MISSED") for row in rows]
    return _columns(lines)


def starts_table(starts: Sequence[Start]) -> str:
    """Every start on a line."""
    lines = [("case", "start", "util", "ready s", "engine s", "KV tokens", "free GiB", "lowest", "load s", "preempted", "remark")]
    for one in starts:
        lines.append(
            (
                one.case,
                one.kind,
                f"{one.utilization:.3f}" if one.utilization is not None else "-",
                _number(one.process_s, 1),
                _number(one.engine_s, 1),
                "-" if one.tokens is None else f"{one.tokens:,}",
                _gib(one.free_ready),
                _gib(one.free_lowest),
                _number(one.load_s, 1),
                str(one.preempted) if one.asked else "-",
                one.failed or _remark(one),
            )
        )
    return _columns(lines)


def to_json(starts: Sequence[Start], machine: Machine) -> dict[str, Any]:
    return {"machine": asdict(machine), "starts": [asdict(one) for one in starts]}


def _of_case(case: str, starts: Sequence[Start], machine: Machine) -> Iterator[Figure]:
    ours = [one for one in starts if one.kind in OURS]
    if ours:
        sized = [one for one in ours if one.by_us]
        why = next((_otherwise(one) for one in ours if not one.by_us), "")
        yield Figure(
            case, "sized by rehearsal, then by profile", "every start", _share(len(sized), len(ours), why), len(sized) == len(ours)
        )
        yield from _tokens(case, sized, best(starts))
        yield from _left(case, sized, machine)
        yield from _load(case, ours)
        yield from _times(case, starts)
    yield from _reserved(case, starts, machine)
    for one in starts:
        if one.kind == "stock":
            told = f"fails: {one.failed}" if one.failed else f"serves {one.tokens or 0:,} tokens, {_gib(one.free_lowest)} GiB were left"
            yield Figure(case, f"stock at {one.utilization}", "fails or over-commits", told, one.failed is not None)


def _reserved(case: str, starts: Sequence[Start], machine: Machine) -> Iterator[Figure]:
    for one in starts:
        if one.kind == RESERVED:
            served = "" if one.survived else f"; {one.failed}"
            told = f"{_gib(one.held)} of {_gib(one.reserved)} GiB, {one.tokens or 0:,} tokens{served}"
            within = one.held is not None and one.held <= one.reserved + machine.tolerance
            what = f"held under the load, of a reservation (within {machine.tolerance / GIB:.2f} GiB)"
            yield Figure(case, what, "no more", told, within and one.survived)


def _tokens(case: str, sized: Sequence[Start], tuned: Start | None) -> Iterator[Figure]:
    ready = [one for one in sized if one.tokens]
    if not ready or tuned is None or not tuned.tokens:
        return
    least = min(one.tokens or 0 for one in ready)
    ratio = least / tuned.tokens
    told = f"{ratio:.3f} ({least:,} of {tuned.tokens:,})"
    what = f"KV tokens, of the best utilization's ({tuned.utilization:.3f})"
    yield Figure(case, what, f"at least {TOKENS_BAR}", told, ratio >= TOKENS_BAR)
    margin = ready[0].report.get("margin_bytes", 0)
    if tuned.free_lowest is not None and tuned.bytes_per_token and tuned.free_lowest < margin:
        fair = tuned.tokens - (margin - tuned.free_lowest) / tuned.bytes_per_token
        yield Figure(case, "the same, had that one left the margin too", "", f"{least / fair:.3f}" if fair > 0 else "-", None)


def _left(case: str, sized: Sequence[Start], machine: Machine) -> Iterator[Figure]:
    tolerance = machine.tolerance / GIB
    known = [(one, one.free_ready, one.expected_free) for one in sized]
    # A part of the batch's room may be with the allocator already.
    errors = [free + one.idle_ready - expected for one, free, expected in known if free is not None and expected is not None]
    if errors:
        worst = max(errors, key=abs)
        aside = statistics.median((one.expected_free or 0) - one.report["margin_bytes"] for one in sized)
        told = f"{worst / GIB:+.2f} GiB, worst of {len(errors)} (median {statistics.median(errors) / GIB:+.2f}; batch {aside / GIB:.2f})"
        what = "free at READY, less margin and the batch's room"
        yield Figure(case, what, f"within {tolerance:.2f} GiB", told, abs(worst) <= machine.tolerance)
    lows = [one.free_lowest - one.report["margin_bytes"] for one in sized if one.free_lowest is not None and one.asked]
    if lows:
        worst = min(lows)
        told = f"{worst / GIB:+.2f} GiB, worst of {len(lows)} (median {statistics.median(lows) / GIB:+.2f})"
        yield Figure(case, "lowest free under the load, less margin", f"at least -{tolerance:.2f} GiB", told, worst >= -machine.tolerance)


def _load(case: str, ours: Sequence[Start]) -> Iterator[Figure]:
    loaded = [one for one in ours if one.asked or one.failed]
    if not loaded:
        return
    survived = sum(one.survived for one in loaded)
    why = next((one.failed for one in loaded if one.failed), "") or ""
    yield Figure(case, "worst-case load", "no failure in any start", _share(survived, len(loaded), why), survived == len(loaded))
    each = [one.preempted / one.asked for one in loaded if one.asked]
    if each:
        yield Figure(case, "preemptions a request", f"at most {STORM:g}", f"{max(each):.2f}, worst of {len(each)}", max(each) <= STORM)


def _times(case: str, starts: Sequence[Start]) -> Iterator[Figure]:
    """Each ratio of two starts next to each other in time; of those the median."""
    stock = {one.rep: one for one in starts if one.kind == "timed" and one.process_s and one.engine_s}
    for kind, what, bar in (("first", "first start", FIRST_BAR), ("profile", "start from a profile", PROFILE_BAR)):
        pairs = [
            (one.process_s / beside.process_s, one.engine_s / beside.engine_s)
            for one in starts
            if one.kind == kind and one.by_us and one.process_s and one.engine_s and (beside := stock.get(one.rep)) is not None
            if beside.process_s and beside.engine_s
        ]
        if not pairs:
            continue
        ratio = statistics.median(whole for whole, _ in pairs)
        spread = f"{min(whole for whole, _ in pairs):.2f} to {max(whole for whole, _ in pairs):.2f}"
        told = f"{ratio:.2f} (median of {len(pairs)}, {spread}; without imports {statistics.median(engine for _, engine in pairs):.2f})"
        yield Figure(case, f"{what}, of stock's time", f"at most {bar}", told, ratio <= bar)


def _otherwise(one: Start) -> str:
    """Why the worker class did not do what this start is about."""
    return str(one.report.get("why") or one.failed or f"a start that is {one.kind} was sized by {one.report.get('source', 'nobody')}")


def _remark(one: Start) -> str:
    told = [str(one.report[name]) for name in ("source", "why") if one.report.get(name)]
    if one.report.get("peak_bytes") is not None:
        told.append(f"peak {_gib(one.report['peak_bytes'])}, graphs {_gib(one.report.get('graphs_bytes'))}")
    if abs(one.others_bytes) > SLACK_BYTES:
        told.append(f"others took {one.others_bytes / GIB:+.2f} GiB")
    return ", ".join(told)


def _share(part: int, whole: int, why: str) -> str:
    return f"{part} of {whole}" + (f": {why}" if part < whole and why else "")


def _columns(lines: Sequence[tuple[str, ...]]) -> str:
    cut = [[cell if len(cell) <= _REMARK else f"{cell[: _REMARK - 2]}.." for cell in line] for line in lines]
    widths = [max(len(line[index]) for line in cut) for index in range(len(cut[0]) - 1)]
    padded = [[*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]] for line in cut]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / GIB:.2f}"
