"""Owns the plots over time: power and memory while the cells ran, and the phases of loads. Knows no HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from sparkd.bench.figures import GIB, WAYS, WEIGHTS, against_predicted, number, ordered, predicted_weights_s
from sparkd.bench.report.drawn import Drawn
from sparkd.bench.report.svg import (
    WIDTH,
    Canvas,
    Scale,
    linear_ticks,
    lowered,
    named,
    runs,
    shortened,
    text_width,
    thinned,
    tick_text,
)
from sparkd.bench.result import BenchResult, BenchSample, CellResult, LoadRow

WIDE = 980
_PANEL, _BETWEEN, _BAR_ROW = 150.0, 40.0, 46.0
# Loads that one picture shows; the table behind it has all.
_MOST_LOADS = 14
_OTHER = "other"
_PLANNED = "weights as planned"


@dataclass(frozen=True)
class _Panel:
    """A curve over time. line: a level to draw across, and its name."""

    name: str
    unit: str
    style: str
    values: list[tuple[float, float | None]]
    line: tuple[float, str] | None
    from_zero: bool


def over_time(result: BenchResult, about: str) -> Drawn | None:
    """Power, memory and temperature, with the cells as bands. None: there are fewer than two samples."""
    panels = [panel for panel in _panels(result) if sum(value is not None for _, value in panel.values) > 1]
    if not panels:
        return None
    canvases = tuple((style, _timeline(result, about, panels, width)) for style, width in (("wide", WIDE), ("narrow", WIDTH)))
    rows = []
    for cell in ordered(result):
        inside = _inside(result, cell)
        rows.append([cell.cell.name, *(_range_text(inside, read) for read in (_watts, _memory_gib, _celsius))])
    names = ", ".join(panel.name for panel in panels)
    described = f"{about}. {names} in {len(result.samples)} samples, with a band for each cell; the table below has the range in each."
    return Drawn(f"{_title(panels)} over time", described, canvases, ["cell", "power, W", "memory, GiB", "temperature, °C"], rows)


def waterfall(result: BenchResult, about: str) -> Drawn:
    """A bar for each load, its phases one after another from the start, with a mark where the plan has the end of the weights."""
    canvases = tuple((style, _waterfall(result, about, width)) for style, width in (("wide", WIDE), ("narrow", WIDTH)))
    loads, names = result.loads, _phases(result.loads)
    rows = []
    for load in loads:
        seconds = dict(_parts(load))
        phases = [number(seconds[name]) if name in seconds else "-" for name in names]
        planned = against_predicted(result, load)
        rows.append([WAYS[load.way], number(load.seconds), number(load.first_answer_s), *phases, planned, _rates(load) or "-"])
    head = ["way", "load, s", "first answer, s", *(f"{name}, s" for name in names), "weights predicted, s", "read rate"]
    return Drawn("Loads by phase", f"{about}. {len(loads)} loads; the table below has the seconds of each phase.", canvases, head, rows)


def _panels(result: BenchResult) -> list[_Panel]:
    idle, predicted = result.idle_w, result.predicted_bytes
    return [
        _Panel("power", "W", "k0", _curve(result, _watts), None if idle is None else (idle, f"idle {number(idle)} W"), True),
        _Panel(
            "memory",
            "GiB",
            "k1",
            _curve(result, _memory_gib),
            None if predicted is None else (predicted / GIB, f"predicted {number(predicted / GIB)} GiB"),
            False,
        ),
        _Panel("temperature", "°C", "k2", _curve(result, _celsius), None, False),
    ]


def _title(panels: Sequence[_Panel]) -> str:
    names = [panel.name for panel in panels]
    return (f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]).capitalize()


def _curve(result: BenchResult, read: Callable[[BenchSample], float | None]) -> list[tuple[float, float | None]]:
    return [(sample.at_s, read(sample)) for sample in sorted(result.samples, key=lambda sample: sample.at_s)]


def _watts(sample: BenchSample) -> float | None:
    return sample.power_w


def _memory_gib(sample: BenchSample) -> float | None:
    return None if sample.memory_bytes is None else sample.memory_bytes / GIB


def _celsius(sample: BenchSample) -> float | None:
    return sample.celsius


def _span(result: BenchResult, cell: CellResult) -> tuple[float, float] | None:
    """Start and end in seconds of the bench. None: the cell did not run."""
    if cell.started_s is None or cell.seconds is None:
        return None
    start = cell.started_s - result.started_s
    return start, start + cell.seconds


def _inside(result: BenchResult, cell: CellResult) -> list[BenchSample]:
    span = _span(result, cell)
    return [] if span is None else [sample for sample in result.samples if span[0] <= sample.at_s <= span[1]]


def _range_text(samples: Sequence[BenchSample], read: Callable[[BenchSample], float | None]) -> str:
    values = [value for sample in samples if (value := read(sample)) is not None]
    return f"{number(min(values))} to {number(max(values))}" if values else "-"


def _timeline(result: BenchResult, about: str, panels: Sequence[_Panel], width: float) -> Canvas:
    top, spans = 92.0 + lowered(about, width), [(cell, span) for cell in ordered(result) if (span := _span(result, cell)) is not None]
    height = top + len(panels) * (_PANEL + _BETWEEN) + 14
    canvas = Canvas(width, height, f"{_title(panels)} over time", about)
    ends = [at_s for panel in panels for at_s, _ in panel.values] + [span[1] for _, span in spans]
    last = max(ends)
    unit_s, unit = (3600.0, "h") if last > 3 * 3600 else (60.0, "min") if last > 180 else (1.0, "s")
    time = Scale(0, last, 58, width - 18)
    bottom = top + len(panels) * (_PANEL + _BETWEEN) - _BETWEEN
    _bands(canvas, spans, time, (top, bottom))
    for index, panel in enumerate(panels):
        _draw_panel(canvas, panel, time, top + index * (_PANEL + _BETWEEN), width)
    for tick in linear_ticks(0, last / unit_s, 6 if width < WIDE else 11):
        if tick * unit_s <= last:
            canvas.line([(time.at(tick * unit_s), bottom), (time.at(tick * unit_s), bottom + 4)], "axis")
            canvas.text(time.at(tick * unit_s), bottom + 17, tick_text(tick), "soft12", "middle")
    canvas.text((time.start + time.end) / 2, bottom + 36, f"{unit} since the bench began; a band is a cell", "soft12", "middle")
    return canvas


def _bands(canvas: Canvas, spans: Sequence[tuple[CellResult, tuple[float, float]]], time: Scale, room: tuple[float, float]) -> None:
    """A band for each cell, darker every second time, and above them the depth that cells in a row share."""
    top, bottom = room
    in_time = sorted(spans, key=lambda each: each[1])
    for index, (cell, (start, end)) in enumerate(in_time):
        style = "band bad" if cell.state == "failed" else "band odd" if index % 2 else "band"
        left, wide = time.at(start), time.at(end) - time.at(start)
        canvas.box(left, top, wide, bottom - top, style, f"{cell.cell.name}, {cell.state}")
        name = f"c{cell.cell.concurrency}{' ✕' if cell.state == 'failed' else ' ⚠' if cell.distorted else ''}"
        if wide > text_width(name, 11) + 2:
            canvas.text(left + wide / 2, top - 5, name, "soft", "middle")
    for depth, group in groupby(in_time, key=lambda each: each[0].cell.depth):
        members = list(group)
        left, right = time.at(members[0][1][0]), time.at(members[-1][1][1])
        canvas.line([(left, top - 19), (right, top - 19)], "axis")
        if right - left > text_width(f"d{depth}", 11) + 4:
            canvas.text((left + right) / 2, top - 23, f"d{depth}", "soft", "middle")


def _draw_panel(canvas: Canvas, panel: _Panel, time: Scale, top: float, width: float) -> None:
    known = [value for _, value in panel.values if value is not None]
    levels = [panel.line[0]] if panel.line else []
    low = 0.0 if panel.from_zero else min(known + levels)
    ticks = linear_ticks(low, max(known + levels), 5)
    scale = Scale(ticks[0], ticks[-1], top + _PANEL, top + 18)
    for tick in ticks:
        canvas.line([(time.start, scale.at(tick)), (time.end, scale.at(tick))], "grid")
        canvas.text(time.start - 6, scale.at(tick) + 4, tick_text(tick), "soft12", "end")
    canvas.text(14, top + 8, f"{panel.name}, {panel.unit}", "label halo")
    for part in runs(panel.values):
        points = thinned(part, int(width))
        canvas.line([(time.at(at_s), scale.at(value)) for at_s, value in points], f"{panel.style} trace")
    if panel.line is not None:
        level, name = panel.line
        canvas.line([(time.start, scale.at(level)), (time.end, scale.at(level))], "level")
        canvas.text(time.end, scale.at(level) - 5, name, "soft halo", "end")


def _phases(loads: Sequence[LoadRow]) -> list[str]:
    """The names, in the order in which the loads have them: one that only some have stands before the one that follows it there."""
    names: list[str] = []
    for load in loads:
        following = len(names)
        for name, _ in reversed(_parts(load)):
            if name in names:
                following = names.index(name)
            else:
                names.insert(following, name)
    return [name for name in names if name != _OTHER] + [_OTHER] * (_OTHER in names)


def _parts(load: LoadRow) -> list[tuple[str, float]]:
    """The phases with their seconds, and the rest of the load as one of its own."""
    parts: dict[str, float] = {}
    for phase in load.phases:
        parts[phase.phase] = parts.get(phase.phase, 0.0) + phase.seconds
    rest = load.seconds - sum(parts.values())
    # Less than a hundredth is the rounding of the phases.
    if rest > load.seconds / 100:
        parts[_OTHER] = parts.get(_OTHER, 0.0) + rest
    return list(parts.items())


def _rates(load: LoadRow) -> str:
    if load.bytes_per_s is None:
        return ""
    disk = f" of the disk's {load.disk_bytes_per_s / 1e9:.2f}" if load.disk_bytes_per_s else ""
    return f"read {load.bytes_per_s / 1e9:.2f}{disk} GB/s"


def _planned(result: BenchResult, load: LoadRow) -> tuple[float, float] | None:
    """When the weights began, and when they would have ended by the plan, in seconds of the load."""
    predicted_s, parts = predicted_weights_s(result, load), _parts(load)
    begin = next((number_of for number_of, (name, _) in enumerate(parts) if name in WEIGHTS), None)
    if predicted_s is None or begin is None:
        return None
    begin_s = sum(seconds for _, seconds in parts[:begin])
    return begin_s, begin_s + predicted_s


def _waterfall(result: BenchResult, about: str, width: float) -> Canvas:
    loads = result.loads[:_MOST_LOADS]
    names, planned = _phases(loads), [_planned(result, load) for load in loads]
    legend = _legend_rows([*names, *([_PLANNED] if any(planned) else [])], width - 28)
    first = 56 + lowered(about, width)
    top = first + 6 + 20 * len(legend)
    bottom = top + _BAR_ROW * len(loads)
    canvas = Canvas(width, bottom + 44, "Loads by phase", about)
    for row, line in enumerate(legend):
        for x, name in line:
            if name == _PLANNED:
                canvas.line(_span_mark((x, x + 11), first + 20 * row + 12, 12), "spread")
            else:
                canvas.box(x, first + 20 * row, 12, 12, f"{_style(name, names)} bar")
            canvas.text(x + 17, first + 10 + 20 * row, name, "label")
    ends = [span[1] for span in planned if span is not None]
    longest = max([sum(seconds for _, seconds in _parts(load)) for load in loads] + ends)
    ticks = linear_ticks(0, longest, 6 if width < WIDE else 11)
    scale = Scale(0, ticks[-1], 16, width - 22)
    for tick in ticks:
        canvas.line([(scale.at(tick), top), (scale.at(tick), bottom)], "axis" if tick == 0 else "grid")
        canvas.text(scale.at(tick), bottom + 16, tick_text(tick), "soft12", "middle")
    canvas.text(width / 2, bottom + 34, "s", "soft12", "middle")
    for index, load in enumerate(loads):
        y = top + _BAR_ROW * index
        _load_bar(canvas, load, (names, scale), y)
        if (span := planned[index]) is not None:
            about_it = f"{_PLANNED}: {number(span[1] - span[0])} s"
            canvas.line(_span_mark((scale.at(span[0]), scale.at(span[1])), y + 41, 21), "spread", about_it)
    return canvas


def _span_mark(span: tuple[float, float], y: float, height: float) -> list[tuple[float, float]]:
    """A line below a span, with an upright one at its end."""
    return [(span[0], y), (span[1], y), (span[1], y - height)]


def _load_bar(canvas: Canvas, load: LoadRow, scaled: tuple[list[str], Scale], y: float) -> None:
    names, scale = scaled
    answer = f", first answer {number(load.first_answer_s)} s" if load.first_answer_s is not None else ""
    full = f"{WAYS[load.way]}: {number(load.seconds)} s{answer}"
    rates = _rates(load)
    room = scale.end - scale.start
    least = f"{WAYS[load.way]}: {number(load.seconds)} s"
    fitting = (text for text in (f"{full}; {rates}".removesuffix("; "), full) if text_width(text, 12) <= room)
    canvas.text(20, y + 14, shortened(next(fitting, least), room, 12), "label halo")
    start = 0.0
    for name, seconds in _parts(load):
        left, wide = scale.at(start), scale.at(start + seconds) - scale.at(start)
        canvas.box(left, y + 20, max(wide - 1, 0.5), 18, f"{_style(name, names)} bar", f"{name}: {number(seconds)} s")
        text = f"{seconds:.1f}"
        if name != _OTHER and wide > text_width(text, 11) + 6:
            canvas.text(left + wide / 2 - 0.5, y + 33, text, "inside", "middle")
        start += seconds


def _style(name: str, names: Sequence[str]) -> str:
    return "rest" if name == _OTHER else named([other for other in names if other != _OTHER].index(name))


def _legend_rows(names: Sequence[str], width: float) -> list[list[tuple[float, str]]]:
    rows: list[list[tuple[float, str]]] = [[]]
    x = 14.0
    for name in names:
        wide = text_width(name, 12) + 32
        if rows[-1] and x + wide > width + 14:
            rows.append([])
            x = 14.0
        rows[-1].append((x, name))
        x += wide
    return rows
