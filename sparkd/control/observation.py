"""Turns one observation of the nodes into the facts about each model: its ranks, and the nodes of it that did not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparkd.cluster.node_tracker import Observation
from sparkd.config.config import Config
from sparkd.control.facts import ModelFacts
from sparkd.control.record import Record
from sparkd.control.residency import PROMISE_S, Stay
from sparkd.state.nouns import RankFact


@dataclass(frozen=True, slots=True)
class Found:
    """by_model: every rank that was seen. steady: the start of each model that no action was changing when the observation began."""

    observation: Observation
    by_model: Mapping[str, list[RankFact]]
    strangers: tuple[RankFact, ...]
    steady: Mapping[str, str | None]

    @classmethod
    def of(cls, observation: Observation, records: Mapping[str, Record], steady: Mapping[str, str | None]) -> Found:
        by_model: dict[str, list[RankFact]] = {}
        for fact in observation.ranks or ():
            by_model.setdefault(fact.handle.model, []).append(fact)
        strangers = tuple(fact for name, ranks in by_model.items() if name not in records for fact in ranks)
        return cls(observation, by_model, strangers, steady)

    def facts_of(self, record: Record, config: Config, now_s: float, frozen: Callable[[Record], str | None]) -> ModelFacts:
        """The plan's facts about a model. frozen: see Pulse.frozen."""
        ranks, spec = self.ranks_of(record), record.spec
        unseen = self.observation.unseen.intersection(record.attempt.nodes)
        return ModelFacts(
            name=record.name,
            want=record.desired.want,
            generation=record.desired.generation,
            state=record.state,
            state_since_s=record.since_s,
            config_hash=record.hash,
            rank_id=record.attempt.rank_id,
            ranks=ranks,
            world=record.attempt.world,
            unseen=bool(unseen),
            dark_s=max((self.observation.dark_s.get(node, 0.0) for node in unseen), default=0.0),
            no_raylet=min(unseen & self.observation.no_raylet, default=None) if spec and spec.executor == "ray" else None,
            halted_s=now_s - record.observed.halted_since_s if record.observed.halted_since_s is not None else 0.0,
            still_s=now_s - record.observed.moved_at_s,
            silent_s=now_s - record.observed.told_at_s,
            frozen=frozen(record),
            busy=record.busy,
            in_flight=record.queue.in_flight,
            queued=record.queue.waiting,
            last_used_s=record.queue.last_used_s,
            last_asked_s=record.last_asked_s,
            attempt_since_s=record.attempt.since_s,
            backoff_until_s=record.backoff_until_s,
            start_deadline_s=config.start_deadline_s(spec) if spec else 0.0,
            drain_deadline_s=config.unload_timeout_s,
            ttl_s=config.ttl_s(spec) if spec else 0.0,
            claims=record.claims,
            asked_since_s=now_s if record.queue.asked_since_s is None else record.queue.asked_since_s,
            lack=record.attempt.lack if record.attempt.entry_hash == record.hash else None,
            pinned=bool(spec and spec.pin),
            priority=spec.priority if spec else 0,
            stay=_stay(record, config),
            yields=record.yields_to is not None,
        )

    def ranks_of(self, record: Record) -> tuple[RankFact, ...] | None:
        """The model's ranks. None if they are unknown: the observation failed, an action is changing them, or its only node is silent."""
        changing = record.name not in self.steady or self.steady[record.name] != record.attempt.rank_id
        only_node_unseen = len(record.attempt.nodes) < 2 and self.observation.unseen.intersection(record.attempt.nodes)
        if self.observation.ranks is None or changing or only_node_unseen:
            return None
        return tuple(self.by_model.get(record.name, ()))


def _stay(record: Record, config: Config) -> Stay:
    if record.attempt.ready_since_s is None:
        return Stay()
    busy = record.queue.in_flight or record.queue.waiters
    idle_at_s = float("inf") if busy else record.queue.last_used_s + config.swap_idle_s
    least_s = config.min_residency_s
    if record.queue.promised_at_s is not None:
        comes_back_s = record.queue.promised_at_s + PROMISE_S
        idle_at_s, least_s = max(idle_at_s, comes_back_s), max(least_s, comes_back_s - record.attempt.ready_since_s)
    return Stay(record.attempt.ready_since_s, record.attempt.load_s or 0.0, least_s, idle_at_s)
