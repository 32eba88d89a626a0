"""The long actions and how each of them stands, also those of earlier daemons."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from sparkd.control.record import Record
from sparkd.errors import NotFound
from sparkd.state.nouns import Operation, OperationState, Progress, Want
from sparkd.state.store import OPERATIONS_KEPT, History


class Operations:
    """Keeps the last operations.

    persist: writes a row, by its table, its key and the write. A full disk does not end serving.
    wall: calendar seconds.
    """

    def __init__(self, history: History, persist: Callable[[str, str, Callable[[], object]], None], wall: Callable[[], float]) -> None:
        self._history = history
        self._persist = persist
        self._wall = wall
        self._operations: dict[str, Operation] = {operation.id: operation for operation in history.operations()}

    def find(self, operation_id: str) -> Operation:
        operation = self._operations.get(operation_id)
        if operation is None:
            raise NotFound(f"The operation {operation_id[:64]!r} is not known; only the last {OPERATIONS_KEPT} are kept.")
        return operation

    def all(self, records: dict[str, Record]) -> dict[str, Operation]:
        """All of them; a running one carries its model's progress."""
        return {operation.id: self._with_progress(operation, records) for operation in self._operations.values()}

    def running(self, record: Record, kind: str) -> Operation | None:
        operation = self._operations.get(record.operation or "")
        return operation if operation and operation.kind == kind and operation.state is OperationState.RUNNING else None

    def begin(self, record: Record, kind: str, by: str) -> Operation:
        self.finish(record, OperationState.CANCELLED, f"It was cancelled: {kind} requested by {by}.")
        operation = self.open(kind, record.name, by)
        record.operation = operation.id
        return operation

    def finish(self, record: Record, state: OperationState, message: str, kind: str | None = None) -> None:
        """End the record's running operation, if it has one (of this kind)."""
        operation = self._operations.get(record.operation or "")
        if operation is not None and kind in (None, operation.kind):
            self.close(operation.id, state, message, record.observed.progress)
            record.operation = None

    def open(self, kind: str, model: str, by: str) -> Operation:
        """Begin an operation that is no wish for the model: a pull goes on whatever becomes of the model's engine."""
        operation = Operation(secrets.token_hex(8), kind, model, OperationState.RUNNING, f"Requested by {by}.", self._wall())
        self._keep(operation)
        return operation

    def tell(self, operation_id: str, message: str, progress: Progress) -> None:
        """How far an operation of `open` is; not written down."""
        if (operation := self._operations.get(operation_id)) and operation.state is OperationState.RUNNING:
            self._operations[operation_id] = replace(operation, message=message, progress=progress)

    def close(self, operation_id: str, state: OperationState, message: str, progress: Progress | None = None) -> None:
        """End an operation. progress: how far it came, if it has not told that itself."""
        if (operation := self._operations.get(operation_id)) and operation.state is OperationState.RUNNING:
            ended_with = progress or operation.progress
            self._keep(replace(operation, state=state, message=message, finished_at_s=self._wall(), progress=ended_with))

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
                self.close(operation.id, OperationState.CANCELLED, "The daemon ended.")

    def _keep(self, operation: Operation) -> None:
        self._operations[operation.id] = operation
        while len(self._operations) > OPERATIONS_KEPT:
            self._operations.pop(next(iter(self._operations)))
        self._persist("operation", operation.id, lambda: self._history.save_operation(operation))

    def _with_progress(self, operation: Operation, records: dict[str, Record]) -> Operation:
        record = records.get(operation.model)
        if operation.state is not OperationState.RUNNING or record is None or record.operation != operation.id:
            return operation
        return replace(operation, progress=record.observed.progress)
