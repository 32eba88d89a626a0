"""The plan of a model over the admin API: by the answers of vLLM that are kept at once, and an operation that has it answer the rest."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from sparkd.admin.answers import accepted
from sparkd.admin.jobs import Jobs, Tell
from sparkd.admin.operator import Operator
from sparkd.capacity.plan_for_node import PlanOrder, order_here, planned_here
from sparkd.capacity.planned_entry import PlanRequest
from sparkd.cluster.cluster import Cluster
from sparkd.control.journal import Journal
from sparkd.control.registry import Registry
from sparkd.control.supervisor import Supervisor
from sparkd.errors import EngineError
from sparkd.execution import tool_process
from sparkd.hardware import Hardware
from sparkd.recipes.admin_policy import refuse_calibration
from sparkd.state.nouns import Operation, Progress
from sparkd.state.snapshot import ModelView, Snapshot
from sparkd.units import GIB
from sparkd.vllm.ask.model import MEMORY_BYTES
from workers.host.interpreter import module_command, program_environment

KIND = "plan"
# The least memory above the guard's soft limit with which vLLM is asked: its import takes about a GiB, and a question as much again.
ROOM_BYTES = 3 * GIB
# The sentence of each step of sparkd.vllm.ask.model.ask.
_STEPS = {"importing": "vLLM is being imported", "ready": "vLLM is ready", "asking": "vLLM builds the model without its weights"}


class PlanOption(BaseModel):
    """One format over so many nodes. footprint: bytes, null where vLLM would not serve the model so. reserved_gib: by a start, on each."""

    model: str
    prequantized: str | None
    format: str
    nodes: int
    tensor_parallel: int
    pipeline_parallel: int
    fits: bool
    reason: str | None
    max_model_len: int
    longest: int | None
    reserved_gib: int
    footprint: dict[str, Any] | None


class PlanChoice(PlanOption):
    """The best option.

    ranks: the command and the environment of each.
    config: a model's entry that asks for it.
    """

    name: str
    config: dict[str, Any] | None
    ranks: list[dict[str, Any]]
    configured: bool | None = None
    container: dict[str, Any] | None = None


class PlanRefusal(BaseModel):
    """Why no option fits.

    cause: memory, cache, length, links, vllm, split, format or uncounted.
    message: with one thing to do.
    """

    cause: str
    message: str


class PlanAnswer(BaseModel):
    """Whether a model fits, and how.

    bytes: of its weights as they are stored.
    unloaded: bytes of the parts of its files that vLLM does not load, `mtp` without speculative decoding only.
    unknown_experts: bytes of experts that no format changes, by the tensors' names.
    """

    model: str
    entry: dict[str, Any] | None
    folder: str
    architecture: str
    layers: int
    max_len: int
    bytes: int
    unloaded: dict[str, int]
    unknown_experts: dict[str, int]
    quantization: str | None
    hardware: Hardware
    asked: dict[str, Any]
    options: list[PlanOption]
    choice: PlanChoice | None
    refusal: PlanRefusal | None
    notes: list[str]
    vllm: dict[str, Any] = Field(
        description="`runtime`, its `version` or null, whether it has `answered` about this model, and how many questions are `unanswered`"
    )
    operation: str | None = Field(description="Of 202: the operation that asks vLLM. The same question then has its numbers")
    href: str | None


class Planning(PlanRequest):
    """quick: vLLM is not asked; the numbers are a guess where it has not answered before."""

    quick: bool = False

    def request(self) -> PlanRequest:
        return PlanRequest.model_validate(self.model_dump(exclude={"quick"}))


class Planner:
    def __init__(
        self, supervisor: Supervisor, registry: Registry, journal: Journal, cluster: Cluster, operator: Operator, jobs: Jobs
    ) -> None:
        self._supervisor, self._registry, self._journal = supervisor, registry, journal
        self._cluster, self._operator, self._jobs = cluster, operator, jobs
        # Each vLLM that is asked takes a core and about a GiB.
        self._turn = asyncio.Lock()

    async def plan(self, request: PlanRequest, *, quick: bool) -> tuple[dict[str, Any], Operation | None]:
        """The plan as plain JSON, and the operation that has vLLM answer what it left open.

        quick: vLLM is not asked.

        Raises ConfigError, CheckpointError and Unavailable.
        """
        refuse_calibration(request.quantize)
        spec = await asyncio.to_thread(self._operator.spec_to_plan, request.model)
        snapshot, registry, cluster = self._supervisor.snapshot(), self._registry, self._cluster
        in_sight, places = sum(node.agent for node in snapshot.nodes), registry.model_places()
        order = await order_here(request, spec, cluster.placer.unlinked, registry.config, in_sight, places, cluster.runtime)
        answer = await planned_here(order)
        notes = list(answer["notes"])
        if spec is not None and (view := snapshot.models.get(spec.name)) is not None and view.ranks:
            notes.append(_runs(view))
        operation = None
        if answer["vllm"]["unanswered"] and not quick:
            room = self._room_bytes(snapshot)
            if room < ROOM_BYTES:
                notes.append(_not_asked(room))
            else:
                operation = await self._asking(spec.name if spec is not None else request.model, order)
        return {**answer, "notes": notes}, operation

    def _room_bytes(self, snapshot: Snapshot) -> int:
        """The memory of this node above the guard's soft limit; 0 before the first reading."""
        readings = (node.reading for node in snapshot.nodes if node.local and node.reading is not None)
        limits = self._registry.config.memory.limits
        return next((reading.mem_available_bytes - limits(reading.mem_total_bytes).soft for reading in readings), 0)

    async def _asking(self, model: str, order: PlanOrder) -> Operation:
        """The operation that is under way for this model, else a new one."""
        await self._jobs.wait_for_cancelled(KIND, model)
        for operation_id in self._jobs.running(KIND, model):
            return self._journal.operations.find(operation_id)
        return self._jobs.start(KIND, model, partial(self._ask, order))

    async def _ask(self, order: PlanOrder, tell: Tell) -> str:
        """Cancelled, it ends the program and its vLLM. Raises EngineError where the memory is gone once its turn has come."""
        tell("waiting for another plan", Progress(phase="asking"))

        async def heard(line: bytes) -> None:
            event = json.loads(line)
            if "error" in event:
                raise EngineError(event["error"])
            tell(_STEPS.get(event["step"], event["step"]), Progress(phase="asking"))

        command, environment = module_command(sys.executable, "sparkd.capacity.ask_for_plan"), program_environment(os.environ)
        async with self._turn:
            if (room := self._room_bytes(self._supervisor.snapshot())) < ROOM_BYTES:
                raise EngineError(_not_asked(room))
            given = pickle.dumps((order, min(room, MEMORY_BYTES)))
            with tempfile.TemporaryDirectory(prefix="sparkd-plan-") as folder:
                await tool_process.run("The plan", command, environment, Path(folder, "said"), heard, given)
        return "vLLM has answered: the same question to /plan has its numbers."


def register_plan(api: APIRouter, planner: Planner) -> None:
    @api.post(
        "/plan",
        status_code=200,
        response_model=None,
        responses={
            200: {"model": PlanAnswer, "description": "vLLM has answered, or is not asked"},
            202: {
                "model": PlanAnswer,
                "description": "The guess so far; `operation` asks vLLM, then ask again",
            },
        },
        summary="Whether a model fits, and how: from its headers, and vLLM's answers",
    )
    async def plan(question: Planning, response: Response) -> dict[str, Any]:
        answer, operation = await planner.plan(question.request(), quick=question.quick)
        if operation is None:
            return {**answer, "operation": None, "href": None}
        response.status_code = 202
        return {**answer, "operation": operation.id, "href": accepted(operation).href}


def _not_asked(room_bytes: int) -> str:
    return (
        f"vLLM was not asked, because it may take {ROOM_BYTES / GIB:g} GiB, and this node has {max(0, room_bytes) / GIB:.1f} GiB above the "
        "guard's soft limit: the numbers are a guess. Unload a model and ask again for vLLM's own."
    )


def _runs(view: ModelView) -> str:
    """The memory and the cache of a model that runs, beside what a plan would give it."""
    tokens = view.progress.kv_tokens if view.progress else None
    cache = f", and its KV cache has {tokens:,} tokens" if tokens is not None else ""
    return f"{view.name} runs: {view.memory_gib or 0:g} GiB are reserved for it on each of its nodes{cache}. The plan is of its next start."
