"""How much unified memory a node offers, a model reserves there and its KV cache may take of that. Never reads tensors: sizes of files
and flags only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkd.capacity.account import Account
from sparkd.capacity.footprint import PROCESS_BYTES
from sparkd.config.config import Config, ModelConfig
from sparkd.hardware import GIB, Hardware
from sparkd.schema.engine_args import EngineArgs
from sparkd.vllm.parsers import Parsers
from sparkd.vllm.translate import Translation
from sparkd.vllm.unaccounted_args import BYTES
from workers.host.meminfo import sample
from workers.kv.settings import CPU_KV_CACHE_GIB

# Of the files of a checkpoint whose headers are of no kind that is counted: what a batch takes beside its weights.
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


def needed_gib(args: EngineArgs, hardware: Hardware, offered_gib: float | None = None, known: Account | None = None) -> int:
    """Whole GiB to reserve on a node; Ray's custom resources are whole numbers above one.

    known: by the checkpoint's headers; where a cache has a size, that account goes before the sizes of files.

    memory_gib where it is given. All that the node offers where a flag changes what the model takes in a way that is not counted, as is a
    number of blocks without the headers; but for gpu_memory_utilization, which vLLM keeps within. A cache of so many bytes: that, the
    weights on disk and the engine's processes. Else on CUDA gpu_memory_utilization of the node, and so much, but no more than the node
    offers, for a cache of all that is left or of a size that only the engine can tell in bytes. On the CPU: weights on disk, the KV cache
    that is configured, and the engine's processes; a hub id that is not on disk yet counts as its processes alone.

    hardware: the node; offered_gib: what it lends.
    """
    if args.memory_gib is not None:
        return math.ceil(args.memory_gib)
    platform, node_gib = hardware.platform, hardware.memory_bytes / GIB
    shared, most = math.ceil((args.share or 0.0) * node_gib), math.ceil(VLLM_DEFAULT_UTILIZATION * node_gib)
    whole = most if offered_gib is None else min(most, int(offered_gib))
    cache_bytes = args.cache.get("bytes") if isinstance(args.cache, Mapping) else None
    if known is not None and known.total is not None and args.sized:
        return max(_lent(known, known.total, offered_gib), shared)
    flags = {flag.strip("-").replace("_", "-") for flag in args.uncounted}
    uncounted = known is None and bool(flags - {BYTES} if platform == "cpu" else flags)
    if args.blocks is not None or (args.share is None and uncounted):
        return max(whole, shared)
    weights_bytes = stored_bytes(args.model)
    if platform == "cuda" and not (cache_bytes and weights_bytes):
        return shared or whole
    if not args.sized:
        # The variable wins over the flag (vllm/platforms/cpu.py).
        cache_bytes = args.cpu_space_bytes if args.cpu_space_bytes is not None else args.cache_bytes
        if cache_bytes is None and args.share is not None:
            return shared
        cache_bytes = CPU_KV_CACHE_GIB * GIB if cache_bytes is None else cache_bytes
    if cache_bytes is None:
        return whole
    if known is not None:
        return _lent(known, known.fixed + cache_bytes, offered_gib)
    return math.ceil((weights_bytes * LOADING_FACTOR + cache_bytes + PROCESS_BYTES[platform]) / GIB)


def _lent(known: Account, size_bytes: float, offered_gib: float | None) -> int:
    """GiB of it: the upper end of a guess, as far as the node lends that."""
    most = size_bytes if offered_gib is None else min(size_bytes, offered_gib * GIB)
    return math.ceil(max(size_bytes - (known.upper or 0), most) / GIB)


def offered_gib(config: Config) -> int:
    """The memory that this node offers to models, whole GiB: all but the system's reserve."""
    total = int(sample()["mem_total_bytes"])
    return max(1, (total - config.memory.os_reserve_bytes(total)) // GIB)


def stored_bytes(model: str) -> int:
    """The safetensors files of a local folder; 0 where there is none, or none that can be read: the engine will say why."""
    try:
        return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
    except OSError:
        return 0
