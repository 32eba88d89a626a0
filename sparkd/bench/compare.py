"""The comparison of two results, figure by figure: how much it changed, whether that is better, and whether it is more than noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparkd.bench.figures import (
    FIGURES,
    QUALITY,
    WAYS,
    Metric,
    date,
    finite,
    labels,
    load_figures,
    measured,
    one_line,
    ordered,
    shown,
    why_unmeasured,
)
from sparkd.bench.result import BenchResult, Cell, CellResult

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
    """A cell, load or format that one result has figures for and the other has not. attempted: the other tried it and failed."""

    where: str
    why: str
    attempted: bool


@dataclass(frozen=True)
class Comparison:
    """of: the names of both results."""

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
    cells_a, cells_b = _by_cell(a), _by_cell(b)
    changes = [change for cell, of_a in cells_a.items() if cell in cells_b for change in _of_cells(of_a, cells_b[cell])]
    for rows_a, rows_b in ((_loads(a), _loads(b)), (_quality(a), _quality(b))):
        changes += [_change(where, rows_a[where], rows_b[where]) for where in rows_a if where in rows_b]
    first, second = labels([a, b])
    return Comparison((first, second), tuple(_differences(a, b)), tuple(changes), tuple(_missing(a, b)), tuple(_missing(b, a)))


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


def _by_cell(result: BenchResult) -> dict[Cell, CellResult]:
    return {each.cell: each for each in measured(result)}


def _of_cells(a: CellResult, b: CellResult) -> Iterator[FigureChange]:
    comparable = not a.distorted and not b.distorted
    for figure in FIGURES:
        of_a, of_b = figure.read(a), figure.read(b)
        if of_a is not None and of_b is not None:
            named = _Named(figure.name, figure.unit, figure.better, of_a)
            yield _change((a.cell.name, figure.name), named, _Named(figure.name, figure.unit, figure.better, of_b), comparable)


@dataclass(frozen=True)
class _Named:
    figure: str
    unit: str
    better: str | None
    metric: Metric


def _change(where: tuple[str, str], a: _Named, b: _Named, comparable: bool = True) -> FigureChange:
    step = b.metric.mean - a.metric.mean
    stds = [std for std in (a.metric.std, b.metric.std) if std is not None]
    better = None if step == 0 or a.better is None else (step > 0) == (a.better == "more")
    return FigureChange(
        where=where[0],
        figure=a.figure,
        unit=a.unit,
        a=a.metric,
        b=b.metric,
        relative=step / abs(a.metric.mean) if a.metric.mean else None,
        better=better,
        beyond_spread=abs(step) > math.fsum(stds) if stds else None,
        comparable=comparable,
    )


def _loads(result: BenchResult) -> dict[tuple[str, str], _Named]:
    rows = load_figures(result.loads)
    return {(WAYS[way], figure): _Named(figure, "s", "less", metric) for (way, figure), metric in rows.items()}


def _quality(result: BenchResult) -> dict[tuple[str, str], _Named]:
    rows: dict[tuple[str, str], _Named] = {}
    for row in result.quality:
        for name, unit, better, read in QUALITY:
            if (value := finite(read(row))) is not None:
                rows[row.format, name] = _Named(name, unit, better, Metric(value))
    return rows


def _differences(a: BenchResult, b: BenchResult) -> Iterator[Difference]:
    # Figures of two tools say little about each other.
    pairs = [("tool", a.tool, b.tool), *((name, getattr(a.subject, name), getattr(b.subject, name)) for name in _SUBJECT)]
    pairs += [(f"entry: {key}", a.subject.entry.get(key), b.subject.entry.get(key)) for key in {**a.subject.entry, **b.subject.entry}]
    pairs += [("profile", a.profile, b.profile), ("text", a.text, b.text), ("date", date(a.started_s), date(b.started_s))]
    for what, of_a, of_b in pairs:
        if of_a != of_b:
            yield Difference(what, shown(of_a), shown(of_b))


def _missing(having: BenchResult, lacking: BenchResult) -> Iterator[MissingFigures]:
    tried = {each.cell: each for each in ordered(lacking)}
    has = _by_cell(lacking)
    for cell in (cell for cell in _by_cell(having) if cell not in has):
        other = tried.get(cell)
        why = "the other's profile does not have it" if other is None else f"in the other: {why_unmeasured(other)}"
        yield MissingFigures(cell.name, why, other is not None and other.state == "failed")
    rows_of_having: tuple[Mapping[tuple[str, str], _Named], ...] = (_loads(having), _quality(having))
    for rows, others in zip(rows_of_having, (_loads(lacking), _quality(lacking)), strict=True):
        for where in dict.fromkeys(where for where, _ in rows):
            if where not in {other for other, _ in others}:
                error = next((row.error for row in lacking.quality if row.format == where), None)
                why = "the other did not measure it" if error is None else f"in the other: {one_line(error)}"
                yield MissingFigures(where, why, error is not None)
