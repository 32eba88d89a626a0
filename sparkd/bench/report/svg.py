"""Owns the drawing of a plot as SVG: a canvas, scales with round ticks, and lines with markers. Knows nothing of a bench.

Colours are classes, so that one style sheet serves the light and the dark scheme: q0 to q7 is a ramp for ordered lines, k0 to k7 are
colours for named ones. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

# A phone shows this width at about nine tenths, so its smallest text stays readable.
WIDTH, HEIGHT = 400, 330
# The mean advance of a character of a sans-serif font, as a share of its size: DejaVu Sans, the widest of the usual ones, has 0.6.
_ADVANCE = 0.6
_LABEL_GAP = 14.0
_SUBTITLE_LINE = 14.0
MARKERS = ("circle", "square", "triangle", "diamond", "down", "cross")
RAMP = NAMED = 8


class Canvas:
    """The parts of one picture. Coordinates are pixels of its view box, y downward."""

    def __init__(self, width: float, height: float, title: str, subtitle: str = "") -> None:
        self.width, self.height = width, height
        self._title = title
        self._parts: list[str] = []
        self.text(14, 23, shortened(title, width - 24, 14), "title")
        for number, line in enumerate(subtitle_lines(subtitle, width)):
            self.text(14, 41 + _SUBTITLE_LINE * number, line, "soft")

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{_class(style)}>{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], style: str, title: str = "") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none"{_class(style)}>{_tip(title)}</polyline>')

    def box(self, x: float, y: float, width: float, height: float, style: str, title: str = "") -> None:
        size = f'width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size}{_class(style)}>{_tip(title)}</rect>')

    def marker(self, x: float, y: float, shape: str, style: str, title: str = "", hollow: bool = False) -> None:
        full = f"{style} mark hollow" if hollow else f"{style} mark"
        self._parts.append(f'<path d="{_outline(shape, x, y)}"{_class(full)}>{_tip(title)}</path>')

    def svg(self, identity: str, description: str, style: str = "") -> str:
        """The element. identity: unique in the page; description: for screen readers."""
        box = f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" width="{self.width:.0f}" height="{self.height:.0f}"'
        names = f'role="img" aria-labelledby="{identity}-t {identity}-d"'
        head = f'<title id="{identity}-t">{escape(self._title)}</title><desc id="{identity}-d">{escape(description)}</desc>'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {box} {names}{_class(f"plot {style}".strip())}>{head}{"".join(self._parts)}</svg>'


@dataclass(frozen=True)
class Scale:
    """Values from low to high on pixels from start to end."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def at(self, value: float) -> float:
        share = (self._of(value) - self._of(self.low)) / ((self._of(self.high) - self._of(self.low)) or 1)
        return self.start + (self.end - self.start) * share

    def _of(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


@dataclass(frozen=True)
class Point:
    """low, high: the ends of its error bar. text: the value in words; where: its cell. hollow: to be read with care."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    text: str = ""
    where: str = ""
    hollow: bool = False


@dataclass(frozen=True)
class PlotLine:
    """points: None is a value that was not measured, and breaks the line. style: q0 to q7 or k0 to k7."""

    name: str
    points: tuple[Point | None, ...]
    style: str
    marker: str = "circle"


@dataclass(frozen=True)
class Axis:
    """at: the values to put ticks at; empty: round ones. low, high: the least range, so that plots beside each other share one."""

    name: str
    logarithmic: bool = False
    at: tuple[float, ...] = ()
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LinePlot:
    """legend: what the names of the lines are. notes: lines below the plot."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: tuple[PlotLine, ...]
    legend: str = ""
    notes: tuple[str, ...] = ()
    size: tuple[float, float] = field(default=(WIDTH, HEIGHT))


def draw(plot: LinePlot) -> Canvas:
    """The plot, each line labelled at its end, in its colour and with its marker."""
    points = [point for line in plot.lines for point in line.points if point is not None]
    notes = [*plot.notes, *(["hollow: not comparable"] if any(point.hollow for point in points) else [])]
    wrapped = [line for note in notes for line in wrap(note, plot.size[0] - 28, 11)]
    width, height = plot.size[0], plot.size[1] + 14 * len(wrapped)
    canvas = Canvas(width, height, plot.title, plot.subtitle)
    label_width = max([text_width(line.name, 12) for line in plot.lines] + [text_width(plot.legend, 11)], default=0) + 30
    lower = lowered(plot.subtitle, width)
    top, bottom, right = 74.0 + lower, plot.size[1] - 48.0, width - label_width - 6
    y_scale, y_ticks = _y_scale(plot, points, bottom, top)
    left = max(text_width(tick_text(tick), 12) for tick in y_ticks) + 22
    x_scale, x_ticks = _x_scale(plot, points, left + 10, right - 10)
    _frame(canvas, plot, (left, right), (x_scale, x_ticks), (y_scale, y_ticks))
    for number, line in enumerate(plot.lines):
        # A pixel or two aside, so that the error bars of lines that meet stay apart.
        aside = (number - (len(plot.lines) - 1) / 2) * min(1.6, 8 / len(plot.lines))
        _line(canvas, line, x_scale, y_scale, aside)
    _labels(canvas, plot, x_scale, y_scale, (right, top, bottom))
    for number, note in enumerate(wrapped):
        canvas.text(14, plot.size[1] + 6 + 14 * number, note, "soft")
    return canvas


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    rough = span / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Ones, twos and fives of the powers of ten from at most `low` to at least `high`; the powers alone where those are too many."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        steps = [float(f"{factor}e{power}") for power in powers for factor in factors]
        first = max(index for index, step in enumerate(steps) if step <= low * 1.0001)
        last = min(index for index, step in enumerate(steps) if step >= high * 0.9999)
        if (ticks := steps[first : max(last, first + 1) + 1]) and len(ticks) <= most:
            return ticks
    return ticks


def tick_text(value: float) -> str:
    """As short as it can be exactly: 20k, 2.5M, 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.6g}{letter}"
    return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:g}"


def text_width(text: str, size: float) -> float:
    """An estimate in pixels, rather too wide than too narrow."""
    return len(text) * size * _ADVANCE


def shortened(text: str, width: float, size: float) -> str:
    """The text, cut with an ellipsis where it would be wider than `width` pixels."""
    most = max(int(width / (size * _ADVANCE)), 1)
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def wrap(text: str, width: float, size: float) -> list[str]:
    """Lines of at most `width` pixels, broken at blanks."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return [shortened(line, width, size) for line in lines if line]


def subtitle_lines(subtitle: str, width: float) -> list[str]:
    """One line, or two where it is long."""
    lines = wrap(subtitle, width - 28, 11)
    return lines if len(lines) < 3 else [lines[0], shortened(f"{lines[1]} {lines[2]}", width - 28, 11)]


def lowered(subtitle: str, width: float) -> float:
    """By how many pixels a second line of the subtitle moves down what is below it."""
    return _SUBTITLE_LINE * max(len(subtitle_lines(subtitle, width)) - 1, 0)


def spread_out(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, at least `gap` apart, in the same order; within low and high if there is room."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [wanted[index] for index in order]
    gap = min(gap, (high - low) / max(len(placed) - 1, 1))
    for index, place in enumerate(placed):
        placed[index] = max(place, low if index == 0 else placed[index - 1] + gap)
    limit = high
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], limit)
        limit = placed[index] - gap
    result = [0.0] * len(wanted)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result


def ramp(number: int, count: int) -> str:
    """The colour of an ordered line."""
    return f"q{round(number * (RAMP - 1) / (count - 1)) if count > 1 else RAMP // 2}"


def named(number: int) -> str:
    """The colour of a line, or of a part, that has a name alone."""
    return f"k{number % NAMED}"


def _y_scale(plot: LinePlot, points: Sequence[Point], bottom: float, top: float) -> tuple[Scale, list[float]]:
    values = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    values += [value for value in (plot.y.low, plot.y.high) if value is not None]
    if plot.y.logarithmic:
        values = [value for value in values if value > 0] or [1.0]
        ticks = log_ticks(min(values), max(values))
    else:
        ticks = linear_ticks(min([0.0, *values]), max(values, default=1.0))
    return Scale(ticks[0], ticks[-1], bottom, top, plot.y.logarithmic), ticks


def _x_scale(plot: LinePlot, points: Sequence[Point], left: float, right: float) -> tuple[Scale, list[float]]:
    values = [point.x for point in points] + [value for value in (*plot.x.at, plot.x.low, plot.x.high) if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = (low / 2, high * 2) if plot.x.logarithmic else (low - 1, high + 1)
    scale = Scale(low, high, left, right, plot.x.logarithmic)
    if not plot.x.at:
        return scale, [tick for tick in linear_ticks(low, high) if low <= tick <= high]
    kept: list[float] = []
    for tick in sorted({*plot.x.at}, reverse=True):
        if not kept or scale.at(kept[-1]) - scale.at(tick) >= text_width(tick_text(kept[-1]), 12) + 6:
            kept.append(tick)
    return scale, kept[::-1]


def _frame(canvas: Canvas, plot: LinePlot, sides: tuple[float, float], x: tuple[Scale, list[float]], y: tuple[Scale, list[float]]) -> None:
    """Grid, ticks and the names of the axes."""
    (left, right), (x_scale, x_ticks), (y_scale, y_ticks) = sides, x, y
    for tick in y_ticks:
        at = y_scale.at(tick)
        canvas.line([(left, at), (right, at)], "grid" if tick != y_ticks[0] else "axis")
        canvas.text(left - 6, at + 4, tick_text(tick), "soft12", "end")
    bottom = y_scale.at(y_ticks[0])
    for tick in x_ticks:
        at = x_scale.at(tick)
        canvas.line([(at, bottom), (at, bottom + 4)], "axis")
        canvas.text(at, bottom + 18, tick_text(tick), "soft12", "middle")
    canvas.text(14, y_scale.end - 12, plot.y.name, "soft12")
    canvas.text((left + right) / 2, bottom + 36, plot.x.name, "soft12", "middle")


def _line(canvas: Canvas, line: PlotLine, x: Scale, y: Scale, aside: float) -> None:
    run: list[tuple[float, float]] = []
    for point in (*line.points, None):
        if point is None:
            if len(run) > 1:
                canvas.line(run, f"{line.style} curve")
            run = []
        else:
            run.append((x.at(point.x) + aside, y.at(point.y)))
    for point in (point for point in line.points if point is not None):
        at, ends = x.at(point.x) + aside, [end for end in (point.low, point.high) if end is not None and end != point.y]
        for end in (min(max(end, y.low), y.high) for end in ends):
            canvas.line([(at, y.at(point.y)), (at, y.at(end))], f"{line.style} whisker")
            canvas.line([(at - 3.5, y.at(end)), (at + 3.5, y.at(end))], f"{line.style} whisker")
        canvas.marker(at, y.at(point.y), line.marker, line.style, f"{line.name}, {point.where}: {point.text}", point.hollow)


def _labels(canvas: Canvas, plot: LinePlot, x: Scale, y: Scale, room: tuple[float, float, float]) -> None:
    """The names of the lines beside their ends, led to where they had to move."""
    right, top, bottom = room
    ends = [(line, next((point for point in reversed(line.points) if point is not None), None)) for line in plot.lines]
    drawn = [(line, point) for line, point in ends if point is not None]
    places = spread_out([y.at(point.y) for _, point in drawn], _LABEL_GAP, top + 4, bottom - 4)
    if plot.legend and drawn:
        canvas.text(right + 10, min(top - 12, min(places) - 14), plot.legend, "soft")
    for (line, point), place in zip(drawn, places, strict=True):
        canvas.line([(x.at(point.x) + 7, y.at(point.y)), (right + 3, place), (right + 8, place)], f"{line.style} lead")
        canvas.marker(right + 15, place, line.marker, line.style)
        canvas.text(right + 24, place + 4, line.name, "label")


def _outline(shape: str, x: float, y: float, r: float = 4.2) -> str:
    if shape == "circle":
        return f"M{x - r:.1f},{y:.1f}a{r},{r} 0 1,0 {2 * r},0a{r},{r} 0 1,0 {-2 * r},0Z"
    corners = {
        "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
        "triangle": ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
        "down": ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
        "diamond": ((0, -1.25), (1.1, 0), (0, 1.25), (-1.1, 0)),
        "cross": tuple(
            (a * turn[0] - b * turn[1], a * turn[1] + b * turn[0])
            for turn in ((1, 0), (0, 1), (-1, 0), (0, -1))
            for a, b in ((0.4, -0.4), (1.15, -0.4), (1.15, 0.4))
        ),
    }[shape]
    return "M" + "L".join(f"{x + r * across:.1f},{y + r * down:.1f}" for across, down in corners) + "Z"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def _tip(title: str) -> str:
    return f"<title>{escape(title)}</title>" if title else ""


def runs(values: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    """The parts of a curve without a gap."""
    parts: list[list[tuple[float, float]]] = [[]]
    for x, y in values:
        if y is None:
            parts.append([])
        else:
            parts[-1].append((x, y))
    return [part for part in parts if part]


def thinned(values: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most about `most` points: of each stretch the least and the greatest, so that no peak is lost."""
    if len(values) <= most:
        return list(values)
    size = math.ceil(2 * len(values) / most)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(values), size):
        part = values[start : start + size]
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept
