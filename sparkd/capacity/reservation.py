"""How much unified memory a node offers, a model reserves there and its KV cache may take of that. Never reads tensors: sizes of files
and flags only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkd.capacity.account import Account
from sparkd.config.config import Config, ModelConfig
from sparkd.errors import ConfigError
from sparkd.schema.kv_cache import cpu_space_gib, vllm_sizes
from sparkd.vllm.arg_check import amount
from sparkd.vllm.parsers import Parsers
from sparkd.vllm.translate import Translation, flag_name, values_of
from sparkd.vllm.unaccounted_args import BYTES, SHARE, blocks_of, share_of, unsized
from workers.host.meminfo import sample
from workers.kv.settings import CPU_KV_CACHE_GIB

GIB = 1 << 30
# An engine's own processes: imports, CUDA context, Python heaps. Three processes measured at 0.6 to 1.7 GiB together on a CPU build.
PROCESSES_GIB = 2.0
LOADING_FACTOR = 1.1
VLLM_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py of 0.32; older releases take 0.90


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one model goes. slug: its name as a file name. platform: `cuda` or `cpu`. entrypoint: the module that is its engine. vllm: its
    version where it is known. spec: the model with what was `auto` in it decided; None where nothing was. peers: nodes of its other ranks,
    in their order; memory_gib is what it takes on each. tensor, pipeline: parallel sizes, together one rank on each node. said: its flags
    as its vLLM knows them. parsers: of its tool calls and reasoning, None of an engine that is no vLLM.
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
    said: Translation | None = None
    parsers: Parsers | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of every rank, rank 0's first."""
        return (self.node_id, *self.peers)


def needed_gib(
    spec: ModelConfig,
    platform: str,
    mem_total_gib: float,
    env: Mapping[str, str],
    offered_gib: float | None = None,
    known: Account | None = None,
) -> int:
    """Whole GiB to reserve; Ray's custom resources are whole numbers above one.

    known: by the checkpoint's headers; where a cache has a size, that account goes before the sizes of files.

    memory_gib where it is given. All that the node offers where a flag changes what the model takes in a way that is not counted, as is a
    number of blocks without the headers; but for gpu_memory_utilization, which vLLM keeps within. A cache of so many bytes: that, the
    weights on disk and the engine's processes. Else on CUDA gpu_memory_utilization of the node, and so much, but no more than the node
    offers, for a cache of all that is left or of a size that only the engine can tell in bytes. On the CPU: weights on disk, the KV cache
    that is configured, and the engine's processes; a hub id that is not on disk yet counts as its processes alone.

    offered_gib: what the node lends.

    Raises ConfigError for a number in the model's own flags or environment that vLLM would not read either.
    """
    if isinstance(spec.memory_gib, int | float):
        return math.ceil(spec.memory_gib)
    flags = spec.vllm_flags()
    share = _share(flags)
    weights = weights_gib(spec.model)
    blocks = blocks_of(spec.extra_args)
    sized = blocks is not None or (spec.kv_cache is not None and not vllm_sizes(spec))
    shared = math.ceil((share or 0.0) * mem_total_gib)
    most = math.ceil(VLLM_DEFAULT_UTILIZATION * mem_total_gib)
    whole = most if offered_gib is None else min(most, int(offered_gib))
    kv_gib = spec.kv_cache["bytes"] / GIB if isinstance(spec.kv_cache, dict) and "bytes" in spec.kv_cache else None
    if known is not None and known.total is not None and sized:
        return max(_lent(known, known.total, offered_gib), shared)
    counted = (SHARE, BYTES) if platform == "cpu" else (SHARE,)
    uncounted = known is None and any(flag_name(flag) not in counted for flag in unsized(spec.extra_args))
    if blocks is not None or (share is None and uncounted):
        return max(whole, shared)
    if platform == "cuda" and not (kv_gib and weights):
        return shared or whole
    if not sized:
        kv_gib = _cpu_kv_gib(flags, env)
        if kv_gib is None and share is not None:
            return shared
        kv_gib = CPU_KV_CACHE_GIB if kv_gib is None else kv_gib
    if kv_gib is None:
        return whole
    if known is not None:
        return _lent(known, known.fixed + kv_gib * GIB, offered_gib)
    return math.ceil(weights * LOADING_FACTOR + kv_gib + PROCESSES_GIB)


def _lent(known: Account, size_bytes: float, offered_gib: float | None) -> int:
    """GiB of it: the upper end of a guess, as far as the node lends that."""
    most = size_bytes if offered_gib is None else min(size_bytes, offered_gib * GIB)
    return math.ceil(max(size_bytes - (known.upper or 0), most) / GIB)


def offered_gib(config: Config) -> int:
    """The memory that this node offers to models, whole GiB: all but the system's reserve."""
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
    share = share_of(flags)
    if share is None and any(True for _ in values_of(flags, SHARE)):
        raise ConfigError("--gpu-memory-utilization must be above 0 and at most 1.", param="extra_args")
    return share


def _cpu_kv_gib(flags: Sequence[str], env: Mapping[str, str]) -> float | None:
    """The variable wins over the flag (vllm/platforms/cpu.py)."""
    sizes = [size for *_, size in values_of(flags, BYTES)]
    space_gib = cpu_space_gib(env)
    if space_gib is not None or not sizes:
        return space_gib
    size_bytes = amount(sizes[-1])
    if size_bytes is None:
        raise ConfigError("--kv-cache-memory-bytes must be a size such as 2G.", param="extra_args")
    return size_bytes / GIB
