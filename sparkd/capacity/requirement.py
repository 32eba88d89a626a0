"""The requirement of one model on a node: the choices for `auto`, and GiB to reserve; and its place once it has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from sparkd.capacity.evidence import EXACT, Ways
from sparkd.capacity.fit import Option, candidates_of, checked, choose
from sparkd.capacity.footprint import Footprint
from sparkd.capacity.placed_entry import PlacedEntry
from sparkd.config.config import Config, ModelConfig
from sparkd.config.engine_args import EngineArgs
from sparkd.hardware import Hardware
from sparkd.units import GIB
from sparkd.vllm.parsers import Parsers
from workers.host.meminfo import mem_total_bytes

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

    args: without `auto`.
    node: one of them.
    gib: whole GiB to reserve.
    option: how it fits; None if its headers are not here.
    parsers: of its tool calls and reasoning; None for an engine that is not vLLM.
    """

    args: EngineArgs
    node: Hardware
    gib: int
    option: Option | None
    parsers: Parsers | None = None

    @property
    def known(self) -> Footprint | None:
        return None if self.option is None else self.option.known


def requirement_of(entry: PlacedEntry, free_gib: float, offered_gib: float, ways: Ways = (1, 1), *, beside: bool = False) -> Requirement:
    """The requirement of an entry, with a choice for each `auto`.

    free_gib: the most that a node has free of other models.
    offered_gib: the GiB that the node lends.
    ways: the tensor and pipeline sizes, with each rank on its own node.
    beside: whether `quantize: auto` may use a quantized copy that is on this machine.
    """
    free = replace(entry.node, system_bytes=entry.node.memory_bytes - int(free_gib * GIB))
    option = None
    if entry.source is not None:
        option = choose(candidates_of(entry.source, entry.copies if beside else ()), free, ways)
    args, known = (entry.args.undecided(), None) if option is None else (option.args, option.known)
    return Requirement(args, entry.node, reserved_gib(args, entry.node, offered_gib, known), option)


def why_illegal(entry: PlacedEntry, ways: Ways) -> str | None:
    """The reason why vLLM would not split the model over `ways`; None if it would, or without headers here."""
    if entry.source is None:
        return None
    stored, *_ = candidates_of(entry.source._replace(args=entry.args.undecided()))
    option = checked(stored, entry.node, ways)
    return option.reason if option.cause in ("vllm", "split") else None


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
