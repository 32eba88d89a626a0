"""The figures that a cell, a load and a format have: their names, units and which way is better."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean, pstdev
from typing import Any

from sparkd.bench.result import BenchResult, BenchSubject, CellResult, LoadRow, QualityRow
from sparkd.units import GIB

# The phases of a load in which it reads weights, by the names of sparkd.admin.starts.
WEIGHTS = ("read", "quantize")
# As long as the memory guard's sentence on an engine that it killed. A tool may repeat the whole body of an answer.
MOST_ERROR_CHARS = 300
WAYS = {"first": "first load", "cached": "load from the quantized cache", "swap": "swap from another model", "back": "swap back to it"}
# Name, unit, better direction and llama-benchy's key.
_TIMED = (
    ("prompt", "t/s", "more", "pp_throughput"),
    ("output", "t/s", "more", "tg_throughput"),
    ("output of a request", "t/s", "more", "tg_req_throughput"),
    ("first response", "ms", "less", "ttfr"),
    ("first token", "ms", "less", "e2e_ttft"),
)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Metric:
    """std: over the repetitions; None: measured once, so no spread is known."""

    mean: float
    std: float | None = None
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Figure:
    """better: `more`, `less`, or None where neither is."""

    name: str
    unit: str
    better: str | None
    metric: Metric


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
    """The text on one line that a table can hold."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_ERROR_CHARS else f"{line[: MOST_ERROR_CHARS - 1].rstrip()}…"


def answer_metric(cell: CellResult, key: str) -> Metric | None:
    """A metric of the prompts themselves: with prefix caching a cell has a second row, of the context."""
    return metric(_row(cell, of_context=False), key)


def max_concurrency(result: BenchResult) -> int:
    """The most requests at once in the whole profile, as llama-benchy's `max_concurrency`."""
    return max((cell.cell.concurrency for cell in result.cells), default=1)


def arena_name(subject: BenchSubject) -> str:
    """The model's name in the arena's tables: that of the Hub, or the configured one for a local folder."""
    return subject.source if _HUB_NAME.fullmatch(subject.source) else subject.model


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


def figures_of(result: BenchResult) -> dict[tuple[str, str], Figure]:
    """Every figure, by the name of its cell, load or format and its own."""
    rows = [(cell.cell.name, figure) for cell in measured(result) for figure in _of_cell(cell)]
    rows += [(WAYS[way], figure) for way in WAYS for figure in _of_loads([load for load in result.loads if load.way == way])]
    rows += [(row.format, figure) for row in result.quality for figure in _of_format(row)]
    return {(where, figure.name): figure for where, figure in rows}


def _of_cell(cell: CellResult) -> Iterator[Figure]:
    for name, unit, better, key in _TIMED:
        if (timed := answer_metric(cell, key)) is not None:
            yield Figure(name, unit, better, timed)
    if (context := metric(_row(cell, of_context=True), "pp_throughput")) is not None:
        yield Figure("context", "t/s", "more", context)
    if (energy := cell.energy) is not None:
        yield from _known(
            ("energy of a prompt token", "J", "less", energy.joules_per_prompt_token),
            ("energy of an output token", "J", "less", energy.joules_per_output_token),
            ("mean power", "W", "less", energy.mean_w),
            ("peak power", "W", "less", energy.peak_w),
        )
    engine, memory = cell.engine, cell.machine.memory_peak_bytes
    accepted = engine.accepted_share_by_position
    yield from _known(
        ("KV cache in use", "%", None, _percent(engine.kv_use_peak)),
        ("prefix hits", "%", None, _percent(engine.prefix_hit_share)),
        ("preemptions", "", None, engine.preemptions),
        ("accepted tokens of a draft", "", None, math.fsum(accepted) if accepted else None),
        ("temperature", "°C", None, cell.machine.celsius_peak),
        ("memory peak", "GiB", None, None if memory is None else memory / GIB),
    )


def _of_loads(loads: Sequence[LoadRow]) -> Iterator[Figure]:
    """Over the repetitions of one way."""
    answers = [load.first_answer_s for load in loads if load.first_answer_s is not None]
    for name, seconds in (("load", [load.seconds for load in loads]), ("first answer", answers)):
        if seconds:
            # The population's standard deviation, as llama-benchy's.
            yield Figure(name, "s", "less", Metric(fmean(seconds), pstdev(seconds) if len(seconds) > 1 else None, tuple(seconds)))


def _of_format(row: QualityRow) -> Iterator[Figure]:
    yield from _known(
        ("perplexity", "", "less", row.perplexity),
        ("KL divergence", "nats a token", "less", row.kl),
        ("KL divergence p99", "nats a token", "less", row.kl_p99),
        ("greedy agreement", "%", "more", _percent(row.agreement)),
    )


def _known(*rows: tuple[str, str, str | None, float | None]) -> Iterator[Figure]:
    """The figures that were measured once, and are numbers."""
    for name, unit, better, value in rows:
        if (known := finite(value)) is not None:
            yield Figure(name, unit, better, Metric(known))


def weights_s(load: LoadRow) -> float | None:
    """Seconds in which the load read and quantized weights, which is all that a plan predicts of a load."""
    return math.fsum(phase.seconds for phase in load.phases if phase.phase in WEIGHTS) or None


def _row(cell: CellResult, *, of_context: bool) -> dict[str, Any] | None:
    return next((row for row in cell.rows if bool(row.get("is_context_prefill_phase")) is of_context), None)


def _percent(share: float | None) -> float | None:
    return None if share is None else share * 100
