"""A result as text: the arena's tables as llama-benchy writes them, and ours below them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sparkd.bench.figures import (
    WAYS,
    Metric,
    answer_metric,
    arena_name,
    max_concurrency,
    measured,
    metric,
    number,
    one_line,
    spread_text,
    unmeasured,
    weights_s,
    why_unmeasured,
)
from sparkd.bench.result import BenchResult, CellResult, LoadRow, Published
from sparkd.units import GIB

# The keys of llama-benchy's JSON in the order of its table's columns (llama_benchy/results.py, save_report).
_PROMPT = ("pp_throughput", "pp_req_throughput", None, None, "ttfr", "est_ppt", "e2e_ttft")
_OUTPUT = ("tg_throughput", "tg_req_throughput", "peak_throughput", "peak_req_throughput", None, None, None)
_HEADS = ("t/s (req)", "peak t/s", "peak t/s (req)", "ttfr (ms)", "est_ppt (ms)", "e2e_ttft (ms)")
# Those that llama-benchy leaves out where no cell has more than one request at once.
_OF_REQUESTS = {"t/s (req)", "peak t/s (req)"}
# llama-benchy's key by the one that a recipe has for the figure.
_KEYS = {"decode_tokens_per_s": "tg_throughput", "prefill_tokens_per_s": "pp_throughput"}
# The least width of a column beyond its head, and the blanks beside each cell (tabulate 0.10, MIN_PADDING and its layout `pipe`).
_HEAD_PADDING = 2


def markdown(result: BenchResult) -> str:
    """The arena's table as llama-benchy writes it, then tables of what it does not measure."""
    parts = [*([arena_table(result)] if result.cells else []), *map(_plain, notes(result))]
    for title, head, rows in tables(result):
        parts.append(f"## {title}\n\n{_pipe([_plain(cell) for cell in head], [[_plain(cell) for cell in row] for row in rows])}")
    return "\n\n".join(parts) + "\n"


def arena_table(result: BenchResult) -> str:
    """llama-benchy's own Markdown, without a line end."""
    many = max_concurrency(result) > 1
    heads = ["t/s (total)" if many else "t/s", *_HEADS]
    kept = [index for index, head in enumerate(heads) if many or head not in _OF_REQUESTS]
    name = _plain(arena_name(result.subject))
    rows = [[name, test, *(_spread(metrics[index]) for index in kept)] for test, metrics in rows_of_tests(result)]
    return _pipe(["model", "test", *(heads[index] for index in kept)], rows) if rows else "No cell was measured."


def benchy_json(result: BenchResult) -> dict[str, Any]:
    """The document that llama-benchy would have written for all measured cells in one run.

    latency_ms: the median over the cells of what llama-benchy subtracted from the first response, since each cell was a run of its own.
    prefix_caching_enabled: whether a cell has a row of its context, which llama-benchy writes with prefix caching alone.
    """
    rows = [row for cell in measured(result) for row in cell.rows]
    ended_s = result.started_s if result.ended_s is None else result.ended_s
    return {
        "version": result.tool.rpartition(" ")[2],
        "timestamp": datetime.fromtimestamp(ended_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ"),
        "latency_mode": result.latency_mode,
        "latency_ms": _latency_ms(rows),
        "model": arena_name(result.subject),
        "prefix_caching_enabled": any(row.get("is_context_prefill_phase") for row in rows),
        "max_concurrency": max_concurrency(result),
        "benchmarks": rows,
    }


def rows_of_tests(result: BenchResult) -> Iterator[tuple[str, list[Metric | None]]]:
    """The rows of the arena: the test's name, and its metrics in the order of _HEADS."""
    many = max_concurrency(result) > 1
    for cell in measured(result):
        for row in cell.rows:
            at_once = f" (c{row.get('concurrency', cell.cell.concurrency)})" if many else ""
            depth = row.get("context_size", cell.cell.depth)
            deep = f" @ d{depth}" if depth else ""
            if row.get("is_context_prefill_phase"):
                prompt, output = f"ctx_pp @ d{depth}", f"ctx_tg @ d{depth}"
            else:
                prompt = f"pp{row.get('prompt_size', cell.cell.prompt_tokens)}{deep}"
                output = f"tg{row.get('response_size', cell.cell.output_tokens)}{deep}"
            if metric(row, "pp_throughput"):
                yield prompt + at_once, [metric(row, key) if key else None for key in _PROMPT]
            if metric(row, "tg_throughput") or metric(row, "peak_throughput"):
                yield output + at_once, [metric(row, key) if key else None for key in _OUTPUT]


Table = tuple[str, list[str], list[list[str]]]


def tables(result: BenchResult) -> Iterator[Table]:
    """Title, head and rows of each table of ours that the result has figures for. A column that is unknown in every row is left out."""
    for title, head, rows in _tables(result):
        known = [index for index in range(len(head)) if any(row[index] != "-" for row in rows)]
        yield title, [head[index] for index in known], [[row[index] for index in known] for row in rows]


def _tables(result: BenchResult) -> Iterator[Table]:
    if cells := measured(result):
        idle = "" if result.idle_w is None else f"; {number(result.idle_w)} W idle are subtracted from J"
        yield f"Figures of each cell{idle}", _CELL_HEAD, [_cell_row(result, cell) for cell in cells]
    if missing := unmeasured(result):
        yield "Cells without figures", ["cell", "why"], [[each.cell.name, why_unmeasured(each)] for each in missing]
    if result.loads:
        yield "Loads", _LOAD_HEAD, [_load_row(load) for load in result.loads]
    if result.quality:
        head = ["format", "perplexity", "KL (nats a token)", "KL p99", "greedy agreement"]
        figures = ((row.format, row.perplexity, row.kl, row.kl_p99, row.agreement) for row in result.quality)
        rows = [[name, number(perplexity, 4), number(kl), number(p99), _share(share)] for name, perplexity, kl, p99, share in figures]
        yield "Quality against the model as stored", head, rows
    if failed := [[row.format, one_line(row.error)] for row in result.quality if row.error]:
        yield "Formats without figures", ["format", "why"], failed
    if rows := predictions(result):
        yield "What `sparkd plan` predicted", ["figure", "predicted", "measured", "difference"], rows
    if result.published:
        rows = [[one.what, _range(one), *beside(one, result), one.when or "-", one.source] for one in result.published]
        yield "Published figures", ["figure", "published", "ours", "our cell", "when", "source"], rows


def notes(result: BenchResult) -> Iterator[str]:
    """Sentences on what the tables do not say: how the bench ended, and which cells are not comparable."""
    if result.state != "done":
        yield f"The bench {STATES[result.state]}. {one_line(result.error or '')}".strip()
    for cell in measured(result):
        if cell.distorted:
            yield f"⚠ Do not compare {cell.cell.name}: {cell.distorted}."


STATES = {"running": "is still running", "failed": "failed", "cancelled": "was cancelled", "done": "is done"}
_CELL_HEAD = ["cell", "prompt t/s", "t/s", "first token ms", "W mean", "J/output token", "W peak", "J/prompt token"]
_CELL_HEAD += ["KV peak", "prefix hits", "preemptions", "accepted by position", "°C peak", "memory GiB", "predicted GiB", "throttled"]
_LOAD_HEAD = ["way", "model", "s", "first answer s", "weights s", "read GB/s (of the disk's)", "disk GB/s", "phases"]


def _cell_row(result: BenchResult, cell: CellResult) -> list[str]:
    energy, engine, machine = cell.energy, cell.engine, cell.machine
    timed = [answer_metric(cell, key) for key in ("pp_throughput", "tg_throughput", "e2e_ttft")]
    watts: list[float | None] = [None] * 4
    if energy is not None:
        watts = [energy.mean_w, energy.joules_per_output_token, energy.peak_w, energy.joules_per_prompt_token]
    return [
        cell.cell.name,
        *("-" if each is None else spread_text(each) for each in timed),
        *map(number, watts),
        _share(engine.kv_use_peak),
        _share(engine.prefix_hit_share),
        "-" if engine.preemptions is None else f"{engine.preemptions:,}",
        " ".join(_share(share) for share in engine.accepted_share_by_position or []) or "-",
        number(machine.celsius_peak),
        _gib(machine.memory_peak_bytes),
        _against(result.predicted_bytes, machine.memory_peak_bytes),
        f"⚠ {', '.join(machine.throttled)}" if machine.throttled else "-",
    ]


def _load_row(load: LoadRow) -> list[str]:
    share = f" ({load.bytes_per_s / load.disk_bytes_per_s:.0%})" if load.bytes_per_s and load.disk_bytes_per_s else ""
    return [
        WAYS[load.way],
        load.model or "-",
        number(load.seconds),
        number(load.first_answer_s),
        number(weights_s(load)),
        _rate(load.bytes_per_s) + share,
        _rate(load.disk_bytes_per_s),
        ", ".join(f"{phase.phase} {number(phase.seconds)} s" for phase in load.phases) or "-",
    ]


def predictions(result: BenchResult) -> list[list[str]]:
    """Figure, prediction, measured value and its difference, for each figure that has both."""
    plan = result.predicted
    if plan is None:
        return []
    alone = _alone(result)
    decode = None if alone is None else answer_metric(alone, "tg_throughput")
    rate = None if decode is None else decode.mean
    pairs = (
        ("decode of one request, t/s", plan.decode_tokens_per_s, rate),
        ("weights of a first load, s", plan.first_load_s, _weights_s(result, "first")),
        ("weights from the quantized cache, s", plan.next_load_s, _weights_s(result, "cached")),
    )
    return [
        [name, number(predicted), number(ours), f"{ours / predicted - 1:+.0%}"] for name, predicted, ours in pairs if predicted and ours
    ]


def _weights_s(result: BenchResult, way: str) -> float | None:
    """Mean over the loads of a way; None where one shows no seconds."""
    seconds = [weights_s(load) for load in result.loads if load.way == way]
    shown = [each for each in seconds if each is not None]
    return statistics.fmean(shown) if shown and len(shown) == len(seconds) else None


def _alone(result: BenchResult) -> CellResult | None:
    """The cell of one request at a time at the smallest depth."""
    depth = min((each.cell.depth for each in result.cells), default=0)
    return next((each for each in measured(result) if (each.cell.depth, each.cell.concurrency) == (depth, 1)), None)


def beside(published: Published, result: BenchResult) -> tuple[str, str]:
    """Our figure for a published one and the cell that it is from: one request at a time at the smallest depth. Dashes where there is none.

    Its conditions are words of its source, so nothing else is matched.
    """
    key, cell = _KEYS.get(published.what), _alone(result)
    ours = None if key is None or cell is None else answer_metric(cell, key)
    return ("-", "-") if ours is None or cell is None else (f"{_spread(ours)} t/s", cell.cell.name)


def _range(published: Published) -> str:
    end = "" if published.to is None else f" to {number(published.to)}"
    return f"{number(published.value)}{end} {published.unit}"


def _latency_ms(rows: Sequence[dict[str, Any]]) -> float:
    """llama-benchy stores est_ppt as ttfr less its latency, and never below 0."""
    latencies_ms = []
    for row in rows:
        response, processing = metric(row, "ttfr"), metric(row, "est_ppt")
        if response and processing and len(response.values) == len(processing.values):
            pairs = zip(response.values, processing.values, strict=True)
            latencies_ms += [first - rest for first, rest in pairs if rest > 0]
    # Milliseconds to the nanosecond: what is below is the rounding of the subtraction.
    return round(statistics.median(latencies_ms), 6) if latencies_ms else 0.0


def _spread(each: Metric | None) -> str:
    """As llama-benchy writes a metric."""
    return "" if each is None else f"{each.mean:.2f} ± {each.std if each.std is not None else math.nan:.2f}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _gib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def _against(predicted_bytes: int | None, peak_bytes: int | None) -> str:
    """The prediction, and by how much the peak is above or below it."""
    if not predicted_bytes or peak_bytes is None:
        return _gib(predicted_bytes)
    return f"{_gib(predicted_bytes)} ({peak_bytes / predicted_bytes - 1:+.1%})"


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"


def _plain(text: str) -> str:
    """Text that stays in its cell of a Markdown table, and that a page which shows the table does not take for HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _pipe(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """tabulate's layout `pipe`, the first column to the left and the others to the right."""
    widths = [max(len(name) + _HEAD_PADDING, *(len(row[index]) for row in rows)) for index, name in enumerate(head)]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(aligned)} |"

    rules = [f":{'-' * (width + 1)}" if index == 0 else f"{'-' * (width + 1)}:" for index, width in enumerate(widths)]
    return "\n".join([line(head), f"|{'|'.join(rules)}|", *(line(row) for row in rows)])
