"""How a model looks from outside: what the snapshot shows, what the guards must know, and which models hold memory that it lacks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sparkd.config.config import Config
from sparkd.config.model import ModelConfig
from sparkd.config.quantize import canonical
from sparkd.control.record import Record
from sparkd.control.registry import Registry
from sparkd.control.request_queue import RequestQueue
from sparkd.control.scheduler import Schedule
from sparkd.state.model_state import AWAY, STARTING, ModelState
from sparkd.state.nouns import Progress, Wait
from sparkd.state.snapshot import ModelView

NO_SCHEDULE = Schedule()
_STORE = "VLLM_ENABLE_RESPONSES_API_STORE"


def holders(registry: Registry, lacking: Record, now_s: float) -> list[dict[str, Any]]:
    """The models that hold memory that `lacking` might have, the largest first: the rows of Unavailable.held_by. An unlisted one has no
    name."""
    others = (record for record in registry.records.values() if record is not lacking)
    held = [record for record in others if record.attempt.memory_gib and record.attempt.rank_id]
    return [
        {
            "model": record.name if record.spec and not record.spec.unlisted else None,
            "node": record.attempt.node_id,
            "memory_gib": record.attempt.memory_gib,
            "state": record.state.value,
            "in_flight": record.queue.in_flight,
            "queued": record.queue.waiting,
            "idle_seconds": round(_idle_s(record.queue, now_s), 1),
        }
        for record in sorted(held, key=lambda record: -(record.attempt.memory_gib or 0.0))
    ]


def guard_hints(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """By model, what the guards of the nodes must know of it: see workers.guard.guard.Guard."""
    return {
        record.name: {
            "in_flight": record.queue.in_flight,
            "priority": record.priority,
            "pinned": record.pinned,
            "state": record.state.value,
            "by": record.desired.by,
            "predicted_gib": record.attempt.memory_gib,
        }
        for record in records
        if record.attempt.rank_id
    }


def view(registry: Registry, record: Record, now_s: float, schedule: Schedule = NO_SCHEDULE, doubt: str | None = None) -> ModelView:
    spec = record.spec
    retries = record.state is ModelState.FAILED and not record.attempt.lasts
    retry_in_s = max(0.0, record.backoff_until_s - now_s) if retries else None
    gone = record.state is ModelState.FAILED and record.observed.ranks == ()
    # A waiting model's tells since when it waits. It may have been STOPPED, and unasked for, ever since the daemon began.
    wait = schedule.waits.get(record.name)
    turn = schedule.queue.index(record.name) + 1 if wait is not None and record.name in schedule.queue else None
    asked_s = record.queue.requested_since_s if turn is not None else None
    since_s = record.since_wall_s if asked_s is None else registry.wall() - (now_s - asked_s)
    configured = spec.max_model_len if spec and isinstance(spec.max_model_len, int) else None
    return ModelView(
        name=record.name,
        aliases=tuple(n for n in spec.served_names() if n != record.name) if spec else (),
        unlisted=spec.unlisted if spec else True,
        default=spec.default if spec else False,
        metadata=spec.metadata if spec else {},
        max_model_len=record.abilities.max_model_len if record.abilities else configured,
        source=spec.model if spec else "",
        quantize=canonical(spec.quantize) if spec else None,
        state=record.state,
        want=record.desired.want,
        wanted_by=record.desired.by,
        generation=record.desired.generation,
        since_s=since_s,
        origin=record.origin,
        reason=record.attempt.reason,
        message=_message(record, wait),
        progress=_without_cache(record.observed.progress) if record.state is ModelState.FAILED else record.observed.progress,
        node=record.attempt.node_id,
        ranks=() if gone else record.attempt.handles,
        in_flight=record.queue.in_flight,
        queued=record.queue.waiting,
        failures=record.failures,
        last_failure=record.last_failure if record.failures and record.state in (ModelState.STOPPED, *STARTING) else None,
        retry_in_s=retry_in_s,
        load_s=None if record.state is ModelState.FAILED else record.attempt.load_s,
        memory_gib=None if gone else record.attempt.memory_gib,
        operation=record.operation,
        transport=record.attempt.transport,
        turn=turn,
        doubt=doubt,
        wait=wait,
        adopted=record.attempt.adopted,
        parsers=None if gone or record.attempt.handle is None else record.attempt.handle.parsers,
        stores_responses=_stores_responses(spec, registry.config) if spec else False,
    )


def _stores_responses(spec: ModelConfig, config: Config) -> bool:
    """Whether vLLM stores responses, by its variable (vllm/envs.py); True for another engine, which sparkd cannot judge."""
    value = spec.environment(config.engine).get(_STORE, os.environ.get(_STORE, "0"))
    return not spec.runs_vllm(config.engine) or value.strip() not in ("0", "")


def _idle_s(queue: RequestQueue, now_s: float) -> float:
    return 0.0 if queue.in_use else max(0.0, now_s - queue.last_used_s)


def _message(record: Record, wait: Wait | None) -> str | None:
    """A model that waits says why, one that failed first how; one that is STOPPED and waits for nothing has nothing to say."""
    waits = wait.message if wait is not None and record.state in AWAY else None
    failed = record.attempt.message if record.state is not ModelState.STOPPED else None
    return " ".join(filter(None, (failed, waits))) or None


def _without_cache(progress: Progress | None) -> Progress | None:
    """The cache of an engine that has failed is gone with it. That one was refused stays said."""
    if progress is None:
        return None
    refused = progress.kv is not None and progress.kv.get("phase") == "refused"
    return replace(progress, kv_tokens=None, kv_gib=None, kv=progress.kv if refused else None)
