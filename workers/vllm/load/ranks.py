"""Owns this process's rank in the engine, and how ranks share the model, from vLLM's groups. Never changes a group; raises MissingSymbol
where vLLM lacks one."""

from __future__ import annotations

from typing import Any

from workers.vllm.symbols import symbol


def experts_are_spread() -> bool:
    """Whether each rank has experts of its own (expert parallelism)."""
    return bool(_parallel().enable_expert_parallel)


def takes_ends() -> bool:
    """Whether this rank takes the last part of every tensor that ranks share: it is the last of its tensor-parallel ranks."""
    parallel = _parallel()
    ranks = int(parallel.tensor_parallel_size)
    return parallel.data_parallel_size == 1 and rank_of_world()[0] % ranks == ranks - 1


def rank_of_world() -> tuple[int, int]:
    """(this rank, number of ranks) of the whole engine."""
    from torch import distributed

    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def _parallel() -> Any:
    return symbol("get_current_vllm_config")().parallel_config
