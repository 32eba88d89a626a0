"""The requirement of one model on a node before it is placed: platform, entry point, the choices for `auto`, and GiB to reserve."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

from sparkd.capacity.entry_faults import file_fault, format_fault
from sparkd.capacity.evidence import EXACT, Answers, Evidence, Ways
from sparkd.capacity.fit import Option, candidates_of, checked, choose
from sparkd.capacity.footprint import Footprint
from sparkd.capacity.headers import headers_here
from sparkd.checkpoint.model_folder import unusable_of
from sparkd.config.config import Config, ModelConfig
from sparkd.config.engine_args import EngineArgs, engine_args
from sparkd.config.quantize import AUTO, is_open
from sparkd.errors import CheckpointUncounted, EngineError, LoadRefused, ModelUnusable, RankError
from sparkd.hardware import Hardware, machine
from sparkd.units import GIB
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.model import Away, InquiryRuntime, ask, kept_answers
from sparkd.vllm.ask.parser import refused
from sparkd.vllm.installed import READ_OFF, full_version_in
from sparkd.vllm.parsers import Parsers
from workers.host.meminfo import mem_total_bytes
from workers.kv.profiles import profiles_in

log = logging.getLogger(__name__)

VLLM_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py of 0.32; older releases take 0.90


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one model.

    slug: its name as a file name.
    memory_gib: reserved on each node.
    platform: `cuda` or `cpu`.
    entrypoint: the module that is its engine.
    vllm: its version, if it is known.
    spec: the model with a choice for each `auto`; None without a choice.
    peers: the nodes of its other ranks, in their order.
    tensor, pipeline: parallel sizes, together one rank on each node.
    parsers: of its tool calls and reasoning; None for an engine that is not vLLM.
    """

    node_id: str
    slug: str
    memory_gib: int
    platform: str
    entrypoint: str
    vllm: str | None = None
    spec: ModelConfig | None = None
    peers: tuple[str, ...] = ()
    tensor: int = 1
    pipeline: int = 1
    parsers: Parsers | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of every rank, rank 0's first."""
        return (self.node_id, *self.peers)


def offered_gib(config: Config) -> int:
    """The memory that this node offers to models, whole GiB: all but the system's reserve."""
    total = mem_total_bytes()
    return max(1, (total - config.memory.os_reserve_bytes(total)) // GIB)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The need of one model on each of its nodes.

    spec, args: without `auto`.
    gib: whole GiB to reserve.
    option: how it fits; None if its headers are not here.
    vllm: its version, if it is known.
    parsers: of its tool calls and reasoning; None for an engine that is not vLLM.
    nodes: the nodes that have its runtime; None for any.
    """

    spec: ModelConfig
    args: EngineArgs
    hardware: Hardware
    entrypoint: str
    gib: int
    option: Option | None
    vllm: str | None = None
    parsers: Parsers | None = None
    nodes: frozenset[str] | None = None

    @property
    def platform(self) -> str:
        return self.hardware.platform

    @property
    def known(self) -> Footprint | None:
        return None if self.option is None else self.option.known


def requirement_of(
    spec: ModelConfig,
    config: Config,
    facts: Mapping[str, Any],
    free_gib: float,
    offered_gib: float,
    ways: Ways = (1, 1),
    beside: bool = False,
) -> Requirement:
    """The requirement of an entry, with a choice for each `auto`. Uses vLLM's kept answers, and never asks.

    facts: of its runtime (workers.host.runtime.Runtime as JSON), with the node's mem_total_bytes if that is another one.
    free_gib: the most that a node has free of other models.
    offered_gib: the GiB that the node lends.
    ways: the tensor and pipeline sizes, with each rank on its own node.
    beside: whether `quantize: auto` may use a quantized copy that is on this machine.

    Raises RankError if the runtime is missing, and ModelUnusable if the folder is missing or holds no model.
    Raises ConfigError for a number of the entry that vLLM would refuse too.
    """
    entrypoint, hardware, evidence = _entrypoint(spec, config, facts), _hardware(config, facts), evidence_of(spec, config, facts)
    if absent := unusable_of(spec, config.engine, config.model_places()):
        raise absent
    node = replace(hardware, system_bytes=hardware.memory_bytes - int(free_gib * GIB))
    args = engine_args(spec, spec.environment(config.engine))
    headers = headers_here(args)
    option = None if headers is None else choose(candidates_of(args, headers, node, evidence, beside=beside), node, ways)
    args, known = (args.undecided(), None) if option is None else (option.args, option.known)
    gib = reserved_gib(args, hardware, offered_gib, known)
    return Requirement(args.spec, args, hardware, entrypoint, gib, option, facts.get("vllm"))


def reserved_gib(args: EngineArgs, hardware: Hardware, offered_gib: float | None = None, known: Footprint | None = None) -> int:
    """Whole GiB to reserve on a node; Ray's custom resources are whole numbers above one.

    1. memory_gib of the entry.
    2. The footprint, where the cache has a size; for gpu_memory_utilization that share, in which vLLM stays.

    Without a footprint, and for a cache of all that is free, all that the node lends.

    hardware: the node.
    offered_gib: that it lends; of a guess no more is reserved.
    """
    if args.memory_gib is not None:
        return ceil(args.memory_gib)
    node_gib = hardware.memory_bytes / GIB
    share_gib = ceil((args.share or 0.0) * node_gib)
    if known is not None and known.cache is not None and (args.blocks is not None or not args.vllm_sizes):
        size = known.fixed + known.cache
        if known.sureness != EXACT and offered_gib is not None:
            size = max(known.surely, min(size, int(offered_gib * GIB)))
        return max(ceil(size / GIB), share_gib)
    most = ceil(VLLM_DEFAULT_UTILIZATION * node_gib)
    return share_gib or (most if offered_gib is None else min(most, int(offered_gib)))


def _entrypoint(spec: ModelConfig, config: Config, facts: Mapping[str, Any]) -> str:
    entrypoint = spec.entrypoint_of(config.engine)
    entrypoint = facts["entrypoint"] if entrypoint == "auto" else entrypoint
    if entrypoint is None:
        interpreter = runtime_of(spec, config)
        raise RankError(
            f"The runtime {interpreter} has no vLLM: run `{interpreter} -m pip install vllm~={'.'.join(map(str, READ_OFF))}.0 "
            "-c deploy/constraints.txt` in sparkd's checkout, or set engine.runtime to the Python interpreter that has it."
        )
    return str(entrypoint)


def _hardware(config: Config, facts: Mapping[str, Any]) -> Hardware:
    """The node of a runtime with these facts."""
    total_bytes, platform = facts.get("mem_total_bytes"), platform_of(facts, config)
    return machine(platform, total_bytes, 0) if isinstance(total_bytes, int) else this_node(platform)


def ask_vllm(spec: ModelConfig, config: Config, facts: Mapping[str, Any], ways: Ways) -> None:
    """Ask this node's vLLM about a model whose format, length or reservation depends on the answer, and keep the answers.

    Blocks for the 10 to 40 s of vLLM's import where one is missing. If vLLM cannot be asked, the estimate counts.
    """
    args, platform = engine_args(spec, spec.environment(config.engine)), platform_of(facts, config)
    is_reserved = args.memory_gib is None and args.given_cache(platform) is not None
    if not (is_reserved or is_open(args.spec.quantize) or args.spec.max_model_len == AUTO) or not _is_ours(spec, config, facts.get("vllm")):
        return
    headers = headers_here(args)
    if headers is None:
        return
    evidence = Evidence(ask=partial(ask, runtime=InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir))))
    consultation = evidence.consultation(args, headers, this_node(platform))
    try:
        consultation.ask_formats(headers.model, None if is_open(args.spec.quantize) else args.recipe, (ways,))
    except (EngineError, OSError) as error:
        log.warning("%s is placed by an estimate, because vLLM could not be asked about it: %s", spec.name, error)


def evidence_of(spec: ModelConfig, config: Config, facts: Mapping[str, Any]) -> Evidence:
    """Measurements of earlier starts, and kept answers of the runtime's vLLM. Never asks vLLM.

    facts: of the runtime, on this node or another.
    """
    vllm, profiles = facts.get("vllm"), profiles_in(str(config.profiles_path))
    if vllm is None or not spec.runs_vllm(config.engine):
        return Evidence(profiles, vllm)
    away = None if _is_ours(spec, config, vllm) else Away("", vllm, str(facts.get("packages", "")))
    runtime = InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir), away)
    return Evidence(profiles, vllm, Answers(partial(kept_answers, runtime=runtime)).ask)


def why_illegal(spec: ModelConfig, config: Config, facts: Mapping[str, Any], ways: Ways) -> str | None:
    """The reason why vLLM would not split the model over `ways`; None if it would, or without headers here. Raises RankError."""
    args, node = engine_args(spec, spec.environment(config.engine)).undecided(), _hardware(config, facts)
    headers = headers_here(args)
    if headers is None:
        return None
    stored, *_ = candidates_of(args, headers, node, evidence_of(spec, config, facts))
    option = checked(stored, node, ways)
    return option.reason if option.cause in ("vllm", "split") else None


def refuse_unloadable(spec: ModelConfig, config: Config) -> None:
    """Raise ModelUnusable or LoadRefused if files are missing here, or the weights cannot have their formats."""
    if not spec.runs_vllm(config.engine):
        return
    args = engine_args(spec, spec.environment(config.engine))
    if (broken := file_fault(args)) is not None and not isinstance(broken, CheckpointUncounted):
        raise ModelUnusable(f"{spec.name} cannot be loaded: {broken.message}")
    if why := format_fault(args):
        raise LoadRefused(f"{spec.name} cannot be loaded: quantize: {why}")


def refused_flags(spec: ModelConfig, config: Config, vllm: str | None, *, ask: bool = False) -> tuple[str, ...]:
    """A message for each flag that the parser of the model's vLLM refuses; none without its answer, or where only another node has it.

    ask: whether to run that parser if it never ran, which takes as long as vLLM's import. Raises EngineError if it gives no answer.
    """
    if vllm is None or not _is_ours(spec, config, vllm):
        return ()
    env, runtime = spec.environment(config.engine), spec.runtime_of(config.engine)
    # Without extra_args only values of known keys are left to check, which is not worth an import of vLLM.
    refusals = refused(spec.vllm_flags(), env, runtime, config.state_dir, ask=ask and bool(spec.extra_args))
    return tuple(refusal.note(vllm) for refusal in refusals)


def _is_ours(spec: ModelConfig, config: Config, vllm: str | None) -> bool:
    """Whether the vLLM is one that this node has too, which can be asked."""
    if vllm is None or not spec.runs_vllm(config.engine):
        return False
    return full_version_in(spec.runtime_of(config.engine)) == vllm


def runtime_of(spec: ModelConfig, config: Config) -> str:
    return str(spec.runtime_of(config.engine) or sys.executable)


def platform_of(found: Mapping[str, Any], config: Config) -> str:
    return str(found["platform"]) if config.engine.platform == "auto" else config.engine.platform


def this_node(platform: str) -> Hardware:
    return machine(platform, mem_total_bytes(), 0)
