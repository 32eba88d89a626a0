"""Counts what a KV cache costs, by vLLM's own functions. Never falls back: it raises MissingSymbol."""

from __future__ import annotations

import copy
import math
from typing import Any

from workers.kv.arithmetic import CacheCosts
from workers.vllm.symbols import symbol

# A pretended size of memory, so large that rounding to blocks does not matter; it is not allocated.
_MUCH = 1 << 50


def need_of(vllm_config: Any, specs: dict[str, Any]) -> CacheCosts | None:
    """The costs of this model's cache, as this release counts it; None for a model without one. Raises MissingSymbol.

    specs: the worker's get_kv_cache_spec(). vLLM itself counts the blocks of each layer type: full, grouped, latent and sliding attention
    and states of Mamba or linear attention take different numbers of blocks for a request.
    """
    if not specs:
        return None
    # Grouping may change the specifications in place.
    groups = symbol("get_kv_cache_groups")(vllm_config, copy.deepcopy(specs))
    cache_config = vllm_config.cache_config
    before, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        config = symbol("get_kv_cache_config_from_groups")(vllm_config, groups, _MUCH)
    finally:
        cache_config.num_gpu_blocks_override = before
    block_bytes = _MUCH // config.num_blocks

    def of(tokens: int) -> int:
        """Bytes of one request of so many tokens, from a configuration with that max_model_len."""
        shorter, model = copy.copy(vllm_config), copy.copy(vllm_config.model_config)
        model.max_model_len, shorter.model_config = tokens, model
        requests = symbol("get_max_concurrency_for_kv_cache_config")(shorter, config)
        return math.ceil(config.num_blocks / requests - 1e-6) * block_bytes

    length = vllm_config.model_config.max_model_len
    per_request = of(length)
    shrinks = getattr(vllm_config.model_config, "original_max_model_len", None) == -1
    scheduler = vllm_config.scheduler_config
    batch, sequences = int(scheduler.max_num_batched_tokens), int(getattr(scheduler, "max_num_seqs", 0))
    # Without chunked prefill no prompt may be longer than a batch (vllm/config/scheduler.py, verify_max_model_len).
    chunked = bool(getattr(scheduler, "enable_chunked_prefill", True))
    bits, lookahead = weight_bits(vllm_config), lookahead_of(vllm_config)
    return CacheCosts(per_request, per_request + block_bytes, length, batch, of, bits, sequences, lookahead, shrinks, chunked)


def lookahead_of(vllm_config: Any) -> int:
    """Slots that vLLM allocates beyond a request's tokens, up to max_model_len (v1/core/sched/scheduler.py: schedule, and
    kv_cache_manager.py: allocate_slots). In its last step a request that ends with n tokens has slots for n - 1, for the drafts of that
    step, for those of the step before with asynchronous scheduling, and for the drafter's own tokens."""
    speculative = getattr(vllm_config, "speculative_config", None)
    drafts = int(getattr(speculative, "num_speculative_tokens", None) or 0)
    if not drafts:
        return 0
    written = getattr(vllm_config, "num_lookahead_tokens", None)
    if written is None:  # a release whose scheduler counts the drafter's tokens itself
        own = getattr(speculative, "use_eagle", bool)() or getattr(speculative, "uses_draft_model", bool)()
        written = drafts if own else 0
    steps = 2 if getattr(vllm_config.scheduler_config, "async_scheduling", False) else 1
    return steps * drafts + int(written) - 1


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
