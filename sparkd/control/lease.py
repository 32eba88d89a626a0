"""Gives each request a lease of an engine, and queues requests whose model is not READY."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

from sparkd.control.ability_lookup import AbilityLookup
from sparkd.control.context import Context
from sparkd.control.desired_states import DesiredStates, unloaded
from sparkd.control.record import Record
from sparkd.control.request_queue import PROMISE_S
from sparkd.control.views import holders, view
from sparkd.errors import (
    ABSENT,
    DoesNotFit,
    Draining,
    ModelCannotLoad,
    ModelFailed,
    ModelLoading,
    ModelUnusable,
    NoToolParser,
    RouteNotServed,
    TooManyRequests,
    Unavailable,
)
from sparkd.execution.shared_answer import SharedAnswer
from sparkd.gateway.proxy import OnWait
from sparkd.gateway.upstream import Upstream
from sparkd.state.abilities import RequestNeeds
from sparkd.state.model_state import AWAY, SERVING, STARTING, ModelState
from sparkd.state.nouns import Want
from sparkd.vllm.parsers import of_handle

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger("sparkd.supervisor")

# The failures that another model's end may help.
_FOR_MEMORY = (DoesNotFit.__name__, "MemoryGuard")

# After wait_for_load_s a request waits up to KEPT_S longer, checked every KEEP_EVERY_S, while the load moves and at most NEARLY_S of it are
# left. A load without progress for STILL_S does not move.
KEPT_S, KEEP_EVERY_S = 120.0, 5.0
NEARLY_S, STILL_S = 60.0, 30.0

# A client whose own limit is below the load's time leaves and asks again: SDKs within 8 s, people and schedules later.
ABANDONED_S = 30.0

_ABSENT, _SEE = "The path in this model's `model` key cannot be used.", "Run `sparkd ps` for the reason."


class Lease:
    """`async with supervisor.lease(name) as lease:` gives .model (the canonical name) and .upstream.

    Leaving the block ends the request's count in flight. The caller sets .answered: whether the engine has begun a good answer, or None for
    an answer that shows nothing about the engine.
    """

    __slots__ = ("_held", "_name", "_need", "_on_wait", "_probe", "_queue", "answered", "model", "upstream")

    model: str
    upstream: Upstream

    def __init__(self, queue: LeaseQueue, name: str, probe: bool, on_wait: OnWait | None, need: RequestNeeds | None) -> None:
        self._queue = queue
        self._name = name
        self._probe = probe
        self._on_wait = on_wait
        self._need = need
        self._held: Record | None = None
        self.answered: bool | None = False

    async def __aenter__(self) -> Lease:
        record = await self._queue.enter(self._name, self._probe, self._on_wait, self._need)
        upstream = record.upstream
        if upstream is None:
            raise _gone_down(record)
        record.queue.begin(probe=self._probe)
        self._held = record
        self.model, self.upstream = record.name, upstream
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._held is not None:
            self._queue.leave(self._held, answered=self.answered, probe=self._probe)
            self._held = None


class LeaseQueue:
    """Admits requests to READY models, holds those whose model is starting, and refuses the rest."""

    def __init__(self, context: Context, desired: DesiredStates, abilities: AbilityLookup) -> None:
        self._look = abilities.look
        self._models = context.cluster.models
        self._shared = SharedAnswer(context.boundary)
        self._registry = context.registry
        self._desired = desired
        self._wake = context.wake
        self._clock = context.clock
        self._waiting = 0
        self._closed = self._closed_wholly = False

    async def enter(self, name: str, probe: bool, on_wait: OnWait | None = None, need: RequestNeeds | None = None) -> Record:
        """Admit one request, after waiting for its model if necessary. See Supervisor.lease for the rules and errors."""
        record = self._registry.find(name)
        if probe:
            if record.state not in STARTING and record.state is not ModelState.READY:
                raise _gone_down(record)
            return record
        self._refuse_closed(record)
        if need is not None:
            if record.abilities is None and record.state is not ModelState.READY:
                await self._once(record, self._look, record)
            _refuse_unable(record, need)
        if record.state is ModelState.READY:
            _refuse_above_limit(record)
        else:
            await self._wait(record, on_wait, need)
        if need is not None and need.tools:
            await self._refuse_toolless(record)  # by the parsers of the engine that is up
        return record

    def leave(self, record: Record, *, answered: bool | None, probe: bool) -> None:
        record.queue.end(self._clock(), probe=probe)
        # sparkd's own probe is not evidence for the watchdog, which would send another probe.
        if answered or (answered is not None and not probe):
            record.queue.unanswered = not answered and record.state is ModelState.READY
        if record.queue.in_flight == 0 and record.state is ModelState.DRAINING:
            self._wake.set()

    def turn_away(self, record: Record, error: Unavailable | None = None, *, keeps_place: bool = False) -> None:
        """Refuse all requests that wait for a model that failed, was stopped or cannot be loaded now.

        keeps_place: the model has not had its turn yet. It keeps its queue position unless only a client requested it.
        """
        record.queue.promised_at_s = None
        if not keeps_place or record.desired.by == "request":
            record.queue.withdraw()
        record.queue.turn_away(error or (self._failed(record) if record.state is ModelState.FAILED else unloaded(record)))

    def close(self, records: Iterable[Record], *, wholly: bool) -> None:
        """Refuse all requests that wait, and load no model for a request from now on."""
        self._closed, self._closed_wholly = True, wholly
        for record in records:
            record.queue.turn_away(_draining())

    async def _wait(self, record: Record, on_wait: OnWait | None, need: RequestNeeds | None) -> None:
        self._refuse_closed_or_failed(record)
        if self._waiting >= self._registry.config.max_queued_requests:
            raise Unavailable(f"{self._waiting} requests wait for a model already, max_queued_requests; try again later.", retry_after_s=10)
        self._waiting += 1
        try:
            await self._refuse_unusable(record)
            if need is not None and need.tools:
                await self._refuse_toolless(record)
            _refuse_above_limit(record)
            if record.state is not ModelState.READY:
                self._refuse_closed_or_failed(record)
                await self._wait_in_line(record, on_wait)
        finally:
            self._waiting -= 1

    async def _wait_in_line(self, record: Record, on_wait: OnWait | None) -> None:
        wait_s = self._registry.config.wait_s(record.spec) if record.spec else 0.0
        if on_wait is not None:  # first: it may refuse the request
            on_wait(
                lambda: view(self._registry, record, self._clock()).loading(),
                bool(record.spec and self._registry.config.tells_loading(record.spec)),
            )
        if record.desired.want is not Want.RUNNING:
            self._desired.want(record.name, Want.RUNNING, "request")
            record.queue.promised_at_s = None
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        record.queue.wait(waiter, self._clock())
        try:
            await self._until_ready(record, waiter, wait_s)
        except TimeoutError:
            # The client gets a Retry-After, and the model goes on loading for it.
            record.queue.promised_at_s = self._clock()
            raise self._loading(record) from None
        except asyncio.CancelledError:
            record.queue.leave(waiter)
            if record.state in (ModelState.STOPPED, ModelState.PLANNED):
                self._withdraw(record)
            else:
                record.queue.abandoned_at_s = self._clock()
            raise
        finally:
            record.queue.leave(waiter)
        self._refuse_closed(record)

    async def _until_ready(self, record: Record, waiter: asyncio.Future[None], wait_s: float) -> None:
        """Wait for wait_s, and longer if the load is about to end and wait_s is not 0. Raises TimeoutError, or the waiter's own error."""
        left_s, kept_s = wait_s, 0.0
        while not (await asyncio.wait({waiter}, timeout=left_s))[0]:
            if not wait_s or kept_s >= KEPT_S or not is_nearly_ready(record, self._clock()):
                raise TimeoutError
            left_s = KEEP_EVERY_S
            kept_s += left_s
        waiter.result()

    async def _once(self, record: Record, look: Callable[[A], Awaitable[T]], argument: A) -> T:
        """`look(argument)`, which reads files or waits for the Hub, once for all clients that ask for this model meanwhile."""
        return await self._shared.get((look, record.name, record.hash), partial(look, argument))

    async def _refuse_unusable(self, record: Record) -> None:
        """Raise ModelCannotLoad at once if the model's files are missing, instead of after its turn in the queue."""
        away = record.state in AWAY and record.backoff_until_s <= self._clock()
        if record.spec is None or not away:
            return
        if fault := await self._once(record, self._models.unusable, record.spec):
            log.warning("a request for %s is refused: %s", record.name, fault.message)
            # It was not tried, so that `sparkd ps` does not show it.
            see = f"Run `sparkd load {record.name}` for the reason."
            raise ModelCannotLoad(f"The model {record.name} cannot be started. {fault.client_message or _ABSENT} {see}")

    async def _refuse_toolless(self, record: Record) -> None:
        """Raise NoToolParser for a model without a tool parser, before it is loaded. An engine tells its parser, else the files do.

        vLLM's own error would name vLLM's flags.
        """
        if record.spec is None:
            return
        if record.attempt.handle is not None and (record.state in STARTING or record.state is ModelState.READY):
            parsers = of_handle(record.attempt.handle.parsers)
        else:
            parsers = await self._once(record, self._models.parsers, record.spec)
        if parsers is not None and parsers.tool is None:
            raise NoToolParser(record.name, parsers.nearest)

    def _withdraw(self, record: Record) -> None:
        """Request the model no longer after its last waiter left: at once if the load has not begun, else after ABANDONED_S.

        Without cancel_abandoned_loads a load in progress goes on. The model stays requested if a client got a Retry-After, or if another
        model was evicted for it: otherwise neither would be loaded.
        """
        by_request = record.desired.want is Want.RUNNING and record.desired.by == "request"
        if record.queue.in_use or record.queue.promised_at_s is not None or not by_request:
            return
        if any(_is_owed(other, record) for other in self._registry.records.values()):
            return
        begun = record.state in STARTING and record.state is not ModelState.PLANNED
        if record.state in (ModelState.STOPPED, ModelState.PLANNED) or (begun and self._registry.config.cancel_abandoned_loads):
            self._desired.want(record.name, Want.STOPPED, "request")

    def forget_clients(self) -> None:
        """Drop the claim of clients that got a 503 and did not return in PROMISE_S: no model is evicted or stays for them. End the loads
        whose clients left and did not return in ABANDONED_S."""
        for record in self._registry.records.values():
            left_s = record.queue.abandoned_at_s
            if left_s is not None and self._clock() - left_s >= ABANDONED_S:
                self._withdraw(record)
            at_s = record.queue.promised_at_s
            if at_s is not None and record.state not in STARTING and self._clock() - at_s >= PROMISE_S:
                record.queue.promised_at_s = None

    def _refuse_closed_or_failed(self, record: Record) -> None:
        self._refuse_closed(record)
        if record.state is ModelState.FAILED and record.backoff_until_s > self._clock():
            raise self._failed(record)

    def _refuse_closed(self, record: Record) -> None:
        if self._closed and (self._closed_wholly or record.state is not ModelState.READY):
            raise _draining()

    def _loading(self, record: Record) -> ModelLoading:
        loading = view(self._registry, record, self._clock()).loading()
        eta_s = loading.get("eta_seconds")
        return ModelLoading(
            f"The model {record.name} is loading ({record.state}) and was not ready in time; try again.",
            loading=loading,
            retry_after_s=max(1, min(60, math.ceil(eta_s))) if eta_s is not None else 10,
            held_by=() if record.attempt.rank_id else holders(self._registry, record, self._clock()),
        )

    def _failed(self, record: Record) -> ModelFailed:
        left_s = max(0.0, record.backoff_until_s - self._clock())
        lasts = record.attempt.lasts or record.attempt.reason == ModelUnusable.__name__
        failed = f"The model {record.name} failed ({record.attempt.reason})"
        if record.attempt.lasts:
            failed += ". Another try will not help until its cause is fixed"
        else:
            failed += f" and is tried again in {left_s:.0f} s"
        # The message itself names other models and paths, which a client may not see.
        why = record.attempt.client_message or (_ABSENT if record.attempt.reason in ABSENT else "")
        message = " ".join(filter(None, (f"{failed}.", why, _SEE)))
        if lasts:
            # It would not fit an empty node either: no model holds what it lacks.
            return ModelCannotLoad(message)
        held_by = holders(self._registry, record, self._clock()) if record.attempt.reason in _FOR_MEMORY else ()
        return ModelFailed(message, retry_after_s=max(1, math.ceil(left_s)), held_by=held_by)


def is_nearly_ready(record: Record, now_s: float) -> bool:
    """Whether the load moves and its weights are loaded, or will be within NEARLY_S."""
    if record.state not in STARTING or now_s - record.observed.last_activity_s >= STILL_S:
        return False
    eta_s = record.observed.progress.eta_s if record.observed.progress else None
    return record.state in (ModelState.WARMING, ModelState.SIZING) or (eta_s is not None and eta_s <= NEARLY_S)


def _is_owed(other: Record, record: Record) -> bool:
    """Whether `other` was evicted for `record`, is to return if that is withdrawn, and has not returned."""
    eviction = other.evicted
    return eviction is not None and eviction.to == record.name and eviction.owed and other.state not in SERVING


def _refuse_above_limit(record: Record) -> None:
    """Raise TooManyRequests where the requests within the engine and those that wait for it are as many as it may serve at once."""
    limit = record.spec.concurrency_limit if record.spec else None
    if limit is not None and record.queue.in_flight + record.queue.waiting >= limit:
        raise TooManyRequests(f"The model {record.name} serves {limit} requests at once, its concurrency_limit; try again shortly.")


def _refuse_unable(record: Record, need: RequestNeeds) -> None:
    """Raise RouteNotServed before the model is loaded: its engine would refuse the request minutes later."""
    abilities = record.abilities
    if abilities is not None and not abilities.has(need):
        raise RouteNotServed(record.name, need.path, abilities.tasks)


def _gone_down(record: Record) -> Unavailable:
    return Unavailable(f"The model {record.name} has just gone down; try again.", retry_after_s=1)


def _draining() -> Draining:
    return Draining("sparkd is shutting down and takes no new requests; try again in a moment.", retry_after_s=5)
