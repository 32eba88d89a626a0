"""What the store keeps, in which order, how much of it, and what it reads of earlier releases."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from sparkd.errors import StateError
from sparkd.state.nouns import Desired, Operation, OperationState, Progress, Want
from sparkd.state.store import Store
from tests.sparkd.control.test_decision import HANDLE


@pytest.fixture
def store(tmp_path: Path):
    made = Store(tmp_path / "state.db")
    yield made
    made.close()


def test_what_is_saved_is_found_again_by_the_next_daemon(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.db"
    desired = Desired("org/Model:1", Want.RUNNING, 3, "admin", 12.5)
    operation = Operation("op", "load", "m", OperationState.RUNNING, "going", 1.0, progress=Progress(phase="loading", fraction=0.5))
    first = Store(path)
    first.wishes.save_desired(desired)
    first.ranks.save_handle(HANDLE)
    first.history.save_operation(operation)
    first.wishes.save_spec("m", {"model": "/x", "extra_args": ["--a", "b"]})
    event = first.history.add_event(1.0, "state", "m", "LOADING -> READY", {"old": "LOADING"})
    first.close()

    second = Store(path)

    assert second.wishes.desired() == {desired.model: desired}
    assert second.ranks.handles() == {HANDLE.rank_id: HANDLE}
    assert second.history.operations() == [operation]
    assert second.wishes.specs() == {"m": {"model": "/x", "extra_args": ["--a", "b"]}}
    assert second.history.events() == [event]
    second.close()


def test_forgetting(store: Store) -> None:
    store.wishes.save_desired(Desired("m", Want.RUNNING, 1, "admin", 0.0))
    store.ranks.save_handle(HANDLE)
    store.wishes.save_spec("m", {})
    store.wishes.forget_desired("m")
    store.ranks.forget_handle(HANDLE.rank_id)
    store.wishes.forget_spec("m")

    assert (store.wishes.desired(), store.ranks.handles(), store.wishes.specs()) == ({}, {}, {})


def test_events_are_in_order_paged_and_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.state.store.EVENTS_KEPT", 300)
    for number in range(500):
        store.history.add_event(float(number), "k", None, str(number), {})

    newest = store.history.events(limit=3)
    assert [event.message for event in newest] == ["497", "498", "499"]
    assert [event.seq for event in store.history.events(after_seq=newest[0].seq)] == [event.seq for event in newest[1:]]
    assert len(store.history.events(after_seq=1, limit=10**6)) <= 300 + 100


def test_events_are_read_in_slices_behind_a_place(store: Store) -> None:
    assert (store.history.behind_newest(0), store.history.events_behind(0, 5)) == (0, ([], 0))
    events = [store.history.add_event(float(number), "k", None, str(number), {}) for number in range(10)]

    assert [store.history.behind_newest(count) for count in (0, 3, 10, 11)] == [10, 7, 0, 0]
    assert store.history.events_behind(7, 2) == (events[7:9], 9)
    assert store.history.events_behind(9, 2) == (events[9:], 10)
    assert store.history.events_behind(10, 2) == ([], 10)


def test_only_the_last_operations_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkd.state.store.OPERATIONS_KEPT", 20)
    operation = Operation("0", "load", "m", OperationState.SUCCEEDED, "", 0.0)
    for number in range(25):
        store.history.save_operation(replace(operation, id=str(number), created_at_s=float(number)))

    kept = store.history.operations()
    assert (len(kept), kept[0].id) == (20, "5")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    content = b"this is no database, but long enough to be one" * 50
    path = tmp_path / "state.db"
    path.write_bytes(content)

    with pytest.raises(StateError, match=r"state\.db .*not a database"):
        Store(path)
    assert path.read_bytes() == content


def test_schema_version_1_as_the_first_release_wrote_it_still_opens(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    golden = Path(__file__).parents[2] / "fixtures" / "state-v1.sql"
    with sqlite3.connect(path) as db:
        db.executescript(golden.read_text())
    db.close()

    found = Store(path)

    assert found.wishes.desired()["m"].want is Want.RUNNING
    assert found.ranks.handles()["r1"] == HANDLE
    assert found.history.operations()[0].state is OperationState.SUCCEEDED
    assert found.history.events()[0].kind == "ready"
    found.close()


def test_an_engine_that_answered_under_an_earlier_release_has_done_so_and_no_more_is_known(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with sqlite3.connect(path) as db:
        db.executescript("CREATE TABLE answered(rank_id TEXT PRIMARY KEY); INSERT INTO answered VALUES ('old'); PRAGMA user_version=1;")
    db.close()
    for _ in range(2):
        found = Store(path)
        assert (found.ranks.answered("old"), found.ranks.answered("new")) == ((None, None), None)
        found.close()
    found = Store(path)
    found.ranks.save_answered("new", 12.5, 3.25)
    assert found.ranks.answered("new") == (12.5, 3.25)
    # The earlier release reads and writes it as it did.
    with sqlite3.connect(path) as db:
        db.execute("INSERT OR REPLACE INTO answered(rank_id) VALUES ('again')")
    db.close()
    assert found.ranks.answered("again") == (None, None)
    found.close()
