"""An entry that is to be placed: parsed and read once, with what a placement and a check refuse of it and ask vLLM about it."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial

from sparkd.capacity.entry_faults import file_fault, format_fault
from sparkd.capacity.evidence import Evidence, Ways
from sparkd.capacity.fit import Source, copies_of, source_of
from sparkd.capacity.headers import headers_here
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.checkpoint.model_folder import unusable_of
from sparkd.config.config import Config, ModelConfig
from sparkd.config.engine_args import EngineArgs, engine_args
from sparkd.config.quantize import AUTO, is_open
from sparkd.errors import CheckpointUncounted, EngineError, LoadRefused, ModelUnusable, RankError
from sparkd.hardware import Hardware, machine
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.model import Away, InquiryRuntime, ask, kept_answers
from sparkd.vllm.ask.parser import refused
from sparkd.vllm.installed import READ_OFF, full_version_in
from workers.host.meminfo import mem_total_bytes
from workers.kv.profiles import profiles_in

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlacedEntry:
    """An entry with the runtime that it is counted by, and what that and its files tell.

    node: one with this runtime, empty of other models.
    entrypoint: the module that is its engine.
    source: of the entry's own checkpoint; None if its headers are not here.
    copies: others have quantized them; read for `quantize: auto` alone.
    """

    config: Config
    runtime: NodeRuntime
    args: EngineArgs
    node: Hardware
    entrypoint: str
    source: Source | None
    copies: tuple[Source, ...] = ()

    @property
    def spec(self) -> ModelConfig:
        return self.args.spec

    @property
    def vllm(self) -> str | None:
        """Its version, if it is known."""
        return self.runtime.facts.get("vllm")


def placed_entry(spec: ModelConfig, config: Config, runtime: NodeRuntime) -> PlacedEntry:
    """The entry as this runtime serves it. Uses vLLM's kept answers, and never asks. Blocks.

    Raises RankError if the runtime has no vLLM, ModelUnusable or LoadRefused if the folder holds no such model or the weights cannot have
    their formats, and ConfigError for a number of the entry that vLLM would refuse too.
    """
    args, entrypoint, node = engine_args(spec, spec.environment(config.engine)), _entrypoint(spec, config, runtime), _node(config, runtime)
    if absent := unusable_of(spec, config.engine, config.model_places()):
        raise absent
    refuse_unloadable(spec, config, args)
    headers = headers_here(args)
    source = None if headers is None else source_of(args, headers, node, _evidence(spec, config, runtime))
    copies = copies_of(source, node) if source is not None and spec.quantize == AUTO else ()
    return PlacedEntry(config, runtime, args, node, entrypoint, source, tuple(copies))


def _entrypoint(spec: ModelConfig, config: Config, runtime: NodeRuntime) -> str:
    entrypoint = spec.entrypoint_of(config.engine)
    entrypoint = runtime.facts["entrypoint"] if entrypoint == AUTO else entrypoint
    if entrypoint is None:
        interpreter = runtime_of(spec, config)
        raise RankError(
            f"The runtime {interpreter} has no vLLM: run `{interpreter} -m pip install vllm~={'.'.join(map(str, READ_OFF))}.0 "
            "-c deploy/constraints.txt` in sparkd's checkout, or set engine.runtime to the Python interpreter that has it."
        )
    return str(entrypoint)


def _node(config: Config, runtime: NodeRuntime) -> Hardware:
    total_bytes = runtime.facts.get("mem_total_bytes")
    platform = str(runtime.facts["platform"]) if config.engine.platform == "auto" else config.engine.platform
    return machine(platform, total_bytes, 0) if isinstance(total_bytes, int) else this_node(platform)


def _evidence(spec: ModelConfig, config: Config, runtime: NodeRuntime) -> Evidence:
    """Measurements of earlier starts, and kept answers of the runtime's vLLM."""
    vllm, profiles = runtime.facts.get("vllm"), profiles_in(str(config.profiles_path))
    if vllm is None or not spec.runs_vllm(config.engine):
        return Evidence(profiles, vllm)
    away = None if _is_ours(spec, config, vllm) else Away("", vllm, str(runtime.facts.get("packages", "")))
    inquiry = InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir), away)
    return Evidence(profiles, vllm, partial(kept_answers, runtime=inquiry))


def ask_vllm(entry: PlacedEntry, ways: Ways) -> None:
    """Ask this node's vLLM about a model whose format, length or reservation depends on the answer, and keep the answers.

    Blocks for the 10 to 40 s of vLLM's import where one is missing. If vLLM cannot be asked, the estimate counts.
    """
    args, spec, config = entry.args, entry.spec, entry.config
    is_reserved = args.memory_gib is None and args.given_cache(entry.node.platform) is not None
    if not (is_reserved or is_open(args.spec.quantize) or args.spec.max_model_len == AUTO) or not _is_ours(spec, config, entry.vllm):
        return
    if entry.source is None:
        return
    runtime = InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir))
    quantize = None if is_open(args.spec.quantize) else args.recipe
    try:
        entry.source.consultation.ask_formats(entry.source.headers.model, quantize, (ways,), partial(ask, runtime=runtime))
    except (EngineError, OSError) as error:
        log.warning("%s is placed by an estimate, because vLLM could not be asked about it: %s", spec.name, error)


def refuse_unloadable(spec: ModelConfig, config: Config, args: EngineArgs) -> None:
    """Raise ModelUnusable or LoadRefused if files are missing here, or the weights cannot have their formats."""
    if not spec.runs_vllm(config.engine):
        return
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


def this_node(platform: str) -> Hardware:
    return machine(platform, mem_total_bytes(), 0)
