"""Writes down whatever must outlive the daemon, as it happens: wishes, handles, operations, events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkd.condition import Condition
from sparkd.control.operations import Operations
from sparkd.errors import StateError
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import Desired, Event, RankHandle
from sparkd.state.store import History, Store

log = logging.getLogger("sparkd.events")

# Rows of history that are read in one turn of the loop: below a millisecond.
SLICE = 50
# Events that are kept in memory while they cannot be written; the oldest go first.
UNSAVED_EVENTS = 1000


class EventFeed:
    """The events for those who follow them. `written`: how many were written since the start."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._reading = asyncio.Lock()
        self.written = 0
        self._news = asyncio.Event()

    def note(self) -> None:
        """One more was written: wake those who wait for the next."""
        self.written += 1
        self._news.set()
        self._news = asyncio.Event()

    async def slice_of_events(self, after_seq: int, limit: int) -> tuple[list[Event], int]:
        """See History.events_behind; at most SLICE rows. Readers take turns, and the loop goes round between two of them: 2,000 who read a
        thousand events each hold nothing else up."""
        async with self._reading:
            await asyncio.sleep(0)
            return self._history.events_behind(after_seq, min(limit, SLICE))

    def behind_newest(self, count: int) -> int:
        """See History.behind_newest."""
        return self._history.behind_newest(count)

    async def wait_for_more(self, written: int) -> None:
        """Until more events were written than `written`, an earlier value of the attribute of this name."""
        while self.written <= written:
            await self._news.wait()


@dataclass(frozen=True, slots=True)
class Served:
    """The note of an earlier daemon about an engine that answered. None where it noted nothing.

    for_s: seconds since it became READY.
    load_s: seconds that its load took.
    """

    for_s: float | None
    load_s: float | None


class Journal:
    """Writes the state that outlives the daemon. A full disk must not end serving: `trouble` says so until everything is saved."""

    def __init__(self, store: Store, wall: Callable[[], float], boundary: Boundary | None = None) -> None:
        self._store = store
        self.wall = wall
        self._boundary = boundary or Boundary(time.monotonic)
        # By table and row, the oldest first: the last write of each row that is not saved.
        self._unsaved: dict[tuple[str, str], Callable[[], object]] = {}
        # Events of this daemon: the number of one is its row's key.
        self._said = 0
        self.operations = Operations(store.history, self._persist, wall)
        self.feed = EventFeed(store.history)
        self.trouble: Condition | None = None

    def keep_wish(self, desired: Desired) -> None:
        self._persist("wish", desired.model, lambda: self._store.wishes.save_desired(desired))

    def forget_wish(self, name: str) -> None:
        self._persist("wish", name, lambda: self._store.wishes.forget_desired(name))

    def handles(self) -> list[RankHandle]:
        """The handles of all ranks that this or an earlier daemon started and none has ended."""
        return list(self._store.ranks.handles().values())

    def keep_handle(self, handle: RankHandle) -> None:
        self._persist("handle", handle.rank_id, lambda: self._store.ranks.save_handle(handle))

    def forget_handle(self, rank_id: str) -> None:
        self._persist("handle", rank_id, lambda: self._store.ranks.forget_handle(rank_id))

    def keep_answered(self, rank_id: str, load_s: float) -> None:
        at_s = self.wall()
        self._persist("answered", rank_id, lambda: self._store.ranks.save_answered(rank_id, at_s, load_s))

    def answered(self, rank_id: str) -> Served | None:
        """None where it is not known: then it is asked again."""
        row = None
        with self._boundary.around("store"):
            try:
                row = self._store.ranks.answered(rank_id)
            except StateError as error:
                self._note(error.message)
        return None if row is None else Served(None if row[0] is None else max(0.0, self.wall() - row[0]), row[1])

    def say(self, kind: str, model: str | None, message: str, **data: Any) -> None:
        """One event: to the log, the database and everyone who listens."""
        log.info("%s%s: %s", f"{model}: " if model else "", kind, message)
        at_s = self.wall()

        def write() -> None:
            self._store.history.add_event(at_s, kind, model, message, data)
            self.feed.note()

        self._said += 1
        self._unsaved.pop(("event", str(self._said - UNSAVED_EVENTS)), None)
        self._persist("event", str(self._said), write)

    def events(self, after_seq: int, limit: int) -> list[Event]:
        """All at once. See History.events."""
        return self._store.history.events(after_seq, limit)

    def save_rest(self) -> None:
        """Write what could not be saved: in each tick, and with the next write."""
        for row, write in [*self._unsaved.items()]:
            with self._boundary.around("store", failed=lambda error: self._note(error.message)):
                try:
                    write()
                except StateError as error:
                    self._note(error.message)
                    return
                del self._unsaved[row]
                if not self._unsaved:
                    self.trouble = None

    def _persist(self, table: str, key: str, write: Callable[[], object]) -> None:
        # Behind the others: to forget a handle is to forget that it has answered.
        self._unsaved.pop((table, key), None)
        self._unsaved[table, key] = write
        self.save_rest()

    def _note(self, message: str) -> None:
        if self.trouble is None:
            log.error("state is not saved: %s", message)
        self.trouble = Condition("StateNotSaved", message)


def say_change(journal: Journal, kind: str, name: str, origin: str) -> None:
    """kind: added, changed or removed. origin: `file` or `api`."""
    actor = "The configuration file" if origin == "file" else "The admin API"
    journal.say(kind, name, f"{actor} has {kind} it.", origin=origin)
