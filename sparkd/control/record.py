"""Owns the supervisor's memory of one model between two ticks. Never decides, never acts; only the supervisor and its door write it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.config.config import ModelConfig
from sparkd.control.observed import Observed
from sparkd.control.request_queue import RequestQueue
from sparkd.control.residency import Evicted
from sparkd.control.wait_reasons import Wait
from sparkd.engine.upstream import Upstream
from sparkd.state.abilities import Abilities
from sparkd.state.memory_book import Lack
from sparkd.state.nouns import Desired, ModelState, RankHandle, Want


@dataclass(frozen=True, slots=True)
class Looked:
    """What the files of the entry with this hash, or its engine, say of the model."""

    hash: str | None
    abilities: Abilities


class Record:
    """One model. Times ending in _s are monotonic seconds, _wall_s calendar seconds."""

    __slots__ = (
        "adopted",
        "attempt_hash",
        "attempt_since_s",
        "backoff_until_s",
        "busy",
        "client_message",
        "desired",
        "evicted",
        "failures",
        "handles",
        "hash",
        "lack",
        "last_asked_s",
        "lasts",
        "load_s",
        "looked",
        "memory_gib",
        "message",
        "name",
        "nodes",
        "observed",
        "operation",
        "origin",
        "queue",
        "rank_id",
        "ready_since_s",
        "reason",
        "restarts",
        "since_s",
        "since_wall_s",
        "spec",
        "stalls",
        "state",
        "task",
        "transport",
        "turn",
        "upstream",
        "wait",
        "world",
        "yields_to",
    )

    def __init__(self, name: str, desired: Desired, now_s: float, wall_s: float) -> None:
        self.name = name
        self.desired = desired
        self.spec: ModelConfig | None = None
        self.hash: str | None = None
        # The source of its entry: `file` is the configuration, `api` the models that were added.
        self.origin = "file"
        self.looked: Looked | None = None
        self.state = ModelState.STOPPED
        self.since_s = now_s
        self.since_wall_s = wall_s
        self.reason: str | None = None
        self.lasts = False
        self.client_message: str | None = None
        self.message: str | None = None
        self.operation: str | None = None
        self.busy: str | None = None
        self.task: asyncio.Task[None] | None = None
        self.rank_id: str | None = None
        # The handles of every rank, rank 0's first; so are the nodes.
        self.handles: tuple[RankHandle, ...] = ()
        self.nodes: tuple[str, ...] = ()
        self.world = 1
        self.observed = Observed(now_s)
        self.memory_gib: float | None = None
        self.upstream: Upstream | None = None
        # Findings on how the ranks of several nodes talk, as plain JSON.
        self.transport: tuple[Mapping[str, str], ...] = ()
        self.adopted = False
        self.queue = RequestQueue(now_s)
        # Its place among all that wait for room or for their turn, 1 for the first.
        self.turn: int | None = None
        # Why it waits in that line.
        self.wait: Wait | None = None
        # The memory that it asked for when there was no room.
        self.lack: Lack | None = None
        # The model for which it goes.
        self.yields_to: str | None = None
        # How its last stay ended, where it went for another one; None once it is READY again.
        self.evicted: Evicted | None = None
        self.last_asked_s = float("-inf")
        self.attempt_since_s = now_s
        # Of the entry with which the attempt began.
        self.attempt_hash: str | None = None
        self.ready_since_s: float | None = None
        self.load_s: float | None = None
        self.failures = 0
        self.stalls: tuple[float, ...] = ()
        self.restarts = 0
        self.backoff_until_s = float("-inf")

    @property
    def abilities(self) -> Abilities | None:
        """None until the files of its present entry were looked at; its engine knows better."""
        return self.looked.abilities if self.looked is not None and self.looked.hash == self.hash else None

    @property
    def claims(self) -> bool:
        """Whether others are to make room for it: a client waits, or was told to come back, or an operator has asked for it."""
        asked = bool(self.queue.waiters) or self.queue.promised_at_s is not None or self.desired.by in ("admin", "group")
        return asked and self.desired.want is Want.RUNNING

    def is_taken_over(self, want: Want, by: str) -> bool:
        """An operator's wish takes over a request's, which a client that hangs up would take back, and while the model is not there one
        that others need make no room for. The configuration's takes over a request's, too."""
        if by != "admin":
            return by == "config" and self.desired.by == "request"
        away = want is Want.RUNNING and self.state is not ModelState.READY
        return self.desired.by in (("request", "retry", "config") if away else ("request", "retry"))

    @property
    def handle(self) -> RankHandle | None:
        """Rank 0's, which serves."""
        return self.handles[0] if self.handles else None

    @property
    def node_id(self) -> str | None:
        return self.nodes[0] if self.nodes else None

    def begin_attempt(self, now_s: float) -> None:
        self.attempt_since_s, self.attempt_hash = now_s, self.hash
        self.last_asked_s = float("-inf")
        self.ready_since_s = self.load_s = None
        self.reason = self.message = None
        self.lasts = False
        self.transport = ()
        self.adopted = False
        self.lack = None
        self.observed.begin(now_s)

    def stalled(self, now_s: float, window_s: float) -> int:
        """One more stall; how many there were within the last window_s."""
        self.stalls = (*(at_s for at_s in self.stalls if now_s - at_s < window_s), now_s)
        return len(self.stalls)

    def fail(self, reason: str, message: str, backoff_until_s: float, *, lasts: bool = False, client_message: str | None = None) -> None:
        """lasts: waiting does not heal it. client_message: what a client may read of it."""
        self.reason, self.message, self.lasts, self.client_message = reason, message, lasts, client_message
        self.backoff_until_s = backoff_until_s
        self.ready_since_s = None
        self.restarts += 1

    def forget_rank(self) -> None:
        self.rank_id = self.memory_gib = self.ready_since_s = None
        self.observed.forget()
        self.handles, self.nodes, self.world = (), (), 1
        self.reason = self.message = None
        self.transport = ()
        self.failures = 0
        self.backoff_until_s = float("-inf")

    def cancel(self, *actions: str) -> None:
        """End what is under way where it is one of these; a stop always runs to its end."""
        if self.task and self.busy in actions:
            self.task.cancel()

    def close_upstream(self, spawn: Callable[[Any, str], object]) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream:
            spawn(upstream.close(), f"close {self.name}")
