"""Changes the desired state of each model, and persists every change before the loop acts on it."""

from __future__ import annotations

from dataclasses import replace

from sparkd.control.context import Context
from sparkd.control.record import Record
from sparkd.errors import Unavailable
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Desired, Operation, OperationState, Want


class DesiredStates:
    """The only writer of desired states."""

    def __init__(self, context: Context) -> None:
        self._registry = context.registry
        self._journal = context.journal
        self._wake = context.wake
        self._clock = context.clock

    def want(self, name: str, want: Want, by: str) -> Operation:
        """See Supervisor.want."""
        record = self._registry.find(name, configured=want is Want.RUNNING)
        kind = "load" if want is Want.RUNNING else "unload"
        running = self._journal.operations.running(record, kind)
        renews = record.desired.want is not want or record.is_taken_over(want, by)
        if running and not renews:
            return running
        if renews:
            record.desired = Desired(record.name, want, record.desired.generation + 1, by, self._journal.wall())
            self._journal.keep_wish(record.desired)
            self._journal.say("want", record.name, f"{want} requested by {by}.", by=by)
        if want is Want.STOPPED:
            record.queue.withdraw()
            record.cancel("place", "ask")
        elif record.state is not ModelState.READY:
            record.queue.request(self._clock())
        operation = self._journal.operations.begin(record, kind, by)
        if record.state is (ModelState.READY if want is Want.RUNNING else ModelState.STOPPED):
            self._journal.operations.finish(record, OperationState.SUCCEEDED, f"It was {record.state} already.")
            if want is Want.STOPPED:
                record.queue.promised_at_s = None
                record.queue.turn_away(unloaded(record))
        self._follow(record.name, want, by)
        self._wake.set()
        return self._journal.operations.find(operation.id)

    def note_failed_load(self, record: Record) -> None:
        """After an operator's load failed, keep the wish, but evict nothing for it until a client or an operator asks again."""
        if record.desired.by == "admin":
            record.desired = replace(record.desired, by="retry")
            self._journal.keep_wish(record.desired)

    def end_removed(self) -> None:
        """Wish STOPPED for models that the configuration no longer has. Nothing is persisted: the row goes with the model."""
        for record in self._registry.records.values():
            if record.spec is None and record.desired.want is Want.RUNNING:
                record.desired = replace(record.desired, want=Want.STOPPED, by="config")

    def _follow(self, name: str, want: Want, by: str) -> None:
        """Apply the wish to the model's companions too.

        An operator's unload stops them all. Any other stop ends only companions that are unused and were wished only as companions.
        """
        for other in sorted(self._registry.ties.companions_of(name)):
            record = self._registry.records.get(other)
            if record is None or record.desired.want is want:
                continue
            unused = record.desired.by == "group" and not record.queue.in_use
            if want is Want.RUNNING or by == "admin" or unused:
                self.want(other, want, "group")


def unloaded(record: Record) -> Unavailable:
    """The error for a request that waited for a model while it was unloaded."""
    return Unavailable(f"The model {record.name} was unloaded meanwhile.")
