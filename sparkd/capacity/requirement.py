"""Owns what one model needs on this node before it is placed: its engine's platform and entry point, what was `auto` in it, GiB to reserve.

Never reserves anything. Everything here blocks: it reads headers and asks an interpreter what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Protocol

from sparkd.capacity.account import Account, Evidence, Ways, account, advice, fault, illegal, machine, too_long, uneven
from sparkd.capacity.auto_resolve import cache_limit, resolved
from sparkd.capacity.consultation import Answers
from sparkd.capacity.fit import short_cache
from sparkd.capacity.kv_cache import fitting, longest, sized
from sparkd.capacity.reservation import GIB, needed_gib
from sparkd.config.config import Config, ModelConfig
from sparkd.entry.parser_choice import with_parsers
from sparkd.errors import CheckpointUncounted, ContextTooLong, LoadRefused, ModelUnusable, RankError
from sparkd.hardware import Hardware
from sparkd.inquiry.flag_table import refused
from sparkd.inquiry.model_answers import Away, InquiryRuntime, kept, places
from sparkd.models.folder import unusable
from sparkd.schema.kv_cache import cache_of, in_words, margin_bytes, spelled, utilization_of, without_cpu_space
from sparkd.vllm.installed import full_version_in, release_in
from sparkd.vllm.parsers import Parsers
from sparkd.vllm.translate import Translation, release_of, translated
from sparkd.vllm.unaccounted_args import SHARE, counted, share_of
from sparkd.vllm.unknown_names import unknown_drafts, unknown_parsers
from workers.host.meminfo import sample
from workers.kv.settings import MARGIN_VARIABLE

# How far an account may be from what an engine takes (the bars of tests/bench/footprint.py).
ERROR_SHARE, ERROR_BYTES = 0.05, 300 << 20
_SMALLER = "a smaller context or format"


@dataclass(frozen=True, slots=True)
class Requirement:
    """spec: without `auto`; gib: whole ones to reserve; account: what the checkpoint's headers say, None where they say nothing; vllm: its
    version where it is known. ways: over how many ranks that is counted. said: its flags as that vLLM knows them. parsers: what its engine
    will have, None of an engine that is no vLLM. nodes: those that have its runtime, None for any."""

    spec: ModelConfig
    platform: str
    entrypoint: str
    gib: int
    account: Account | None
    vllm: str | None = None
    ways: Ways = (1, 1)
    said: Translation | None = None
    parsers: Parsers | None = None
    nodes: frozenset[str] | None = None


class Node(Protocol):
    def runtime(self, interpreter: str) -> Mapping[str, Any]:
        """The abilities of a Python environment: `platform`, and `entrypoint` and `vllm` (its version) or None; `packages`, a digest of
        them."""


def need_of(
    spec: ModelConfig, config: Config, node: Node, free_gib: float, offered_gib: float, ways: Ways = (1, 1), beside: bool = False
) -> Requirement:
    """free_gib: the most that a node has beside the other models. ways: over how many ranks, each on a node of its own. beside:
    see sparkd.capacity.auto_resolve.resolved.

    Raises RankError where the runtime is not there, ModelUnusable where the folder is not, or holds no model, CheckpointError as
    sparkd.capacity.account.account.
    """
    engine = config.engine
    if why := unusable(spec.model, vllm=spec.runs_vllm(engine), places=config.model_places()):
        raise ModelUnusable(why)
    interpreter = runtime_of(spec, config)
    found = node.runtime(interpreter)
    platform = platform_of(found, config)
    entrypoint = spec.entrypoint_of(engine)
    if entrypoint == "auto":
        entrypoint = found["entrypoint"]
    if entrypoint is None:
        raise RankError(
            f"The runtime {interpreter} has no vLLM: install one there (`{interpreter} -m pip install vllm`), or set engine.runtime "
            "to the Python interpreter of an environment that has it."
        )
    here = this_node(platform)
    env, evidence = spec.environment(engine), evidence_of(spec, config, found)
    spec = resolved(spec, here, env, int(free_gib * GIB), ways, evidence, beside=beside)
    parsers = None
    if spec.runs_vllm(engine):
        spec, parsers = with_parsers(spec, env, spec.runtime_of(engine))
    known = account(spec, here, env, evidence, ways)
    gib = needed_gib(spec, platform, here.memory_bytes / GIB, spec.environment(engine), offered_gib, known)
    return Requirement(spec, platform, entrypoint, gib, known, found.get("vllm"), ways, parsers=parsers)


def evidence_of(spec: ModelConfig, config: Config, found: Mapping[str, Any]) -> Evidence:
    """The measurements of earlier starts, and the answers of the vLLM of the model's runtime when it was asked: nothing is asked here.
    found: what that runtime has, on this node or another."""
    vllm, profiles = found.get("vllm"), str(config.profiles_path())
    if vllm is None or not spec.runs_vllm(config.engine):
        return Evidence(profiles, vllm)
    away = None if _is_ours(spec, config, vllm) else Away("", vllm, str(found.get("packages", "")))
    runtime = InquiryRuntime(spec.runtime_of(config.engine), places(config.state_dir), away)
    return Evidence(profiles, vllm, Answers(lambda questions: [kept(each, runtime) for each in questions]).ask)


def why_illegal(spec: ModelConfig, config: Config, node: Node, ways: Ways) -> str | None:
    """Why vLLM would not split the model so; None where it would, or its headers are not here. Raises RankError."""
    runtime = node.runtime(runtime_of(spec, config))
    platform = platform_of(runtime, config)
    return illegal(spec, this_node(platform), spec.environment(config.engine), ways, evidence_of(spec, config, runtime))


def refuse_unloadable(spec: ModelConfig, config: Config) -> None:
    """Raises ModelUnusable, ContextTooLong and LoadRefused for what would end an engine's start and can be read off the checkpoint here."""
    if not spec.runs_vllm(config.engine):
        return
    env = spec.environment(config.engine)
    if (broken := fault(spec, env)) is not None and not isinstance(broken, CheckpointUncounted):
        raise ModelUnusable(f"{spec.name} cannot be loaded: {broken.message}")
    if why := too_long(spec, env, release_in(spec.runtime_of(config.engine))):
        raise ContextTooLong(f"{spec.name} cannot be loaded: max_model_len: {why}")
    if why := uneven(spec, env):
        raise LoadRefused(f"{spec.name} cannot be loaded: quantize: {why}")


def said_to(spec: ModelConfig, config: Config, vllm: str | None, *, ask: bool = False) -> Translation:
    """The model's flags and variables as its release of vLLM knows them; refused too is what its parser here is known not to take. ask:
    that parser is asked where it never was, which takes as long as vLLM's import."""
    env = without_cpu_space(spec, spec.environment(config.engine))
    said = translated(spec.vllm_flags(), env, release_of(vllm))
    if said.refused or not _is_ours(spec, config, vllm):
        return said
    runtime = spec.runtime_of(config.engine)
    if unknown := (*unknown_parsers(said.args, env, runtime), *unknown_drafts(said.args, env, runtime)):
        return replace(said, refused=unknown)
    # For the values of keys alone nobody waits for an import of vLLM.
    ask = ask and bool(spec.extra_args)
    return replace(said, refused=refused(spec.vllm_flags(), env, runtime, config.state_dir, ask=ask))


def _is_ours(spec: ModelConfig, config: Config, vllm: str | None) -> bool:
    """Whether the vLLM is one that this node has too, which can be asked."""
    if vllm is None or not spec.runs_vllm(config.engine):
        return False
    return full_version_in(spec.runtime_of(config.engine)) == vllm


def runtime_of(spec: ModelConfig, config: Config) -> str:
    return str(spec.runtime_of(config.engine) or sys.executable)


def too_large(need: Requirement, most_gib: int, where: str, env: Mapping[str, str]) -> str | None:
    """Why no node can ever hold it, with what would fit; None where one can. where: `this node`, most_gib: what it offers."""
    spec, known = need.spec, need.account
    kept = (margin_bytes(spec, env) or 0) / GIB if utilization_of(counted(spec)) is None else 0.0
    room = int((most_gib - kept) * GIB)
    if known is not None and (short := _short_cache(need, known, room, env)):
        return short
    if known is not None and spec.memory_gib == "auto" and known.surely > room:
        free = f", of which {'kv_margin_gib' if spec.kv_margin_gib is not None else MARGIN_VARIABLE} keeps {kept:g} free" if kept else ""
        cure = _what_would_fit(need, known, most_gib, room, env) or f"Choose {_SMALLER}"
        return f"{spec.name} does not fit: {known.sentence}; {where} offers {most_gib} GiB{free}. {cure}."
    if known is not None and outgrown(need) and need.gib <= most_gib:
        allow = f"Allow it more (memory_gib: {more}), or" if (more := ceil(known.least / GIB)) <= most_gib else ""
        cure = _what_would_fit(need, known, most_gib, int(float(spec.memory_gib) * GIB), env)
        told = f"{allow}{':' if allow and cure else ''} {cure or f'choose {_SMALLER}'}".strip()
        return f"{spec.name} does not fit into memory_gib: {spec.memory_gib:g}: {known.sentence}. {told[0].upper()}{told[1:]}."
    if short := share_too_large(spec, need.gib, this_node(need.platform).memory_bytes, most_gib, where):
        return short
    if need.gib > most_gib:
        size = "a smaller size" if isinstance(spec.kv_cache, dict) else "a size"
        return (
            f"{spec.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB: choose {_SMALLER}, "
            f"give kv_cache {size}, or set memory_gib to what it really needs."
        )
    return None


def share_too_large(spec: ModelConfig, gib: int, memory_bytes: int, most_gib: int, where: str) -> str | None:
    """Why no node can lend the share of its memory that vLLM is to take, with the largest that one can; None where one can, or the gib to
    reserve do not follow from a share. memory_bytes: all of a node's; where, most_gib: as in `too_large`."""
    share = utilization_of(counted(spec)) if spec.memory_gib == "auto" else None
    if share is None or gib <= most_gib or gib != ceil(share * (memory_bytes / GIB)):
        return None
    key = f"gpu_memory_utilization {share:g}"
    if share_of(spec.extra_args) is not None:
        key = f"--{SHARE} {share:g}"
    elif isinstance(spec.kv_cache, dict) and "utilization" in spec.kv_cache:
        key = f"kv_cache: {spelled(spec.kv_cache)}"
    most = int(100 * share * most_gib / gib) / 100
    return f"{spec.name} asks for {gib} GiB of unified memory ({key}) and {where} offers {most_gib} GiB: choose {most:g} or less."


def _what_would_fit(need: Requirement, known: Account, most_gib: int, room: int, env: Mapping[str, str]) -> str:
    """In place of a cache of a given size a smaller one, where room bytes hold one request; empty where nothing is known that would."""
    spec, layout, given = need.spec, known.layout, cache_of(need.spec)
    left = room - known.fixed
    if less := fitting(given, layout, known.max_model_len, left):
        size, cost = sized(less, layout, known.max_model_len) or 0, known.kv
        many = "" if "sequences" in less else f" ({(size - cost.block_bytes) // cost.per_request:,} of {known.max_model_len:,} tokens)"
        shorter = longest(given, layout, known.max_model_len, left) if list(given or ()) == ["sequences"] else 0
        context = f", or max_model_len {shorter:,} as it is" if shorter else ""
        smaller = in_words(less) if "blocks" in less else f"a smaller kv_cache, {spelled(less)}"
        return f"What would fit: {smaller}{many}{context}"
    told = advice(spec, machine(need.platform, most_gib * GIB, 0), env, room, need.ways)
    return f"{told}, with kv_cache: {{sequences: 1}}" if told and known.cache is not None and known.cache > known.kv.least else told


def outgrown(need: Requirement) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the account may be wrong: of less the engine decides,
    which measures."""
    return need.account is not None and exceeds(need.account, need.spec.memory_gib)


def exceeds(known: Account, memory_gib: float | str) -> bool:
    """As `outgrown`, of an account by itself. memory_gib: `auto` is never too little."""
    surely_bytes = known.surely - max(ERROR_SHARE * known.surely, ERROR_BYTES)
    return isinstance(memory_gib, int | float) and surely_bytes > memory_gib * GIB


def _short_cache(need: Requirement, known: Account, room: int, env: Mapping[str, str]) -> str | None:
    """Why a cache of its size would hold no request. room: bytes for the engine."""
    spec, kv = need.spec, known.kv
    wanted = cache_of(spec) if known.cache is not None else None
    cache = wanted if isinstance(wanted, Mapping) else None
    size = known.cache if known.cache is not None else cache_limit(spec, need.platform, env)
    short = short_cache(cache, size, kv)
    if short is None or spec.memory_gib != "auto" or known.upper is not None:
        return None
    reason, cure = short
    cures = [cure] if known.fixed + kv.least <= room else []
    # The bytes of a cache in tokens or requests follow from the length.
    limit = size if cache is None else None
    shorter = longest(cache, known.layout, kv.max_model_len, room - known.fixed, limit=limit)
    cures += [f"choose max_model_len {shorter:,} or less"] if shorter else []
    cure = ", or ".join(cures) or f"choose {_SMALLER}"
    return f"{spec.name} does not fit: {reason}. {cure[0].upper()}{cure[1:]}."


def platform_of(found: Mapping[str, Any], config: Config) -> str:
    return str(found["platform"]) if config.engine.platform == "auto" else config.engine.platform


def this_node(platform: str) -> Hardware:
    return machine(platform, int(sample()["mem_total_bytes"]), 0)
