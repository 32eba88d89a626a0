"""The frozen picture of everything that the supervisor hands out. Never changes after it was made, never reaches back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkd.condition import Condition
from sparkd.state.nouns import EngineMemory, Machine, ModelState, Operation, Progress, RankHandle, Reading, Want


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model as the outside sees it. Times are wall-clock seconds; retry_in_s counts down to the next try of a failed model.

    since_s: since when it is in this state; of one that waits, since when it does.
    turn: its place among the models that wait for room or for their turn, 1 for the first; None of one that does not wait.
    doubt: why its engine is under suspicion while it is READY or DRAINING: it was asked a question and has not answered yet
    (sparkd.control.watchdog). adopted: its engine ran already when it was taken over; load_s is what its start took then, None where nobody
    kept that. parsers: the fields of a sparkd.vllm.parsers.Parsers, as its engine has them; None while it has none, or nobody knows.
    origin: where its entry is: `file`, the configuration's, or `api`, which it was added by.
    stores_responses: whether its engine keeps answers of /v1/responses to be found by their ids.
    wait: why it waits, for code: `reason`, and `models`, those that it waits for; None of one that does not wait.
    transport: of ranks on several nodes, what NCCL's lines prove: the fields of a fabric_findings.Finding, worst first.
    """

    name: str
    aliases: tuple[str, ...]
    unlisted: bool
    default: bool
    metadata: Mapping[str, Any]
    max_model_len: int | None
    source: str
    quantize: Mapping[str, Any] | str | None
    kv_cache: Mapping[str, Any] | str | None
    state: ModelState
    want: Want
    wanted_by: str
    generation: int
    since_s: float
    created_at_s: float
    reason: str | None
    message: str | None
    progress: Progress | None
    node: str | None
    ranks: tuple[RankHandle, ...]
    in_flight: int
    queued: int
    failures: int
    restarts: int
    retry_in_s: float | None
    load_s: float | None
    memory_gib: float | None
    operation: str | None
    transport: tuple[Mapping[str, str], ...] = ()
    turn: int | None = None
    doubt: str | None = None
    adopted: bool = False
    origin: str = "file"
    parsers: Mapping[str, str | None] | None = None
    stores_responses: bool = False
    wait: Mapping[str, Any] | None = None

    def loading(self) -> dict[str, Any]:
        """The `loading` object of a 503: only what is known."""
        fields: dict[str, Any] = {"model": self.name, "state": self.state.value, "node": self.node}
        if self.progress:
            fields |= {
                "progress": self.progress.fraction,
                "bytes_done": self.progress.bytes_done,
                "bytes_total": self.progress.bytes_total,
                "bytes_per_second": self.progress.bytes_per_s,
                "eta_seconds": self.progress.eta_s,
            }
        return {key: value for key, value in fields.items() if value is not None}


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node of the cluster. `agent` is false while its agent does not answer. machine: None before the agent has looked."""

    node_id: str
    address: str
    local: bool
    agent: bool
    reading: Reading | None
    unified_memory_gib: float | None
    reserved_gib: float
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment. `settled` is true once the first reading, the adoption scan and the configuration were in.

    engines: the memory of those that live; returning_bytes: by node, memory of engines that ended which has not come back.
    """

    at_s: float
    settled: bool
    draining: bool
    tick_age_s: float
    models: Mapping[str, ModelView]
    nodes: tuple[NodeView, ...]
    operations: Mapping[str, Operation]
    cluster: Mapping[str, Any] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    engines: tuple[EngineMemory, ...] = ()
    returning_bytes: Mapping[str, int] = field(default_factory=dict)
