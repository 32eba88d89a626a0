"""Repacks a layer's experts for a kernel without a second copy: calls vLLM's own functions for a few experts at a time and writes the
results back in place.

Stock vLLM repacks a layer's experts for Marlin into new tensors, so one layer's experts are in memory twice, and NVFP4's scales several
times in wider types. Without padding the packed bytes keep their number (marlin_utils_fp4.py, marlin_utils.py), and experts
are independent, so this module writes a few at a time back in place. For other layouts, and in a release with other functions, stock vLLM
repacks the layer, and the log says so.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from sparkd.errors import MissingSymbol
from workers.vllm.symbols import symbol

logger = logging.getLogger("vllm.sparkd.stream")

AT_ONCE_BYTES = 16 * 2**20  # packed bytes of the experts that are worked on together; their scales in wider types are several times as many

# (function, positions of the arguments that have one entry for each expert, position of the layer that says how many there are)
_BY_EXPERT: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("_repack_marlin_experts", (0,), None),
    ("prepare_nvfp4_moe_layer_for_marlin", (1, 2, 3, 4, 5, 6), 0),
    ("gptq_marlin_moe_repack", (0,), None),
)


def repack_in_place() -> None:
    """Replace the functions of this process's vLLM; the log names those that this release lacks. Idempotent."""
    missing: list[str] = []
    for name, by_expert, layer in _BY_EXPERT:
        try:
            stock = symbol(name)
        except MissingSymbol as error:
            missing.append(error.symbol)
            continue
        if not hasattr(stock, "sparkd_stock"):
            _replace(stock, name, few_at_a_time(stock, by_expert, layer))
    if missing:
        logger.warning("sparkd: this vLLM has no %s; its experts are repacked with a second copy of one layer.", ", ".join(missing))


class FewExperts:
    """A stand-in for a layer with fewer experts; all other attributes are the layer's."""

    def __init__(self, layer: Any, num_experts: int) -> None:
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "num_experts", num_experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._layer, name, value)


def few_at_a_time(stock: Callable[..., Any], by_expert: tuple[int, ...], layer: int | None = None) -> Callable[..., Any]:
    """`stock`, a function of tensors [experts, ...] to one such tensor or a tuple of them, run for few experts at a time.

    Each result goes into the memory of the argument with as many bytes for each expert, where there is one; its argument must not be used
    afterwards.

    by_expert: positions of the arguments with one entry for each expert.
    layer: position of the one whose `num_experts` says how many.
    """

    @functools.wraps(stock)
    def in_place(*args: Any, **kwargs: Any) -> Any:
        args = _positional(stock, args, kwargs)
        tensors = [args[at] for at in by_expert if isinstance(args[at], torch.Tensor)]
        experts = tensors[0].shape[0]
        step = max(1, AT_ONCE_BYTES // max(1, _bytes(tensors[0]) // max(1, experts)))
        if experts <= step or any(tensor.shape[0] != experts for tensor in tensors):
            return stock(*args, **kwargs)

        def some(first: int) -> Any:
            last = min(experts, first + step)
            cut = [arg[first:last] if at in by_expert and isinstance(arg, torch.Tensor) else arg for at, arg in enumerate(args)]
            if layer is not None:
                cut[layer] = FewExperts(args[layer], last - first)
            return stock(*cut, **kwargs)

        result = some(0)
        single = isinstance(result, torch.Tensor)
        parts = (result,) if single else tuple(result)
        if any(isinstance(part, torch.Tensor) and part.shape[:1] != (step,) for part in parts):
            return stock(*args, **kwargs)
        homes = [tensor for tensor in tensors if tensor.is_contiguous()]
        into = [_home(part, experts, step, homes) if isinstance(part, torch.Tensor) else part for part in parts]
        for first in range(0, experts, step):
            if first:
                result = some(first)
                parts = (result,) if single else tuple(result)
            for whole, part in zip(into, parts, strict=True):
                if isinstance(whole, torch.Tensor):
                    whole[first : first + part.shape[0]] = part
        return into[0] if single else tuple(into)

    in_place.sparkd_stock = stock  # type: ignore[attr-defined]
    return in_place


def _home(part: torch.Tensor, experts: int, step: int, homes: list[torch.Tensor]) -> torch.Tensor:
    """Where [experts, ...] of a result goes: the memory of an argument of the same size, else new memory."""
    shape = (experts, *part.shape[1:])
    wanted = part.numel() * part.element_size() // step * experts
    at = next((at for at, tensor in enumerate(homes) if _bytes(tensor) == wanted and tensor.device == part.device), None)
    if at is None or not wanted:
        return torch.empty(shape, dtype=part.dtype, device=part.device)
    return homes.pop(at).detach().view(-1).view(torch.uint8).view(part.dtype).view(shape)


def _positional(stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position. Named arguments move from kwargs to their position, up to the first missing one."""
    code = stock.__code__
    positional = list(args)
    for name in code.co_varnames[len(args) : code.co_argcount]:
        if name not in kwargs:
            break
        positional.append(kwargs.pop(name))
    return tuple(positional)


def _replace(stock: Callable[..., Any], name: str, ours: Callable[..., Any]) -> None:
    """Replace the function in every module of vLLM that has imported it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "vllm" and module is not None and module.__dict__.get(name) is stock:
            setattr(module, name, ours)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
