"""The figures that a cell, a load and a format have: their names, units and which way is better."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sparkd.bench.result import BenchResult, BenchSubject, CellResult, LoadRow, QualityRow
from sparkd.units import GIB

# The phases of a load in which it reads weights, by the names of sparkd.admin.starts.
WEIGHTS = ("read", "quantize")
# A result of an earlier release may have errors of thousands.
MOST_ERROR_CHARS = 160
WAYS = {"first": "first load", "cached": "load from the quantized cache", "swap": "swap from another model", "back": "swap back to it"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Metric:
    """std: over the repetitions; None: measured once, so no spread is known."""

    mean: float
    std: float | None = None
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class FigureKind:
    """better: `more`, `less`, or None where neither is."""

    key: str
    name: str
    unit: str
    better: str | None
    read: Callable[[CellResult], Metric | None]


def metric(row: dict[str, Any] | None, key: str) -> Metric | None:
    """A metric of a row of llama-benchy. None: the row lacks it, or it is not a finite number."""
    stored = row.get(key) if row else None
    if not isinstance(stored, dict):
        return None
    mean, std = finite(stored.get("mean")), finite(stored.get("std"))
    values = stored.get("values")
    numbers = [finite(value) for value in values] if isinstance(values, list) else []
    return None if mean is None else Metric(mean, std, tuple(number for number in numbers if number is not None))


def finite(value: object) -> float | None:
    """The value as a number. None: it is none, or it is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def ordered(result: BenchResult) -> list[CellResult]:
    """Every cell, in the order in which llama-benchy runs them."""
    return sorted(result.cells, key=lambda each: (each.cell.depth, each.cell.prompt_tokens, each.cell.output_tokens, each.cell.concurrency))


def measured(result: BenchResult) -> list[CellResult]:
    """The cells with figures. A failed cell is left out even if the tool wrote rows before it failed."""
    return [cell for cell in ordered(result) if cell.state == "done" and cell.rows]


def unmeasured(result: BenchResult) -> list[CellResult]:
    """The cells without figures."""
    return [cell for cell in ordered(result) if cell.state != "done" or not cell.rows]


def why_unmeasured(cell: CellResult) -> str:
    """The reason in a few words."""
    return one_line(cell.error or "") or {"done": "it has no rows", "failed": "it failed"}.get(cell.state, "it did not run")


def one_line(text: str) -> str:
    """The text on one line that a table can hold. A tool may repeat the whole body of an answer."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR_CHARS else f"{line[: MOST_ERROR_CHARS - 1].rstrip()}…"


def answer_row(cell: CellResult) -> dict[str, Any] | None:
    """The row of the prompts themselves: with prefix caching a cell has a second one, of the context."""
    return next((row for row in cell.rows if not row.get("is_context_prefill_phase")), None)


def context_row(cell: CellResult) -> dict[str, Any] | None:
    return next((row for row in cell.rows if row.get("is_context_prefill_phase")), None)


def percentile(values: Sequence[float], share: float) -> float:
    """Between the two nearest values, linearly, as numpy does by default."""
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def max_concurrency(result: BenchResult) -> int:
    """The most requests at once in the whole profile, as llama-benchy's `max_concurrency`."""
    return max((cell.cell.concurrency for cell in result.cells), default=1)


def arena_name(subject: BenchSubject) -> str:
    """The model's name in the arena's tables: that of the Hub, or the configured one for a local folder."""
    return subject.source if _HUB_NAME.fullmatch(subject.source) else subject.model


def label(result: BenchResult) -> str:
    """A few words that tell this result from another: model and format."""
    return f"{result.subject.model} {result.subject.format}" if result.subject.format else result.subject.model


def labels(results: Sequence[BenchResult]) -> list[str]:
    """One for each result, no two alike."""
    names = [label(result) for result in results]
    if len({result.subject.model for result in results}) == 1 and all(result.subject.format for result in results) and len(results) > 1:
        names = [result.subject.format or "" for result in results]
    if len({*names}) < len(names):
        names = [f"{name}, {date(result.started_s)}" for name, result in zip(names, results, strict=True)]
    if len({*names}) < len(names):
        names = [result.id for result in results]
    if len({*names}) < len(names):
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    return names


def date(epoch_s: float) -> str:
    """In UTC, to the minute."""
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%d %H:%M")


def number(value: float | None, digits: int = 3) -> str:
    """With so many significant digits, never in powers of ten; a hyphen for None."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.{min(max(_decimals(value, digits), 0), 6)}f}"


def spread_text(metric: Metric, unit: str = "") -> str:
    """The mean and its standard deviation, both as exact as the two first digits of the deviation, or five of the mean."""
    if not metric.std:
        return f"{number(metric.mean, 4)} {unit}".rstrip()
    decimals = min(max(min(_decimals(metric.std, 2), _decimals(metric.mean, 5) if metric.mean else 6), 0), 6)
    return f"{metric.mean:,.{decimals}f} ± {metric.std:,.{decimals}f} {unit}".rstrip()


def shown(value: object) -> str:
    """A key of an entry or a subject, as a person writes it."""
    if value is None or value == "":
        return "-"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _decimals(value: float, digits: int) -> int:
    """How many decimals show so many significant digits. Rounded first: 0.0999 has as many as 0.1."""
    return digits - 1 - int(f"{value:.{digits - 1}e}".partition("e")[2])


def _of_row(key: str, row: Callable[[CellResult], dict[str, Any] | None] = answer_row) -> Callable[[CellResult], Metric | None]:
    return lambda cell: metric(row(cell), key)


def _once(read: Callable[[CellResult], float | None]) -> Callable[[CellResult], Metric | None]:
    def metric_of(cell: CellResult) -> Metric | None:
        value = finite(read(cell))
        return None if value is None else Metric(value)

    return metric_of


FIGURES: tuple[FigureKind, ...] = (
    FigureKind("pp", "prompt", "t/s", "more", _of_row("pp_throughput")),
    FigureKind("tg", "output", "t/s", "more", _of_row("tg_throughput")),
    FigureKind("tg_req", "output of a request", "t/s", "more", _of_row("tg_req_throughput")),
    FigureKind("ctx_pp", "context", "t/s", "more", _of_row("pp_throughput", context_row)),
    FigureKind("ttfr", "first response", "ms", "less", _of_row("ttfr")),
    FigureKind("ttft", "first token", "ms", "less", _of_row("e2e_ttft")),
    FigureKind("j_prompt", "energy of a prompt token", "J", "less", _once(lambda cell: _energy(cell, "joules_per_prompt_token"))),
    FigureKind("j_output", "energy of an output token", "J", "less", _once(lambda cell: _energy(cell, "joules_per_output_token"))),
    FigureKind("mean_w", "mean power", "W", "less", _once(lambda cell: _energy(cell, "mean_w"))),
    FigureKind("peak_w", "peak power", "W", "less", _once(lambda cell: _energy(cell, "peak_w"))),
    FigureKind("kv", "KV cache in use", "%", None, _once(lambda cell: _percent(cell.engine.kv_use_peak))),
    FigureKind("prefix", "prefix hits", "%", None, _once(lambda cell: _percent(cell.engine.prefix_hit_share))),
    FigureKind("preemptions", "preemptions", "", None, _once(lambda cell: cell.engine.preemptions)),
    FigureKind("accepted", "accepted tokens of a draft", "", None, _once(lambda cell: _sum(cell.engine.accepted_share_by_position))),
    FigureKind("celsius", "temperature", "°C", None, _once(lambda cell: cell.machine.celsius_peak)),
    FigureKind("memory", "memory peak", "GiB", None, _once(lambda cell: _gib(cell.machine.memory_peak_bytes))),
)
BY_KEY = {figure.key: figure for figure in FIGURES}


def read(key: str, cell: CellResult) -> Metric | None:
    """The figure of FIGURES with this key."""
    return BY_KEY[key].read(cell)


def load_figures(loads: Sequence[LoadRow]) -> dict[tuple[str, str], Metric]:
    """Seconds by way and `load` or `first answer`, over the repetitions of a way."""
    values: dict[tuple[str, str], list[float]] = {}
    for load in loads:
        values.setdefault((load.way, "load"), []).append(load.seconds)
        if load.first_answer_s is not None:
            values.setdefault((load.way, "first answer"), []).append(load.first_answer_s)
    return {key: _over(seconds) for key, seconds in values.items()}


def weights_s(load: LoadRow) -> float | None:
    """Seconds in which the load read and quantized weights, which is all that a plan predicts of a load."""
    return math.fsum(phase.seconds for phase in load.phases if phase.phase in WEIGHTS) or None


def predicted_weights_s(result: BenchResult, load: LoadRow) -> float | None:
    """The plan's seconds for the same; None for the other model of a swap, of which no plan was asked."""
    if result.predicted is None or load.way == "back":
        return None
    return result.predicted.first_load_s if load.way == "first" else result.predicted.next_load_s


def against_predicted(result: BenchResult, load: LoadRow) -> str:
    """The plan's seconds, and by how much the measured ones are above or below them."""
    ours, predicted = weights_s(load), predicted_weights_s(result, load)
    return number(predicted) if not ours or not predicted else f"{number(predicted)} ({ours / predicted - 1:+.0%})"


TAIL = "KL divergence p99"
QUALITY: tuple[tuple[str, str, str, Callable[[QualityRow], float | None]], ...] = (
    ("perplexity", "", "less", lambda row: row.perplexity),
    ("KL divergence", "nats a token", "less", lambda row: row.kl),
    (TAIL, "nats a token", "less", lambda row: row.kl_p99),
    ("greedy agreement", "%", "more", lambda row: _percent(row.agreement)),
)


def _over(values: Sequence[float]) -> Metric:
    """The population's standard deviation, as llama-benchy's."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) if len(values) > 1 else None
    return Metric(mean, std, tuple(values))


def _energy(cell: CellResult, name: str) -> float | None:
    return None if cell.energy is None else finite(getattr(cell.energy, name))


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB


def _sum(shares: list[float] | None) -> float | None:
    return math.fsum(shares) if shares else None
