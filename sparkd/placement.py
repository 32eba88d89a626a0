"""How much unified memory a node offers and a model reserves there. Never reads tensors: sizes of files and flags only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkd.config import Config, ModelConfig
from sparkd.errors import ConfigError
from workers.command import CPU_KV_CACHE_GIB
from workers.meminfo import sample

GIB = 1 << 30
# An engine's own processes: imports, CUDA context, Python heaps. Three processes measured at 0.6 to 1.7 GiB together on a CPU build.
PROCESSES_GIB = 2.0
LOADING_FACTOR = 1.1
VLLM_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py of 0.32; older releases take 0.90
_CPU_KV = "VLLM_CPU_KVCACHE_SPACE"
# vLLM's sizes (vllm/utils/argparse_utils.py, human_readable_int): a small letter is a power of 1000, a capital one of 1024.
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgtKMGT]?)")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one model goes. slug is its name as a file name; platform is `cuda` or `cpu`; entrypoint the module that is its engine."""

    node_id: str
    slug: str
    memory_gib: int
    platform: str
    entrypoint: str


def needed_gib(spec: ModelConfig, platform: str, mem_total_gib: float, env: Mapping[str, str]) -> int:
    """Whole GiB to reserve; Ray's custom resources are whole numbers above one.

    memory_gib where it is given. On CUDA what vLLM will take: gpu_memory_utilization of the node. On the CPU: weights on disk, the KV
    cache that is configured, and the engine's processes. A hub id that is not on disk yet counts as its processes alone.

    Raises ConfigError for a number in the model's own flags or environment that vLLM would not read either.
    """
    if isinstance(spec.memory_gib, int | float):
        return math.ceil(spec.memory_gib)
    flags = spec.vllm_flags()
    share = _share(flags)
    if platform == "cuda":
        return math.ceil((share or VLLM_DEFAULT_UTILIZATION) * mem_total_gib)
    kv_gib = _cpu_kv_gib(flags, env)
    if kv_gib is None and share is not None:
        return math.ceil(share * mem_total_gib)
    return math.ceil(weights_gib(spec.model) * LOADING_FACTOR + (CPU_KV_CACHE_GIB if kv_gib is None else kv_gib) + PROCESSES_GIB)


def nodes_with_room(offered_gib: Mapping[str, float], reserved: Iterable[tuple[str, int]], here: str, need_gib: int) -> list[str]:
    """Nodes that can hold need_gib beside what is reserved on them: `here` first, then the one with the most room.

    offered_gib: node -> GiB. reserved: (node, GiB) of every other model.
    """
    free_gib = free_on(offered_gib, reserved)
    fitting = [node for node, gib in free_gib.items() if gib >= need_gib]
    return sorted(fitting, key=lambda node: (node != here, -free_gib[node], node))


def free_on(offered_gib: Mapping[str, float], reserved: Iterable[tuple[str, int]]) -> dict[str, float]:
    """node -> GiB that no model has reserved there."""
    free = dict(offered_gib)
    for node, gib in reserved:
        if node in free:
            free[node] -= gib
    return free


def offered_gib(config: Config) -> int:
    """What this node offers to models, whole GiB: all but the system's reserve."""
    total = int(sample()["mem_total_bytes"])
    return max(1, (total - config.memory.os_reserve_bytes(total)) // GIB)


def weights_gib(model: str) -> float:
    """Bytes of the safetensors files of a local folder, GiB; 0 where there is none, or none that can be read: the engine will say why."""
    folder = Path(model)
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB
    except OSError:
        return 0.0


def _share(flags: Sequence[str]) -> float | None:
    """--gpu-memory-utilization, which on the CPU backend is a share of the machine's memory (cpu_worker.py)."""
    given = _last(flags, "--gpu-memory-utilization")
    if given is None:
        return None
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1.", param="extra_args")
    return share


def _cpu_kv_gib(flags: Sequence[str], env: Mapping[str, str]) -> float | None:
    """The variable wins over the flag (vllm/platforms/cpu.py)."""
    if gib := env.get(_CPU_KV, ""):
        if not re.fullmatch(r"[0-9]{1,6}", gib):
            raise ConfigError(f"{_CPU_KV} must be a whole number of GiB.", param="env")
        return int(gib)
    size = _last(flags, "--kv-cache-memory-bytes")
    if size is None:
        return None
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ConfigError("--kv-cache-memory-bytes must be a size such as 2G.", param="extra_args")
    number, letter = match.groups()
    return float(number) * (1000 if letter.islower() else 1024) ** (" kmgt".index(letter.lower() or " ")) / GIB


def _last(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag as argparse would read it: `--name value` or `--name=value`, underscores for dashes, the last one counts."""
    found = None
    for index, flag in enumerate(flags):
        key, equals, value = flag.partition("=")
        if key.replace("_", "-") == name:
            found = value if equals else flags[index + 1] if index + 1 < len(flags) else ""
    return found
