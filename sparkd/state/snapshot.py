"""Holds the frozen picture of everything that the supervisor hands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sparkd.condition import Condition
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import AS_NODE, EngineMemory, Machine, Operation, Progress, RankHandle, Reading, Wait, Want


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model as the outside sees it. Times are wall-clock seconds.

    since_s: start of the present state, under whichever daemon; for a model that waits, start of the wait
    retry_in_s: counts down to the next try of a failed model; None where another try does not help until the cause is fixed
    load_s: of an adopted engine the duration of its start, None if not recorded
    transport: for ranks on several nodes, what NCCL's log lines prove: the fields of sparkd.fabric.checks.Finding, worst first
    turn: queue position among the models that wait for room or for their turn, 1 for the first; None for a model that does not wait
    doubt: why the engine is under suspicion while it is READY or DRAINING: a test question has had no answer yet (sparkd.control.watchdog)
    adopted: this daemon took over a running engine
    origin: where the entry comes from: `file`, the configuration, or `api`, the admin API
    parsers: the fields of a sparkd.vllm.parsers.Parsers, as its engine has them; None where it has none or they are unknown
    stores_responses: whether its engine keeps the responses of /v1/responses under their ids
    wait: why it waits; None for a model that does not wait
    last_failure: of the try before this one, while the model starts again: `reason`, `message`, `at_s`
    """

    name: str
    aliases: tuple[str, ...]
    unlisted: bool
    default: bool
    metadata: Mapping[str, Any]
    max_model_len: int | None
    source: str
    quantize: Mapping[str, Any] | str | None
    state: ModelState
    want: Want
    wanted_by: str
    generation: int
    since_s: float
    reason: str | None
    message: str | None
    progress: Progress | None
    node: str | None
    ranks: tuple[RankHandle, ...]
    in_flight: int
    queued: int
    failures: int
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
    wait: Wait | None = None
    last_failure: Mapping[str, Any] | None = None

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

    node_id: str = field(metadata=AS_NODE)
    address: str
    local: bool
    agent: bool
    reading: Reading | None
    unified_memory_gib: float | None
    reserved_gib: float
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment.

    settled: true once the first reading, the adoption scan and the configuration were in
    engines: the memory of those that live
    returning_bytes: by node, memory of engines that ended which has not come back
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
