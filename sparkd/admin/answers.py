"""The types of the admin API's answers that are no nouns themselves. `node` is always a node's address in the cluster."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, Field

from sparkd.cluster.ray_head import Costs
from sparkd.condition import Condition
from sparkd.fabric.report import Offered
from sparkd.gateway.routes import ADMIN_ROOT
from sparkd.hardware import Hardware
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Event, Operation, Reading
from sparkd.state.snapshot import ModelView, NodeView


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted(Operation):
    """A long action that has begun, and where to ask for it. operation is its id."""

    operation: str
    href: str


def accepted(operation: Operation) -> Accepted:
    members = {member.name: getattr(operation, member.name) for member in fields(operation)}
    return Accepted(**members, operation=operation.id, href=f"{ADMIN_ROOT}/operations/{operation.id}")


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


class Events(BaseModel):
    events: list[Event]


def answers(model: Any, status: int = 200, *, media_type: str | None = None) -> dict[str, Any]:
    """The arguments of a route whose answer is made elsewhere, as a dict or a text that `model` describes. It is sent unchecked.

    media_type: the type that it streams instead, on request.
    """
    answer: dict[str, Any] = {"model": model, "description": "As asked"}
    if media_type is not None:
        answer["content"] = {media_type: {"schema": {"type": "string"}}}
    return {"status_code": status, "response_model": None, "responses": {status: answer}}
