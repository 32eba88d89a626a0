"""Kernel repacking without a second copy of a layer's experts: vLLM's own repack functions, called for one expert at a time, written
back in place. Never computes a layout.

Stock vLLM (0.26 to 0.33) repacks a layer's experts for Marlin into a new tensor of the same size, so one layer's experts are resident
twice. The packed bytes are as many
before and after when nothing is padded (marlin_utils_fp4.py, marlin_utils.py), so each expert's result fits where it came from. Where
it does not, or where a release
has another function, stock behaviour stays and the log says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.sparkd.stream")

# (module, function, which positional arguments have one entry for each expert)
_BY_EXPERT: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4", "_repack_marlin_experts", (0,)),
    ("vllm._custom_ops", "gptq_marlin_moe_repack", (0, 1)),
)


def repack_in_place() -> list[str]:
    """Replaces the repack functions of this process's vLLM; the names of those that this release does not have. Idempotent."""
    missing: list[str] = []
    for module_name, name, by_expert in _BY_EXPERT:
        try:
            module = importlib.import_module(module_name)
            stock = getattr(module, name)
        except (ImportError, AttributeError):
            missing.append(f"{module_name}.{name}")
            continue
        if not hasattr(stock, "sparkd_stock"):
            setattr(module, name, one_at_a_time(stock, by_expert))
    if missing:
        logger.warning("sparkd: this vLLM has no %s; its experts are repacked with a second copy of one layer.", ", ".join(missing))
    return missing


def one_at_a_time(stock: Callable[..., torch.Tensor], by_expert: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """`stock`, a function from [experts, ...] to [experts, ...], run expert by expert into the memory of its first argument.

    by_expert: positions of the arguments that have one entry for each expert. Falls back to `stock` where the result has another number
    of bytes.
    """

    @functools.wraps(stock)
    def in_place(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not args or not isinstance(args[0], torch.Tensor):  # called by keyword: as the function declares them
            names = stock.__code__.co_varnames[: stock.__code__.co_argcount]
            args = tuple(kwargs.pop(name) for name in names[: len(args) + len(kwargs)] if name in kwargs)
        weight = args[0]
        experts = weight.shape[0]
        if experts < 2 or not weight.is_contiguous():
            return stock(*args, **kwargs)

        def one(index: int) -> torch.Tensor:
            return stock(
                *(arg[index : index + 1] if at in by_expert and isinstance(arg, torch.Tensor) else arg for at, arg in enumerate(args)),
                **kwargs,
            )

        first = one(0)
        size = first.numel() * first.element_size()
        if first.shape[0] != 1 or size * experts != weight.numel() * weight.element_size():
            return stock(*args, **kwargs)
        into = weight.detach().view(-1).view(torch.uint8).view(experts, size)
        into[0] = first.view(-1).view(torch.uint8)
        for index in range(1, experts):
            into[index] = one(index).view(-1).view(torch.uint8)
        return into.view(-1).view(first.dtype).view(experts, *first.shape[1:])

    in_place.sparkd_stock = stock  # type: ignore[attr-defined]
    return in_place
