"""Runs encoders of images, sound and video in a profile run, where vLLM's own leaves them out. Never with more items than a batch may have.

V1 has always profiled encoders. V2 does since it has `EncoderRunner.profile_encoder_cache`; before that (0.26) it fills memory with a cache
and processes its first image with the memory that is left.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from workers.vllm.symbols import symbol

# Errors of a processor, which is the model's own code. vLLM itself starts without calling it.
_ANY = (ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)

logger = logging.getLogger("vllm.sparkd.kv")


def items(runner: Any) -> int:
    """The number of items of the largest kind that a profile run encodes at once; 0 for a model without encoders. Raises MissingSymbol."""
    return _most(_budget(runner))[1] if _encodes(runner) else 0


def profile_run(runner: Any) -> None:
    """vLLM's profile run, with the encoders' outputs in memory meanwhile. Raises MissingSymbol."""
    encoder_runner = getattr(getattr(runner, "model_state", None), "encoder_runner", None)  # V2's
    if encoder_runner is None or hasattr(encoder_runner, "profile_encoder_cache") or not _encodes(runner):
        runner.profile_run()
        return
    largest = _largest(runner)
    try:
        outputs = encoder_runner.execute_mm_encoder(largest) if largest else []
        # A real request keeps these outputs too, for the steps of its prefill.
        runner.encoder_cache.encoder_outputs.update((f"sparkd-{number}", output) for number, output in enumerate(outputs))
        del outputs
        runner.profile_run()
    finally:
        runner.reset_encoder_cache()


def _encodes(runner: Any) -> bool:
    config = getattr(runner.model_config, "multimodal_config", None)
    first = getattr(runner, "is_first_pp_rank", True)  # the stage that has the encoders
    return bool(runner.supports_mm_inputs and config is not None and not config.skip_mm_profiling and first)


def _largest(runner: Any) -> list[tuple[str, Any]]:
    """As many of the largest items as a batch may have; empty where the model's own processor cannot make one."""
    budget = _budget(runner)
    kind, count = _most(budget)
    if not count:
        return []
    try:
        inputs = runner.mm_registry.get_dummy_mm_inputs(runner.model_config, mm_counts={kind: 1}, cache=budget.cache)
        return [(kind, inputs["mm_kwargs"][kind][0])] * count
    except _ANY as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        logger.warning(
            "sparkd: no %s could be made to rehearse with (%s): its encoder's memory is not counted. A larger kv_margin_gib leaves room "
            "for it, limit_mm_per_prompt does without it.",
            kind,
            type(error).__name__,
        )
        return []


def _most(budget: Any) -> tuple[str, int]:
    """(kind of the largest item, the most items of it in a batch)."""
    if budget.get_encoder_budget() <= 0 or not budget.mm_max_toks_per_item:
        return "", 0
    kind = budget.get_modality_with_max_tokens()
    return kind, int(budget.mm_max_items_per_batch[kind])


def _budget(runner: Any) -> Any:
    budget = getattr(runner, "mm_budget", None)
    if budget is not None:
        return budget
    kind = symbol("MultiModalBudget")  # V2 makes one for each run
    more = {"enable_cache": False} if "enable_cache" in inspect.signature(kind).parameters else {}
    return kind(runner.vllm_config, runner.mm_registry, **more)
