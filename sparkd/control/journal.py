"""Owns whatever must outlive the daemon: wishes, handles, operations, events, written as they happen. Never decides, never acts."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sparkd.condition import Condition
from sparkd.control.load_costs import Loads, recalled
from sparkd.control.record import Record
from sparkd.errors import StateError, UnknownOperation
from sparkd.execution.boundary import Boundary
from sparkd.state.nouns import (
    EVENTS_KEPT,
    OPERATIONS_KEPT,
    Desired,
    Event,
    Operation,
    OperationState,
    Progress,
    RankHandle,
    Store,
    Want,
)
from sparkd.state.rows import DAMAGES_SHOWN, Damage

log = logging.getLogger("sparkd.events")

# Rows of history that are read in one turn of the loop: below a millisecond.
SLICE = 50


@dataclass(frozen=True, slots=True)
class Served:
    """How long an engine that has answered has been READY, and how long its load took, seconds; None where nobody kept it."""

    for_s: float | None
    load_s: float | None


class Ledger:
    """The supervisor's book. A full disk must not end serving: `trouble` says what is not saved, and the next write tries again."""

    def __init__(self, store: Store, wall: Callable[[], float], boundary: Boundary | None = None) -> None:
        self._store = store
        self.wall = wall
        self._boundary = boundary or Boundary(time.monotonic)
        self._operations: dict[str, Operation] = {operation.id: operation for operation in store.operations()}
        self._reading = asyncio.Lock()
        # How many events were written, and what wakes those who wait for the next.
        self.written = 0
        self._news = asyncio.Event()
        self.trouble: Condition | None = None

    def tell_damages(self) -> None:
        """Once at the start: which rows of the database are left out, an event for each table."""
        tables: dict[str, list[Damage]] = {}
        for damage in self._store.damages:
            tables.setdefault(damage.table, []).append(damage)
        for table, damages in tables.items():
            file, shown = str(self._store.path), damages[:DAMAGES_SHOWN]
            for damage in shown:
                log.warning("%s: %s; it is left out", file, damage)
            message = f"{file}: {len(damages)} of its rows cannot be used and are left out: {'; '.join(map(str, shown))}."
            self.say("store", None, message, file=file, table=table, rows=[damage.row for damage in shown], count=len(damages))

    def keep_wish(self, desired: Desired) -> None:
        self._persist(lambda: self._store.save_desired(desired))

    def forget_wish(self, name: str) -> None:
        self._persist(lambda: self._store.forget_desired(name))

    def handles(self) -> list[RankHandle]:
        """Of ranks that were started and have not been ended, by any daemon."""
        return list(self._store.handles().values())

    def keep_handle(self, handle: RankHandle) -> None:
        self._persist(lambda: self._store.save_handle(handle))

    def forget_handle(self, rank_id: str) -> None:
        self._persist(lambda: self._store.forget_handle(rank_id))

    def keep_answered(self, rank_id: str, load_s: float) -> None:
        self._persist(lambda: self._store.save_answered(rank_id, self.wall(), load_s))

    def answered(self, rank_id: str) -> Served | None:
        """None where it is not known: then it is asked again."""
        found = None
        with self._boundary.around("store"):
            try:
                found = self._store.answered(rank_id)
            except StateError as error:
                self._note(error.message)
        return None if found is None else Served(None if found[0] is None else max(0.0, self.wall() - found[0]), found[1])

    def operation(self, operation_id: str) -> Operation:
        operation = self._operations.get(operation_id)
        if operation is None:
            raise UnknownOperation(f"The operation {operation_id[:64]!r} is not known; only the last {OPERATIONS_KEPT} are kept.")
        return operation

    def operations(self, records: dict[str, Record]) -> dict[str, Operation]:
        """All of them; a running one carries its model's progress."""
        return {operation.id: self._with_progress(operation, records) for operation in self._operations.values()}

    def running(self, record: Record, kind: str) -> Operation | None:
        operation = self._operations.get(record.operation or "")
        return operation if operation and operation.kind == kind and operation.state is OperationState.RUNNING else None

    def begin(self, record: Record, kind: str, by: str) -> Operation:
        self.finish(record, OperationState.CANCELLED, f"Superseded by {kind}.")
        operation = Operation(secrets.token_hex(8), kind, record.name, OperationState.RUNNING, f"Asked for by {by}.", self.wall())
        record.operation = operation.id
        self._keep(operation)
        return operation

    def finish(self, record: Record, state: OperationState, message: str, kind: str | None = None) -> None:
        """End the record's running operation, if it has one (of this kind)."""
        operation = self._operations.get(record.operation or "")
        if operation is None or operation.state is not OperationState.RUNNING or (kind and operation.kind != kind):
            return
        self._keep(replace(operation, state=state, message=message, finished_at_s=self.wall(), progress=record.progress))
        record.operation = None

    def open(self, kind: str, model: str, by: str) -> Operation:
        """Begin an operation that is no wish for the model: a pull goes on whatever becomes of the model's engine."""
        operation = Operation(secrets.token_hex(8), kind, model, OperationState.RUNNING, f"Asked for by {by}.", self.wall())
        self._keep(operation)
        return operation

    def tell(self, operation_id: str, message: str, progress: Progress) -> None:
        """How far an operation of `open` is; not written down."""
        if (operation := self._operations.get(operation_id)) and operation.state is OperationState.RUNNING:
            self._operations[operation_id] = replace(operation, message=message, progress=progress)

    def close(self, operation_id: str, state: OperationState, message: str) -> None:
        """End an operation of `open`."""
        if (operation := self._operations.get(operation_id)) and operation.state is OperationState.RUNNING:
            self._keep(replace(operation, state=state, message=message, finished_at_s=self.wall()))

    def take_over(self, records: dict[str, Record]) -> None:
        """An operation of an earlier daemon goes on where its wish still stands, and ends otherwise."""
        for operation in list(self._operations.values()):
            if operation.state is not OperationState.RUNNING:
                continue
            record = records.get(operation.model)
            kind = "load" if record and record.desired.want is Want.RUNNING else "unload"
            if record and record.operation is None and kind == operation.kind:
                record.operation = operation.id
            else:
                self._keep(replace(operation, state=OperationState.CANCELLED, message="The daemon ended.", finished_at_s=self.wall()))

    def failed_ago_s(self, reason: str, window_s: float) -> dict[str, list[float]]:
        """model -> how long ago it failed for this reason, seconds, the oldest first; an earlier daemon's failures count too."""
        found: dict[str, list[float]] = {}
        for event in self._store.events(0, EVENTS_KEPT, kind="failed"):
            age_s = max(0.0, self.wall() - event.at_s)
            if event.model and event.data.get("reason") == reason and age_s < window_s:
                found.setdefault(event.model, []).append(age_s)
        return found

    def loads(self, now_s: float) -> Loads:
        """The cost of evictions so far, by earlier daemons' events. now_s: this moment, of the clock that the answer goes by."""
        return recalled(self._store.events(0, EVENTS_KEPT), now_s, self.wall())

    def say(self, kind: str, model: str | None, message: str, **data: Any) -> None:
        """One event: to the log, the database and everyone who listens."""
        log.info("%s%s: %s", f"{model}: " if model else "", kind, message)
        written = False
        with self._boundary.around("store", failed=self._note):
            try:
                self._store.add_event(self.wall(), kind, model, message, data)
                written = True
            except StateError as error:
                self._note(error.message)
        if not written:
            return
        self.written += 1
        self._news.set()
        self._news = asyncio.Event()

    def events(self, after_seq: int, limit: int) -> list[Event]:
        """All at once. See Store.events."""
        return self._store.events(after_seq, limit)

    async def slice_of_events(self, after_seq: int, limit: int) -> tuple[list[Event], int]:
        """See Store.events_behind; at most SLICE rows. Readers take turns, and the loop goes round between two of them: 2,000 who read a
        thousand events each hold nothing else up."""
        async with self._reading:
            await asyncio.sleep(0)
            return self._store.events_behind(after_seq, min(limit, SLICE))

    def behind_newest(self, count: int) -> int:
        """See Store.behind_newest."""
        return self._store.behind_newest(count)

    async def wait_for_more(self, written: int) -> None:
        """Until more events were written than `written`, an earlier value of the attribute of this name."""
        while self.written <= written:
            await self._news.wait()

    def _keep(self, operation: Operation) -> None:
        self._operations[operation.id] = operation
        while len(self._operations) > OPERATIONS_KEPT:
            self._operations.pop(next(iter(self._operations)))
        self._persist(lambda: self._store.save_operation(operation))

    def _with_progress(self, operation: Operation, records: dict[str, Record]) -> Operation:
        record = records.get(operation.model)
        if operation.state is not OperationState.RUNNING or record is None or record.operation != operation.id:
            return operation
        return replace(operation, progress=record.progress)

    def _persist(self, write: Callable[[], object]) -> None:
        with self._boundary.around("store", failed=self._note):
            try:
                write()
                self.trouble = None
            except StateError as error:
                self._note(error.message)

    def _note(self, message: str) -> None:
        if self.trouble is None:
            log.error("state is not saved: %s", message)
        self.trouble = Condition("StateNotSaved", message)


def say_change(journal: Ledger, kind: str, name: str, origin: str) -> None:
    """kind: added, changed or removed. origin: `file` or `api`."""
    actor = "The configuration file" if origin == "file" else "The admin API"
    journal.say(kind, name, f"{actor} has {kind} it.", origin=origin)
