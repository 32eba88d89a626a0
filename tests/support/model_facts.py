"""Facts of a model for the tests of decisions, by short names for the parts of its record."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from sparkd.control.facts import ModelFacts
from sparkd.control.record import Record
from sparkd.state.nouns import Desired, Want

NOW_S = 1000.0
_SINCE = {"halted_s": "halted_since_s", "deaf_s": "deaf_since_s", "still_s": "last_activity_s", "silent_s": "last_output_s"}
_OF_OBSERVED = {"ranks": "current", "unseen": "unseen", "dark_s": "dark_s", "no_raylet": "no_raylet"}
_OF_ATTEMPT = {"rank_id": "rank_id", "attempt_since_s": "since_s"}
_OF_QUEUE = ("in_flight", "last_used_s", "asked_since_s")
_OF_RECORD = {"config_hash": "hash", "state_since_s": "since_s"} | {
    name: name for name in ("name", "state", "busy", "last_asked_s", "backoff_until_s", "lost_load_s")
}


def facts_of(name: str, **changes: Any) -> ModelFacts:
    """A model that is wanted, by no one in particular, and STOPPED."""
    record = Record(name, Desired(name, Want.RUNNING, 1, "config", 0.0), 0.0, 0.0)
    record.hash = "h"
    record.spec = cast(Any, SimpleNamespace(pin=False, priority=50, executor="native"))
    record.observed.current = ()
    record.observed.last_activity_s = record.observed.last_output_s = float("-inf")
    return changed(ModelFacts(record, NOW_S), **changes)


def changed(facts: ModelFacts, **changes: Any) -> ModelFacts:
    """The same facts but for these."""
    record, of_tick = copy(facts.record), {}
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
        elif name in ("pinned", "priority", "executor"):
            setattr(record.spec, "pin" if name == "pinned" else name, value)
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
        elif name in _OF_RECORD:
            setattr(record, _OF_RECORD[name], value)
        else:
            of_tick[name] = value
    return replace(facts, record=record, **of_tick)
