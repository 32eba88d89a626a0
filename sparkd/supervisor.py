"""The single writer: observes, plans and acts, and offers lease, want and snapshot. Never reads /proc, a socket or a file."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from sparkd import gauges
from sparkd.cluster import Cluster, Observation
from sparkd.config import Config, config_hash, parse_model
from sparkd.errors import ClusterError, Conflict, SparkdError, UnknownModel
from sparkd.lease import Door, Lease
from sparkd.ledger import Ledger
from sparkd.plan import (
    Action,
    Adopt,
    Ask,
    Backoff,
    Destroy,
    Drain,
    Fail,
    ModelFacts,
    Move,
    Place,
    Rest,
    Stop,
    Unwant,
    plan,
)
from sparkd.record import Record
from sparkd.snapshot import ModelView, Snapshot
from sparkd.state import (
    RESIDENT,
    STARTING,
    Desired,
    ModelState,
    Operation,
    OperationState,
    RankFact,
    Store,
    Want,
    check_step,
)
from sparkd.upstream import Upstream

log = logging.getLogger("sparkd.supervisor")

TICK_S = 1.0
BUSY_TICK_S = 0.25

AskFunction = Callable[[str, float], Awaitable[None]]


class Supervisor:
    """Owns the state of every model.

    `ask(model, timeout_s)` puts one real question to the model through the gateway; it returns when it was answered, raises
    SparkdError otherwise. `clock` is monotonic, `wall` is the calendar; both in seconds.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        cluster: Cluster,
        *,
        ask: AskFunction,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._ask = ask
        self._clock = clock
        self._wall = wall
        self._rng = rng or random.Random()  # jitter only
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._records: dict[str, Record] = {}
        self._names: dict[str, str] = {}
        self._strays: set[str] = set()
        self._observation: Observation | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._settled = False
        self._draining = False
        self._ticked_at_s = clock()
        self._started_at_s = wall()
        self._ledger = Ledger(store, wall)
        self.door = Door(self)
        self._configure(config)
        self._wish_at_start()
        self._ledger.take_over(self._records)

    # The three verbs.

    def lease(self, name: str, *, wait_s: float | None = None, probe: bool = False) -> Lease:
        """The right to use the engine of `name` for one request, as an async context manager.

        READY: at once. STOPPED or starting: it is wished for and waited for, up to wait_s (default: the model's). STOPPING: waits for
        the stop, then starts. FAILED in back-off: ModelFailed at once. Cancelling the wait withdraws a wish that nothing acted on yet.
        probe=True may use a model that is not READY yet; it never starts one.
        """
        return Lease(self.door, name, wait_s, probe)

    def want(self, name: str, want: Want, by: str) -> Operation:
        """Wish `name` to be RUNNING or STOPPED. Persisted before anything acts; idempotent. Raises UnknownModel."""
        record = self.record(name)
        kind = "load" if want is Want.RUNNING else "unload"
        running = self._ledger.running(record, kind)
        if record.desired.want is want and running:
            return running
        if record.desired.want is not want:
            self._ledger.wish(record, want, by)
        if want is Want.RUNNING and by == "admin":
            record.backoff_until_s = float("-inf")
        if want is Want.STOPPED:
            record.cancel()
        operation = self._ledger.begin(record, kind, by)
        if record.state is (ModelState.READY if want is Want.RUNNING else ModelState.STOPPED):
            self._ledger.finish(record, OperationState.SUCCEEDED, f"It was {record.state} already.")
        self.wake()
        return self._ledger.operation(operation.id)

    def snapshot(self) -> Snapshot:
        now_s = self._clock()
        observation = self._observation
        conditions = tuple(filter(None, (self._ledger.trouble, observation.trouble if observation else None)))
        return Snapshot(
            at_s=self._wall(),
            settled=self._settled,
            draining=self._draining,
            tick_age_s=now_s - self._ticked_at_s,
            models={name: self._view(record, now_s) for name, record in self._records.items()},
            nodes=observation.nodes if observation else (),
            operations=self._ledger.operations(self._records),
            cluster=observation.cluster if observation else {},
            conditions=conditions,
        )

    # What the admin API and the daemon need besides.

    def record(self, name: str) -> Record:
        """The record behind a name or an alias; UnknownModel names the known ones. Read-only outside this module and queue."""
        record = self._records.get(self._names.get(name, ""))
        if record is None:
            raise UnknownModel(name, [r.name for r in self._records.values() if r.spec is None or not r.spec.unlisted])
        return record

    def cancel(self, operation_id: str) -> Operation:
        """Cancel a running load (its model is wished STOPPED) or unload (RUNNING again). A finished operation stays as it is."""
        operation = self._ledger.operation(operation_id)
        if operation.state is OperationState.RUNNING:
            self.want(operation.model, Want.STOPPED if operation.kind == "load" else Want.RUNNING, "admin")
        return self._ledger.operation(operation_id)

    def operation(self, operation_id: str) -> Operation:
        """One operation with its progress; UnknownOperation where it is not kept."""
        self._ledger.operation(operation_id)
        return self._ledger.operations(self._records)[operation_id]

    def add(self, name: str, raw: Mapping[str, Any]) -> None:
        """Take in a model that the configuration file does not have. Adding the same again changes nothing.

        Raises ConfigError for a specification that cannot be used, Conflict for a name that the file or another model has.
        """
        spec = parse_model(name, raw, over_admin=True)
        if name in self._base.models:
            raise Conflict(f"The model {name} is in the configuration file: change it there and reload sparkd.")
        self.config.with_model(spec)
        self._store.save_spec(name, raw)
        self._configure(self._base)
        self.wake()

    def remove(self, name: str) -> Operation:
        """Unload and forget a model that was added by `add`. Raises Conflict for one of the configuration file."""
        record = self.record(name)
        if record.name in self._base.models:
            raise Conflict(f"The model {record.name} is in the configuration file: take it out there and reload sparkd.")
        operation = self.want(record.name, Want.STOPPED, "admin")
        self._store.forget_spec(record.name)
        self._configure(self._base)
        self.wake()
        return operation

    def next_actions(self) -> list[Action]:
        """What a tick would do now, without doing it."""
        return self._plan(self._observation) if self._observation and self._settled else []

    def reconfigure(self, config: Config) -> None:
        """Take a new configuration. Engines whose own settings did not change keep running untouched."""
        self._configure(config)
        self._ledger.say("config", None, "The configuration was read again.")
        self.wake()

    @property
    def ledger(self) -> Ledger:
        """Events and operations, to read and to listen to."""
        return self._ledger

    def now_s(self) -> float:
        return self._clock()

    async def log_text(self, name: str, cursor: str | None, max_bytes: int) -> dict[str, str]:
        """The engine's log: {"text", "cursor"}; give the cursor back to go on from there."""
        record = self.record(name)
        path = record.log_path
        if path is None:
            return {"text": "", "cursor": cursor or ""}
        return await self._cluster.read_log(record.node_id, path, cursor, max_bytes)

    def wake(self) -> None:
        self._wake.set()

    def drain(self) -> None:
        """The daemon is going down: no new lease."""
        self._draining = True
        self.door.close()

    def upstreams(self) -> list[tuple[str, str, Upstream]]:
        """(model, node, upstream) of every engine that serves."""
        ready = [record for record in self._records.values() if record.state in (ModelState.READY, ModelState.DRAINING)]
        return [(record.name, record.node_id or "", record.upstream) for record in ready if record.upstream]

    async def first_look(self, timeout_s: float) -> None:
        """Returns once the first tick has acted and what it adopted answers, or after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._looked.wait()
        except TimeoutError:
            return

    async def stop_everything(self) -> None:
        """Stop every rank that can be found, READY or not, whatever is wished; wishes stay as they are for the next start."""
        observation = await self._cluster.observe()
        results = await asyncio.gather(*(self._cluster.destroy(fact) for fact in observation.ranks or ()), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                log.error("a rank was not stopped: %s", error)
        for record in self._records.values():
            if record.upstream:
                await record.upstream.close()

    # The loop.

    async def run(self) -> None:
        """Tick until cancelled: at once when woken, every second otherwise, more often while something starts."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                await self.tick()
                hurry = any(record.state in STARTING or record.state is ModelState.STOPPING for record in self._records.values())
                try:
                    async with asyncio.timeout(BUSY_TICK_S if hurry else TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass
                self._wake.clear()

    async def tick(self) -> None:
        """One round: observe, plan, act. Acts only once the first reading and the adoption scan are in."""
        self._observation = observation = await self._cluster.observe()
        if observation.ranks is not None and observation.reading is not None and not self._settled:
            self._settled = True
            self._ledger.say("settled", None, f"The first reading and the adoption scan are in: {len(observation.ranks)} ranks found.")
        if self._settled and not self._draining:
            for action in self._plan(observation):
                self._act(action, observation)
        self._ticked_at_s = self._clock()
        if self._settled and not any(record.adopted and record.state in STARTING for record in self._records.values()):
            self._looked.set()
        gauges.show(self.snapshot())

    def _plan(self, observation: Observation) -> list[Action]:
        by_model: dict[str, list[RankFact]] = {}
        for fact in observation.ranks or ():
            by_model.setdefault(fact.handle.model, []).append(fact)
        facts: dict[str, ModelFacts] = {}
        for name, record in self._records.items():
            ranks = tuple(by_model.get(name, ())) if observation.ranks is not None else None
            record.observe(ranks)
            facts[name] = self._facts(record, ranks)
        strangers = tuple(
            fact
            for name, found in by_model.items()
            if name not in self._records
            for fact in found
            if fact.handle.rank_id not in self._strays
        )
        return plan(facts, strangers, observation.connected, self._clock())

    def _facts(self, record: Record, ranks: tuple[RankFact, ...] | None) -> ModelFacts:
        spec = record.spec
        return ModelFacts(
            name=record.name,
            want=record.desired.want,
            generation=record.desired.generation,
            state=record.state,
            state_since_s=record.since_s,
            config_hash=record.hash,
            rank_id=record.rank_id,
            ranks=ranks,
            busy=record.busy,
            in_flight=record.in_flight,
            queued=record.queued,
            last_used_s=record.last_used_s,
            last_asked_s=record.last_asked_s,
            attempt_since_s=record.attempt_since_s,
            backoff_until_s=record.backoff_until_s,
            start_deadline_s=self.config.start_deadline_s(spec) if spec else 0.0,
            drain_deadline_s=self.config.unload_timeout_s,
            ttl_s=self.config.ttl_s(spec) if spec else 0.0,
        )

    def _act(self, action: Action, observation: Observation) -> None:
        if isinstance(action, Destroy):
            fact = next(fact for fact in observation.ranks or () if fact.handle.rank_id == action.rank_id)
            record = self._records.get(action.model)
            if record:
                self._start(record, "destroy", self._destroy(fact, action.why))
            else:
                self._strays.add(action.rank_id)
                self._spawn(self._destroy(fact, action.why), f"destroy {action.rank_id}")
            return
        record = self._records[action.model]
        match action:
            case Place():
                self._start(record, "place", self._place(record))
            case Adopt(rank_id=rank_id):
                self._adopt(record, next(fact for fact in observation.ranks or () if fact.handle.rank_id == rank_id))
            case Move(state=state):
                self._move(record, state)
            case Ask():
                record.last_asked_s = self._clock()
                self._start(record, "ask", self._ask_once(record))
            case Unwant(idle_s=idle_s):
                self._ledger.say("ttl", record.name, f"Idle for {idle_s:.0f} s, its ttl: it is unloaded.")
                self.want(record.name, Want.STOPPED, "ttl")
            case Drain():
                self._move(record, ModelState.DRAINING)
            case Stop():
                if record.state is not ModelState.STOPPING:
                    self._move(record, ModelState.STOPPING)
                self._start(record, "stop", self._stop(record, record.ranks or ()))
            case Rest():
                self._rest(record)
            case Fail(reason=reason, message=message):
                self._fail(record, reason, message)

    # The actions. Each is one task of one model; what it did is seen by the next observation.

    async def _place(self, record: Record) -> None:
        spec = record.spec
        if spec is None:
            return
        record.begin_attempt(self._clock())
        self._move(record, ModelState.PLANNED)
        try:
            placement = await self._cluster.place(spec)
            record.node_id, record.memory_gib = placement.node_id, placement.memory_gib
            rank_id = f"{placement.slug}-{record.desired.generation}-{secrets.token_hex(4)}"
            record.rank_id = rank_id
            handle = await self._cluster.spawn(placement, spec, rank_id, record.desired.generation, record.hash or "")
        except SparkdError as error:
            record.rank_id = None
            self._fail(record, type(error).__name__, error.message)
            return
        record.handle = handle
        self._ledger.keep_handle(handle)
        self._move(record, ModelState.LOADING)
        self._ledger.say("started", record.name, f"Rank {rank_id} started on {placement.node_id} as process {handle.pid}.", pid=handle.pid)

    def _adopt(self, record: Record, fact: RankFact) -> None:
        record.begin_attempt(self._clock())
        record.rank_id, record.handle, record.node_id = fact.handle.rank_id, fact.handle, fact.handle.node_id
        record.adopted = True
        self._ledger.keep_handle(fact.handle)
        self._move(record, ModelState.LOADING)
        told = f"Rank {fact.handle.rank_id}, process {fact.handle.pid}, was adopted as it runs."
        self._ledger.say("adopted", record.name, told, pid=fact.handle.pid)
        self._start(record, "hold", self._hold(record))

    async def _hold(self, record: Record) -> None:
        if record.spec:
            await self._cluster.hold(record.spec)

    async def _ask_once(self, record: Record) -> None:
        handle = record.handle
        if handle is None:
            return
        if record.upstream is None:
            record.upstream = await self._cluster.upstream(handle)
        try:
            names = await self._cluster.served_names(record.upstream)
            if names is None:
                return
            if record.name not in names:
                self._fail(record, "WrongModel", f"The server answers for {', '.join(names)[:200]}, not for {record.name}.")
                return
            deadline_s = self.config.start_deadline_s(record.spec) if record.spec else 60.0
            await self._ask(record.name, max(1.0, deadline_s - (self._clock() - record.attempt_since_s)))
        except SparkdError as error:
            record.message = f"It does not answer yet: {error.message}"
            return
        if record.state in STARTING:
            self._ready(record)

    async def _stop(self, record: Record, ranks: tuple[RankFact, ...]) -> None:
        try:
            for fact in ranks:
                await self._cluster.destroy(fact)
                self._ledger.forget_handle(fact.handle.rank_id)
            await self._cluster.release(record.name)
        except ClusterError as error:
            record.message = error.message
            self._ledger.say("stop", record.name, error.message)
            await asyncio.sleep(TICK_S)

    async def _destroy(self, fact: RankFact, why: str) -> None:
        rank_id, model = fact.handle.rank_id, fact.handle.model
        self._ledger.say("destroy", model, f"Rank {rank_id} is removed: {why}.")
        try:
            await self._cluster.destroy(fact)
            self._ledger.forget_handle(rank_id)
            await self._cluster.release(model)
        except ClusterError as error:
            self._ledger.say("destroy", model, error.message)
            await asyncio.sleep(TICK_S)
            return
        finally:
            self._strays.discard(rank_id)
        record = self._records.get(model)
        if record and record.rank_id == rank_id:
            record.rank_id = None

    def _ready(self, record: Record) -> None:
        record.load_s = self._clock() - record.attempt_since_s
        record.ready_since_s = record.last_used_s = self._clock()
        self._move(record, ModelState.READY)
        record.reason = record.message = None
        how = "was adopted and answers" if record.adopted else f"answers after {record.load_s:.1f} s"
        self._ledger.say("ready", record.name, f"The model {how}.", seconds=round(record.load_s, 2), adopted=record.adopted)
        gauges.loaded(record.name, record.load_s, record.adopted)
        self._ledger.finish(record, OperationState.SUCCEEDED, f"The model {how}.")
        self.door.open(record)

    def _rest(self, record: Record) -> None:
        record.forget_rank()
        self._move(record, ModelState.STOPPED)
        self._ledger.finish(record, OperationState.SUCCEEDED, "Every process of it is gone.", kind="unload")
        self._ledger.say("stopped", record.name, "Every process of it is gone.")
        if record.desired.want is Want.STOPPED:
            self.door.turn_away(record)
        if record.spec is None:
            del self._records[record.name]
            self._ledger.forget_wish(record.name)
        self.wake()

    def _fail(self, record: Record, reason: str, message: str) -> None:
        backoff = Backoff(**self.config.backoff.model_dump())
        ready_s = self._clock() - record.ready_since_s if record.ready_since_s is not None else 0.0
        record.failures = 1 if ready_s >= backoff.reset_after_s else record.failures + 1
        delay_s = backoff.delay_s(record.failures, self._rng)
        record.fail(reason, message, self._clock() + delay_s)
        self._move(record, ModelState.FAILED)
        told = f"{reason}: {message} Next try in {delay_s:.0f} s."
        self._ledger.say("failed", record.name, told, reason=reason, failures=record.failures)
        gauges.failed(record.name, reason)
        self._ledger.finish(record, OperationState.FAILED, message, kind="load")
        self.door.turn_away(record)

    # Bookkeeping.

    def _move(self, record: Record, state: ModelState) -> None:
        if record.state is state:
            return
        check_step(record.state, state)
        self._ledger.say("state", record.name, f"{record.state} -> {state}", old=record.state.value, new=state.value)
        record.state, record.since_s, record.since_wall_s = state, self._clock(), self._wall()
        if state not in RESIDENT:
            record.close_upstream(self._spawn)

    def _start(self, record: Record, name: str, work: Any) -> None:
        record.busy = name
        record.task = self._spawn(self._once(record, work), f"{name} {record.name}")

    async def _once(self, record: Record, work: Awaitable[None]) -> None:
        try:
            await work
        except (SparkdError, OSError) as error:
            log.error("%s of %s failed: %s", record.busy, record.name, error)
        finally:
            record.busy = record.task = None
            self.wake()

    def _spawn(self, work: Any, name: str) -> asyncio.Task[None]:
        if self._tasks is None:
            raise RuntimeError("the supervisor does not run")
        return self._tasks.create_task(work, name=name)

    def _configure(self, base: Config) -> None:
        """`base` is the file's configuration; models added by `add` come on top."""
        self._base = base
        self.config = self._with_added(base)
        models = self.config.models
        for name in set(self._records) - set(models):
            record = self._records[name]
            record.spec = record.hash = None
            record.desired = replace(record.desired, want=Want.STOPPED, by="config")
        stored = self._store.desired()
        for name, spec in models.items():
            if name not in self._records:
                desired = stored.get(name) or Desired(name, Want.STOPPED, 0, "config", self._wall())
                self._records[name] = Record(name, desired, self._clock(), self._wall())
            self._records[name].spec = spec
            self._records[name].hash = config_hash(spec, self.config.engine)
        self._names = {name: name for name in self._records} | self.config.names()

    def _with_added(self, config: Config) -> Config:
        """One that a newer release refuses, or whose name the file has taken since, is left out."""
        for name, raw in self._store.specs().items():
            if name in config.models:
                continue
            try:
                config = config.with_model(parse_model(name, raw, over_admin=True))
            except SparkdError as error:
                log.warning("the model %s, added earlier, is left out: %s", name, error.message)
        return config

    def _wish_at_start(self) -> None:
        """An operator's unload outlives a restart; an idle one (ttl) does not stand in the way of preload."""
        for name in self.config.preload():
            record = self._records[name]
            fresh = record.desired.generation == 0
            if record.desired.want is Want.STOPPED and (fresh or record.desired.by in ("ttl", "request", "config")):
                self.want(name, Want.RUNNING, "config")

    def _view(self, record: Record, now_s: float) -> ModelView:
        spec = record.spec
        retry_in_s = max(0.0, record.backoff_until_s - now_s) if record.state is ModelState.FAILED else None
        max_model_len = spec.max_model_len if spec and isinstance(spec.max_model_len, int) else None
        return ModelView(
            name=record.name,
            aliases=tuple(n for n in spec.served_names() if n != record.name) if spec else (),
            unlisted=spec.unlisted if spec else True,
            metadata=spec.metadata if spec else {},
            max_model_len=max_model_len,
            source=spec.model if spec else "",
            state=record.state,
            want=record.desired.want,
            wanted_by=record.desired.by,
            generation=record.desired.generation,
            since_s=record.since_wall_s,
            created_at_s=self._started_at_s,
            reason=record.reason,
            message=record.message,
            progress=record.progress,
            node=record.node_id,
            ranks=(record.handle,) if record.handle else (),
            in_flight=record.in_flight,
            queued=record.queued,
            failures=record.failures,
            restarts=record.restarts,
            retry_in_s=retry_in_s,
            load_s=record.load_s,
            memory_gib=record.memory_gib,
            operation=record.operation,
        )
