"""Runs the largest batches against a KV cache of a few blocks, before the real one exists. Never leaves any memory behind.

vLLM has two runners: `v1.worker.gpu_model_runner` (V1) has methods for such a cache, `v1.worker.gpu.model_runner` (V2, the usual one) has
functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from workers.vllm.kv.costs import cache_of
from workers.vllm.kv.prompt_logprobs import rehearse as rehearse_prompt_logprobs
from workers.vllm.symbols import method, symbol

MINIMAL_BLOCKS = 8
# The most blocks of the minimal cache. The rehearsal runs fewer sequences where the cache has fewer blocks.
MOST_BYTES = 1 << 30


def is_v2(runner: Any) -> bool:
    return not hasattr(runner, "_init_minimal_kv_cache_for_profiling") and hasattr(runner, "cudagraph_manager")


def require(runner: Any) -> None:
    """Raise MissingSymbol for the first name of vLLM's that the rehearsal of any rank would lack.

    The stages of a pipeline use different ones, and a rank that left its rehearsal would not come to the batches where the others wait."""
    own = ("warmup_kernels", "_teardown_profiling_state") if is_v2(runner) else ("CUDAGraphMode",)
    for name in ("kernel_warmup", "set_current_vllm_config", "MultiModalBudget", *own):
        symbol(name)
    methods = ("initialize_kv_cache",) if is_v2(runner) else ("_init_minimal_kv_cache_for_profiling", "_cleanup_profiling_kv_cache")
    graphs = () if runner.model_config.enforce_eager else ("profile_cudagraph_memory",)
    for name in ("_dummy_run", "_dummy_sampler_run", *methods, *graphs):
        method(runner, name)


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
    if isinstance(rows, torch.Tensor) and rows.ndim == 2 and not runner.is_pooling_model:  # else no last stage, or nothing to sample
        method(runner, "_dummy_sampler_run")(rows[: sequences * each])
    return sequences / most


def profiled(runner: Any, scale: float, peak: Callable[[Callable[[], Any]], int]) -> int:
    """The peak bytes of vLLM's own profile run, computed from one with a smaller batch. peak: measures the peak of a run.

    Encoders run as many items as a batch may have, and at least one, however small the batch is: so their part is measured separately.
    Raises MissingSymbol.
    """
    items = encoder_items(runner) if scale < 1 else 0
    with smaller_batches(runner, scale) as share:
        whole = peak(runner.profile_run)
        if not items:
            return int(whole / share)
        of_items = max(1, encoder_items(runner)) / items
        with _set(runner.model_config.multimodal_config, skip_mm_profiling=True):
            text = peak(runner.profile_run)
    # The encoders' outputs stay in memory while the text part runs, unless the encoders alone had the larger peak.
    return int(max(whole / of_items, text / share + max(0, whole - text) / of_items))


def encoder_items(runner: Any) -> int:
    """The number of images, sounds or videos, of the kind with most tokens, that a profile run encodes at once; 0 for a model without
    encoders. Raises MissingSymbol."""
    config = runner.model_config.multimodal_config
    first = getattr(runner, "is_first_pp_rank", True)  # the stage that has the encoders
    if not (runner.supports_mm_inputs and config is not None and not config.skip_mm_profiling and first):
        return 0
    budget = getattr(runner, "mm_budget", None)
    if budget is None:  # V2 makes one for each run
        budget = symbol("MultiModalBudget")(runner.vllm_config, runner.mm_registry, enable_cache=False)
    if budget.get_encoder_budget() <= 0 or not budget.mm_max_toks_per_item:
        return 0
    return int(budget.mm_max_items_per_batch[budget.get_modality_with_max_tokens()])


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
    whole_items = scheduler.disable_chunked_mm_input and runner.supports_mm_inputs
    configured: dict[str, Any] = {} if whole_items else {"max_num_batched_tokens": tokens}
    share = tokens / most
    with contextlib.ExitStack() as stack:
        if scale < 1:
            names = ("max_num_encoder_input_tokens", "encoder_cache_size")
            configured |= {name: max(1, int(getattr(scheduler, name) * scale)) for name in names}
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
    """The bytes of all CUDA graphs, which vLLM estimates from a few that it captures and drops; 0 where it captures none. Encoders may have
    graphs where cudagraph_mode is NONE. Raises MissingSymbol."""
    return 0 if runner.model_config.enforce_eager else max(0, int(method(runner, "profile_cudagraph_memory")()))


def _v1(runner: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    return method(runner, "_init_minimal_kv_cache_for_profiling"), method(runner, "_cleanup_profiling_kv_cache")


def _v2(runner: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """V2's functions to make and to remove a minimal cache. It has blocks for every sequence, within MOST_BYTES, because V2's warm-up runs
    as many real requests as the blocks allow."""
    tear_down = symbol("_teardown_profiling_state")
    _, block_bytes = cache_of(runner.vllm_config, runner.get_kv_cache_spec(), 1)
    blocks = max(MINIMAL_BLOCKS, min(1 + 2 * runner.max_num_reqs, MOST_BYTES // block_bytes))

    def allocate() -> None:
        config, _ = cache_of(runner.vllm_config, runner.get_kv_cache_spec(), blocks)
        method(runner, "initialize_kv_cache")(config, is_profiling=True)
        runner.cache_config.num_gpu_blocks = config.num_blocks

    return allocate, lambda: tear_down(runner)
