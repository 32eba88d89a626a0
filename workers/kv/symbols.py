"""vLLM's functions and methods that sizing needs and that are not promised to stay. Never falls back: it names what is missing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from typing import Any

from workers.kv.arithmetic import CacheCosts

# vLLM 0.33 moved some of them.
_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")
# Enough for more blocks than any rounding matters for; nothing of it is taken.
_MUCH = 1 << 50


class Missing(Exception):
    """A release without a symbol; its name is the message."""


def need_of(vllm_config: Any, specs: dict[str, Any]) -> CacheCosts | None:
    """The costs of this model's cache, as this release counts it; None for a model without one. Raises Missing.

    specs: the worker's get_kv_cache_spec(). All layer types are vLLM's own affair here: full, grouped, latent and sliding attention
    and states of Mamba or linear attention differ in how many blocks of the one pool a request takes.
    """
    if not specs:
        return None
    # Grouping may change the specifications in place.
    groups = function("get_kv_cache_groups")(vllm_config, copy.deepcopy(specs))
    cache_config = vllm_config.cache_config
    before, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        config = function("get_kv_cache_config_from_groups")(vllm_config, groups, _MUCH)
    finally:
        cache_config.num_gpu_blocks_override = before
    block_bytes = _MUCH // config.num_blocks

    def of(tokens: int) -> int:
        """Bytes of one request, by a configuration that differs in its length alone."""
        shorter, model = copy.copy(vllm_config), copy.copy(vllm_config.model_config)
        model.max_model_len, shorter.model_config = tokens, model
        requests = function("get_max_concurrency_for_kv_cache_config")(shorter, config)
        return math.ceil(config.num_blocks / requests - 1e-6) * block_bytes

    length = vllm_config.model_config.max_model_len
    per_request = of(length)
    shrinks = getattr(vllm_config.model_config, "original_max_model_len", None) == -1
    scheduler = vllm_config.scheduler_config
    batch, sequences = int(scheduler.max_num_batched_tokens), int(getattr(scheduler, "max_num_seqs", 0))
    # Without it no prompt may be longer than a batch (vllm/config/scheduler.py, verify_max_model_len).
    chunked = bool(getattr(scheduler, "enable_chunked_prefill", True))
    bits, lookahead = weight_bits(vllm_config), lookahead_of(vllm_config)
    return CacheCosts(per_request, per_request + block_bytes, length, batch, of, bits, sequences, lookahead, shrinks, chunked)


def lookahead_of(vllm_config: Any) -> int:
    """Tokens that vLLM has slots for beyond those of a request, up to max_model_len (v1/core/sched/scheduler.py: schedule, and
    kv_cache_manager.py: allocate_slots). In its last step a request that ends with n tokens has n - 1, the drafts of that step, those of
    the step before where its result is not awaited, and what the drafter writes itself."""
    speculative = getattr(vllm_config, "speculative_config", None)
    drafts = int(getattr(speculative, "num_speculative_tokens", None) or 0)
    if not drafts:
        return 0
    written = getattr(vllm_config, "num_lookahead_tokens", None)
    if written is None:  # releases whose scheduler counts them itself
        own = getattr(speculative, "use_eagle", bool)() or getattr(speculative, "uses_draft_model", bool)()
        written = drafts if own else 0
    steps = 2 if getattr(vllm_config.scheduler_config, "async_scheduling", False) else 1
    return steps * drafts + int(written) - 1


def weight_bits(vllm_config: Any) -> int:
    """The bits of most weights, as far as their names say: 16, 8, or 4 where they are quantized in another way."""
    method = getattr(vllm_config.model_config, "quantization", None)
    if method is None:
        return 16
    loader = getattr(getattr(vllm_config, "load_config", None), "model_loader_extra_config", None)
    words = f"{method} {loader.get('quantize') if isinstance(loader, dict) else ''}".lower()
    return 8 if "fp8" in words and "fp4" not in words and "int4" not in words else 4


def requests_in(vllm_config: Any, kv_cache_config: Any) -> float:
    """How many requests of max_model_len tokens a cache holds. Raises Missing."""
    return float(function("get_max_concurrency_for_kv_cache_config")(vllm_config, kv_cache_config))


def imported(module: str, name: str) -> Any:
    """`name` of one of vLLM's modules, asked for where it is needed: a release without it sizes its cache itself. Raises Missing."""
    try:
        symbol = getattr(importlib.import_module(module), name, None)
    except ImportError:
        symbol = None
    if symbol is None:
        raise Missing(f"{module}.{name}")
    return symbol


def function(name: str) -> Any:
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            symbol = getattr(importlib.import_module(module), name, None)
            if symbol is not None:
                return symbol
    raise Missing(f"{_MODULES[0]}.{name}")


def method(holder: Any, name: str) -> Any:
    bound = getattr(holder, name, None)
    if bound is None:
        raise Missing(f"{type(holder).__name__}.{name}")
    return bound
