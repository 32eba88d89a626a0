"""The supervisor's memory of one model between two ticks. Only the supervisor and its parts write it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkd.config.config import ModelConfig
from sparkd.control.observed_ranks import ObservedRanks
from sparkd.control.request_queue import RequestQueue
from sparkd.gateway.upstream import Upstream
from sparkd.state.abilities import Abilities
from sparkd.state.memory_book import Lack
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Desired, RankFact, RankHandle, Want


@dataclass(frozen=True, slots=True)
class Attempt:
    """Times ending in _s are monotonic seconds.

    entry_hash: of the entry with which it began.
    rank_id: of the start; None before its ranks are started and once they are gone.
    handles: of every rank, rank 0's first; so are the nodes.
    memory_gib: reserved on each node.
    transport: findings on how the ranks of several nodes talk, as plain JSON.
    lack: the memory that it asked for when there was no room.
    load_s: how long its load took.
    reason: why it failed.
    lasts: another try does not help until the cause is fixed.
    client_message: what a client may read of the failure.
    message: what an operator reads now.
    """

    since_s: float
    entry_hash: str | None = None
    rank_id: str | None = None
    handles: tuple[RankHandle, ...] = ()
    nodes: tuple[str, ...] = ()
    memory_gib: float | None = None
    adopted: bool = False
    transport: tuple[Mapping[str, str], ...] = ()
    lack: Lack | None = None
    ready_since_s: float | None = None
    load_s: float | None = None
    reason: str | None = None
    lasts: bool = False
    client_message: str | None = None
    message: str | None = None

    @property
    def handle(self) -> RankHandle | None:
        """Rank 0's, which serves."""
        return self.handles[0] if self.handles else None

    @property
    def world(self) -> int:
        """How many ranks it has."""
        return max(1, len(self.nodes))

    @property
    def node_id(self) -> str | None:
        return self.nodes[0] if self.nodes else None


@dataclass(frozen=True, slots=True)
class KnownAbilities:
    """The abilities of a model, read from the files of the entry with this hash or from its engine."""

    hash: str | None
    abilities: Abilities


@dataclass(frozen=True, slots=True)
class Evicted:
    """How a model's stay ended, if that was for another model.

    to: the other model.
    by: who had requested the evicted model before.
    owed: whether the evicted model is loaded again if the other one's load ends without being READY.
    """

    to: str
    by: str
    owed: bool = True


class Record:
    """One model. Times ending in _s are monotonic seconds, _wall_s calendar seconds."""

    def __init__(self, name: str, desired: Desired, now_s: float, wall_s: float) -> None:
        self.name = name
        self.desired = desired
        self.spec: ModelConfig | None = None
        self.hash: str | None = None
        # The source of its entry: `file` is the configuration, `api` the models that were added.
        self.origin = "file"
        self.known_abilities: KnownAbilities | None = None
        self.state = ModelState.STOPPED
        self.since_s = now_s
        self.since_wall_s = wall_s
        self.operation: str | None = None
        self.busy: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.attempt = Attempt(now_s)
        self.observed = ObservedRanks(now_s)
        self.upstream: Upstream | None = None
        self.queue = RequestQueue(now_s)
        # The model for which it is being evicted.
        self.evicted_for: str | None = None
        # None once it is READY again.
        self.evicted: Evicted | None = None
        # Whether it was evicted for another model, or another for it, since the daemon began.
        self.takes_turns = False
        # How long its last load took, if that failed.
        self.lost_load_s = 0.0
        self.last_asked_s = float("-inf")
        self.failures = 0
        # Why and when the last try failed; a new try does not forget it.
        self.last_failure: Mapping[str, Any] | None = None
        self.hang_times_s: tuple[float, ...] = ()
        self.backoff_until_s = float("-inf")

    @property
    def abilities(self) -> Abilities | None:
        """None until the files of its present entry were looked at; its engine knows better."""
        return self.known_abilities.abilities if self.known_abilities is not None and self.known_abilities.hash == self.hash else None

    @property
    def ranks(self) -> tuple[RankFact, ...] | None:
        """None where they are unknown. A model on several nodes may lack the ranks of a node that does not answer."""
        return self.observed.current

    @property
    def is_leaving(self) -> bool:
        """Whether it is being unloaded, or evicted for another model."""
        return self.desired.want is Want.STOPPED or self.evicted_for is not None

    @property
    def pinned(self) -> bool:
        return bool(self.spec and self.spec.pin)

    @property
    def priority(self) -> int:
        return self.spec.priority if self.spec else 0

    @property
    def lack(self) -> Lack | None:
        """The memory that its present entry asked for when there was no room."""
        return self.attempt.lack if self.attempt.entry_hash == self.hash else None

    @property
    def has_claim(self) -> bool:
        """Whether other models make room for it: a client waits or was asked to retry, or an operator has requested the model."""
        requested = bool(self.queue.waiters) or self.queue.promised_at_s is not None or self.desired.by in ("admin", "group")
        return requested and self.desired.want is Want.RUNNING

    def is_taken_over(self, want: Want, by: str) -> bool:
        """Whether this wish replaces the present one, although both want the same.

        An operator's wish replaces a request's, which ends when its client hangs up. While the model is not READY it also replaces a wish
        for which no other model is evicted. The configuration's wish replaces a request's.
        """
        if by != "admin":
            return by == "config" and self.desired.by == "request"
        away = want is Want.RUNNING and self.state is not ModelState.READY
        return self.desired.by in (("request", "retry", "config") if away else ("request", "retry"))

    def begin_attempt(self, now_s: float) -> None:
        self.attempt = Attempt(now_s, self.hash)
        self.last_asked_s = float("-inf")
        self.observed.begin(now_s)

    def fail(self, reason: str, message: str, backoff_until_s: float, *, lasts: bool = False, client_message: str | None = None) -> None:
        """Note a failure. lasts: another try does not help until its cause is fixed. client_message: the text for clients."""
        self.attempt = replace(self.attempt, reason=reason, message=message, lasts=lasts, client_message=client_message, ready_since_s=None)
        self.backoff_until_s = backoff_until_s

    def forget_rank(self) -> None:
        """Forget the attempt of ranks that have ended, except how long its load took."""
        self.attempt = Attempt(self.attempt.since_s, self.attempt.entry_hash, load_s=self.attempt.load_s)
        self.observed.forget()
        self.failures = 0
        self.backoff_until_s = float("-inf")

    def cancel(self, *actions: str) -> None:
        """Cancel the action in progress if it is one of these; a stop always runs to its end."""
        if self.task and self.busy in actions:
            self.task.cancel()

    def close_upstream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream:
            upstream.close()
