"""Carries out the decisions: each is one task of one model, and the next observation shows what it did."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from sparkd import metrics
from sparkd.cluster.launcher import StartId
from sparkd.control import gauges
from sparkd.control.ability_lookup import AbilityLookup
from sparkd.control.backoff import FOR_ITS_OWNER, back_off
from sparkd.control.context import Context
from sparkd.control.desired_states import DesiredStates
from sparkd.control.journal import Served
from sparkd.control.lease import LeaseQueue
from sparkd.control.rank_stopper import RankStopper
from sparkd.control.record import Record
from sparkd.errors import (
    ClusterError,
    DoesNotFit,
    MemoryReturns,
    NodeRefused,
    NoRoom,
    SparkdError,
    refused_by,
)
from sparkd.fabric.transport import transport_summary
from sparkd.state.memory_book import Lack
from sparkd.state.model_state import AWAY, RESIDENT, STARTING, ModelState, check_step
from sparkd.state.nouns import OperationState, RankFact, RankHandle, Want

log = logging.getLogger("sparkd.supervisor")

AskFunction = Callable[[str, float], Awaitable[None]]


class Effects:
    """Carries out the actions, and alone writes a model's attempt."""

    def __init__(
        self,
        context: Context,
        queue: LeaseQueue,
        desired: DesiredStates,
        rank_stopper: RankStopper,
        abilities: AbilityLookup,
        *,
        ask: AskFunction,
    ) -> None:
        self._registry = context.registry
        self._journal = context.journal
        self._cluster = context.cluster
        self._boundary = context.boundary
        self._spawn = context.tasks.spawn
        self._wake = context.wake
        self._clock = context.clock
        self._wall = context.journal.wall
        self._rng = context.rng
        self._queue = queue
        self._desired = desired
        self._rank_stopper = rank_stopper
        self._abilities = abilities
        self._ask = ask

    def recall(self, handles: Iterable[RankHandle]) -> None:
        """At the start: mark the models of an earlier daemon's ranks as unknown, not absent, until their nodes were seen."""
        ordered = sorted(handles, key=lambda handle: handle.started_at_s)
        newest = {handle.model: handle.start for handle in ordered}
        for model, start in newest.items():
            ranks = sorted((each.rank, each.node_id) for each in ordered if each.model == model and each.start == start)
            if record := self._registry.records.get(model):
                record.attempt = replace(record.attempt, nodes=tuple(node for _, node in ranks))
        self._cluster.expect({node for record in self._registry.records.values() for node in record.attempt.nodes})

    async def place(self, record: Record) -> None:
        spec = record.spec
        if spec is None:
            return
        record.begin_attempt(self._clock())
        if record.failures:
            metrics.MODEL_RESTARTS.labels(record.name).inc()
        self.move(record, ModelState.PLANNED)
        try:
            placement = await self._cluster.placer.place(spec)
            rank_id = f"{placement.slug}-{record.desired.generation}-{secrets.token_hex(4)}"
            record.attempt = replace(record.attempt, rank_id=rank_id, nodes=placement.nodes, memory_gib=placement.memory_gib)
            start = StartId(rank_id, record.desired.generation, record.hash or "")
            handles = await self._cluster.launcher.start(placement, spec, start, partial(self._journal.say, "start", record.name))
        except NoRoom as error:
            self._wait_for_room(record, error)
            return
        except (SparkdError, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:
                raise  # nothing that a system said: a TimeoutError of some library
            fault = error if isinstance(error, SparkdError) else refused_by(error, "This node")
            record.attempt = replace(record.attempt, rank_id=None)
            lasts = isinstance(fault, DoesNotFit) and fault.lasts
            self.fail(record, fault.reason, fault.message, lasts=lasts, client_message=fault.client_message)
            return
        record.attempt = replace(record.attempt, handles=handles)
        for handle in handles:
            self._journal.keep_handle(handle)
        self.move(record, ModelState.LOADING)
        for handle in handles:
            self._journal.say("started", record.name, _started(handle), pid=handle.pid)

    def _wait_for_room(self, record: Record, error: NoRoom) -> None:
        """Wait for memory that other models hold: no failure of this one, since they may be evicted (sparkd.control.scheduler)."""
        lack = Lack(error.gib, error.nodes, error.only)
        if not isinstance(error, MemoryReturns) and self._cluster.reservations.book().has_room(record.name, lack):
            # The free memory is on a node that cannot serve it; another try would end the same.
            self.fail(record, DoesNotFit.__name__, error.message)
            return
        record.attempt = replace(record.attempt, rank_id=None, lack=lack)
        self.move(record, ModelState.STOPPED)

    def adopt(self, record: Record, ranks: Sequence[RankFact]) -> None:
        """Take over the ranks of one start, all of them, by number."""
        handles = tuple(fact.handle for fact in ranks)
        memory_gib = max(handle.memory_gib for handle in handles)
        record.begin_attempt(self._clock())
        record.attempt = replace(
            record.attempt,
            rank_id=handles[0].start,
            handles=handles,
            nodes=tuple(handle.node_id for handle in handles),
            memory_gib=memory_gib or None,
            adopted=True,
        )
        for handle in handles:
            self._journal.keep_handle(handle)
        self.move(record, ModelState.LOADING)
        for handle in handles:
            text = f"Rank {handle.rank_id}, process {handle.pid}, was adopted as it runs."
            self._journal.say("adopted", record.name, text, pid=handle.pid)
        # An older sparkd may have started it without a note of its memory: then all that the node lends counts as taken.
        self._cluster.reservations.hold(record.name, memory_gib or self._cluster.total_gib, record.attempt.nodes)

    async def ask(self, record: Record) -> None:
        handle = record.attempt.handle
        if handle is None:
            return
        record.last_asked_s = self._clock()
        if record.upstream is None:
            record.upstream = await self._cluster.launcher.upstream(handle)
        try:
            models = await self._cluster.models.served_models(record.upstream)
            if models is None:
                return
            if record.name not in models.names:
                self.fail(record, "WrongModel", f"The server answers for {', '.join(models.names)[:200]}, not for {record.name}.")
                return
            self._spawn(self._abilities.learn(record, record.upstream, models), f"learn {record.name}")
            if record.attempt.adopted and (served := self._journal.answered(handle.rank_id)) is not None:
                self._ready(record, served=served)
                return
            deadline_s = self._registry.config.start_deadline_s(record.spec) if record.spec else 60.0
            await self._ask(record.name, max(1.0, deadline_s - (self._clock() - record.attempt.since_s)))
        except SparkdError as error:
            record.attempt = replace(record.attempt, message=f"It does not answer yet: {error.message}")
            return
        if record.state in STARTING:
            self._ready(record)

    async def stop(self, record: Record, ranks: Sequence[RankFact]) -> None:
        def say(message: str) -> None:
            record.attempt = replace(record.attempt, message=message)
            self._journal.say("stop", record.name, message)

        await self._rank_stopper.stop("stop", record.name, record.name, ranks, say)

    async def destroy(self, ranks: Sequence[RankFact], reason: str) -> None:
        """ranks: all that were seen of one start."""
        start, model = ranks[0].handle.start, ranks[0].handle.model
        record = self._registry.records.get(model)
        for fact in ranks:
            self._journal.say("destroy", model, f"Rank {fact.handle.rank_id} is removed: {reason}.")
        ended = await self._rank_stopper.stop("destroy", start, model, ranks, partial(self._journal.say, "destroy", model))
        if ended and record and record.attempt.rank_id == start:
            record.attempt = replace(record.attempt, rank_id=None)

    def _ready(self, record: Record, served: Served | None = None) -> None:
        """Make the model READY. served: earlier times of an adopted model."""
        took_s = self._clock() - record.attempt.since_s
        load_s, ready_for_s = (self._load_s(record), 0.0) if served is None else (served.load_s, served.for_s or 0.0)
        record.attempt = replace(record.attempt, load_s=load_s, ready_since_s=self._clock() - ready_for_s)
        record.lost_load_s = 0.0
        self.move(record, ModelState.READY)
        record.since_wall_s -= ready_for_s
        if record.attempt.rank_id and served is None and load_s is not None:
            self._journal.keep_answered(record.attempt.rank_id, load_s)
        record.attempt = replace(record.attempt, reason=None, message=None)
        how = "was adopted and serves on" if record.attempt.adopted else f"answers after {took_s:.1f} s"
        self._journal.say("ready", record.name, f"The model {how}.", seconds=round(took_s, 2), adopted=record.attempt.adopted)
        if not record.attempt.adopted:
            metrics.MODEL_LOAD_SECONDS.labels(record.name).observe(took_s)
        self._journal.operations.finish(record, OperationState.SUCCEEDED, f"The model {how}.")
        record.queue.open(self._clock())
        handles = [fact.handle for fact in record.observed.ranks or () if fact.alive]
        if len({handle.node_id for handle in handles}) > 1:
            self._spawn(self._prove(record, handles), f"transport {record.name}")

    def _load_s(self, record: Record) -> float:
        """Seconds since its load began, under whichever daemon."""
        attempt = record.attempt
        took_s = self._clock() - attempt.since_s
        return max(took_s, self._wall() - attempt.handle.started_at_s) if attempt.adopted and attempt.handle else took_s

    async def _prove(self, record: Record, handles: list[RankHandle]) -> None:
        """NCCL has said how its ranks talk before they answered; a model that crawls over sockets must not look well."""
        rank_id, env = record.attempt.rank_id, record.spec.environment(self._registry.config.engine) if record.spec else {}
        try:
            findings = await self._cluster.launcher.transport(handles, env)
        except ClusterError as error:
            self._journal.say("transport", record.name, f"How its ranks talk is not known: {error.message}")
            return
        if findings and record.attempt.rank_id == rank_id:
            record.attempt = replace(record.attempt, transport=tuple(asdict(finding) for finding in findings))
            self._journal.say("transport", record.name, transport_summary(findings), verdict=findings[0].verdict)

    def resume(self, record: Record) -> None:
        """Make a model READY again that was requested while it drained."""
        self.move(record, ModelState.READY)
        self._journal.operations.finish(record, OperationState.SUCCEEDED, "It was requested again before it had ended.", kind="load")
        record.queue.open(self._clock())

    def mark_stopped(self, record: Record) -> None:
        message = "All of its processes have ended."
        if record.state is ModelState.FAILED:
            message = "It had failed; sparkd does not try again."
            self._cluster.reservations.release(record.name)
        record.forget_rank()
        self.move(record, ModelState.STOPPED)
        self._journal.operations.finish(record, OperationState.SUCCEEDED, message, kind="unload")
        self._journal.say("stopped", record.name, message)
        if record.desired.want is Want.STOPPED:
            self._queue.turn_away(record)
        if record.spec is None:
            self._journal.operations.finish(record, OperationState.CANCELLED, "The model was removed from the configuration.")
            del self._registry.records[record.name]
            self._journal.forget_wish(record.name)
        self._wake.set()

    def fail(self, record: Record, reason: str, message: str, *, lasts: bool = False, client_message: str | None = None) -> None:
        """Make the model FAILED. lasts: whether a retry cannot help although `reason` allows one. client_message: the text for clients."""
        if record.state in STARTING:
            record.lost_load_s = self._load_s(record)
        backoff = back_off(record, reason, self._registry.config.backoff, self._clock(), self._rng, lasts=lasts)
        message = f"{message} {backoff.advice}".rstrip()
        record.fail(reason, message, self._clock() + backoff.delay_s, lasts=backoff.lasts, client_message=client_message)
        record.last_failure = {"reason": reason, "message": message, "at_s": self._registry.wall()}
        waited = record.state in AWAY
        if reason == "RankLost":
            # Its node went out of sight. If that comes back first, the rank is adopted as it runs.
            record.attempt = replace(record.attempt, rank_id=None)
        self.move(record, ModelState.FAILED)
        entry = f"{reason}: {message}" if backoff.lasts else f"{reason}: {message} Next try in {backoff.delay_s:.0f} s."
        self._journal.say("failed", record.name, entry, reason=reason, failures=record.failures, start=record.attempt.rank_id)
        gauges.failed(record.name, reason)
        if reason in FOR_ITS_OWNER and self._journal.operations.running(record, "load"):
            self._desired.note_failed_load(record)
        self._journal.operations.finish(record, OperationState.FAILED, message, kind="load")
        self._queue.turn_away(record, keeps_place=waited)
        if not record.observed.ranks and reason != "RankLost":
            # Where a rank is left, its removal releases the memory; a lost one may still use it.
            self._cluster.reservations.release(record.name)

    def move(self, record: Record, state: ModelState) -> None:
        if record.state is state:
            return
        check_step(record.state, state)
        self._journal.say("state", record.name, f"{record.state} -> {state}", old=record.state.value, new=state.value)
        record.state, record.since_s, record.since_wall_s = state, self._clock(), self._wall()
        if state not in RESIDENT:
            record.close_upstream()

    def give_up(self, record: Record, error: SparkdError) -> None:
        """End the attempt of a model over which an error came that no code expected; the next attempt waits.

        A model that serves or ends goes on. A model that served before it was adopted is asked again.
        """
        if record.attempt.adopted and record.state in STARTING:
            record.attempt = replace(record.attempt, message=error.message)
        elif record.state in STARTING or record.state in AWAY:
            reason = error.reason if isinstance(error, NodeRefused) else "InternalError"
            self.fail(record, reason, error.message)

    def start(self, record: Record, name: str, work: Coroutine[Any, Any, None]) -> None:
        record.busy = name
        record.task = self._spawn(self._once(record, name, work), f"{name} {record.name}")
        record.task.add_done_callback(partial(self._done, record, work))

    async def _once(self, record: Record, name: str, work: Coroutine[Any, Any, None]) -> None:
        with self._boundary.around(name, record.name, partial(self.give_up, record)):
            try:
                await work
            except ClusterError as error:
                log.error("%s of %s failed: %s", name, record.name, error.message)

    def _done(self, record: Record, work: Coroutine[Any, Any, None], task: asyncio.Task[None]) -> None:
        """A callback and no `finally`: a task that is cancelled before its first step never enters its coroutine."""
        work.close()
        if record.task is task:
            record.busy = record.task = None
        self._wake.set()


def _started(handle: RankHandle) -> str:
    which = f" ({handle.rank + 1} of {handle.world})" if handle.world > 1 else ""
    return f"Rank {handle.rank_id}{which} started on {handle.node_id} as process {handle.pid}."
