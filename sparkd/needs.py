"""Owns what one model needs on this node before it is placed: its engine's platform and entry point, what was `auto` in it, GiB to reserve.

Never reserves anything. Everything here blocks: it reads headers and asks an interpreter what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sparkd.admission import Account, Ways, account, advice, illegal, machine, resolved
from sparkd.config import Config, ModelConfig
from sparkd.errors import RankError
from sparkd.hardware import Hardware
from sparkd.kv_sizing import without_cpu_space
from sparkd.placement import GIB, needed_gib
from sparkd.vllm_flags import Translation, release_of, translated
from workers.meminfo import sample


@dataclass(frozen=True, slots=True)
class Need:
    """spec: without `auto`; gib: whole ones to reserve; account: what the checkpoint's headers say, None where they say nothing; vllm: its
    version where it is known."""

    spec: ModelConfig
    platform: str
    entrypoint: str
    gib: int
    account: Account | None
    vllm: str | None = None


class Node(Protocol):
    def runtime(self, interpreter: str) -> Mapping[str, Any]:
        """What a Python environment has: `platform`, and `entrypoint` and `vllm` (its version) or None."""


def need_of(spec: ModelConfig, config: Config, node: Node, free_gib: float, offered_gib: float, ways: Ways = (1, 1)) -> Need:
    """free_gib: the most that a node has beside the other models. ways: over how many ranks, each on a node of its own.

    Raises RankError where the runtime or the folder is not there.
    """
    engine = config.engine
    if spec.model.startswith("/") and not Path(spec.model).is_dir():
        raise RankError(f"The folder {spec.model} is not on this node: check the path in `model`, or use a hub id (owner/name).")
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
    spec = resolved(spec, here, spec.environment(engine), int(free_gib * GIB), ways)
    known = account_of(spec, config, platform, ways)
    gib = needed_gib(spec, platform, here.memory_bytes / GIB, spec.environment(engine), offered_gib, known)
    return Need(spec, platform, entrypoint, gib, known, found.get("vllm"))


def account_of(spec: ModelConfig, config: Config, platform: str, ways: Ways = (1, 1)) -> Account | None:
    """Of one node; see admission.account."""
    return account(spec, _this_node(platform), spec.environment(config.engine), str(config.profiles_path()), ways)


def why_illegal(spec: ModelConfig, config: Config, node: Node, ways: Ways) -> str | None:
    """Why vLLM would not split the model so; None where it would, or its headers are not here. Raises RankError."""
    platform = _platform(node.runtime(runtime_of(spec, config)), config)
    return illegal(spec, _this_node(platform), spec.environment(config.engine), ways)


def said_to(spec: ModelConfig, config: Config, vllm: str | None) -> Translation:
    """The model's flags and variables as its release of vLLM knows them."""
    return translated(spec.vllm_flags(), without_cpu_space(spec, spec.environment(config.engine)), release_of(vllm))


def runtime_of(spec: ModelConfig, config: Config) -> str:
    return str(spec.runtime_of(config.engine) or sys.executable)


def too_large(need: Need, most_gib: int, where: str, env: Mapping[str, str]) -> str | None:
    """Why no node can ever hold it, with what would fit; None where one can. where: `this node`, most_gib: what it offers."""
    spec, known = need.spec, need.account
    if known is not None and known.least > most_gib * GIB and spec.memory_gib == "auto":
        cure = advice(spec, machine(need.platform, most_gib * GIB, 0), env, most_gib * GIB) or "Choose a smaller context or format"
        return f"{spec.name} does not fit: {known.sentence}; {where} offers {most_gib} GiB. {cure}."
    if need.gib > most_gib:
        return (
            f"{spec.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB: choose a smaller "
            "context or format, give kv_cache a size, or set memory_gib to what it really needs."
        )
    return None


def _platform(found: Mapping[str, Any], config: Config) -> str:
    return str(found["platform"]) if config.engine.platform == "auto" else config.engine.platform


def _this_node(platform: str) -> Hardware:
    return machine(platform, int(sample()["mem_total_bytes"]), 0)
