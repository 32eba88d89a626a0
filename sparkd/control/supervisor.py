"""The control loop: observes, decides and acts, and offers lease, want and snapshot."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from sparkd import metrics
from sparkd.cluster.cluster import Cluster
from sparkd.cluster.compatibility import UNLINKED
from sparkd.cluster.node_tracker import Observation
from sparkd.condition import Condition
from sparkd.config.config import Config
from sparkd.control import gauges
from sparkd.control.ability_lookup import AbilityLookup
from sparkd.control.backoff import FOR_ITS_OWNER, end_backoffs
from sparkd.control.context import Context, Tasks
from sparkd.control.decision import Action, Adopt, Ask, Destroy, Evict, Expire, Fail, MarkStopped, Move, Place, Stop, decide
from sparkd.control.desired_states import DesiredStates
from sparkd.control.effects import AskFunction, Effects
from sparkd.control.evictions import Evictions
from sparkd.control.journal import Journal, say_change
from sparkd.control.lease import Lease, LeaseQueue
from sparkd.control.load_gate import LoadGate
from sparkd.control.rank_stopper import RankStopper
from sparkd.control.registry import Registry
from sparkd.control.scheduler import Schedule, make_schedule
from sparkd.control.views import NO_SCHEDULE, guard_hints, view
from sparkd.control.watchdog import Watchdog
from sparkd.errors import DoesNotFit, SparkdError
from sparkd.execution.boundary import Boundary
from sparkd.gateway.proxy import OnWait
from sparkd.state.abilities import RequestNeeds
from sparkd.state.model_state import STARTING, ModelState
from sparkd.state.nouns import EngineMemory, Operation, RankFact, Wait, Want
from sparkd.state.snapshot import Snapshot

log = logging.getLogger("sparkd.supervisor")

TICK_S = 1.0
BUSY_TICK_S = 0.25
# Stands for an observation that failed.
UNSEEN = Observation(None, None, False)
GATE_FAILED = Wait("InternalError", "It waits: sparkd made an error, and does not know where a load may begin. Its log says more.")


class Supervisor:
    """Runs the loop. It and its parts alone write the state of a model.

    ask: sends one real request to a model through the gateway, with a time limit. Returns after the answer, or raises SparkdError.
    outside: returns a condition of the rest of the daemon.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        registry: Registry,
        journal: Journal,
        cluster: Cluster,
        *,
        ask: AskFunction,
        outside: Callable[[], Condition | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        boundary: Boundary | None = None,
    ) -> None:
        self.boundary = boundary or Boundary(clock)
        self._cluster = cluster
        self._outside = outside
        self._clock = clock
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._observation: Observation | None = None
        self._last_schedule = NO_SCHEDULE
        self._settled = False
        self._draining = False
        self._refused: Condition | None = None
        self._agents: set[str] = set()
        self._ticked_at_s = clock()
        self.registry = registry
        self.journal = journal
        # They are called with the snapshot of every tick.
        self.snapshot_followers: list[Callable[[Snapshot], None]] = []
        self.tasks = Tasks(self.boundary)
        context = Context(registry, journal, cluster, self.boundary, self.tasks, self._wake, clock, rng or random.Random())
        self._abilities = AbilityLookup(context)
        self._desired = DesiredStates(context)
        self._queue = LeaseQueue(context, self._desired, self._abilities)
        self._gate = LoadGate(context, self._queue, self._desired)
        self._evictions = Evictions(context, self._desired)
        self._rank_stopper = RankStopper(context)
        self._effects = Effects(context, self._queue, self._desired, self._rank_stopper, self._abilities, ask=ask)
        self._watchdog = Watchdog(self.tasks.spawn, ask, clock)
        for record in self.registry.missing():
            self.want(record.name, Want.RUNNING, "config")
        self.journal.operations.take_over(self.registry.records)
        self._effects.recall(journal.handles())

    # The requests of clients and operators.

    def lease(self, name: str, *, probe: bool = False, on_wait: OnWait | None = None, need: RequestNeeds | None = None) -> Lease:
        """The right to use the engine of `name` for one request, as an async context manager.

        A READY model is leased at once. For another the request waits up to its wait_for_load_s: STOPPED, it is requested; STOPPING, it
        stops and starts again. In the back-off of a failure ModelFailed is raised at once. A client that leaves as the last one withdraws
        the request.

        probe: lease a model that is not READY yet, and start none.
        on_wait: called once if the request has to wait.
        need: what the request needs. Raises RouteNotServed if the model is known not to have it, NoToolParser for tools without a parser.
        """
        return Lease(self._queue, name, probe, on_wait, need)

    def want(self, name: str, want: Want, by: str) -> Operation:
        """Set the desired state of `name`. It is persisted before the loop acts on it. Idempotent. Raises UnknownModel.

        by: who wants it: admin, config, request, ttl, guard, swap or group.
        """
        operation = self._desired.want(name, want, by)
        if want is Want.RUNNING and by == "admin":
            end_backoffs(self.registry, self._clock(), (), {self.registry.find(name).name})
        return operation

    def snapshot(self) -> Snapshot:
        now_s = self._clock()
        observation = self._observation
        seen = observation.trouble if observation else None
        own = (self._refused, self.journal.trouble, *self.registry.conditions)
        every = (*own, seen, *self._gate.conditions, *self._watchdog.conditions, self.boundary.condition, self._outside())
        return Snapshot(
            at_s=self.journal.wall(),
            settled=self._settled,
            draining=self._draining,
            tick_age_s=now_s - self._ticked_at_s,
            models={
                name: view(self.registry, record, now_s, self._last_schedule, self._watchdog.doubt(record))
                for name, record in self.registry.records.items()
            },
            nodes=observation.nodes if observation else (),
            operations=self.journal.operations.all(self.registry.records),
            cluster=observation.cluster if observation else {},
            conditions=tuple(condition for condition in every if condition is not None),
            engines=tuple(
                EngineMemory(fact.handle.model, fact.handle.node_id, fact.host_bytes, fact.device_bytes)
                for fact in (observation.ranks if observation else None) or ()
                if fact.alive
            ),
            returning_bytes=self._gate.release.missing_bytes,
        )

    # For the daemon.

    def reconfigure(self, config: Config) -> dict[str, list[str]]:
        """Apply a new configuration. Returns the names of the models that are added, removed, restarted and adjusted.

        An engine keeps running unless its own settings changed. Models that are new in the preload list are loaded.
        """
        before = dict(self.registry.records)
        changes = self.registry.configure(config)
        self._desired.end_removed()
        for name in before.keys() - self.registry.records.keys():
            self._queue.turn_away(before[name])
        for name in changes.pop("preload"):
            self.want(name, Want.RUNNING, "config")
        # Models that lacked memory may have it now. A model whose engine hangs or crashes keeps its back-off unless its entry changed.
        end_backoffs(self.registry, self._clock(), FOR_ITS_OWNER, changes["restarted"])
        for kind, how in (("added", "added"), ("changed", "restarted"), ("changed", "adjusted"), ("removed", "removed")):
            for name in changes[how]:
                say_change(self.journal, kind, name, "file")
        summary = "; ".join(f"{how}: {', '.join(names)}" for how, names in changes.items() if names)
        self.journal.say("config", None, f"The configuration was read again{f' ({summary})' if summary else ''}.")
        self._wake.set()
        return changes

    def note_refused(self, reason: str | None) -> None:
        """Record why the last reload was refused. None: it was accepted."""
        if reason is not None:
            self.journal.say("config", None, f"A new configuration was refused, and the old one stays: {reason}")
        message = f"The configuration file was rejected: {reason}"
        self._refused = Condition("ConfigRefused", message) if reason is not None else None

    def drain(self, *, wholly: bool = True) -> None:
        """Refuse all requests that wait, and all new ones. wholly=False still leases models that are READY."""
        self._draining = True
        self._queue.close(self.registry.records.values(), wholly=wholly)

    async def first_look(self, timeout_s: float) -> None:
        """Wait until the first tick has acted and the models that it adopted answer, or for timeout_s."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._looked.wait()

    async def finish_placing(self, timeout_s: float) -> None:
        """Wait for rank starts in progress. A start cancelled half-way could bring the rank up after shutdown."""
        placing = [record.task for record in self.registry.records.values() if record.busy == "place" and record.task]
        if placing:
            await asyncio.wait(placing, timeout=timeout_s)

    async def stop_everything(self, *, at_once: bool = False) -> None:
        """Stop every rank that can be found. The desired states stay for the daemon's next start."""
        observation = await self._cluster.observe()
        for error in await self._rank_stopper.stop_all(observation.ranks or (), hangs=at_once):
            log.error("a rank was not stopped: %s", error)
        for node in sorted(observation.unseen):
            log.error("the ranks on %s were not stopped: that node does not answer", node)
        for record in self.registry.records.values():
            record.close_upstream()

    # The loop.

    async def run(self) -> None:
        """Tick until cancelled: at once when woken, every BUSY_TICK_S while a model starts or stops, every TICK_S otherwise."""
        async with asyncio.TaskGroup() as tasks:
            self.tasks.group = tasks
            while True:
                with self.boundary.around("tick"), metrics.TICK_SECONDS.time():
                    await self.tick()
                hurry = any(record.state in STARTING or record.state is ModelState.STOPPING for record in self.registry.records.values())
                hurry = hurry or bool(self._gate.release.room_gib)
                with suppress(TimeoutError):
                    async with asyncio.timeout(BUSY_TICK_S if hurry else TICK_S):
                        await self._wake.wait()
                self._wake.clear()

    async def tick(self) -> None:
        """Observe, decide and act once. Acts only after the first memory reading and the adoption scan.

        Each step has its own boundary: an exception in one step, or for one model, does not stop the others.
        """
        around, records = self.boundary.around, self.registry.records
        # An observation that began during an action may show the ranks from before it. Asking a question changes no rank.
        steady = {name: record.attempt.rank_id for name, record in records.items() if record.busy in (None, "ask")}
        self.journal.save_rest()
        with around("hints"):
            self._cluster.set_guard_hints(guard_hints(records.values()))
        before, observation = self._observation or UNSEEN, UNSEEN
        with around("observe"):
            observation = await self._cluster.observe()
        self._observation = observation
        if before.unseen - observation.unseen or observation.connected > before.connected:
            self._rank_stopper.retry_now()
        if observation.ranks is not None and observation.reading is not None and not self._settled:
            self._settled = True
            self.journal.say("settled", None, f"The first reading and adoption scan are complete; ranks: {len(observation.ranks)}.")
        with around("conditions"):
            self._note_conditions(before, observation)
        with around("nodes"):
            self._note_nodes(observation)
        with around("abilities"):
            self._abilities.look_at_new()
        with around("watchdog"):
            self._watchdog.look(records.values(), observation.readings)
        if self._settled and not self._draining:
            self._decide_and_act(observation, steady)
        elif not self._settled:
            with around("waits"):
                self._note_waits(observation)
        self._ticked_at_s = self._clock()
        if self._settled and not any(record.attempt.adopted and record.state in STARTING for record in records.values()):
            self._looked.set()
        with around("metrics"):
            snapshot = self.snapshot()
            gauges.show(snapshot, self.registry.config.memory.limits)
            for show in self.snapshot_followers:
                show(snapshot)

    def _decide_and_act(self, observation: Observation, steady: Mapping[str, str | None]) -> None:
        """Take in the observation and start the next actions. steady: by model whose ranks no action was changing, its start."""
        around, records = self.boundary.around, self.registry.records
        # sparkd starts nothing until it knows which nodes are open and which models hold their memory. Stops go ahead.
        is_open = False
        # Without the gate's word no node is open, to a placement in progress either.
        all_nodes = frozenset(node.node_id for node in observation.nodes)
        with around("gate", failed=lambda _: self._cluster.reservations.cordon(all_nodes, {}, {})):
            self._gate.look(observation, records)
            self._cluster.reservations.cordon(self._gate.cordoned, self._gate.release.room_gib, self._gate.release.leaked_gib)
            is_open = True
        for name, record in records.items():
            with around("observed", name):
                is_steady = name in steady and steady[name] == record.attempt.rank_id
                attempt = record.attempt
                record.observed.take_in(observation, name, attempt.rank_id, attempt.nodes, self._clock(), is_steady=is_steady)
                record.observed.hang = self._watchdog.frozen(record)
        with around("wishes"):
            self._desired.end_removed()
            self._queue.forget_clients()
            self._evictions.settle()
        with around("decide"):
            strangers = tuple(fact for fact in observation.ranks or () if fact.handle.model not in records)
            schedule = Schedule()
            with around("schedule"):
                schedule = self._schedule(observation, strangers, is_open)
            actions = decide(self.registry, strangers, schedule, self._clock())
            with around("schedule"):
                self._note_schedule(schedule)
            for action in actions:
                with around(type(action).__name__.lower(), action.model, partial(self._give_up, action.model)):
                    self._act(action, observation)

    def _note_waits(self, observation: Observation) -> None:
        """Note for each model that is to be loaded what keeps the daemon from its first look at the ranks."""
        block_reason, records = self._gate.block_reason(observation), self.registry.records
        waiting = [name for name, record in records.items() if record.desired.want is Want.RUNNING and record.state is ModelState.STOPPED]
        self._last_schedule = Schedule(waits={} if block_reason is None else dict.fromkeys(waiting, block_reason))

    def _note_conditions(self, before: Observation, now: Observation) -> None:
        """Write an event when Ray on a node has ended, and when a condition of the cluster begins or is over."""
        for node in sorted(now.no_raylet - before.no_raylet):
            self.journal.say("cluster", None, f"Ray on {node} has ended: its raylet refuses connections.", node=node)
        old, new = before.trouble, now.trouble
        if new is not None and (old is None or (old.reason, old.node) != (new.reason, new.node)):
            self.journal.say("cluster", None, new.message, reason=new.reason, node=new.node)
        elif old is not None and new is None and now is not UNSEEN:
            self.journal.say("cluster", None, f"{old.reason} is over.", reason=old.reason, node=old.node)

    def _note_nodes(self, observation: Observation) -> None:
        """End the back-off of models that had no room when a node has joined, is back or takes models again."""
        agents = {node.node_id for node in observation.nodes if node.agent} - self._gate.cordoned
        if agents - self._agents:
            end_backoffs(self.registry, self._clock(), {DoesNotFit.__name__, UNLINKED})
        self._agents = agents

    def _schedule(self, observation: Observation, strangers: Sequence[RankFact], is_open: bool) -> Schedule:
        """May a model start now, and why not? Changes nothing.

        strangers: ranks of models that are not configured.
        is_open: the gate and the cluster know on which nodes a load may begin.
        """
        block_reason = self._gate.block_reason(observation) if is_open else GATE_FAILED
        return make_schedule(self.registry, strangers, self._cluster.reservations.book(), self._clock(), block_reason)

    def _note_schedule(self, schedule: Schedule) -> None:
        """Keep the queue positions and reasons of the waiting models, and write an event for each new reason."""
        before, self._last_schedule = self._last_schedule, schedule
        for name in schedule.queue:
            self.registry.records[name].queue.request(self._clock())
        for name, wait in schedule.waits.items():
            # Seconds that are left change with every look.
            if not wait.is_as(before.waits.get(name)):
                self.journal.say("waits", name, wait.message)
        self._evictions.withdraw(schedule.victims)

    def _give_up(self, model: str, error: SparkdError) -> None:
        if record := self.registry.records.get(model):
            self._effects.give_up(record, error)

    def _act(self, action: Action, observation: Observation) -> None:
        if isinstance(action, Destroy):
            if self._rank_stopper.is_waiting(action.rank_id):
                return
            ranks = observation.of_start(action.rank_id)
            record = self.registry.records.get(action.model)
            if record:
                self._effects.start(record, "destroy", self._effects.destroy(ranks, action.why))
            else:
                self.tasks.spawn(self._effects.destroy(ranks, action.why), f"destroy {action.model}")
            return
        record = self.registry.records[action.model]
        match action:
            case Place():
                self._effects.start(record, "place", self._effects.place(record))
            case Adopt(rank_id=rank_id):
                self._effects.adopt(record, observation.of_start(rank_id))
            case Move(state=ModelState.READY):
                self._effects.resume(record)
            case Move(state=state):
                self._effects.move(record, state)
            case Ask():
                self._effects.start(record, "ask", self._effects.ask(record))
            case Expire(idle_s=idle_s):
                self.journal.say("ttl", record.name, f"Idle for {idle_s:.0f} s, its ttl: it is unloaded.")
                self._desired.want(record.name, Want.STOPPED, "ttl")
            case Evict(to=to):
                self._evictions.evict(record, self.registry.records[to])
            case Stop():
                if record.state is not ModelState.STOPPING:
                    self._effects.move(record, ModelState.STOPPING)
                elif self._rank_stopper.is_waiting(record.name):
                    return
                self._effects.start(record, "stop", self._effects.stop(record, record.observed.ranks or ()))
            case MarkStopped():
                self._effects.mark_stopped(record)
            case Fail(reason=reason, message=message, client_message=client_message):
                record.cancel("ask")
                self._effects.fail(record, reason, message, client_message=client_message)
