"""Records of models for the tests of decisions, by short names for their parts, and the decisions that are made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from sparkd.config.groups import Ties
from sparkd.control.decision import Action, decide
from sparkd.control.record import Record
from sparkd.control.scheduler import Schedule, make_schedule
from sparkd.state.memory_book import MemoryBook
from sparkd.state.nouns import Desired, RankFact, Wait, Want

NOW_S = 1000.0
_SINCE = {"halted_s": "halted_since_s", "deaf_s": "deaf_since_s", "still_s": "last_activity_s", "silent_s": "last_output_s"}
_OF_OBSERVED = {"ranks": "current", "unseen": "unseen", "dark_s": "dark_s", "no_raylet": "no_raylet", "frozen": "hang"}
_OF_ATTEMPT = {"rank_id": "rank_id", "attempt_since_s": "since_s", "ready_since_s": "ready_since_s", "load_s": "load_s"}
_OF_QUEUE = ("in_flight", "last_used_s", "requested_since_s")
_OF_RECORD = {"config_hash": "hash", "state_since_s": "since_s"} | {
    name: name for name in ("name", "state", "busy", "last_asked_s", "backoff_until_s", "lost_load_s", "takes_turns")
}
_OF_SPEC = {"pinned": "pin"} | {name: name for name in ("priority", "executor", "ttl_s", "start_deadline_s", "stop_timeout_s")}


def record_of(name: str, **changes: Any) -> Record:
    """A model that is wanted, by no one in particular, and STOPPED."""
    record = Record(name, Desired(name, Want.RUNNING, 1, "config", 0.0), 0.0, 0.0)
    record.hash = "h"
    spec = SimpleNamespace(pin=False, priority=50, executor="native", ttl_s=0.0, start_deadline_s=1800.0, stop_timeout_s=30.0)
    record.spec = cast(Any, spec)
    record.observed.current = ()
    record.observed.last_activity_s = record.observed.last_output_s = float("-inf")
    return changed(record, **changes)


def changed(before: Record, **changes: Any) -> Record:
    """The same record but for these."""
    record = copy(before)
    record.queue, record.spec, record.observed = copy(record.queue), copy(record.spec), copy(record.observed)
    for name, value in changes.items():
        if name == "want":
            record.desired = replace(record.desired, want=value)
        elif name == "claims":
            record.desired = replace(record.desired, by="admin" if value else "config")
        elif name == "lack":
            record.attempt = replace(record.attempt, lack=value, entry_hash=record.hash)
        elif name == "yields":
            record.evicted_for = "another" if value else None
        elif name == "queued":
            record.queue.waiters = cast(Any, dict.fromkeys(range(value)))
        elif name in _OF_SPEC:
            setattr(record.spec, _OF_SPEC[name], value)
        elif name in _SINCE:
            setattr(record.observed, _SINCE[name], NOW_S - value)
        elif name in _OF_OBSERVED:
            setattr(record.observed, _OF_OBSERVED[name], value)
        elif name == "world":
            record.attempt = replace(record.attempt, nodes=("n", "o")[:value])
        elif name in _OF_ATTEMPT:
            record.attempt = replace(record.attempt, **{_OF_ATTEMPT[name]: value})
        elif name in _OF_QUEUE:
            setattr(record.queue, name, value)
        else:
            setattr(record, _OF_RECORD[name], value)
    return record


def _registry(records: Iterable[Record], ties: Ties | None) -> Any:
    """A model in use stays for ever, and an idle one is evicted at once."""
    by_name = {record.name: record for record in records}
    stop_timeout_s = max((cast(Any, record.spec).stop_timeout_s for record in by_name.values()), default=30.0)
    config = SimpleNamespace(
        unload_timeout_s=60.0,
        min_residency_s=float("inf"),
        swap_idle_s=0.0,
        engine=SimpleNamespace(stop_timeout_s=stop_timeout_s),
        start_deadline_s=lambda spec: spec.start_deadline_s,
        ttl_s=lambda spec: spec.ttl_s,
    )
    return SimpleNamespace(records=by_name, ties=ties or Ties(), config=config)


def scheduled(
    *records: Record,
    book: MemoryBook | None = None,
    ties: Ties | None = None,
    strangers: Collection[RankFact] = (),
    block_reason: Wait | None = None,
) -> Schedule:
    return make_schedule(_registry(records, ties), strangers, book or MemoryBook(), NOW_S, block_reason)


def planned(
    *records: Record, ties: Ties | None = None, strangers: tuple[RankFact, ...] = (), block_reason: Wait | None = None
) -> list[Action]:
    """The next actions on an empty machine."""
    schedule = scheduled(*records, ties=ties, strangers=strangers, block_reason=block_reason)
    return decide(_registry(records, ties), strangers, schedule, NOW_S)
