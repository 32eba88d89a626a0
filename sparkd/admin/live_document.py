"""The document that the page shows: nodes, models, operations and cables of one moment, and the figures of it that are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sparkd import __version__
from sparkd.condition import Condition
from sparkd.fabric.report import Cable
from sparkd.gateway.rates import Rates
from sparkd.state.nouns import EngineMemory, Operation, OperationState, Reading
from sparkd.state.snapshot import ModelView, NodeView, Snapshot
from workers.host.memory_limits import MemoryLimits

OPERATIONS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode(NodeView):
    """
    limits: the guard's marks.
    returning_bytes: memory of engines that ended which has not come back.
    """

    limits: MemoryLimits | None
    engines: Sequence[EngineMemory]
    returning_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveModel(ModelView):
    """joules_per_token is of its nodes' GPUs; None where another engine shares one of them: no driver reports shares."""

    pin: bool
    rates: Rates | None
    joules_per_token: float | None


class LiveCable(Cable):
    """A cable, with its nodes by their addresses.

    rate_gb_s: measured last, where it holds.
    problem: the worst finding, with what helps.
    """

    rate_gb_s: float | None
    verdict: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """Values that the daemon asks of every node, and so not every second."""

    cables: Sequence[LiveCable] = ()
    last_incident: str | None = None


@dataclass(frozen=True, slots=True)
class LiveDocument:
    """The page's data.

    last_event: the number of the newest event.
    last_incident: the id of the newest incident.
    """

    at_s: float
    settled: bool
    draining: bool
    conditions: Sequence[Condition]
    nodes: Mapping[str, LiveNode]
    models: Mapping[str, LiveModel]
    operations: Mapping[str, Operation]
    cables: Sequence[LiveCable]
    last_event: int
    last_incident: str | None
    version: str = field(default=__version__)


def document_of(
    snapshot: Snapshot,
    rates: Mapping[str, Rates],
    pins: frozenset[str],
    limits: Callable[[int], MemoryLimits],
    last_event: int,
    answers: NodeAnswers,
) -> LiveDocument:
    """
    pins: the pinned models.
    limits: the guard's, for a node's MemTotal in bytes.
    """
    engines: dict[str, list[EngineMemory]] = {}
    for engine in snapshot.engines:
        engines.setdefault(engine.node, []).append(engine)
    return LiveDocument(
        at_s=snapshot.at_s,
        settled=snapshot.settled,
        draining=snapshot.draining,
        conditions=snapshot.conditions,
        nodes={
            node.node_id: LiveNode(
                **_flat(node),
                limits=limits(node.reading.mem_total_bytes) if node.reading else None,
                engines=engines.get(node.node_id, ()),
                returning_bytes=snapshot.returning_bytes.get(node.node_id, 0),
            )
            for node in snapshot.nodes
        },
        models={
            name: LiveModel(
                **_flat(view), pin=name in pins, rates=rates.get(name), joules_per_token=_joules_per_token(name, rates.get(name), snapshot)
            )
            for name, view in snapshot.models.items()
        },
        operations={operation.id: operation for operation in _shown(snapshot.operations)},
        cables=answers.cables,
        last_event=last_event,
        last_incident=answers.last_incident,
    )


def series_of(snapshot: Snapshot, rates: Mapping[str, Rates]) -> dict[str, float | None]:
    """The figures of this moment that are kept, by the names of their series."""
    figures: dict[str, float | None] = {}
    for node in snapshot.nodes:
        if (reading := node.reading) is not None:
            figures |= {f"node.{node.node_id}.{name}": getattr(reading, of) for name, of in _NODE_SERIES}
    held: dict[str, int] = {}
    for engine in snapshot.engines:
        held[engine.model] = held.get(engine.model, 0) + (engine.host_bytes or 0) + (engine.device_bytes or 0)
    figures |= {f"model.{model}.memory_bytes": size for model, size in held.items()}
    for model, now in rates.items():
        figures |= {f"model.{model}.{name}": getattr(now, name) for name in _MODEL_SERIES}
    return figures


def cables_of(report: Mapping[str, Any]) -> list[LiveCable]:
    """The cables of a fabric's report (sparkd.fabric.report), each with its rate and its worst finding."""
    rates = {frozenset((rate["a"], rate["b"])): rate for rate in report["rates"]}
    cables = []
    for cable in report["cables"]:
        pair, place = f"{cable['a']} - {cable['b']}", f"{cable['a_cage']} - {cable['b_cage']}"
        rate = rates.get(frozenset((cable["a"], cable["b"])))
        here = [finding for finding in report["findings"] if finding["node"] == pair]
        about = [finding for finding in here if finding["about"] == place or finding["check"] == "rate"]
        bad = [finding for finding in about if finding["verdict"] != "ok"]
        worst = max(bad, key=lambda finding: bool(finding["verdict"] == "fail"), default=None)
        cables.append(
            LiveCable(
                **cable,
                rate_gb_s=rate["gb_s"] if rate else None,
                verdict=worst["verdict"] if worst else "ok",
                problem=f"{worst['evidence']}. {worst['cure']}".strip() if worst else None,
            )
        )
    return cables


_NODE_SERIES = (
    ("available_bytes", "mem_available_bytes"),
    ("free_bytes", "mem_free_bytes"),
    ("cached_bytes", "cached_bytes"),
    ("unaccounted_bytes", "unaccounted_bytes"),
    ("psi_full", "psi_full_avg10"),
    ("gpu_power_w", "gpu_power_w"),
    ("gpu_busy", "gpu_busy_percent"),
    ("gpu_celsius", "gpu_celsius"),
)
_MODEL_SERIES = (
    *("prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting", "kv_usage"),
    *("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "e2e_p95_s"),
)


def _flat(noun: NodeView | ModelView) -> dict[str, Any]:
    """The fields as a map: dataclasses.asdict without its copies."""
    return {member.name: getattr(noun, member.name) for member in fields(noun)}


def _joules_per_token(model: str, rates: Rates | None, snapshot: Snapshot) -> float | None:
    nodes = {engine.node for engine in snapshot.engines if engine.model == model}
    shared = any(engine.node in nodes and engine.model != model for engine in snapshot.engines)
    if not nodes or shared or rates is None or not rates.generation_tokens_per_s:
        return None
    readings: dict[str, Reading] = {node.node_id: node.reading for node in snapshot.nodes if node.reading}
    drawn_w = [reading.gpu_power_w for node in nodes if (reading := readings.get(node)) and reading.gpu_power_w is not None]
    return sum(drawn_w) / rates.generation_tokens_per_s if len(drawn_w) == len(nodes) else None


def _shown(operations: Mapping[str, Operation]) -> list[Operation]:
    """The running operations and the newest others."""
    running = [operation for operation in operations.values() if operation.state is OperationState.RUNNING]
    ended = [operation for operation in operations.values() if operation.state is not OperationState.RUNNING]
    return [*ended[-OPERATIONS:], *running]
