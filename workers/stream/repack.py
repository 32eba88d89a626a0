"""Kernel repacking without a second copy of a layer's experts: vLLM's own functions, called for few experts at a time, written back in
place. Never
computes a layout.

Stock vLLM (0.26 to 0.33) repacks a layer's experts for Marlin into new tensors, so one layer's experts are resident twice, and NVFP4's
scales several times
more in wider types. The packed bytes are as many before and after when nothing is padded (marlin_utils_fp4.py, marlin_utils.py), and
experts do not know of each
other, so a few at a time can go back to where they came from. Where that does not hold, or where a release has another function, stock
behaviour stays and
the log says so.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.sparkd.stream")

AT_ONCE_BYTES = 16 * 2**20  # packed bytes of the experts that are worked on together; their scales in wider types are several times as many

_FP4 = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
# (module, function, positions of the arguments that have one entry for each expert, position of the layer that says how many there are)
_BY_EXPERT: tuple[tuple[str, str, tuple[int, ...], int | None], ...] = (
    (_FP4, "_repack_marlin_experts", (0,), None),
    (_FP4, "prepare_nvfp4_moe_layer_for_marlin", (1, 2, 3, 4, 5, 6), 0),
    ("vllm._custom_ops", "gptq_marlin_moe_repack", (0, 1), None),
)


def repack_in_place() -> list[str]:
    """Replaces the functions of this process's vLLM; the names of those that this release does not have. Idempotent."""
    missing: list[str] = []
    for module_name, name, by_expert, layer in _BY_EXPERT:
        try:
            stock = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError):
            missing.append(f"{module_name}.{name}")
            continue
        if not hasattr(stock, "sparkd_stock"):
            _replace(stock, name, few_at_a_time(stock, by_expert, layer))
    if missing:
        logger.warning("sparkd: this vLLM has no %s; its experts are repacked with a second copy of one layer.", ", ".join(missing))
    return missing


class FewExperts:
    """A layer as it would be with fewer experts; everything else is the layer's own."""

    def __init__(self, layer: Any, num_experts: int) -> None:
        self._layer = layer
        self.num_experts = num_experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def few_at_a_time(stock: Callable[..., Any], by_expert: tuple[int, ...], layer: int | None = None) -> Callable[..., Any]:
    """`stock`, a function of tensors [experts, ...] to one such tensor or a tuple of them, run for few experts at a time.

    Each result goes into the memory of the argument with as many bytes for each expert, where there is one; its argument must not be
    used afterwards.
    by_expert: positions of the arguments with one entry for each expert. layer: position of the one whose `num_experts` says how many.
    """

    @functools.wraps(stock)
    def in_place(*args: Any, **kwargs: Any) -> Any:
        args = _positional(stock, args, kwargs)
        given = [args[at] for at in by_expert if isinstance(args[at], torch.Tensor)]
        experts = given[0].shape[0]
        step = max(1, AT_ONCE_BYTES // max(1, _bytes(given[0]) // max(1, experts)))
        if experts <= step or any(one.shape[0] != experts for one in given):
            return stock(*args, **kwargs)

        def some(first: int) -> Any:
            last = min(experts, first + step)
            cut = [arg[first:last] if at in by_expert and isinstance(arg, torch.Tensor) else arg for at, arg in enumerate(args)]
            if layer is not None:
                cut[layer] = FewExperts(args[layer], last - first)
            return stock(*cut, **kwargs)

        made = some(0)
        single = isinstance(made, torch.Tensor)
        parts = (made,) if single else tuple(made)
        if any(isinstance(one, torch.Tensor) and one.shape[:1] != (step,) for one in parts):
            return stock(*args, **kwargs)
        homes = [one for one in given if one.is_contiguous()]
        into = [_home(one, experts, step, homes) if isinstance(one, torch.Tensor) else one for one in parts]
        for first in range(0, experts, step):
            if first:
                made = some(first)
                parts = (made,) if single else tuple(made)
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
    home = next((one for one in homes if _bytes(one) == wanted and one.device == part.device), None)
    if home is None or not wanted:
        return torch.empty(shape, dtype=part.dtype, device=part.device)
    homes.remove(home)
    return home.detach().view(-1).view(torch.uint8).view(part.dtype).view(shape)


def _positional(stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments by position; those that were given by name are taken out of kwargs as far as no one before them is missing."""
    code = stock.__code__
    found = list(args)
    for name in code.co_varnames[len(args) : code.co_argcount]:
        if name not in kwargs:
            break
        found.append(kwargs.pop(name))
    return tuple(found)


def _replace(stock: Callable[..., Any], name: str, ours: Callable[..., Any]) -> None:
    """Everywhere in vLLM where the function was imported to."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "vllm" and module is not None and module.__dict__.get(name) is stock:
            setattr(module, name, ours)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
