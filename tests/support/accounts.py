"""The footprint of an entry as the tests ask for it: parsed and with its headers read, then counted as sparkd.capacity does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sparkd.capacity import advice as advices
from sparkd.capacity import entry_faults
from sparkd.capacity import placed_entry as placing
from sparkd.capacity.estimate import kv_layout
from sparkd.capacity.evidence import NOTHING, Evidence, Ways
from sparkd.capacity.fit import (
    LINKED,
    Candidate,
    Option,
    Unlinked,
    candidates_of,
    choose,
    copies_of,
    fitted,
    preference,
    single_formats,
    source_of,
    splits,
)
from sparkd.capacity.footprint import Footprint
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import KvCost, Serving
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.placed_entry import placed_entry
from sparkd.capacity.requirement import Requirement, requirement_of, reserved_gib
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint.shape import Shape
from sparkd.config.config import Config, parse_model
from sparkd.config.engine_args import engine_args
from sparkd.config.model import ModelConfig
from sparkd.errors import CheckpointError
from sparkd.hardware import SPARK, Hardware, machine
from sparkd.units import GIB

Env = Mapping[str, str]


def candidates(spec: ModelConfig, hardware: Hardware, env: Env, evidence: Evidence = NOTHING, *, beside: bool = False) -> list[Candidate]:
    args = engine_args(spec, env)
    headers = headers_here(args)
    if headers is None:
        return []
    source = source_of(args, headers, hardware, evidence)
    return candidates_of(source, copies_of(source, hardware) if beside else ())


def option(spec: ModelConfig, hardware: Hardware, env: Env, evidence: Evidence = NOTHING, ways: Ways = (1, 1)) -> Option | None:
    """In its own format, as stored for `auto`."""
    spec = spec if spec.quantize != "auto" else spec.model_copy(update={"quantize": None})
    found = candidates(spec, hardware, env, evidence)
    return fitted(found[0], hardware, ways) if found else None


def account(spec: ModelConfig, hardware: Hardware, env: Env, evidence: Evidence = NOTHING, ways: Ways = (1, 1)) -> Footprint | None:
    """What a reservation is made of."""
    found = option(spec, hardware, env, evidence, ways)
    return None if found is None else found.known


def resolved(spec: ModelConfig, hardware: Hardware, env: Env, free_bytes: int, *, beside: bool = False) -> ModelConfig:
    node = replace(hardware, system_bytes=hardware.memory_bytes - free_bytes)
    found = candidates(spec, node, env, beside=beside)
    return (choose(found, node).args if found else engine_args(spec, env).undecided()).spec


def options(
    model: Inventory,
    hardware: Hardware = SPARK,
    *,
    nodes: int = 1,
    ways: Iterable[Ways] | None = None,
    unlinked: Unlinked = LINKED,
    evidence: Evidence = NOTHING,
    **keys: Any,
) -> list[Option]:
    """An entry with these keys at every split, best first: in its format, or in every single one."""
    args = engine_args(parse_model("m", {"model": "/m", "max_model_len": "auto", **keys}, over_admin=False), {})
    source = source_of(args, Headers(model), hardware, evidence)
    found = single_formats(source)
    if args.spec.quantize is not None or "quantize" in keys:
        found = candidates_of(source)
    return sorted((fitted(one, hardware, split, unlinked) for one in found for split in ways or splits(nodes)), key=preference)


def advice(spec: ModelConfig, hardware: Hardware, env: Env, offered_bytes: int, ways: Ways = (1, 1)) -> str:
    found = option(spec, hardware, env, ways=ways)
    return "" if found is None else str(advices.advice(found, offered_bytes) or "")


def too_large(need: Requirement, most_gib: int, where: str = "this node") -> str | None:
    refusal = advices.too_large(need, most_gib, where)
    return None if refusal is None else refusal.message


def needed_gib(
    spec: ModelConfig, platform: str, node_gib: float, env: Env, offered_gib: float | None = None, known: Footprint | None = None
) -> int:
    return reserved_gib(engine_args(spec, env), machine(platform, int(node_gib * GIB), 0), offered_gib, known)


def needing(spec: ModelConfig, platform: str, gib: int, how: Option | None) -> Requirement:
    """On a node of 121.6 GiB."""
    return Requirement(engine_args(spec, {}), machine(platform, int(121.6 * GIB), 0), gib, how)


def requirement(
    spec: ModelConfig, config: Config, facts: Mapping[str, Any], free_gib: float, offered_gib: float, ways: Ways = (1, 1)
) -> Requirement:
    """facts: of the runtime on this node."""
    return requirement_of(placed_entry(spec, config, NodeRuntime(facts, "node")), free_gib, offered_gib, ways)


def refuse_unloadable(spec: ModelConfig, config: Config) -> None:
    placing.refuse_unloadable(spec, config, engine_args(spec, spec.environment(config.engine)))


def kv_cost(shape: Shape, serving: Serving) -> KvCost:
    return kv_layout(shape, serving).cost(serving.max_model_len)


def fault(spec: ModelConfig, env: Env) -> CheckpointError | None:
    return entry_faults.file_fault(engine_args(spec, env))
