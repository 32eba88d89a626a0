"""Owns one comparison of a prediction with what was measured, and how many of them are printed. Never predicts, never measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Row:
    """unit: what both numbers are in. bar: what must hold, empty where nothing must; passed: None without a bar. note: why, or what is
    not known."""

    what: str
    case: str
    predicted: float | None
    measured: float | None
    unit: str
    bar: str = ""
    passed: bool | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of the measured number."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "error": self.error}


def table(rows: Sequence[Row]) -> str:
    """A block for each `what`, in the order of their first rows."""
    kinds = list(dict.fromkeys(row.what for row in rows))
    return "\n\n".join(_block(kind, [row for row in rows if row.what == kind]) for kind in kinds)


def summary(rows: Iterable[Row]) -> str:
    held = [row for row in rows if row.passed is not None]
    missed = [row for row in held if not row.passed]
    told = f"{len(held) - len(missed)} of {len(held)} bars held"
    return told + "".join(f"\n  missed: {row.what}, {row.case}" + (f" ({row.note})" if row.note else "") for row in missed)


def within(predicted: float, measured: float, share: float, slack: float = 0.0) -> bool:
    """Off by at most `share` of what was measured, or by `slack` in its unit, whichever allows more."""
    return abs(predicted - measured) <= max(share * abs(measured), slack)


def _block(kind: str, rows: Sequence[Row]) -> str:
    lines = [["", "predicted", "measured", "unit", "error", "bar", "", ""]]
    for row in rows:
        error = "" if row.error is None else f"{row.error * 100:+.2f} %"
        held = "" if row.passed is None else "held" if row.passed else "MISSED"
        lines.append(
            [row.case, _number(row.predicted, row.unit), _number(row.measured, row.unit), row.unit, error, row.bar, held, row.note]
        )
    widths = [max(len(line[column]) for line in lines) for column in range(7)]
    printed = [kind]
    for line in lines:
        figures = [line[column].rjust(widths[column]) for column in (1, 2)]
        words = [line[column].ljust(widths[column]) for column in (5, 6)]
        unit, error = line[3].ljust(widths[3]), line[4].rjust(widths[4])
        printed.append("  ".join([f"  {line[0].ljust(widths[0])}", *figures, unit, error, *words, line[7]]).rstrip())
    return "\n".join(printed)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if unit in ("tokens", "bytes", "s", "elements") else f"{value:.3f}" if unit == "GiB" else f"{value:,.2f}"
