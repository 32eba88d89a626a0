"""`sparkd requests --follow` over many pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkd.cli.requests import _since


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


@pytest.mark.parametrize(("count", "shown"), [(0, 0), (5, 4), (25, 11)])
def test_what_ended_since_the_last_look(count: int, shown: int) -> None:
    assert [row["number"] for row in _since(session(count), shown, {"limit": 10})] == list(range(shown + 1, count + 1))
