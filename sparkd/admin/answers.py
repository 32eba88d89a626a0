"""The types of the admin API's answers that are no nouns themselves. `node` is always a node's address in the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import BaseModel, Field

from sparkd.cluster.ray_head import RayProcess
from sparkd.condition import Condition
from sparkd.fabric.checks import Finding
from sparkd.fabric.report import Offered
from sparkd.hardware import Hardware
from sparkd.state.nouns import Event, ModelState, Operation, Reading
from sparkd.state.snapshot import ModelView, NodeView

PREFIX = "/admin/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Operation):
    """A long action that has begun, and where to ask for it. operation is its id."""

    operation: str
    href: str


def accepted(operation: Operation) -> Accepted:
    members = {member.name: getattr(operation, member.name) for member in fields(operation)}
    return Accepted(**members, operation=operation.id, href=f"{PREFIX}/operations/{operation.id}")


class Cost(BaseModel):
    """Anonymous memory and CPU seconds of the daemon."""

    anonymous_bytes: int
    cpu_s: float


class Costs(BaseModel):
    """The cost of the daemon and of Ray on this node. ray_listeners: `ADDRESS:PORT NAME` of each TCP socket of Ray's."""

    daemon: Cost
    ray: list[RayProcess]
    ray_anonymous_bytes: int
    ray_listeners: list[str]


class Status(BaseModel):
    version: str
    settled: bool
    draining: bool
    tick_age_s: float
    cluster: dict[str, Any] = Field(description="`connected`, `address`, `own_head`; empty before the first look")
    conditions: list[str] = Field(description="Each begins with its reason and a colon")
    typed_conditions: list[Condition] = Field(description="The same; node is null for one that is not about a single node")
    models: dict[str, ModelState]
    nodes: list[NodeView]
    costs: Costs


class Nodes(BaseModel):
    nodes: list[NodeView]
    offered: list[Offered]
    head: str | None
    hardware: Hardware


class Memory(BaseModel):
    readings: list[Reading]


class Examination(BaseModel):
    """The doctor's findings. nodes: those that answered."""

    nodes: list[str]
    findings: list[Finding]
    verdict: str


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


class Models(BaseModel):
    models: list[ModelView]


class TakenIn(BaseModel):
    """A model that was added or changed and is not to be loaded now."""

    operation: None = None
    model: ModelView


class LogPage(BaseModel):
    """Whole lines; give the cursor back to go on from there."""

    text: str
    cursor: str


class Operations(BaseModel):
    operations: list[Operation]


class Meaning(BaseModel):
    """The body of `POST /models` that adds what a user means."""

    name: str
    spec: dict[str, str]
    known: str | None = Field(description="The known model that is meant; null for one to add, and where `model` was not asked for")


class RecipeSummary(BaseModel):
    name: str
    description: str
    model: str
    quantize: Any
    nodes: int
    speculative: str
    decode_tokens_per_s: Any
    path: str


class Recipes(BaseModel):
    recipes: list[RecipeSummary]
    problems: list[str]


class RecipeChoice(BaseModel):
    """The whole recipe, and what it comes to."""

    name: str
    description: str
    model: str
    quantize: Any
    nodes: dict[str, Any]
    speculative: str
    decode_tokens_per_s: Any
    path: str
    choice: Any
    container: dict[str, Any] | None
    needs_vllm: Any
    spec: dict[str, Any]
    flags: list[str]
    env: dict[str, str]
    translated: list[str]
    sampling: Any
    expected: list[dict[str, Any]]
    sources: dict[str, Any]
    notes: list[str]


class PlanOption(BaseModel):
    """One format over so many nodes. footprint: bytes, null where vLLM would not split the model so."""

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
    footprint: dict[str, Any] | None


class PlanChoice(PlanOption):
    """The best option. ranks: the command and the environment of each; config: a model's entry that asks for it."""

    name: str
    config: dict[str, Any] | None
    ranks: list[dict[str, Any]]
    configured: bool | None = None
    container: dict[str, Any] | None = None
    said: list[str] | None = None
    notes: list[str] | None = None


class PlanRefusal(BaseModel):
    """Why no option fits. cause: memory, cache, length, links, vllm, split, format or uncounted; message: with one thing to do."""

    cause: str
    message: str


class FitAnswer(BaseModel):
    """Whether a model fits, and how. bytes: of its weights as they are stored. unloaded: bytes of the parts of its files that vLLM does not
    load, `mtp` without speculative decoding only. unknown_experts: bytes of experts that no format changes, by the tensors' names."""

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
    floor: list[dict[str, Any]]
    notes: list[str]
    vllm: dict[str, Any] = Field(description="`runtime`, its `version` or null, and whether it has `answered` about this model")


class RequestBody(BaseModel):
    """One request for a model. Times are in seconds: started_s since 1970, the others since its arrival.

    number counts the finished ones and is null in flight. tokens: as the engine counted them, at the end of its answer; null in flight,
    because counting them on the way would mean to read each chunk. tokens_per_s: of a stream behind its first.
    """

    request_id: str
    number: int | None
    model: str = Field(description="A configured name; `unknown`, or empty, if the request named none")
    route: str
    key: str | None = Field(description="The name of the client's key; null if none is configured")
    started_s: float
    phase: Literal["queued", "forwarded", "streaming", "done"]
    status: int | None = Field(description="499: the client left; null before the answer has begun")
    code: str | None = Field(description="The code of the error that ended it")
    failed: bool = Field(description="It ended with a code, or a status of 400 or more")
    seconds: float
    queued_s: float | None
    ttft_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int | None
    tokens_per_s: float | None
    bytes_out: int
    streamed: bool
    pieces: int | None = Field(description="Pieces of a stream in flight so far: one for each token, or for the few that the engine had")


class Requests(BaseModel):
    in_flight: list[RequestBody] = Field(description="Oldest first")
    finished: list[RequestBody] = Field(description="Newest first, by their end")
    next: int | None = Field(description="The `before` of the next page")


class Events(BaseModel):
    events: list[Event]


class Reloaded(BaseModel):
    """Keys of the file that changed, those that wait for the next start, and names of models."""

    changed: list[str]
    later: list[str]
    added: list[str]
    removed: list[str]
    restarted: list[str]
    adjusted: list[str]


def answers(model: Any, status: int = 200, *, media_type: str | None = None, description: str = "As asked") -> dict[str, Any]:
    """The arguments of a route whose answer is made elsewhere, as a dict or a text that `model` describes. It is sent unchecked.

    media_type: the type that it streams instead, on request.
    """
    answer: dict[str, Any] = {"model": model, "description": description}
    if media_type is not None:
        answer["content"] = {media_type: {"schema": {"type": "string"}}}
    return {"status_code": status, "response_model": None, "responses": {status: answer}}


def described_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """FastAPI's document with the two ways to show a key. On loopback without keys configured none is asked for."""
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An admin key: `Authorization: Bearer KEY`"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key in a header of its own"},
    }
    components = {**document.get("components", {}), "securitySchemes": schemes}
    return {**document, "components": components, "security": [{"bearer": []}, {"key": []}, {}]}
