"""Owns what one model needs on this node before it is placed: its engine's platform and entry point, what was `auto` in it, GiB to reserve.

Never reserves anything. Everything here blocks: it reads headers and asks an interpreter what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from sparkd.admission import Account, Ways, account, advice, illegal, machine, too_long, uneven
from sparkd.config import Config, ModelConfig
from sparkd.errors import ContextTooLong, LoadRefused, ModelUnusable, RankError
from sparkd.fit import gib
from sparkd.hardware import Hardware
from sparkd.installed import full_version_in, release_in
from sparkd.kv_sizing import margin_bytes, utilization_of, without_cpu_space
from sparkd.model_folder import unusable
from sparkd.placement import GIB, needed_gib
from sparkd.resolving import cache_limit, resolved
from sparkd.vllm_flags import Translation, release_of, translated
from sparkd.vllm_table import refused
from workers.kv.settings import MARGIN_VARIABLE
from workers.meminfo import sample

# How far an account may be from what an engine takes (the bars of tests/bench/footprint.py).
ERROR_SHARE, ERROR_BYTES = 0.05, 300 << 20
_CURE = "Choose a smaller context or format"


@dataclass(frozen=True, slots=True)
class Need:
    """spec: without `auto`; gib: whole ones to reserve; account: what the checkpoint's headers say, None where they say nothing; vllm: its
    version where it is known. ways: over how many ranks that is counted. said: its flags as that vLLM knows them."""

    spec: ModelConfig
    platform: str
    entrypoint: str
    gib: int
    account: Account | None
    vllm: str | None = None
    ways: Ways = (1, 1)
    said: Translation | None = None


class Node(Protocol):
    def runtime(self, interpreter: str) -> Mapping[str, Any]:
        """What a Python environment has: `platform`, and `entrypoint` and `vllm` (its version) or None."""


def need_of(
    spec: ModelConfig, config: Config, node: Node, free_gib: float, offered_gib: float, ways: Ways = (1, 1), beside: bool = False
) -> Need:
    """free_gib: the most that a node has beside the other models. ways: over how many ranks, each on a node of its own. beside:
    see sparkd.resolving.resolved.

    Raises RankError where the runtime is not there, ModelUnusable where the folder is not, or holds no model.
    """
    engine = config.engine
    if why := unusable(spec.model, vllm=spec.runs_vllm(engine)):
        raise ModelUnusable(why)
    interpreter = runtime_of(spec, config)
    found = node.runtime(interpreter)
    platform = _platform(found, config)
    entrypoint = spec.entrypoint_of(engine)
    if entrypoint == "auto":
        entrypoint = found["entrypoint"]
    if entrypoint is None:
        raise RankError(
            f"The runtime {interpreter} has no vLLM: install one there (`{interpreter} -m pip install vllm`), or set engine.runtime "
            "to the Python interpreter of an environment that has it."
        )
    here = _this_node(platform)
    env, profiles = spec.environment(engine), str(config.profiles_path())
    spec = resolved(spec, here, env, int(free_gib * GIB), ways, profiles, found.get("vllm"), beside=beside)
    known = account_of(spec, config, platform, ways, found.get("vllm"))
    gib = needed_gib(spec, platform, here.memory_bytes / GIB, spec.environment(engine), offered_gib, known)
    return Need(spec, platform, entrypoint, gib, known, found.get("vllm"), ways)


def account_of(spec: ModelConfig, config: Config, platform: str, ways: Ways = (1, 1), vllm: str | None = None) -> Account | None:
    """Of one node; see admission.account."""
    return account(spec, _this_node(platform), spec.environment(config.engine), str(config.profiles_path()), ways, vllm)


def why_illegal(spec: ModelConfig, config: Config, node: Node, ways: Ways) -> str | None:
    """Why vLLM would not split the model so; None where it would, or its headers are not here. Raises RankError."""
    platform = _platform(node.runtime(runtime_of(spec, config)), config)
    return illegal(spec, _this_node(platform), spec.environment(config.engine), ways)


def refuse_unloadable(spec: ModelConfig, config: Config) -> None:
    """Raises ContextTooLong and LoadRefused for what would end an engine's start and can be read off the checkpoint here."""
    if not spec.runs_vllm(config.engine):
        return
    env = spec.environment(config.engine)
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
    return replace(said, refused=refused(spec.vllm_flags(), env, spec.runtime_of(config.engine), config.state_dir, ask=ask))


def _is_ours(spec: ModelConfig, config: Config, vllm: str | None) -> bool:
    """Whether somebody wrote flags for a vLLM that this node has too, whose parser can be asked."""
    if vllm is None or not spec.extra_args or not spec.runs_vllm(config.engine):
        return False
    return full_version_in(spec.runtime_of(config.engine)) == vllm


def runtime_of(spec: ModelConfig, config: Config) -> str:
    return str(spec.runtime_of(config.engine) or sys.executable)


def too_large(need: Need, most_gib: int, where: str, env: Mapping[str, str]) -> str | None:
    """Why no node can ever hold it, with what would fit; None where one can. where: `this node`, most_gib: what it offers."""
    spec, known = need.spec, need.account
    if known is not None and (short := _short_cache(need, known, env)):
        return short
    kept = (margin_bytes(spec, env) or 0) / GIB if utilization_of(spec) is None else 0.0
    if known is not None and spec.memory_gib == "auto" and known.least > (most_gib - kept) * GIB:
        free = f", of which {'kv_margin_gib' if spec.kv_margin_gib is not None else MARGIN_VARIABLE} keeps {kept:g} free" if kept else ""
        cure = advice(spec, machine(need.platform, most_gib * GIB, 0), env, int((most_gib - kept) * GIB), need.ways) or _CURE
        return f"{spec.name} does not fit: {known.sentence}; {where} offers {most_gib} GiB{free}. {cure}."
    if known is not None and outgrown(need) and need.gib <= most_gib:
        cure = advice(spec, machine(need.platform, most_gib * GIB, 0), env, int(float(spec.memory_gib) * GIB), need.ways) or _CURE
        return f"{spec.name} does not fit into memory_gib: {spec.memory_gib:g}: {known.sentence}. Allow it more, or: {cure}."
    if need.gib > most_gib:
        return (
            f"{spec.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB: choose a smaller "
            "context or format, give kv_cache a size, or set memory_gib to what it really needs."
        )
    return None


def outgrown(need: Need) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the account may be wrong: of less the engine decides,
    which measures."""
    known, own = need.account, need.spec.memory_gib
    if known is None or not isinstance(own, int | float):
        return False
    return known.least - max(ERROR_SHARE * known.least, ERROR_BYTES) > own * GIB


def _short_cache(need: Need, known: Account, env: Mapping[str, str]) -> str | None:
    """Why a cache of its size would hold no request: vLLM ends its start over that, with all weights loaded."""
    spec = need.spec
    limit = cache_limit(spec, need.platform, env)
    size = known.cache if known.cache is not None else limit
    if size is None or known.request <= size or spec.memory_gib != "auto":
        return None
    said = "kv_cache" if known.cache is not None else "the cache of a CPU's engine"
    one = f"one request of {known.max_model_len:,} tokens needs {gib(known.request)}"
    return f"{spec.name} does not fit: {said} holds {gib(size)}, and {one}. Give kv_cache a larger size, or choose a smaller max_model_len."


def _platform(found: Mapping[str, Any], config: Config) -> str:
    return str(found["platform"]) if config.engine.platform == "auto" else config.engine.platform


def _this_node(platform: str) -> Hardware:
    return machine(platform, int(sample()["mem_total_bytes"]), 0)
