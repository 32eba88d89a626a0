"""The book of long actions: what the next daemon makes of those that ran, and how many are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkd.control.operations import Operations
from sparkd.control.record import Record
from sparkd.state.nouns import Desired, OperationState, Want
from sparkd.state.store import History, Store


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    store = Store(tmp_path / "state.db")
    yield store.history
    store.close()


def book(history: History) -> Operations:
    return Operations(history, lambda _table, _key, write: write(), lambda: 1.0)


@pytest.mark.parametrize(("want", "state"), [(Want.RUNNING, OperationState.RUNNING), (Want.STOPPED, OperationState.CANCELLED)])
def test_one_of_an_earlier_daemon_goes_on_where_its_wish_stands_and_ends_otherwise(
    want: Want, state: OperationState, history: History
) -> None:
    def record() -> Record:
        return Record("m", Desired("m", want, 1, "admin", 0.0), 0.0, 0.0)

    begun = book(history).begin(record(), "load", "admin")
    again, taken = book(history), record()
    again.take_over({"m": taken})

    assert again.find(begun.id).state is state
    assert taken.operation == (begun.id if want is Want.RUNNING else None)


def test_only_the_last_are_kept(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.control.operations.OPERATIONS_KEPT", 3)
    made = book(history)
    begun = [made.open("pull", f"m{number}", "admin").id for number in range(5)]

    assert list(made.all({})) == begun[2:]


def test_after_a_clock_was_set_back_the_newest_are_kept(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("control.operations", "state.store"):
        monkeypatch.setattr(f"sparkd.{module}.OPERATIONS_KEPT", 3)
    begun = []
    for wall_s in (9e9, 9e9, 9e9, 1e9, 2e9):
        made = Operations(history, lambda _table, _key, write: write(), lambda wall_s=wall_s: wall_s)  # type: ignore[misc]
        begun.append(made.open("pull", "m", "admin").id)
        made.close(begun[-1], OperationState.SUCCEEDED, "done")

    assert [operation.id for operation in history.operations()] == list(made.all({})) == begun[2:]
