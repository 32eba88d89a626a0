"""Repacks a layer's experts for a kernel without a second copy: calls vLLM's own functions for a few experts at a time and writes the
results back in place. Never computes a layout.

Stock vLLM (0.26 to 0.33) repacks a layer's experts for Marlin into new tensors, so one layer's experts are in memory twice, and NVFP4's
scales several times in wider types. Without padding the packed bytes keep their number (marlin_utils_fp4.py, marlin_utils.py), and experts
are independent, so this module writes a few at a time back in place. For other layouts, and in a release with other functions, stock vLLM
repacks the layer, and the log says so.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from sparkd.errors import MissingSymbol
from workers.vllm.symbols import symbol

logger = logging.getLogger("vllm.sparkd.stream")

AT_ONCE_BYTES = 16 * 2**20  # packed bytes of the experts that are worked on together; their scales in wider types are several times as many

SCALES_AT_ONCE_BYTES = 2 * 2**20  # the same for scales alone, one byte each, of which Marlin's functions make about ten

TILE_N, TILE_K = 64, 16  # gptq_marlin_repack refuses sizes that are no multiples (csrc/quantization/marlin/gptq_marlin_repack.cu)

_NVFP4 = "prepare_nvfp4_moe_layer_for_marlin"
# (function, positions of the arguments that have one entry for each expert, position of the layer that says how many there are)
_BY_EXPERT: tuple[tuple[str, tuple[int, ...], int | None], ...] = (
    ("_repack_marlin_experts", (0,), None),
    (_NVFP4, (1, 2, 3, 4, 5, 6), 0),
    ("gptq_marlin_moe_repack", (0, 1), None),
)


def repack_in_place() -> list[str]:
    """Replace the functions of this process's vLLM. Returns the names of functions that this release lacks. Idempotent."""
    missing: list[str] = []
    for name, by_expert, layer in _BY_EXPERT:
        try:
            stock = symbol(name)
        except MissingSymbol as error:
            missing.append(error.symbol)
            continue
        if not hasattr(stock, "sparkd_stock"):
            ours = few_at_a_time(stock, by_expert, layer)
            _replace(stock, name, scales_as_one(stock, ours) if name == _NVFP4 else ours)
    if missing:
        logger.warning("sparkd: this vLLM has no %s; its experts are repacked with a second copy of one layer.", ", ".join(missing))
    return missing


class FewExperts:
    """A stand-in for a layer with fewer experts; all other attributes are the layer's."""

    def __init__(self, layer: Any, num_experts: int) -> None:
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "num_experts", num_experts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._layer, name, value)


def few_at_a_time(
    stock: Callable[..., Any], by_expert: tuple[int, ...], layer: int | None = None, at_once_bytes: int | None = None
) -> Callable[..., Any]:
    """`stock`, a function of tensors [experts, ...] to one such tensor or a tuple of them, run for few experts at a time.

    Each result goes into the memory of the argument with as many bytes for each expert, where there is one; its argument must not be
    used afterwards.
    by_expert: positions of the arguments with one entry for each expert. layer: position of the one whose `num_experts` says how many.
    at_once_bytes: of the first such argument; AT_ONCE_BYTES where it is not said.
    """

    @functools.wraps(stock)
    def in_place(*args: Any, **kwargs: Any) -> Any:
        args = _positional(stock, args, kwargs)
        tensors = [args[at] for at in by_expert if isinstance(args[at], torch.Tensor)]
        experts = tensors[0].shape[0]
        step = max(1, (at_once_bytes or AT_ONCE_BYTES) // max(1, _bytes(tensors[0]) // max(1, experts)))
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


def scales_as_one(stock: Callable[..., Any], careful: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's `prepare_nvfp4_moe_layer_for_marlin` without a wait for the device at every expert; `careful` where it cannot be.

    Stock permutes the scales expert by expert, with lists as indices and values read back: three waits for each. Its functions work along
    rows, so the experts' scales can stand below each other as one matrix. Stock is asked about two experts; where the same functions
    called so do not give its very bits (a padded layer, another release), `careful` does all of it.
    """
    module = sys.modules[stock.__module__]
    agreed: dict[Any, bool] = {}

    @functools.wraps(stock)
    def in_place(*args: Any, **kwargs: Any) -> Any:
        args = _positional(stock, args, kwargs)
        try:
            layer, tensors = args[0], list(args[1:7])
            key = (layer.params_dtype, *((tensor.dtype, tensor.shape[1:]) for tensor in tensors))
            if key not in agreed:
                two = [tensor[:2] for tensor in tensors]
                stocks = stock(FewExperts(layer, two[0].shape[0]), *(tensor.clone() for tensor in two), *args[7:], **kwargs)
                ours = _as_one(module, layer.params_dtype, [tensor.clone() for tensor in two], _bytes(two[1]))
                agreed[key] = all(_same(a, b) for a, b in zip(stocks, ours, strict=True))
            if agreed[key]:
                return _as_one(module, layer.params_dtype, tensors, SCALES_AT_ONCE_BYTES)
        except _NotAlike as reason:
            logger.info("sparkd: NVFP4 scales are repacked expert by expert: %s.", reason)
        return careful(*args, **kwargs)

    in_place.sparkd_stock = stock  # type: ignore[attr-defined]
    return in_place


class _NotAlike(Exception):
    """The fast way is not known to be right for this layer or release."""


def _as_one(module: Any, dtype: torch.dtype, tensors: list[torch.Tensor], at_once_bytes: int) -> tuple[torch.Tensor, ...]:
    """(w13, its scales, its second-level scales, w2, ..) in Marlin's layout, in the memory of `tensors`. Raises _NotAlike."""
    try:
        permute, process = module.marlin_permute_scales, module.nvfp4_marlin_process_scales
        factor_of, process_global, repack = (
            module._nvfp4_compute_scale_factor,
            module.nvfp4_marlin_process_global_scale,
            module._repack_marlin_experts,
        )
    except AttributeError as error:
        raise _NotAlike(str(error)) from None
    parts = (tensors[:3], tensors[3:])
    # Everything that may turn out otherwise comes before the first weight is written over.
    factors: list[float] = []
    for packed, scales, _ in parts:
        size_n, size_k = packed.shape[1], packed.shape[2] * 2
        if size_n % TILE_N or size_k % TILE_K:
            raise _NotAlike(f"a matrix of {size_n} x {size_k} is padded")
        if scales.dtype != torch.float8_e4m3fn or scales.shape[1:] != (size_n, size_k // 16):
            raise _NotAlike(f"scales of {scales.dtype} and shape {list(scales.shape)}")
        largest = scales.view(torch.uint8).amax().reshape(1)
        if int(largest) >= 0x7F:
            raise _NotAlike("a scale is negative or not a number")
        factors.append(factor_of(largest.view(torch.float8_e4m3fn).to(dtype), dtype))
    repacked: list[torch.Tensor] = []
    for (packed, scales, second), factor in zip(parts, factors, strict=True):
        size_n, size_k = packed.shape[1], packed.shape[2] * 2

        def rows(part: torch.Tensor, n: int = size_n, k: int = size_k, factor: float = factor) -> torch.Tensor:
            below = part.to(dtype).transpose(1, 2).reshape(-1, n)
            turned = permute(s=below, size_k=k, size_n=n, group_size=16, is_a_8bit=False)
            return process(turned, scale_factor=factor, a_dtype=dtype)[0].view(part.shape[0], k // 16, n)

        repacked.append(_repacked(repack, packed, size_n, size_k))
        repacked.append(few_at_a_time(rows, (0,), at_once_bytes=at_once_bytes)(scales))
        repacked.append(process_global(second, dtype) / factor)
    return tuple(repacked)


def _repacked(repack: Callable[..., Any], packed: torch.Tensor, size_n: int, size_k: int) -> torch.Tensor:
    """By name, for later releases have no permutation. Raises _NotAlike."""
    arguments = {"weight": packed, "size_n": size_n, "size_k": size_k, "is_a_8bit": False}
    arguments["perm"] = torch.empty(0, dtype=torch.int, device=packed.device)
    names = inspect.signature(repack).parameters
    if not names.keys() <= arguments.keys():
        raise _NotAlike(f"{repack.__name__} takes {', '.join(names)}")
    return repack(**{name: arguments[name] for name in names})


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _home(part: torch.Tensor, experts: int, step: int, homes: list[torch.Tensor]) -> torch.Tensor:
    """Where [experts, ...] of a result goes: the memory of an argument of the same size, else new memory."""
    shape = (experts, *part.shape[1:])
    wanted = part.numel() * part.element_size() // step * experts
    home = next((tensor for tensor in homes if _bytes(tensor) == wanted and tensor.device == part.device), None)
    if home is None or not wanted:
        return torch.empty(shape, dtype=part.dtype, device=part.device)
    homes.remove(home)
    return home.detach().view(-1).view(torch.uint8).view(part.dtype).view(shape)


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
