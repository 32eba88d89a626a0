"""Which rank of the engine this process is, and what ranks share. Never changes a group; asks vLLM's own."""

from __future__ import annotations


def experts_are_spread() -> bool:
    """Whether each rank has experts of its own (expert parallelism)."""
    from vllm.config import get_current_vllm_config

    return bool(get_current_vllm_config().parallel_config.enable_expert_parallel)


def tensor_parallel_rank() -> int:
    """This process's rank among those that share the model's layers; 0 where nothing is shared."""
    from vllm.distributed import get_tensor_model_parallel_rank

    try:
        return int(get_tensor_model_parallel_rank())
    except (AssertionError, RuntimeError):
        return 0


def ranks() -> dict[str, int | bool]:
    """How the engine is cut, for the key of a cache that holds one rank's part."""
    from vllm.config import get_current_vllm_config

    parallel = get_current_vllm_config().parallel_config
    return {"tp": parallel.tensor_parallel_size, "pp": parallel.pipeline_parallel_size, "ep": bool(parallel.enable_expert_parallel)}


def rank_of_world() -> tuple[int, int]:
    """(this rank, how many there are) of the whole engine."""
    from torch import distributed

    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
