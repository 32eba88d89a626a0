"""Runs the largest batches against a KV cache of a few blocks, before the real one exists. Never leaves any memory behind.

vLLM has two runners: `v1.worker.gpu_model_runner` (V1) has methods for such a cache; `v1.worker.gpu.model_runner` (V2, the usual one for
dense models since 0.24 and for most models since 0.30) has functions for it since 0.30, and none before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sparkd.errors import MissingSymbol
from workers.vllm.kv import encoders
from workers.vllm.kv.costs import need_of
from workers.vllm.kv.prompt_logprobs import rehearse as rehearse_prompt_logprobs
from workers.vllm.symbols import method, symbol

MINIMAL_BLOCKS = 8
# The most blocks of the minimal cache. The rehearsal runs fewer sequences where the cache has fewer blocks.
MOST_BYTES = 1 << 30
# The least bytes of a captured graph: its nodes and the driver's structures (vLLM's estimate has the same lower bound).
GRAPH_BYTES = 1 << 20
_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"


def is_v2(runner: Any) -> bool:
    return not hasattr(runner, "_init_minimal_kv_cache_for_profiling") and hasattr(runner, "cudagraph_manager")


@contextlib.contextmanager
def minimal_cache(runner: Any) -> Iterator[None]:
    """A context with a small KV cache for forward passes with attention. Raises MissingSymbol."""
    allocate, tear_down = _v2(runner) if is_v2(runner) else _v1(runner)
    set_current_vllm_config = symbol("set_current_vllm_config")
    try:
        with set_current_vllm_config(runner.vllm_config):
            allocate()
        yield
    finally:
        tear_down()


def largest_prefill(runner: Any, scale: float = 1.0) -> float:
    """Run the largest prefill of the scheduler, max_num_batched_tokens at the end of the longest context. scale: the share to run. Returns
    the share that ran, like the other runs here. Raises MissingSymbol."""
    tokens = max(1, int(runner.max_num_tokens * scale))
    sequence_tokens = -(-tokens // min(tokens, runner.max_num_reqs))
    # V2 before 0.30 ignores context_len.
    at_end = (
        {"context_len": max(0, runner.max_model_len - sequence_tokens)} if is_v2(runner) else {"profile_seq_lens": runner.max_model_len}
    )
    rehearse_prompt_logprobs(runner, _run(runner, tokens, **at_end)[0])
    return float(tokens / runner.max_num_tokens)


def all_decoding(runner: Any, scale: float = 1.0) -> float:
    """Run the largest decoding batch: every sequence decodes, with its drafts, and is sampled. scale: share of max_num_seqs. Raises
    MissingSymbol."""
    each = int(getattr(runner, "uniform_decode_query_len", None) or getattr(runner, "decode_query_len", None) or 1)
    most = max(1, min(runner.max_num_reqs, runner.max_num_tokens // each))
    sequences = max(1, int(most * scale))
    hidden, last = _run(runner, sequences * each, uniform_decode=True)
    rows = last if each == 1 else hidden  # with drafts, the model verifies each token
    pools = getattr(runner, "is_pooling_model", False) or getattr(runner, "pooling_runner", None) is not None
    if isinstance(rows, torch.Tensor) and rows.ndim == 2 and not pools:  # else no last stage, or nothing to sample
        method(runner, "_dummy_sampler_run")(rows[: sequences * each])
    return sequences / most


def profiled(runner: Any, scale: float, peak: Callable[[Callable[[], Any]], int]) -> int:
    """The peak bytes of vLLM's own profile run, computed from one with a smaller batch. peak: measures the peak of a run.

    Encoders run as many items as a batch may have, and at least one, however small the batch is: so their part is measured separately.
    Raises MissingSymbol.
    """
    items = encoders.items(runner) if scale < 1 else 0
    with smaller_batches(runner, scale) as share:
        whole = peak(lambda: encoders.profile_run(runner))
        if not items:
            return int(whole / share)
        of_items = max(1, encoders.items(runner)) / items
        with _set(runner.model_config.multimodal_config, skip_mm_profiling=True):
            text = peak(lambda: encoders.profile_run(runner))
    # The encoders' outputs stay in memory while the text part runs, unless the encoders alone had the larger peak.
    return int(max(whole / of_items, text / share + max(0, whole - text) / of_items))


def _run(runner: Any, tokens: int, **named: Any) -> Any:
    run = method(runner, "_dummy_run")
    if is_v2(runner):
        return run(tokens, skip_eplb=True, **named)
    # Without this V1 would capture graphs of this minimal cache, into the pool of the real graphs.
    none = symbol("CUDAGraphMode").NONE
    return run(tokens, force_attention=True, skip_eplb=True, cudagraph_runtime_mode=none, **named)


@contextlib.contextmanager
def smaller_batches(runner: Any, scale: float, *, sequences: bool = False) -> Iterator[float]:
    """A context in which vLLM's profile run and kernel tuning use a smaller batch; yields the share of max_num_batched_tokens that runs.

    The runner has a copy of that number, and vllm/model_executor/warmup reads the scheduler's configuration. The encoders have a budget: V1
    makes one at its start, V2 makes one from the configuration (vllm/multimodal/encoder_budget.py). sequences: reduce max_num_seqs as well,
    for V2's warm-up, which runs that many short requests (vllm/v1/worker/gpu/warmup.py)."""
    scheduler = runner.scheduler_config
    most = runner.max_num_tokens
    tokens = max(min(most, runner.max_num_reqs), int(most * scale))
    # vLLM refuses a budget smaller than an item that must be in one batch.
    whole_items = getattr(scheduler, "disable_chunked_mm_input", False) and getattr(runner, "supports_mm_inputs", False)
    configured: dict[str, Any] = {} if whole_items else {"max_num_batched_tokens": tokens}
    share = tokens / most
    with contextlib.ExitStack() as stack:
        if scale < 1:
            names = ("max_num_encoder_input_tokens", "encoder_cache_size")
            configured |= {name: max(1, int(getattr(scheduler, name) * scale)) for name in names if hasattr(scheduler, name)}
            if sequences:
                configured["max_num_seqs"] = max(1, int(scheduler.max_num_seqs * scale))
                share = configured["max_num_seqs"] / scheduler.max_num_seqs
            budget = getattr(runner, "mm_budget", None)
            if budget is not None:
                items = {kind: min(count, max(1, int(count * scale))) for kind, count in budget.mm_max_items_per_batch.items()}
                stack.enter_context(_set(budget, mm_max_items_per_batch=items))
        stack.enter_context(_set(runner, max_num_tokens=tokens))
        stack.enter_context(_set(scheduler, **configured))
        yield share


@contextlib.contextmanager
def _set(holder: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(holder, name) for name in values}
    for name, value in values.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


def graphs_of(runner: Any) -> int:
    """The bytes of all CUDA graphs, estimated from a few that are captured and dropped. 0 without graphs. Raises MissingSymbol."""
    if getattr(runner.compilation_config.cudagraph_mode, "name", "NONE") == "NONE":
        return 0
    size = max(0, int(method(runner, "profile_cudagraph_memory")()))
    # Before 0.30 V2's own method answered 0 whatever there was to capture.
    return size if size or not is_v2(runner) else _sampled(runner)


def receive(runner: Any, stages: int) -> None:
    """Make the buffer in which a later stage of a pipeline receives the tensors of the stage before.

    vLLM makes it in its first dummy run. The CPU backend has no dummy run where nothing is compiled, and the first request would end the
    engine (0.32: gpu_model_runner.py, _dummy_run and sync_and_gather_intermediate_tensors).
    """
    if stages > 1 and runner.intermediate_tensors is None and hasattr(runner.model, "make_empty_intermediate_tensors"):
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _v1(runner: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    start, end = method(runner, "_init_minimal_kv_cache_for_profiling"), method(runner, "_cleanup_profiling_kv_cache")
    compilation = runner.compilation_config
    captured = compilation.max_cudagraph_capture_size

    def allocate() -> None:
        if captured is None:  # eager: the method takes the smaller of it and max_num_seqs (gpu_model_runner.py)
            compilation.max_cudagraph_capture_size = MINIMAL_BLOCKS
        start()

    def tear_down() -> None:
        compilation.max_cudagraph_capture_size = captured
        end()

    return allocate, tear_down


def _v2(runner: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """V2's functions to make and to remove a minimal cache. It has blocks for every sequence, within MOST_BYTES, because V2's warm-up runs
    as many real requests as the blocks allow."""
    need = need_of(runner.vllm_config, runner.get_kv_cache_spec())
    wanted = 1 + 2 * runner.max_num_reqs
    blocks = max(MINIMAL_BLOCKS, wanted if need is None else min(wanted, MOST_BYTES // need.per_block))

    def allocate() -> None:
        cache = runner.cache_config
        groups = symbol("get_kv_cache_groups")(runner.vllm_config, runner.get_kv_cache_spec())
        before, cache.num_gpu_blocks_override = cache.num_gpu_blocks_override, blocks
        try:
            config = symbol("get_kv_cache_config_from_groups")(runner.vllm_config, groups, 0)
        finally:
            cache.num_gpu_blocks_override = before
        method(runner, "initialize_kv_cache")(config, **_profiling(runner.initialize_kv_cache))
        cache.num_gpu_blocks = config.num_blocks

    return allocate, lambda: _tear_down(runner)


def _profiling(initialize: Callable[..., Any]) -> dict[str, bool]:
    """Keyword arguments for a cache that is not the final one: releases since 0.30 need is_profiling."""
    code = getattr(initialize, "__code__", None)
    return {"is_profiling": True} if code is not None and "is_profiling" in code.co_varnames[: code.co_argcount] else {}


def _tear_down(runner: Any) -> None:
    """Restore the V2 runner to its state before the minimal cache."""
    theirs = getattr(importlib.import_module(_GRAPHS), "_teardown_profiling_state", None)
    if theirs is not None:
        theirs(runner)
        return
    torch.accelerator.synchronize()
    for name, empty in (("_mamba_ctx", None), ("_mamba_group_ids", []), ("_mamba_spec", None)):
        if hasattr(runner.model_state, name):
            setattr(runner.model_state, name, empty)
    for name in ("kv_caches", "attn_groups"):
        if hasattr(runner, name):
            getattr(runner, name).clear()
    runner.__dict__.pop("kv_cache_config", None)
    runner.cudagraph_manager = None
    for layer in itertools.chain(runner.compilation_config.static_forward_context.values(), runner.model.modules()):
        cache = getattr(layer, "kv_cache", None)
        if cache is not None:
            layer.kv_cache = torch.tensor([]) if isinstance(cache, torch.Tensor) else []
    runner.cache_config.num_gpu_blocks = None
    gc.collect()
    torch.accelerator.empty_cache()


def _sampled(runner: Any) -> int:
    """The graphs' bytes for a V2 runner without an estimate of its own. The largest graph of a kind allocates memory that the others share:
    so two of each kind are captured, largest first, as in the real capture."""
    first: dict[Any, int] = {}
    total = 0
    with _throwaway_pool(runner), minimal_cache(runner):
        manager = runner.cudagraph_manager
        if manager is None or not manager.needs_capture():
            return 0
        capture = method(runner, "capture_model")
        every = dict(_descriptors(manager))
        if getattr(runner, "speculator", None) is not None:
            return max(0, int(capture()))  # its own graphs are captured with the first, and only once
        for number in range(2):
            for mode in sorted(every, key=lambda mode: getattr(mode, "name", "") != "PIECEWISE"):
                if len(every[mode]) <= number:
                    continue
                manager._capture_descs = {mode: [every[mode][number]]}
                taken = max(GRAPH_BYTES, int(capture()))
                # The driver reports these bytes: where a graph costs more than the larger one before it, another process took memory.
                total += first.setdefault(mode, taken) if number == 0 else min(taken, first[mode]) * (len(every[mode]) - 1)
        del manager
    return total


def _descriptors(manager: Any) -> dict[Any, list[Any]]:
    descriptors: dict[Any, list[Any]] = method(manager, "_capture_descs")
    return descriptors


@contextlib.contextmanager
def _throwaway_pool(runner: Any) -> Iterator[None]:
    """A context in which captured graphs use a separate memory pool, which is dropped with them: torch's allocator refuses a pool whose
    last graph is gone (create_or_incref_pool in CUDACachingAllocator.cpp)."""
    current_platform = symbol("current_platform")
    platform: Any = type(current_platform)
    method(platform, "_global_graph_pool")
    pool = current_platform.graph_pool_handle()
    kinds = [symbol("CUDAGraphWrapper")]
    with contextlib.suppress(MissingSymbol):
        kinds.append(symbol("BreakableCUDAGraphWrapper"))
    wrappers = [(wrapper, wrapper.graph_pool) for kind in kinds for wrapper in list(kind._all_instances)]
    before, platform._global_graph_pool = platform._global_graph_pool, pool
    for wrapper, _ in wrappers:
        wrapper.graph_pool = pool
    try:
        yield
    finally:
        platform._global_graph_pool = before
        for kind in kinds:
            kind.clear_all_graphs()
        for wrapper, own in wrappers:
            wrapper.graph_pool = own
        gc.collect()
        torch.accelerator.empty_cache()
