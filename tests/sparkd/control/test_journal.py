"""The book of the supervisor: what could not be saved is kept, and saved before it says that all is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from sparkd.control.journal import Journal
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Desired, Want
from sparkd.state.store import Store
from tests.sparkd.control.test_decision import HANDLE
from tests.sparkd.control.test_supervisor import make_ready, stage
from tests.support.fakes import FakeClock

WISH = Desired("m", Want.STOPPED, 2, "admin", 0.0)


class Other:
    """Another connection that writes to the same file."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None)

    def begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def end(self) -> None:
        self.db.execute("ROLLBACK")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "state.db")) as made:
        made._db.execute("PRAGMA busy_timeout=0")
        yield made


@pytest.fixture
def other(store: Store) -> Iterator[Other]:
    made = Other(store.path)
    yield made
    made.db.close()


def test_what_another_writer_held_up_is_saved_before_the_condition_ends(store: Store, other: Other) -> None:
    journal = Journal(store, FakeClock())
    journal.keep_handle(HANDLE)
    other.begin()
    journal.keep_wish(Desired("m", Want.RUNNING, 1, "admin", 0.0))
    journal.keep_wish(WISH)
    journal.keep_answered(HANDLE.rank_id, 3.0)
    journal.forget_handle(HANDLE.rank_id)
    assert journal.trouble is not None and journal.trouble.reason == "StateNotSaved"
    other.end()

    journal.keep_wish(Desired("k", Want.RUNNING, 1, "admin", 0.0))

    assert journal.trouble is None
    assert (store.wishes.desired()["m"], set(store.wishes.desired())) == (WISH, {"m", "k"})
    assert (store.ranks.handles(), store.ranks.answered(HANDLE.rank_id)) == ({}, None)


def test_an_event_that_could_not_be_written_is_written_later_with_its_own_time(
    store: Store, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkd.control.journal.UNSAVED_EVENTS", 3)
    clock = FakeClock()
    journal = Journal(store, clock)
    other.begin()
    journal.say("note", None, "left out")
    journal.say("note", "m", "first", why="x")
    clock.now_s += 5
    journal.say("note", None, "second")
    journal.say("note", None, "third")
    assert (journal.feed.written, journal.trouble and journal.trouble.reason) == (0, "StateNotSaved")
    other.end()

    journal.save_rest()

    assert (journal.feed.written, journal.trouble) == (3, None)
    first, *later = store.history.events()
    assert (first.message, first.model, first.at_s, first.data) == ("first", "m", 1000.0, {"why": "x"})
    assert [event.message for event in later] == ["second", "third"]


def test_an_older_wish_never_replaces_a_newer(store: Store, other: Other) -> None:
    journal = Journal(store, FakeClock())
    other.begin()
    journal.keep_wish(Desired("m", Want.RUNNING, 1, "admin", 0.0))
    other.end()
    journal.keep_wish(WISH)
    journal.save_rest()
    assert store.wishes.desired() == {"m": WISH}


async def test_an_unload_that_could_not_be_saved_outlives_the_daemon_all_the_same(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await make_ready(made)
        made.store._db.execute("PRAGMA busy_timeout=0")
        other = Other(made.store.path)
        other.begin()
        made.supervisor.want("m", Want.STOPPED, "admin")
        assert [one.reason for one in made.supervisor.snapshot().conditions] == ["StateNotSaved"]
        other.db.close()
        await made.tick()
        assert made.supervisor.snapshot().conditions == ()
        assert made.store.wishes.desired()["m"].want is Want.STOPPED
    async with stage(tmp_path) as made:
        await made.tick(3)
        assert made.state("m") == ModelState.STOPPED
        assert made.cluster.ranks == {}
