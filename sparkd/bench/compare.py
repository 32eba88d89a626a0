"""The comparison of two results, figure by figure: how much it changed, whether that is better, and whether it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from sparkd.bench.figures import Figure, Metric, date, figures_of, one_line, shown, why_unmeasured
from sparkd.bench.result import BenchResult

_SUBJECT = ("model", "source", "checkpoint", "format", "vllm", "sparkd", "driver", "gpu", "nodes")


@dataclass(frozen=True)
class Difference:
    """A property of the subject, the profile or the date that the two results do not share."""

    what: str
    a: str
    b: str


@dataclass(frozen=True)
class FigureChange:
    """A figure of both.

    relative: (b - a) / a; None where a is 0.
    better: None where the figure is equal, or has no better direction.
    beyond_spread: whether the means are further apart than both standard deviations together; None where neither has one.
    comparable: False where one of the cells is distorted.
    """

    where: str
    figure: str
    unit: str
    a: Metric
    b: Metric
    relative: float | None
    better: bool | None
    beyond_spread: bool | None
    comparable: bool = True


@dataclass(frozen=True)
class MissingFigures:
    """A cell, load or format that one result has figures for and the other has not.

    attempted: the other tried it and failed.
    """

    where: str
    why: str
    attempted: bool


@dataclass(frozen=True)
class Comparison:
    """of: the ids of both results."""

    of: tuple[str, str]
    differences: tuple[Difference, ...]
    changes: tuple[FigureChange, ...]
    only_a: tuple[MissingFigures, ...]
    only_b: tuple[MissingFigures, ...]

    def worst(self, fail_over: float) -> FigureChange | None:
        """The figure that became worse by the largest share above `fail_over` (0.05: 5 %), or None.

        A change within the spread of the repetitions does not count, nor one of a cell that is distorted.
        """
        worse = [change for change in self.changes if _is_worse(change, fail_over)]
        return max(worse, key=lambda change: abs(change.relative or 0), default=None)

    @property
    def lost(self) -> tuple[MissingFigures, ...]:
        """Those that failed in b and have figures in a: a check for CI should not pass over them."""
        return tuple(missing for missing in self.only_a if missing.attempted)


def compare(a: BenchResult, b: BenchResult) -> Comparison:
    """b against a, the earlier or the reference."""
    of_a, of_b = figures_of(a), figures_of(b)
    distorted = {cell.cell.name for result in (a, b) for cell in result.cells if cell.distorted}
    changes = [_change(key[0], of_a[key], of_b[key], key[0] not in distorted) for key in of_a if key in of_b]
    return Comparison((a.id, b.id), tuple(_differences(a, b)), tuple(changes), tuple(_missing(a, b)), tuple(_missing(b, a)))


def verdict(change: FigureChange) -> str:
    """One word: better, worse, or empty; `~` before it where the change is no more than the spread."""
    word = {True: "better", False: "worse", None: ""}[change.better]
    if not change.comparable:
        return f"⚠ {word}".rstrip()
    return f"~ {word}".rstrip() if change.beyond_spread is False else word


def relative_text(change: FigureChange) -> str:
    return "-" if change.relative is None else f"{change.relative:+.1%}"


def _is_worse(change: FigureChange, fail_over: float) -> bool:
    if change.better is not False or not change.comparable or change.beyond_spread is False or change.relative is None:
        return False
    return abs(change.relative) > fail_over


def _change(where: str, a: Figure, b: Figure, comparable: bool) -> FigureChange:
    step = b.metric.mean - a.metric.mean
    stds = [std for std in (a.metric.std, b.metric.std) if std is not None]
    return FigureChange(
        where=where,
        figure=a.name,
        unit=a.unit,
        a=a.metric,
        b=b.metric,
        relative=step / abs(a.metric.mean) if a.metric.mean else None,
        better=None if step == 0 or a.better is None else (step > 0) == (a.better == "more"),
        beyond_spread=abs(step) > math.fsum(stds) if stds else None,
        comparable=comparable,
    )


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Difference]:
    # Figures of two tools say little about each other.
    pairs = [("tool", a.tool, b.tool), *((name, getattr(a.subject, name), getattr(b.subject, name)) for name in _SUBJECT)]
    pairs += [(f"entry: {key}", a.subject.entry.get(key), b.subject.entry.get(key)) for key in {**a.subject.entry, **b.subject.entry}]
    pairs += [("profile", a.profile, b.profile), ("text", a.text, b.text), ("date", date(a.started_s), date(b.started_s))]
    for what, of_a, of_b in pairs:
        if of_a != of_b:
            yield Difference(what, shown(of_a), shown(of_b))


def _missing(having: BenchResult, lacking: BenchResult) -> Iterator[MissingFigures]:
    failures = {cell.cell.name: why_unmeasured(cell) for cell in lacking.cells if cell.state == "failed"}
    failures |= {row.format: one_line(row.error) for row in lacking.quality if row.error}
    others = {where for where, _ in figures_of(lacking)}
    for where in dict.fromkeys(where for where, _ in figures_of(having) if where not in others):
        why = f"in the other: {failures[where]}" if where in failures else "the other did not measure it"
        yield MissingFigures(where, why, where in failures)
