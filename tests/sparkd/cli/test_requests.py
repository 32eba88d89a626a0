"""`sparkd requests --follow` over many pages, and how requests look. tests/sparkd/daemon/test_recorded_requests.py has a real daemon."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from sparkd.cli.requests import _since
from sparkd.render import requests as show_requests
from sparkd.state.request_store import RequestRow

ROW = RequestRow(
    *(1, "req-1", "tiny", "/v1/messages", "laptop", 1000.0, 200, None, 3.0, 0.5, 1.0, 7, 4, 5),
    bytes_out=900,
    streamed=True,
).body()


def session(count: int) -> Any:
    """A daemon that has finished so many requests."""

    def get(path: str, limit: int, before: int | None = None, **_: Any) -> dict[str, Any]:
        newest = count if before is None else before - 1
        numbers = list(range(newest, max(0, newest - limit), -1))
        return {
            "in_flight": [],
            "finished": [{"number": number} for number in numbers],
            "next": numbers[-1] if len(numbers) == limit else None,
        }

    return SimpleNamespace(client=SimpleNamespace(get=get))


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (5, 4), (25, 11), (20, 10)])
def test_what_ended_since_the_last_look(count: int, shown: int) -> None:
    assert [row["number"] for row in _since(session(count), shown, {"limit": 10})] == list(range(shown + 1, count + 1))


def drawn(answer: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    show_requests.listed(answer, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_tables() -> None:
    waiting = ROW | {"number": None, "phase": "queued", "status": None, "queued_s": None, "ttft_s": None, "bytes_out": 0, "key": None}
    broken = ROW | {
        "status": 499,
        "model": "",
        "prompt_tokens": None,
        "cached_tokens": None,
        "completion_tokens": None,
        "tokens_per_s": None,
    }
    refused = ROW | {"status": 503, "code": "model_\x1b[loading", "seconds": 300.0}
    head, going, _, titles, *rows = drawn({"in_flight": [waiting], "finished": [refused, broken, ROW], "next": None})
    assert head.split() == ["ID", "MODEL", "KEY", "ROUTE", "PHASE", "AGE", "QUEUED", "TTFT", "SENT"]
    assert going.split() == ["req-1", "tiny", "-", "/v1/messages", "queued", "3.00", "-", "-", "0", "B"]
    assert titles.split()[-3:] == ["CACHED", "OUT", "TOKENS/S"]
    assert rows[0].split()[2:] == ["tiny", "laptop", "/v1/messages", "200", "3.00", "0.50", "1.00", "7", "4", "5", "2.0"]
    assert rows[1].split()[2:] == ["-", "laptop", "/v1/messages", "left", "3.00", "0.50", "1.00", "-", "-", "-", "-"]
    assert rows[2].split()[5:8] == ["503", "model_[loading", "5m"]
    assert drawn({"in_flight": [], "finished": [], "next": None}) == ["No request is in flight."]
