"""Counts what a KV cache costs, by vLLM's own functions. Never falls back: it raises MissingSymbol."""

from __future__ import annotations

import copy
import math
from typing import Any

from workers.kv.arithmetic import CacheCosts
from workers.vllm.symbols import has, symbol

# Blocks of a pretended cache, in which any request fits; it is not allocated.
_MANY = 1 << 24


def need_of(vllm_config: Any, specs: dict[str, Any]) -> CacheCosts | None:
    """The costs of this model's cache, as this release counts it; None for a model without one. Raises MissingSymbol.

    specs: the worker's get_kv_cache_spec(). vLLM itself counts the blocks of each layer type: full, grouped, latent and sliding attention
    and states of Mamba or linear attention take different numbers of blocks for a request.
    """
    if not specs:
        return None
    # Grouping may change the specifications in place.
    config, block_bytes = cache_of(vllm_config, copy.deepcopy(specs), _MANY)

    def of(tokens: int) -> int:
        """Bytes of one request of so many tokens, from a configuration with that max_model_len."""
        shorter, model = copy.copy(vllm_config), copy.copy(vllm_config.model_config)
        model.max_model_len, shorter.model_config = tokens, model
        requests = symbol("get_max_concurrency_for_kv_cache_config")(shorter, config)
        return math.ceil(config.num_blocks / requests - 1e-6) * block_bytes

    length = vllm_config.model_config.max_model_len
    per_request = of(length)
    shrinks = getattr(vllm_config.model_config, "original_max_model_len", None) == -1
    bits, lookahead = weight_bits(vllm_config), lookahead_of(vllm_config)
    return CacheCosts(per_request, per_request + block_bytes, length, of, bits, lookahead, shrinks)


def cache_of(vllm_config: Any, specs: dict[str, Any], blocks: int) -> tuple[Any, int]:
    """vLLM's configuration of a cache of so many blocks, and the bytes of one, as this release makes them. --num-gpu-blocks-override does
    not count. Raises MissingSymbol."""
    cache_config = vllm_config.cache_config
    before, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        groups = groups_of(vllm_config, specs)
        block_bytes = block_bytes_of(vllm_config, groups)
        if (builder := _builder(vllm_config)) is not None:
            return builder.get_kv_cache_config_from_groups(vllm_config, groups, blocks), block_bytes
        return symbol("get_kv_cache_config_from_groups")(vllm_config, groups, blocks * block_bytes), block_bytes
    finally:
        cache_config.num_gpu_blocks_override = before


def groups_of(vllm_config: Any, specs: dict[str, Any]) -> Any:
    """The layers in vLLM's groups. A model or a platform may group its layers in its own way. Raises MissingSymbol."""
    if (builder := _builder(vllm_config)) is not None:
        return symbol("get_kv_cache_groups_from_builder")(builder, vllm_config, specs)
    return symbol("get_kv_cache_groups")(vllm_config, specs)


def block_bytes_of(vllm_config: Any, groups: Any) -> int:
    """The bytes of one block of all groups. Raises MissingSymbol."""
    if (builder := _builder(vllm_config)) is not None:
        return int(symbol("_pool_bytes_per_block_from_builder")(builder, vllm_config, groups))
    return int(symbol("_pool_bytes_per_block")(vllm_config, groups))


def longest_bytes_of(vllm_config: Any, groups: Any) -> int:
    """The bytes that one request of max_model_len tokens takes. Raises MissingSymbol."""
    of_release = (vllm_config, groups) if (builder := _builder(vllm_config)) is None else (builder, vllm_config, groups)
    return int(symbol("_max_memory_usage_bytes_from_groups")(*of_release))


def _builder(vllm_config: Any) -> Any:
    """The maker of groups since 0.33; None before."""
    return symbol("get_kv_cache_config_builder")(vllm_config) if has("get_kv_cache_config_builder") else None


def lookahead_of(vllm_config: Any) -> int:
    """Slots that vLLM allocates beyond a request's tokens, up to max_model_len (v1/core/sched/scheduler.py: schedule, and
    kv_cache_manager.py: allocate_slots). In its last step a request that ends with n tokens has slots for n - 1, for the drafts of that
    step, for those of the step before with asynchronous scheduling, and for the drafter's own tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    drafts = int(getattr(speculative, "num_speculative_tokens", None) or 0)
    if not drafts:
        return 0
    steps = 2 if vllm_config.scheduler_config.async_scheduling else 1
    return steps * drafts + int(vllm_config.num_lookahead_tokens) - 1


def weight_bits(vllm_config: Any) -> int:
    """The bits of most weights, by the name of the quantization: 16, 8, or 4 for any other quantization."""
    method = getattr(vllm_config.model_config, "quantization", None)
    if method is None:
        return 16
    loader = getattr(getattr(vllm_config, "load_config", None), "model_loader_extra_config", None)
    words = f"{method} {loader.get('quantize') if isinstance(loader, dict) else ''}".lower()
    return 8 if "fp8" in words and "fp4" not in words and "int4" not in words else 4


def requests_in(vllm_config: Any, kv_cache_config: Any) -> float:
    """The number of requests of max_model_len tokens that a cache holds. Raises MissingSymbol."""
    return float(symbol("get_max_concurrency_for_kv_cache_config")(vllm_config, kv_cache_config))
