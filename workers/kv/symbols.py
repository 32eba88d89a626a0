"""vLLM's functions and methods that sizing needs and that are not promised to stay. Never falls back: it names what is missing."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections.abc import Iterator
from typing import Any

from workers.kv.arithmetic import Need

# vLLM 0.33 moved some of them.
_MODULES = ("vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_planning")
# Enough for more blocks than any rounding matters for; nothing of it is taken.
_MUCH = 1 << 50
MINIMAL_BLOCKS = 8


class Missing(Exception):
    """A release without a symbol; its name is the message."""


def need_of(vllm_config: Any, specs: dict[str, Any]) -> Need | None:
    """What the cache of this model costs, as this release counts it; None for a model without one. Raises Missing.

    specs: the worker's get_kv_cache_spec(). All layer types are vLLM's own affair here: full, grouped, latent and sliding attention
    and states of Mamba or linear attention differ in how many blocks of the one pool a request takes.
    """
    if not specs:
        return None
    # Grouping may change the specifications in place.
    groups = function("get_kv_cache_groups")(vllm_config, copy.deepcopy(specs))
    cache_config = vllm_config.cache_config
    given, cache_config.num_gpu_blocks_override = cache_config.num_gpu_blocks_override, None
    try:
        config = function("get_kv_cache_config_from_groups")(vllm_config, groups, _MUCH)
    finally:
        cache_config.num_gpu_blocks_override = given
    block_bytes = _MUCH // config.num_blocks
    requests = function("get_max_concurrency_for_kv_cache_config")(vllm_config, config)
    per_request = math.ceil(config.num_blocks / requests - 1e-6) * block_bytes
    return Need(per_request, per_request + block_bytes, vllm_config.model_config.max_model_len)


def requests_in(vllm_config: Any, kv_cache_config: Any) -> float:
    """How many requests of max_model_len tokens a cache holds. Raises Missing."""
    return float(function("get_max_concurrency_for_kv_cache_config")(vllm_config, kv_cache_config))


def function(name: str) -> Any:
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                return found
    raise Missing(f"{_MODULES[0]}.{name}")


def method(holder: Any, name: str) -> Any:
    found = getattr(holder, name, None)
    if found is None:
        raise Missing(f"{type(holder).__name__}.{name}")
    return found


@contextlib.contextmanager
def minimal_cache(runner: Any) -> Iterator[None]:
    """A KV cache of a few blocks, for forward passes with attention before there is a real one. Raises Missing."""
    allocate = method(runner, "_init_minimal_kv_cache_for_profiling")
    tear_down = method(runner, "_cleanup_profiling_kv_cache")
    compilation = runner.compilation_config
    captured = compilation.max_cudagraph_capture_size
    if captured is None:  # eager: the method takes the smaller of it and max_num_seqs (gpu_model_runner.py)
        compilation.max_cudagraph_capture_size = MINIMAL_BLOCKS
    try:
        allocate()
        yield
    finally:
        compilation.max_cudagraph_capture_size = captured
        tear_down()


def largest_batches(runner: Any, scale: float = 1.0) -> None:
    """What the scheduler may ask at most: a prefill of max_num_batched_tokens at the end of the longest context, and every sequence
    decoding. scale: of the prefill's tokens. Raises Missing."""
    run = method(runner, "_dummy_run")
    tokens = max(1, int(runner.max_num_tokens * scale))
    run(tokens, force_attention=True, skip_eplb=True, profile_seq_lens=runner.max_model_len)
    run(min(runner.max_num_reqs, runner.max_num_tokens), force_attention=True, uniform_decode=True, skip_eplb=True)
