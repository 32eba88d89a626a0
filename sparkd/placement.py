"""How much unified memory a model reserves on its node. Never reads tensors: sizes of files and flags only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkd.config import ModelConfig

GIB = 1 << 30
# An engine's own processes: imports, CUDA context, Python heaps. Three processes measured at 0.6 to 1.7 GiB together on a CPU build.
PROCESSES_GIB = 2.0
LOADING_FACTOR = 1.1
CPU_KV_GIB = 1.0
VLLM_DEFAULT_UTILIZATION = 0.9


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
    """
    if isinstance(spec.memory_gib, int | float):
        return math.ceil(spec.memory_gib)
    if platform == "cuda":
        return math.ceil((spec.gpu_memory_utilization or VLLM_DEFAULT_UTILIZATION) * mem_total_gib)
    kv_gib = float(env.get("VLLM_CPU_KVCACHE_SPACE", CPU_KV_GIB))
    return math.ceil(weights_gib(spec.model) * LOADING_FACTOR + kv_gib + PROCESSES_GIB)


def weights_gib(model: str) -> float:
    """Bytes of the safetensors files of a local folder, GiB; 0 where there is none."""
    folder = Path(model)
    if not folder.is_dir():
        return 0.0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) / GIB
