"""Owns the report of one or more results: one HTML file with plots and the tables behind them. It asks no host for anything."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from itertools import count

from sparkd.bench import compare, tables
from sparkd.bench.compare import Comparison
from sparkd.bench.figures import (
    GIB,
    WAYS,
    Metric,
    date,
    labels,
    load_figures,
    measured,
    number,
    one_line,
    percentile,
    read,
    shown,
    spread_text,
    unmeasured,
    why_unmeasured,
)
from sparkd.bench.report.bars import quality
from sparkd.bench.report.curves import curves, overlays, short_name, subtitle
from sparkd.bench.report.drawn import Drawn
from sparkd.bench.report.timelines import over_time, waterfall
from sparkd.bench.result import BenchResult, CellResult

# A value that is a figure, its unit, and where it is from.
_Key = tuple[str, str, str]


def html(results: Sequence[BenchResult], comparison: Comparison | None = None) -> str:
    """The whole file. comparison: of two of the results, shown as a table."""
    style, script = (files(__package__) / "report.css").read_text("utf-8"), (files(__package__) / "report.js").read_text("utf-8")
    title = f"Bench: {', '.join(dict.fromkeys(result.subject.model for result in results))}" if results else "Bench"
    policy = f"default-src 'none'; img-src blob: data:; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    body = "\n".join(_sections(results, comparison))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _digest(text: str) -> str:
    """By which a content security policy allows an inline style or script (CSP 3, 2.3.1)."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _sections(results: Sequence[BenchResult], comparison: Comparison | None) -> Iterator[str]:
    if not results:
        yield "<p>There are no results.</p>"
        return
    identities = count(1)
    yield from _notices(results)
    yield _glance(results)
    if len(results) > 1:
        yield _grid("Side by side", overlays(results), identities)
    if comparison is not None:
        yield _comparison(comparison)
    by_title = list(curves(results))
    if len(results) == 1:
        yield _grid("Speed, first token and energy", [plot for _, plots in by_title for plot in plots], identities)
    else:
        for title, plots in by_title:
            yield _grid(title, plots, identities)
    yield _grid("Power and memory over time", [plot for result in results if (plot := over_time(result, subtitle(result)))], identities)
    yield _grid("Loads", [waterfall(result, subtitle(result)) for result in results if result.loads], identities)
    yield _grid("Quality", [quality(result.quality, subtitle(result)) for result in results if result.quality], identities)
    yield _subjects(results)
    for name, result in zip(labels(results), results, strict=True):
        yield _tables(name if len(results) > 1 else "", result)


def _notices(results: Sequence[BenchResult]) -> Iterator[str]:
    """Cells without figures, cells not to compare, and benches that did not end well: before any figure."""
    for name, result in zip(labels(results), results, strict=True):
        of = f"{escape(name)}: " if len(results) > 1 else ""
        if result.state != "done":
            yield f'<p class="notice bad"><strong>{of}the bench {tables.STATES[result.state]}.</strong> {escape(result.error or "")}</p>'
        if missing := unmeasured(result):
            lines = "".join(f"<li>{escape(each.cell.name)}: {escape(why_unmeasured(each))}</li>" for each in missing)
            yield f'<div class="notice bad"><strong>{of}{_many(len(missing), "cell")} without figures</strong><ul>{lines}</ul></div>'
        if failed := [row for row in result.quality if row.error]:
            lines = "".join(f"<li>{escape(row.format)}: {escape(one_line(row.error or ''))}</li>" for row in failed)
            yield f'<div class="notice bad"><strong>{of}{_many(len(failed), "format")} without figures</strong><ul>{lines}</ul></div>'
        if distorted := [(each.cell.name, each.distorted) for each in measured(result) if each.distorted]:
            lines = "".join(f"<li>{escape(cell)}: {escape(why)}</li>" for cell, why in distorted)
            head = f"{_many(len(distorted), 'cell')} not to compare, drawn hollow"
            yield f'<div class="notice busy"><strong>⚠ {of}{head}</strong><ul>{lines}</ul></div>'


def _many(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}{'' if number_of == 1 else 's'}"


def _glance(results: Sequence[BenchResult]) -> str:
    keys = [{name: (value, where) for name, value, where in _key_figures(result)} for result in results]
    names = list(dict.fromkeys(name for of_result in keys for name in of_result))
    if len(results) == 1:
        tiles = "".join(
            f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="where">{escape(where)}</dd></div>'
            for name, (value, where) in keys[0].items()
        )
        about = f"{subtitle(results[0])} · {results[0].profile} · {results[0].tool} · {date(results[0].started_s)} UTC"
        return f'<p class="about">{escape(about)}</p><dl class="tiles">{tiles}</dl>'
    rows = []
    for name in names:
        cells = [of_result.get(name, ("-", "")) for of_result in keys]
        rows.append([name, *(f"{value}, {where}" if where else value for value, where in cells)])
    return f"<section><h2>At a glance</h2>{_table(['figure', *labels(results)], rows)}</section>"


def _key_figures(result: BenchResult) -> Iterator[_Key]:
    """The few figures that a reader looks for first, each with the cell that it is from."""
    cells = [cell for cell in measured(result) if not cell.distorted] or measured(result)
    if cells:
        first = cells[0]
        if metric := read("tg", first):
            yield f"output, {_requests(first)}", spread_text(metric, "t/s"), short_name(first)
        if best := _extreme(cells, "tg"):
            yield "highest output", spread_text(best[1], "t/s"), short_name(best[0])
        if best := _extreme(cells, "pp"):
            yield "highest prompt rate", spread_text(best[1], "t/s"), short_name(best[0])
        if (metric := read("ttft", first)) and metric.values:
            half, most = percentile(metric.values, 0.5), percentile(metric.values, 0.95)
            yield "first token, p50 and p95", f"{number(half)} and {number(most)} ms", short_name(first)
        if best := _extreme(cells, "j_output", lowest=True):
            yield "lowest energy of an output token", f"{number(best[1].mean)} J", short_name(best[0])
        if best := _extreme(cells, "memory"):
            predicted = f"predicted {number(result.predicted_bytes / GIB)}, " if result.predicted_bytes else ""
            yield "memory peak", f"{number(best[1].mean)} GiB", f"{predicted}{short_name(best[0])}"
    for (way, figure), metric in load_figures(result.loads).items():
        if figure == "load":
            yield WAYS[way], spread_text(metric, "s"), f"{_many(len(metric.values), 'load')}"


def _requests(cell: CellResult) -> str:
    return "one request" if cell.cell.concurrency == 1 else f"{cell.cell.concurrency} requests at once"


def _extreme(cells: Sequence[CellResult], key: str, *, lowest: bool = False) -> tuple[CellResult, Metric] | None:
    """The cell with the highest or the lowest value of a figure."""
    having = [(cell, metric) for cell in cells if (metric := read(key, cell)) is not None]
    ranked = sorted(having, key=lambda each: each[1].mean, reverse=not lowest)
    return ranked[0] if ranked else None


def _grid(title: str, plots: Sequence[Drawn], identities: Iterator[int]) -> str:
    if not plots:
        return ""
    figures = "".join(_figure(plot, identities) for plot in plots)
    return f'<section><h2>{escape(title)}</h2><div class="grid{" full" if plots[0].wide else ""}">{figures}</div></section>'


def _figure(plot: Drawn, identities: Iterator[int]) -> str:
    pictures = "".join(canvas.svg(f"plot-{next(identities)}", plot.description, style) for style, canvas in plot.canvases)
    buttons = '<button type="button" data-save="svg">Save as SVG</button><button type="button" data-save="png">Save as PNG</button>'
    behind = f"<details><summary>The numbers behind it</summary>{_table(plot.head, plot.rows)}</details>"
    name = escape(plot.title)
    caption = f'<figcaption><div class="save">{buttons}</div>{behind}</figcaption>'
    return f'<figure data-name="{name}"><h3>{name}</h3>{pictures}{caption}</figure>'


def _comparison(comparison: Comparison) -> str:
    a, b = comparison.of
    verdicts = [compare.verdict(change) for change in comparison.changes]
    counted = f"{verdicts.count('better')} figures of B are better than those of A, {verdicts.count('worse')} are worse"
    marks = "~ marks a change that is no more than the spread of the repetitions, ⚠ one of a cell that is not comparable"
    parts = [f"<p>A is {escape(a)}, B is {escape(b)}. {counted}. {marks}.</p>"]
    if comparison.differences:
        parts.append("<h3>What else is different</h3>")
        parts.append(_table(["of", "A", "B"], [[one.what, one.a, one.b] for one in comparison.differences]))
    if comparison.changes:
        rows = []
        for change in comparison.changes:
            values = [spread_text(change.a, change.unit), spread_text(change.b, change.unit)]
            rows.append([change.where, change.figure, *values, compare.relative_text(change), compare.verdict(change)])
        parts.append("<h3>Figures</h3>")
        parts.append(_table(["cell", "figure", "A", "B", "change", "verdict"], rows, verdicts=True))
    for name, missing in (("A", comparison.only_a), ("B", comparison.only_b)):
        if missing:
            lines = "".join(f"<li>{escape(one.where)}: {escape(one.why)}</li>" for one in missing)
            parts.append(f"<p>Only {name} has:</p><ul>{lines}</ul>")
    return f"<section><h2>Comparison</h2>{''.join(parts)}</section>"


def _subjects(results: Sequence[BenchResult]) -> str:
    rows = []
    for what in ("model", "source", "checkpoint", "format", "gpu", "driver", "vllm", "sparkd"):
        rows.append([what, *(getattr(result.subject, what) or "-" for result in results)])
    rows.append(["nodes", *(", ".join(result.subject.nodes) or "-" for result in results)])
    for key in dict.fromkeys(key for result in results for key in result.subject.entry):
        rows.append([f"entry: {key}", *(shown(result.subject.entry.get(key)) for result in results)])
    rows.append(["profile", *(result.profile for result in results)])
    rows.append(["tool", *(result.tool for result in results)])
    rows.append(["text", *(result.text or "-" for result in results)])
    rows.append(["began", *(f"{date(result.started_s)} UTC" for result in results)])
    if any(result.cells for result in results):
        rows.append(["cells", *(f"{result.done} of {len(result.cells)}" for result in results)])
    return f"<section><h2>Measured on</h2>{_table(['of', *labels(results)], rows)}</section>"


def _tables(name: str, result: BenchResult) -> str:
    head, rows = tables.arena(result)
    arena = f"<h3>Speed, in the arena's columns</h3>{_table(head[1:], [row[1:] for row in rows])}" if rows else ""
    ours = "".join(f"<h3>{escape(title)}</h3>{_table(columns, body)}" for title, columns, body in tables.tables(result))
    title = f"Tables of {escape(name)}" if name else "Tables"
    return f"<section><h2>{title}</h2>{arena}{ours}</section>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], verdicts: bool = False) -> str:
    """In a frame of its own that scrolls, so that a wide table does not widen the page."""
    left = [' class="left"' if any(row[index][:1].isalpha() for row in rows) else "" for index in range(len(head))]
    heads = "".join(f'<th scope="col"{style}>{escape(cell)}</th>' for cell, style in zip(head, left, strict=True))
    lines = []
    for row in rows:
        cells = "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row[1:], left[1:], strict=True))
        style = f' class="{row[-1].split()[-1]}"' if verdicts and row[-1] in ("better", "worse") else ""
        lines.append(f'<tr{style}><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
