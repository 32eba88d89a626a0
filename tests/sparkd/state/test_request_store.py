"""The table of finished requests: what it keeps, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sparkd.errors import StateError
from sparkd.state.request_store import REQUESTS_KEPT, RequestRow, RequestStore
from sparkd.state.store import Store

ROW = RequestRow(
    *(1, "req-1", "tiny", "/v1/chat/completions", "laptop", 1000.0, 200, None, 3.0, 0.5, 1.0, 7, 4, 5),
    bytes_out=900,
    streamed=True,
)


def numbered(*numbers: int, **changes: Any) -> list[RequestRow]:
    return [ROW._replace(number=number, **changes) for number in numbers]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RequestStore]:
    store = RequestStore(tmp_path / "state.db")
    yield store
    store.close()


def test_what_is_written_is_read_by_the_next_daemon(tmp_path: Path) -> None:
    store = RequestStore(tmp_path / "state.db")
    nothing = RequestRow(2, "r", "", "/score", None, 1.5, None, "bad_request", 0.0, None, None, None, None, None, 0, streamed=False)
    store.write([ROW, nothing])
    store.close()
    store = RequestStore(tmp_path / "state.db")
    assert store.last_number() == 2
    assert store.read() == [nothing, ROW]
    store.close()


def test_pages_and_filters(store: RequestStore) -> None:
    store.write([*numbered(1, 2, 3), *numbered(4, model="other"), *numbered(5, status=500), *numbered(6, code="engine_gone")])
    assert [row.number for row in store.read(limit=2)] == [6, 5]
    assert [row.number for row in store.read(before=5, limit=2)] == [4, 3]
    assert [row.number for row in store.read(model="tiny")] == [6, 5, 3, 2, 1]
    assert [row.number for row in store.read(failed=True)] == [6, 5]
    assert [row.number for row in store.read(failed=False, limit=3)] == [4, 3, 2]
    assert store.read(model="' OR 1=1 --") == []


def test_the_oldest_go(store: RequestStore) -> None:
    store.write(numbered(*range(1, REQUESTS_KEPT + 1)))
    store.write(numbered(REQUESTS_KEPT + 1, REQUESTS_KEPT + 2))
    numbers = [row.number for row in store.read()]
    assert (len(numbers), numbers[0], numbers[-1]) == (REQUESTS_KEPT, REQUESTS_KEPT + 2, 3)


def test_rates() -> None:
    assert ROW.tokens_per_s == (5 - 1) / (3.0 - 1.0)
    assert ROW._replace(streamed=False).tokens_per_s == 5 / (3.0 - 0.5)
    for nothing in (
        ROW._replace(completion_tokens=None),
        ROW._replace(completion_tokens=0),
        ROW._replace(completion_tokens=1),
        ROW._replace(ttft_s=None),
        ROW._replace(seconds=1.0),
    ):
        assert nothing.tokens_per_s is None
    assert [ROW.failed, ROW._replace(status=499).failed, ROW._replace(code="x").failed] == [False, True, True]
    assert set(ROW.body()) == {*RequestRow._fields, "tokens_per_s", "failed"}


def test_it_shares_state_db_with_the_supervisor(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "state.db")) as others, closing(RequestStore(tmp_path / "state.db")) as store:
        others.wishes.save_spec("m", {"model": "o/m"})
        store.write([ROW])
        assert (store.read(), others.wishes.specs()) == ([ROW], {"m": {"model": "o/m"}})
    with closing(Store(tmp_path / "state.db")) as others:
        assert others.damages == []


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(StateError, match=r"state\.db"):
        RequestStore(tmp_path / "state.db")
