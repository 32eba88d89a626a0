"""Owns the plots of cells: speed, first token and energy over concurrency and over depth. Knows no HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from sparkd.bench.figures import Metric, labels, measured, number, ordered, percentile, read, spread_text
from sparkd.bench.report.bars import Bar, Bars, bars
from sparkd.bench.report.drawn import Drawn
from sparkd.bench.report.svg import MARKERS, Axis, LinePlot, PlotLine, Point, draw, named, ramp
from sparkd.bench.result import BenchResult, CellResult

CONCURRENCY, DEPTH = "concurrency", "depth"
_AXES = {CONCURRENCY: "requests at once", DEPTH: "depth: tokens of context before the prompt"}
# From here on a first token is shown in seconds.
_SECONDS_FROM_MS = 10_000


@dataclass(frozen=True)
class PlotReading:
    """A figure of a cell and the ends of its error bar."""

    value: float
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Kind:
    """A figure that is drawn. over: the axes that it is drawn over; name: of the vertical axis."""

    key: str
    title: str
    name: str
    over: tuple[str, ...]
    read: Callable[[CellResult], PlotReading | None]
    logarithmic: bool = False


def curves(results: Sequence[BenchResult]) -> Iterator[tuple[str, list[Drawn]]]:
    """By title, a plot of each result, all with the same scales."""
    for shape in _shapes(results):
        for kind in _kinds(results):
            for over in kind.over:
                panels = [_panel(kind, over, result, shape) for result in results]
                if panels := [panel for panel in panels if panel is not None]:
                    yield panels[0].title, [_drawn(plot, kind) for plot in _alike(panels)]
    if several := _by_cell(results):
        yield "Figures by cell", several


def overlays(results: Sequence[BenchResult]) -> list[Drawn]:
    """Plots with a line for each result: at the ends of what all of them measured."""
    drawn = []
    for shape in _shapes(results):
        common = _common(results, shape)
        for kind in _kinds(results):
            for over in kind.over:
                fixed = sorted({depth if over == CONCURRENCY else concurrency for depth, concurrency in common})
                for at in dict.fromkeys([*fixed[:1], *(fixed[-1:] if kind.key == "tg" else [])]):
                    plot = _overlay(kind, (over, at), results, shape)
                    if plot is not None:
                        drawn.append(_drawn(plot, kind))
    return drawn


def subtitle(result: BenchResult, short: str = "") -> str:
    """The origin of a picture, which it names wherever it is copied to."""
    subject = result.subject
    name = f"{subject.model} {subject.format}" if subject.format else subject.model
    gpu = (subject.gpu or "").removeprefix("NVIDIA ")
    parts = [name, gpu, f"vLLM {subject.vllm}" if subject.vllm else None, f"{len(subject.nodes)} nodes" if subject.nodes[1:] else None]
    return " · ".join(part for part in ([short] if short else parts) if part)


def common_subtitle(results: Sequence[BenchResult]) -> str:
    """The parts of a subtitle that all results share."""
    alike = [{subtitle(result).split(" · ")[index] for result in results} for index in range(1, 3) if _has_parts(results, index)]
    models = {result.subject.model for result in results}
    return " · ".join(part for names in [models, *alike] if len(names) == 1 for part in names)


def short_name(cell: CellResult) -> str:
    return f"d{cell.cell.depth} (c{cell.cell.concurrency})"


def _has_parts(results: Sequence[BenchResult], index: int) -> bool:
    return all(len(subtitle(result).split(" · ")) > index for result in results)


def _kinds(results: Sequence[BenchResult]) -> list[Kind]:
    idle = {result.idle_w for result in results}
    above = f" above {number(idle.pop())} W idle" if len(idle) == 1 and None not in idle else " above idle"
    scale, unit = _first_token_unit(results)
    return [
        Kind("tg", "Output tokens a second", "t/s, all requests", (CONCURRENCY, DEPTH), lambda cell: _with_std(read("tg", cell), "t/s")),
        Kind("pp", "Prompt tokens a second", "t/s, all requests", (DEPTH,), lambda cell: _with_std(read("pp", cell), "t/s")),
        Kind(
            "ttft",
            "First token, p50 to p95,",
            f"{unit}, logarithmic",
            (CONCURRENCY, DEPTH),
            lambda cell: _first_token(read("ttft", cell), scale, unit),
            logarithmic=True,
        ),
        Kind("j_output", "Energy of an output token", f"J{above}", (CONCURRENCY,), lambda cell: _with_std(read("j_output", cell), "J")),
        Kind("j_prompt", "Energy of a prompt token", f"J{above}", (DEPTH,), lambda cell: _with_std(read("j_prompt", cell), "J")),
    ]


def _first_token_unit(results: Sequence[BenchResult]) -> tuple[float, str]:
    values = [value for result in results for cell in measured(result) if (ttft := read("ttft", cell)) for value in ttft.values]
    return (1000.0, "s") if max(values, default=0) >= _SECONDS_FROM_MS else (1.0, "ms")


def _with_std(metric: Metric | None, unit: str) -> PlotReading | None:
    if metric is None:
        return None
    if metric.std is None or len(metric.values) < 2:
        return PlotReading(metric.mean, text=f"{number(metric.mean)} {unit}")
    low, high = metric.mean - metric.std, metric.mean + metric.std
    return PlotReading(metric.mean, max(low, 0.0), high, spread_text(metric, unit))


def _first_token(metric: Metric | None, scale: float, unit: str) -> PlotReading | None:
    values = [value / scale for value in metric.values if value > 0] if metric is not None else []
    if not values:
        return None
    half, most = percentile(values, 0.5), percentile(values, 0.95)
    return PlotReading(half, None, most, f"{number(half)} to {number(most)} {unit} ({len(values)} requests)")


Shape = tuple[int, int]


def _shapes(results: Sequence[BenchResult]) -> list[Shape]:
    """Prompt and output tokens of the cells that a curve can be drawn through."""
    points: dict[Shape, set[tuple[int, int]]] = {}
    for result in results:
        for cell in (each.cell for each in measured(result)):
            points.setdefault((cell.prompt_tokens, cell.output_tokens), set()).add((cell.depth, cell.concurrency))
    return [shape for shape, found in points.items() if len(found) > 1]


def _of_shape(cells: Sequence[CellResult], shape: Shape) -> list[CellResult]:
    return [each for each in cells if (each.cell.prompt_tokens, each.cell.output_tokens) == shape]


def _place(cell: CellResult, over: str) -> tuple[int, int]:
    """Where a cell stands on the axis, and which line it belongs to."""
    depth, concurrency = cell.cell.depth, cell.cell.concurrency
    return (concurrency, depth) if over == CONCURRENCY else (depth, concurrency)


def _panel(kind: Kind, over: str, result: BenchResult, shape: Shape) -> LinePlot | None:
    cells = _of_shape(ordered(result), shape)
    names = sorted({_place(cell, over)[1] for cell in cells})
    letter = "d" if over == CONCURRENCY else "c"
    lines = []
    for index, name in enumerate(names):
        points = _points(kind, over, [cell for cell in cells if _place(cell, over)[1] == name])
        if any(points):
            lines.append(PlotLine(f"{letter}{name}", points, ramp(index, len(names)), MARKERS[index % len(MARKERS)]))
    if len({point.x for line in lines for point in line.points if point is not None}) < 2:
        return None
    legend = "depth" if over == CONCURRENCY else "at once"
    return LinePlot(_title(kind, over, result, shape), subtitle(result), _x(over, cells), _y(kind), tuple(lines), legend, _missing(cells))


def _title(kind: Kind, over: str, result: BenchResult, shape: Shape) -> str:
    several = len({(each.cell.prompt_tokens, each.cell.output_tokens) for each in result.cells}) > 1
    return f"{kind.title} over {over}" + (f" (pp{shape[0]} tg{shape[1]})" if several else "")


def _points(kind: Kind, over: str, cells: Sequence[CellResult]) -> tuple[Point | None, ...]:
    """In the order of the axis; None for a cell without the figure."""
    points: list[Point | None] = []
    for cell in sorted(cells, key=lambda cell: _place(cell, over)):
        reading = kind.read(cell) if cell.state == "done" else None
        if reading is None or (kind.logarithmic and reading.value <= 0):
            points.append(None)
            continue
        x, hollow = float(_place(cell, over)[0]), bool(cell.distorted)
        points.append(Point(x, reading.value, reading.low, reading.high, reading.text, short_name(cell), hollow))
    return tuple(points)


def _x(over: str, cells: Sequence[CellResult]) -> Axis:
    values = sorted({float(_place(cell, over)[0]) for cell in cells})
    if over == DEPTH:
        return Axis(_AXES[over], low=0.0)
    return Axis(_AXES[over], logarithmic=values[-1] / values[0] >= 16, at=tuple(values))


def _y(kind: Kind) -> Axis:
    return Axis(kind.name, kind.logarithmic)


def _missing(cells: Sequence[CellResult]) -> tuple[str, ...]:
    names = [short_name(cell) for cell in cells if cell.state != "done" or not cell.rows]
    return (f"not measured: {', '.join(names)}",) if names else ()


def _alike(panels: Sequence[LinePlot]) -> Iterator[LinePlot]:
    """The panels with one range for all of them."""

    def ends(axis: str) -> tuple[float, float]:
        points = [point for panel in panels for line in panel.lines for point in line.points if point is not None]
        values = [point.x for point in points]
        if axis == "y":
            values = [value for point in points for value in (point.y, point.low, point.high) if value]
        return min(values, default=0.0), max(values, default=1.0)

    (x_low, x_high), (y_low, y_high) = ends("x"), ends("y")
    for panel in panels:
        x = replace(panel.x, low=x_low if panel.x.low is None else panel.x.low, high=x_high)
        yield replace(panel, x=x, y=replace(panel.y, low=y_low, high=y_high))


def _common(results: Sequence[BenchResult], shape: Shape) -> set[tuple[int, int]]:
    """Depth and concurrency of the cells that every result measured."""
    found = [{(each.cell.depth, each.cell.concurrency) for each in _of_shape(measured(result), shape)} for result in results]
    return set.intersection(*found) if found else set()


def _overlay(kind: Kind, at: tuple[str, int], results: Sequence[BenchResult], shape: Shape) -> LinePlot | None:
    over, fixed = at
    lines, cells, by_name = [], list[CellResult](), dict[str, list[CellResult]]()
    for index, (name, result) in enumerate(zip(labels(results), results, strict=True)):
        of_line = [cell for cell in _of_shape(ordered(result), shape) if _place(cell, over)[1] == fixed]
        cells += of_line
        by_name[name] = of_line
        points = _points(kind, over, of_line)
        if any(points):
            lines.append(PlotLine(name, points, named(index), MARKERS[index % len(MARKERS)]))
    if len({point.x for line in lines for point in line.points if point is not None}) < 2 or len(lines) < 2:
        return None
    where = f"depth {fixed:,}" if over == CONCURRENCY else ("one request at a time" if fixed == 1 else f"{fixed} requests at once")
    title = f"{kind.title} over {over}"
    about = " · ".join(part for part in (where, f"pp{shape[0]} tg{shape[1]}", common_subtitle(results)) if part)
    missing = [f"{name}: {note}" for name, of_line in by_name.items() for note in _missing(of_line)]
    return LinePlot(title, about, _x(over, cells), _y(kind), tuple(lines), notes=tuple(missing))


def _by_cell(results: Sequence[BenchResult]) -> list[Drawn]:
    """Bars, where a profile's cells differ in more than depth and concurrency, or where there is only one."""
    shapes = _shapes(results)
    alone = [result for result in results if any(not _of_shape([cell], shape) for cell in measured(result) for shape in shapes or [(0, 0)])]
    drawn = []
    for kind in _kinds(results) if alone else ():
        readings = [(cell, kind.read(cell)) for result in alone for cell in measured(result)]
        highest = max((reading.high or reading.value for _, reading in readings if reading), default=0.0)
        for result in alone:
            rows = [
                Bar(cell.cell.name, reading.value, reading.low, reading.high, reading.text, bool(cell.distorted))
                for cell in measured(result)
                if (reading := kind.read(cell)) is not None
            ]
            if rows:
                drawn.append(bars(Bars(f"{kind.title} by cell", subtitle(result), kind.name.partition(",")[0], tuple(rows), highest)))
    return drawn


def _drawn(plot: LinePlot, kind: Kind) -> Drawn:
    """With the table behind it: the axis down, the lines across."""
    places = sorted({point.x for line in plot.lines for point in line.points if point is not None})
    rows = []
    for place in places:
        by_line = [{point.x: point.text for point in line.points if point is not None} for line in plot.lines]
        rows.append([f"{place:,.0f}", *(texts.get(place, "not measured") for texts in by_line)])
    count = sum(point is not None for line in plot.lines for point in line.points)
    return Drawn(
        plot.title,
        f"{plot.subtitle}. {kind.title} ({kind.name}), {len(plot.lines)} lines, {count} points; the table below has the numbers.",
        (("", draw(plot)),),
        [plot.x.name, *(line.name for line in plot.lines)],
        rows,
    )
