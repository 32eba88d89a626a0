"""How the requests for models look on a terminal: tables, and a line for each one that ends. It asks no daemon."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from sparkd.render.models import size
from sparkd.render.page import duration, printable
from sparkd.render.table import Table

_NUMBERS = ("AGE", "QUEUED", "TTFT", "SENT", "TOOK", "IN", "CACHED", "OUT", "TOKENS/S")
# The columns that are missed least in a narrow terminal come first. An id is all that `requests cancel` takes.
_SPARE = ("CACHED", "QUEUED", "TTFT", "KEY", "ROUTE", "SENT", "TOKENS/S", "TOOK")


def listed(answer: Mapping[str, Any], console: Console) -> None:
    """`sparkd requests`: those in flight, oldest first, and below them the finished ones, the newest last."""
    if answer["in_flight"]:
        table = _table("ID", "MODEL", "KEY", "ROUTE", "PHASE", "AGE", "QUEUED", "TTFT", "SENT")
        for row in answer["in_flight"]:
            seconds = (_seconds(row["seconds"]), _seconds(row["queued_s"]), _seconds(row["ttft_s"]))
            table.add(row["request_id"], *_names(row), row["phase"], *seconds, size(row["bytes_out"]))
        table.show(console)
    else:
        console.print("No request is in flight.")
    if answer["finished"]:
        console.print()
        table = _table("ENDED", "MODEL", "KEY", "ROUTE", "STATUS", "TOOK", "QUEUED", "TTFT", "IN", "CACHED", "OUT", "TOKENS/S")
        for row in reversed(answer["finished"]):
            table.add(*_cells(row))
        table.show(console)


def line(row: Mapping[str, Any], console: Console) -> None:
    """One finished request, for `--follow`."""
    ended, model, key, route, status, took, _, ttft, tokens_in, _, tokens_out, rate = _cells(row)
    facts = f"  {took} s, first byte {ttft} s, {tokens_in} in, {tokens_out} out, {rate} tokens/s"
    console.print(Text.assemble(ended, "  ", model, "  ", key, "  ", route, "  ", status, facts), soft_wrap=True)


def _table(*columns: str) -> Table:
    return Table(*columns, right=_NUMBERS, spare=[name for name in _SPARE if name in columns])


def _names(row: Mapping[str, Any]) -> Sequence[str]:
    return row["model"] or "-", row["key"] or "-", row["route"]


def _cells(row: Mapping[str, Any]) -> list[str | Text]:
    ended_s = row["started_s"] + row["seconds"]
    counts = (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"])
    rate = row["tokens_per_s"]
    times = (_seconds(row["seconds"]), _seconds(row["queued_s"]), _seconds(row["ttft_s"]))
    return [
        Text(time.strftime("%m-%d %H:%M:%S", time.localtime(ended_s)), style="dim"),
        *_names(row),
        Text(_status(row), style="red" if row["failed"] else "green"),
        *times,
        *("-" if count is None else f"{count:,}" for count in counts),
        "-" if rate is None else f"{rate:,.1f}",
    ]


def _status(row: Mapping[str, Any]) -> str:
    status = "left" if row["status"] == 499 else str(row["status"])
    return printable(f"{status} {row['code']}" if row["code"] else status)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f}" if seconds < 100 else duration(seconds)
