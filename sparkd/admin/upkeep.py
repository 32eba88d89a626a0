"""The admin API's routes of upkeep: the doctor, the guards' incidents, the reload."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from functools import partial
from heapq import merge
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from sparkd.admin.answers import answers
from sparkd.cluster.cluster import Cluster
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.control.watchdog import GUARD_ABSENT
from sparkd.doctor.report import Report, examined
from sparkd.errors import NotFound
from sparkd.execution.shared_answer import SharedAnswer

HOSTS_KEPT_S = 5.0

Reload = Callable[[], Awaitable[dict[str, Any]]]


class IncidentSummary(BaseModel):
    """An action of a memory guard. A field is null if the guard's release did not write it."""

    id: str
    at_s: float | None = None
    node: str | None = None
    model: str | None = None
    rank_id: str | None = None
    phase: str | None = None
    why: str | None = None
    level: str | None = None
    freed_bytes: int | None = None


class Incidents(BaseModel):
    incidents: list[IncidentSummary]
    silent: list[str] = Field(description="Nodes that do not answer")


class Incident(IncidentSummary, extra="allow"):
    """One bundle, as the guard of its release wrote it: readings under `columns`, the end of the engine's log, who asked."""

    told: dict[str, Any] | None = None
    pids: list[int] | None = None
    limits: dict[str, int] | None = None
    engines: list[dict[str, Any]] | None = None
    available_bytes: int | None = None
    columns: list[str] | None = None
    readings: list[Any] | None = None
    log: list[str] | None = None
    survivors: list[int] | None = None


class Reloaded(BaseModel):
    """Keys of the file that changed, those that wait for the next start, and names of models."""

    changed: list[str]
    later: list[str]
    added: list[str]
    removed: list[str]
    restarted: list[str]
    adjusted: list[str]


def register_upkeep(api: APIRouter, supervisor: Supervisor, registry: Registry, cluster: Cluster, reload: Reload) -> None:
    @api.post(
        "/reload",
        **answers(Reloaded),
        summary="Read the configuration again and list what changed; an invalid file is refused, and the old one stays",
    )
    async def read_again() -> dict[str, Any]:
        return await reload()

    # Each reading starts programs on every node.
    hosts = SharedAnswer(supervisor.boundary, HOSTS_KEPT_S)

    @api.get("/doctor", summary="How well the nodes are prepared, what is wrong, how to fix it, and why models failed")
    async def doctor() -> Report:
        snapshot, config = supervisor.snapshot(), registry.config
        runtime = str(config.engine.runtime or sys.executable)
        readings = await hosts.get(runtime, partial(cluster.ask_all, "host", runtime))
        unguarded = [condition for condition in snapshot.conditions if condition.reason == GUARD_ABSENT]
        return examined(readings, config, snapshot.models.values(), unguarded)

    @api.get("/incidents", **answers(Incidents), summary="Actions of the nodes' memory guards, newest first")
    async def incidents() -> dict[str, Any]:
        by_node = await cluster.ask_all("incidents")
        # A node lists its own oldest first, also where its clock was set back.
        newest_first = (reversed(listed) for listed in by_node.values() if listed)
        rows = merge(*newest_first, key=lambda row: str(row["id"]), reverse=True)
        return {"incidents": list(rows), "silent": [node for node, listed in by_node.items() if listed is None]}

    @api.get(
        "/incidents/{incident_id}",
        **answers(Incident),
        summary="One incident: two minutes of readings, the engine's log, the requester, the predicted size",
    )
    async def incident(incident_id: str) -> dict[str, Any]:
        by_node = await cluster.ask_all("incident", incident_id)
        bundle = next(filter(None, by_node.values()), None)
        if bundle is None:
            raise NotFound(f"There is no incident {incident_id[:128]!r} on the nodes that answer. `sparkd incidents ls` lists them.")
        return dict(bundle)
