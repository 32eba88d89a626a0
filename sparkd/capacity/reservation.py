"""Owns how much unified memory this node offers to models, and where one of them goes. Counts no model."""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.config.config import Config, ModelConfig
from sparkd.hardware import GIB
from sparkd.vllm.parsers import Parsers
from sparkd.vllm.translate import Translation
from workers.host.meminfo import mem_total_bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one model.

    slug: its name as a file name. platform: `cuda` or `cpu`.
    entrypoint: the module that is its engine. vllm: its version, if it is known.
    spec: the model with a choice for each `auto`; None without a choice.
    peers: the nodes of its other ranks, in their order; memory_gib: reserved on each node.
    tensor, pipeline: parallel sizes, together one rank on each node.
    said: its flags in the words of its vLLM.
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
    said: Translation | None = None
    parsers: Parsers | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of every rank, rank 0's first."""
        return (self.node_id, *self.peers)


def offered_gib(config: Config) -> int:
    """The memory that this node offers to models, whole GiB: all but the system's reserve."""
    total = mem_total_bytes()
    return max(1, (total - config.memory.os_reserve_bytes(total)) // GIB)
