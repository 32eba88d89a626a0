"""Owns the plots with a bar or a dot in each row: figures by cell, and the quality of formats. Knows no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkd.bench.figures import QUALITY, TAIL, finite, number
from sparkd.bench.report.drawn import Drawn
from sparkd.bench.report.svg import WIDTH, Canvas, Scale, linear_ticks, lowered, shortened, text_width, tick_text, wrap
from sparkd.bench.result import QualityRow

_ROW = 38.0


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Bars:
    """highest: the least end of the axis, so that plots beside each other share one."""

    title: str
    subtitle: str
    unit: str
    rows: tuple[Bar, ...]
    highest: float = 0.0


def bars(plot: Bars) -> Drawn:
    """A name above each bar, so that long ones have room on a small screen."""
    top = 62 + lowered(plot.subtitle, WIDTH)
    bottom = top + _ROW * len(plot.rows)
    canvas = Canvas(WIDTH, bottom + 42, plot.title, plot.subtitle)
    ticks = linear_ticks(0, max([plot.highest, *(bar.high or bar.value for bar in plot.rows)]), 5)
    scale = Scale(ticks[0], ticks[-1], 16, WIDTH - 26)
    for tick in ticks:
        canvas.line([(scale.at(tick), top - 2), (scale.at(tick), bottom)], "axis" if tick == 0 else "grid")
        canvas.text(scale.at(tick), bottom + 16, tick_text(tick), "soft12", "middle")
    canvas.text(WIDTH / 2, bottom + 34, plot.unit, "soft12", "middle")
    for index, bar in enumerate(plot.rows):
        y = top + _ROW * index
        canvas.text(20, y + 14, shortened(bar.name, WIDTH * 0.62, 12) + (" ⚠" if bar.marked else ""), "label")
        canvas.text(WIDTH - 24, y + 14, bar.text, "soft12", "end")
        canvas.box(scale.at(0), y + 19, scale.at(bar.value) - scale.at(0), 12, "k0 bar", f"{bar.name}: {bar.text}")
        ends = [end for end in (bar.low, bar.high) if end is not None]
        if ends:
            canvas.line([(scale.at(end), y + 25) for end in (bar.value, *ends)], "spread")
    rows = [[bar.name, bar.text, "yes" if bar.marked else "no"] for bar in plot.rows]
    described = f"{plot.subtitle}. {len(plot.rows)} bars; the table below has the numbers."
    return Drawn(plot.title, described, (("", canvas),), ["cell", plot.unit, "not comparable"], rows)


def quality(rows: Sequence[QualityRow], about: str) -> Drawn:
    """Formats down, and across the figures that any of them has. Perplexity has no zero to start from, so it is a dot.

    The tail of KL is in the tables only: a fourth figure has no room for its bars.
    """
    columns = [column for column in QUALITY if column[0] != TAIL and any(finite(column[3](row)) is not None for row in rows)]
    left = min(max([text_width(row.format, 12) for row in rows], default=0) + 26, 150)
    wide = (WIDTH - left - 6) / max(len(columns), 1)
    top = lowered(about, WIDTH)
    canvas = Canvas(WIDTH, top + 126 + 26 * len(rows), "Quality by format", about)
    for index, row in enumerate(rows):
        canvas.text(14, top + 140 + 26 * index, shortened(row.format, left - 20, 12), "label")
    for number_of, (name, unit, better, read) in enumerate(columns):
        start = left + wide * number_of
        values = [finite(read(row)) for row in rows]
        heads = [(line, "label") for line in wrap(name, wide - 6, 12)]
        heads += [(line, "soft") for line in (unit, f"{better} is better") if line not in ("", "%")]
        for below, (line, style) in enumerate(heads):
            canvas.text(start, top + 66 + 15 * below, line, style)
        known = [value for value in values if value is not None]
        dots = name == "perplexity"
        shown = ["-" if value is None else f"{value:.1f}%" if unit == "%" else number(value, 4 if dots else 3) for value in values]
        span = (max(known) - min(known)) or abs(known[0]) or 1.0
        low, high = (min(known) - span * 0.15, max(known) + span * 0.15) if dots else (0.0, 100.0 if unit == "%" else max(known) or 1.0)
        scale = Scale(low, high, start, start + wide - max(text_width(text, 12) for text in shown) - 16)
        for index, value in enumerate(values):
            y = top + 136 + 26 * index
            canvas.line([(start, y), (scale.end, y)], "grid")
            text = shown[index]
            if value is not None and dots:
                canvas.marker(scale.at(value), y, "circle", "k0", f"{rows[index].format}: {text}")
            elif value is not None:
                canvas.box(start, y - 6, scale.at(value) - start, 12, "k0 bar", f"{rows[index].format}: {text}")
            canvas.text(scale.end + 7, y + 4, text, "soft12")
    head = ["format", *(f"{name} ({unit})" if unit else name for name, unit, _, _ in columns)]
    table = [[row.format, *(number(finite(read(row)), 4) for _, _, _, read in columns)] for row in rows]
    described = f"{about}. {len(rows)} formats against the model as it is stored; the table below has the numbers."
    return Drawn("Quality by format", described, (("", canvas),), head, table)
