"""Owns the document that the page shows: nodes, models, operations and cables as one tree, what changed in it, and the figures of it that
are kept. Pure: looks at nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sparkd import __version__
from sparkd.gateway.rates import Rates
from sparkd.state.nouns import EngineMemory, Operation, OperationState, Progress, RankHandle, Reading
from sparkd.state.snapshot import ModelView, NodeView, Snapshot
from workers.host.memory_limits import MemoryLimits

GIB = 1 << 30
OPERATIONS = 50
# An uptime that changed each second would be in every change.
UPTIME_STEP_S = 60

Tree = dict[str, Any]

_READING, _PROGRESS, _OPERATION = (tuple(field.name for field in fields(noun)) for noun in (Reading, Progress, Operation))
_NODE = tuple(field.name for field in fields(NodeView) if field.name not in ("reading", "machine"))
_MODEL = tuple(field.name for field in fields(ModelView) if field.name not in ("ranks", "progress"))
# A private path: no answer shows it.
_RANK = tuple(field.name for field in fields(RankHandle) if field.name != "api_key_path")
_RATES = tuple(field.name for field in fields(Rates))
_GPU = ("name", "power_w", "busy_percent", "celsius", "clock_mhz", "throttled")


@dataclass(frozen=True, slots=True)
class Beside:
    """The facts that a snapshot lacks. limits: the guard's limits for a node's MemTotal in bytes; pins: the pinned models; rates: by model;
    cables: see `cables_of`; last_seq: number of the newest event; last_incident: id of the newest incident."""

    boot: str
    limits: Callable[[int], MemoryLimits]
    pins: frozenset[str]
    rates: Mapping[str, Rates]
    cables: Sequence[Mapping[str, Any]] = ()
    last_seq: int = 0
    last_incident: str | None = None


def document_of(snapshot: Snapshot, beside: Beside, former: tuple[Snapshot, Tree] | None = None) -> Tree:
    """The whole document. An unknown value is None. former: an earlier one, whose unchanged models are taken over as they are."""
    earlier, shown = (former[0].models, former[1]["models"]) if former else ({}, {})
    engines: dict[str, list[EngineMemory]] = {}
    for engine in snapshot.engines:
        engines.setdefault(engine.node, []).append(engine)
    readings = {node.node_id: node.reading for node in snapshot.nodes if node.reading}
    return {
        "boot": beside.boot,
        "version": __version__,
        "at_s": round(snapshot.at_s, 3),
        "settled": snapshot.settled,
        "draining": snapshot.draining,
        "conditions": [_flat(condition, ("reason", "message", "node")) for condition in snapshot.conditions],
        "nodes": {
            node.node_id: _node(node, engines.get(node.node_id, ()), snapshot.returning_bytes.get(node.node_id, 0), beside.limits)
            for node in snapshot.nodes
        },
        "models": {
            name: shown[name]
            if earlier.get(name) == view and name not in beside.rates and _is_still(shown[name], name in beside.pins)
            else _model(view, name in beside.pins, _rates(beside.rates.get(name), view, snapshot, readings))
            for name, view in snapshot.models.items()
        },
        "operations": {operation.id: _operation(operation) for operation in _shown(snapshot.operations)},
        "cables": list(beside.cables),
        "events": {"last_seq": beside.last_seq},
        "incidents": {"last_id": beside.last_incident},
    }


def patch_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> Tree:
    """The JSON merge patch (RFC 7396) from one tree to the next; empty where nothing changed."""
    changes: Tree = {}
    for key, value in after.items():
        old = before.get(key)
        if value is old:
            continue
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := patch_of(old, value):
                changes[key] = inner
        elif value != old:
            changes[key] = value
    for key in before.keys() - after.keys():
        changes[key] = None
    return changes


def series_of(snapshot: Snapshot, rates: Mapping[str, Rates]) -> dict[str, float]:
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
    return {name: float(value) for name, value in figures.items() if value is not None}


def cables_of(report: Mapping[str, Any]) -> list[Tree]:
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
            {
                **cable,
                "rate_gb_s": rate["gb_s"] if rate else None,
                "verdict": worst["verdict"] if worst else "ok",
                "problem": f"{worst['evidence']}. {worst['cure']}".strip() if worst else None,
            }
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


def _flat(noun: object, names: Sequence[str]) -> Tree:
    """The named fields as a map: dataclasses.asdict without its copies, for 200 models a second."""
    return {name: getattr(noun, name) for name in names}


def _node(view: NodeView, engines: Sequence[EngineMemory], returning_bytes: int, limits: Callable[[int], MemoryLimits]) -> Tree:
    reading, machine = view.reading, view.machine
    disk = machine and machine.disk_total_bytes is not None
    marks = limits(reading.mem_total_bytes) if reading else None
    return {
        **_flat(view, _NODE),
        "node": view.node_id,
        "reading": reading and _reading(reading),
        "limits": marks and {"soft": marks.soft, "hard": marks.hard, "floor": marks.floor},
        "engines": [_flat(engine, ("model", "host_bytes", "device_bytes")) for engine in engines],
        "reserved_bytes": int(view.reserved_gib * GIB),
        "released_bytes": returning_bytes,
        "host": machine and machine.host,
        "uptime_s": machine.uptime_s // UPTIME_STEP_S * UPTIME_STEP_S if machine and machine.uptime_s is not None else None,
        "disk": {"total_bytes": machine.disk_total_bytes, "free_bytes": machine.disk_free_bytes} if machine and disk else None,
        "gpu": reading and _gpu(reading),
    }


def _reading(reading: Reading) -> Tree:
    return {name: _rounded(getattr(reading, name), 3) for name in _READING} | {"node": reading.node_id}


def _gpu(reading: Reading) -> Tree | None:
    values = {name: getattr(reading, f"gpu_{name}") for name in _GPU}
    return values if any(value is not None for value in values.values()) else None


def _model(view: ModelView, pin: bool, rates: Tree | None) -> Tree:
    return {
        **_flat(view, _MODEL),
        # A waiting model's is worked out anew each time, and differs by microseconds.
        "since_s": round(view.since_s, 1),
        "progress": view.progress and _flat(view.progress, _PROGRESS),
        "ranks": [_flat(rank, _RANK) | {"node": rank.node_id} for rank in view.ranks],
        "pin": pin,
        "rates": rates,
    }


def _is_still(body: Tree, pin: bool) -> bool:
    """Whether a body whose view has not changed may stand: it shows no rates, which change each second."""
    return body["rates"] is None and body["pin"] is pin


def _rates(rates: Rates | None, view: ModelView, snapshot: Snapshot, readings: Mapping[str, Reading]) -> Tree | None:
    if rates is None:
        return None
    figures = {name: _rounded(getattr(rates, name), 5) for name in _RATES}
    power_w, tokens_per_s = _power_w(view, snapshot, readings), rates.generation_tokens_per_s
    return figures | {"joules_per_token": round(power_w / tokens_per_s, 3) if power_w is not None and tokens_per_s else None}


def _rounded(value: Any, digits: int) -> Any:
    return round(value, digits) if type(value) is float else value


def _power_w(view: ModelView, snapshot: Snapshot, readings: Mapping[str, Reading]) -> float | None:
    """Sum of the power draw of the GPUs of a model's nodes; None where another engine shares a node: no driver reports shares."""
    nodes = {engine.node for engine in snapshot.engines if engine.model == view.name}
    if not nodes or any(engine.node in nodes and engine.model != view.name for engine in snapshot.engines):
        return None
    drawn = [reading.gpu_power_w if (reading := readings.get(node)) else None for node in nodes]
    return None if None in drawn else sum(watts for watts in drawn if watts is not None)


def _shown(operations: Mapping[str, Operation]) -> list[Operation]:
    """The running operations and the newest others."""
    running = [operation for operation in operations.values() if operation.state is OperationState.RUNNING]
    ended = [operation for operation in operations.values() if operation.state is not OperationState.RUNNING]
    return [*ended[-OPERATIONS:], *running]


def _operation(operation: Operation) -> Tree:
    return _flat(operation, _OPERATION) | {"progress": operation.progress and _flat(operation.progress, _PROGRESS)}
