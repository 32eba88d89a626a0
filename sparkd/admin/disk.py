"""The admin API's routes of what lies on the nodes' disks: list it, verify it, remove it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field

from sparkd.admin.answers import Accepted, accepted
from sparkd.admin.jobs import Jobs, Tell
from sparkd.checkpoint.source import source_of
from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Journal
from sparkd.control.record import Record
from sparkd.control.registry import Registry
from sparkd.errors import CheckpointError, Conflict, NotFound, StateError
from sparkd.state.model_state import AWAY
from sparkd.state.nouns import Operation, Progress
from sparkd.units import GIB
from workers.host.hub_cache import cache_places

REMOVE, VERIFY = "remove", "verify"
REMOVE_TIMEOUT_S = 120.0
# For one entry: a disk of a Spark gives some GB/s, and the largest models have some hundred.
VERIFY_TIMEOUT_S = 1800.0


class Verifying(BaseModel, extra="forbid"):
    """Which entry; none is every one."""

    kind: str | None = Field(None, max_length=16)
    id: str | None = Field(None, max_length=256)


class DiskEntry(BaseModel):
    """
    kind: hub, quantized or profile.
    used_s: wall clock.
    used_by: models that are configured with it.
    valid: null where that has no meaning.
    fault: why it cannot be used as it is.
    """

    kind: str
    id: str
    node: str
    name: str
    size_bytes: int
    used_s: float | None
    used_by: list[str]
    valid: bool | None
    fault: str | None


class DiskFolder(BaseModel):
    kind: str
    node: str
    path: str
    size_bytes: int
    free_bytes: int | None
    limit_bytes: int | None


class DiskAnswer(BaseModel):
    entries: list[DiskEntry]
    folders: list[DiskFolder]


class Disk:
    """The models, quantized weights and profiles on the nodes' disks, and which models use them."""

    def __init__(self, registry: Registry, journal: Journal, cluster: Cluster, jobs: Jobs) -> None:
        self._registry = registry
        self._journal = journal
        self._cluster = cluster
        self._jobs = jobs
        self._turn = asyncio.Lock()

    async def listing(self) -> DiskAnswer:
        entries, folders = [], []
        # One listing at a time: each holds a thread of every agent.
        async with self._turn:
            answers = await self._cluster.ask_all("stored", *self._where())
        for node, stored in answers.items():
            for entry in (stored or {}).get("entries", ()):
                valid = None if entry["kind"] == "profile" else entry["fault"] is None
                entries.append(DiskEntry(**entry, node=node, used_by=[record.name for record in self._users(entry)], valid=valid))
            for folder in (stored or {}).get("folders", ()):
                folders.append(DiskFolder(**folder, node=node, limit_bytes=self._limit_bytes(folder["kind"])))
        return DiskAnswer(entries=entries, folders=folders)

    async def remove(self, kind: str, name: str, node: str | None) -> Operation:
        """Begin; raises Conflict where a model that is not at rest may use it or a pull runs, NotFound where the node does not list it."""
        node = node or self._cluster.node_ip
        entries = (await self.listing()).entries
        entry = next((entry for entry in entries if (entry.kind, entry.id, entry.node) == (kind, name, node)), None)
        if entry is None:
            raise NotFound(f"{kind[:16]}/{name[:80]} is not on node {node[:64]}. GET /admin/v1/disk lists what the nodes keep.")
        if self._jobs.running("pull"):
            raise Conflict(f"{kind}/{name} was not removed: a pull runs, and may write to it. Wait for the pull, or cancel it.")
        for record in self._registry.records.values():
            if record.state not in AWAY and _may_use(record, entry):
                raise Conflict(f"{kind}/{name} was not removed: {record.name}, which is {record.state.value}, may use it. Unload it first.")
        return self._jobs.start(REMOVE, name, partial(self._remove, entry), remains="The node may have removed it already.")

    async def _remove(self, entry: DiskEntry, _: Tell) -> str:
        kind, name, node = entry.kind, entry.id, entry.node
        freed = await self._cluster.ask(node, "remove_stored", kind, name, *self._where(), timeout_s=REMOVE_TIMEOUT_S)
        message = f"{kind}/{name} was removed from {node}: {freed / GIB:.1f} GiB."
        self._journal.say("disk", None, message, node=node, freed_bytes=freed)
        return message

    async def verify(self, kind: str | None, name: str | None) -> Operation:
        """Begin; the operation's message names the faults. Raises Conflict for a second one: each holds a thread of an agent."""
        await self._jobs.wait_for_cancelled(VERIFY)
        self._jobs.refuse_second(VERIFY, "verification")
        return self._jobs.start(VERIFY, name or "", partial(self._verify, kind, name))

    async def _verify(self, kind: str | None, name: str | None, tell: Tell) -> str:
        entries = (await self.listing()).entries
        chosen = [entry for entry in entries if kind in (None, entry.kind) and name in (None, entry.id)]
        if not chosen and name is None:
            return "Nothing is kept, so nothing was verified."
        if not chosen:
            raise StateError(f"There is no {'/'.join(filter(None, (kind, name)))} on any node; GET /admin/v1/disk lists what there is.")
        faults = []
        for number, entry in enumerate(chosen):
            tell(f"{entry.name} on {entry.node}", Progress(phase="verifying", fraction=number / len(chosen)))
            order = (entry.kind, entry.id, *self._where())
            fault = await self._cluster.ask(entry.node, "verify_stored", *order, timeout_s=VERIFY_TIMEOUT_S)
            faults += [f"{entry.name} on {entry.node}: {fault}"] if fault else []
        if faults:
            raise CheckpointError("; ".join(faults))
        return f"All {len(chosen)} can be used."

    def _where(self) -> tuple[dict[str, str], dict[str, str]]:
        """The daemon's folders, and the variables of its engines that move the hub's cache."""
        config = self._registry.config
        environ = {name: value.get_secret_value() for name, value in config.engine.env.items()}
        return {"quantized": str(config.quantized_path), "profile": str(config.profiles_path)}, cache_places(environ)

    def _users(self, entry: Mapping[str, Any]) -> list[Record]:
        source = entry["source"]
        if source is None:
            return []
        configured = ((record, record.spec) for record in self._registry.records.values() if record.spec is not None)
        return [record for record, spec in configured if _is_of(source, entry["kind"], spec.model, spec.quantize)]

    def _limit_bytes(self, kind: str) -> int | None:
        limit_gib = self._registry.config.quantized_cache.limit_gib
        return int(limit_gib * GIB) if kind == "quantized" and limit_gib is not None else None


def _may_use(record: Record, entry: DiskEntry) -> bool:
    """Whether an entry's files may be open. A hub folder is looked for in all words of the model's entry: its draft and tokenizer count."""
    if entry.kind == "quantized":
        return record.name in entry.used_by
    if record.spec is None or entry.kind != "hub":
        return True
    words = repr(record.spec)
    return entry.id in words or entry.name in words


def _is_of(source: str, kind: str, model: str, quantize: object) -> bool:
    if kind == "hub":
        return source == model
    wanted = source_of(model)
    same = wanted == source if wanted.startswith("/") else f"/models--{wanted.replace('/', '--')}/" in source
    return same and quantize is not None


def register_disk(api: APIRouter, disk: Disk) -> None:
    @api.get("/disk", summary="What the nodes keep of models: the hub's cache, quantized weights, profiles")
    async def stored() -> DiskAnswer:
        return await disk.listing()

    @api.post("/disk/verify", status_code=202, summary="Verify what the nodes keep; the hub's files are read whole")
    async def verify(which: Annotated[Verifying, Body(default_factory=Verifying)]) -> Accepted:
        return accepted(await disk.verify(which.kind, which.id))

    @api.delete("/disk/{kind}/{id}", status_code=202, summary="Remove one entry of a node, the daemon's own unless `node` names another")
    async def remove_stored(kind: str, id: str, node: Annotated[str | None, Query(max_length=64)] = None) -> Accepted:
        return accepted(await disk.remove(kind, id, node))
