"""Refuses a checkpoint that lacks a weight although neither its shards nor its index show it. Never reads a weight.

vLLM's own check, which it runs by itself for unquantized models only, names the parameters that a model does not report as loaded. It does
not see which of several tensors of one parameter is missing (k of q/k/v, an expert), and some classes report too little; the trace
(trace.py) shows both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from sparkd.errors import CheckpointError
from workers.load.trace import Trace
from workers.quantization.fusion import EXPERT

Check = Callable[[torch.nn.Module, set[str]], None]
Span = tuple[int, int]  # the first and the last element in a storage

_NAMED = 3
_CURE = "Download it again, and check that its config.json is its own"
_WHOLE = "; if it is whole, that class does not take this recipe, and `quantize: bf16` loads it"
_ALLOWED = "; if the model runs without them, `allow_missing_weights: true` on it"
# Parts of a weight, in sparkd's formats and in AWQ's and GPTQ's. A module with a quantization method has more parameters, some of which a
# checkpoint may lack: scales of activations and of the KV cache, zero points, GPTQ's biases of experts that have none.
_FILLED = re.compile(r"(w13_|w2_)?(weight|weight_packed|weight_scale|weight_global_scale|qweight|scales)|bias")


def refuse_unfilled(
    model: torch.nn.Module, trace: Trace, loaded: Collection[str], check: Check, experts: int | None, folder: str, *, quantized: bool
) -> None:
    """Raise CheckpointError with the first unfilled parts of the model and their number.

    loaded: the parameters that the model reports as loaded. check: vLLM's, which raises ValueError with the names of the others. experts:
    of each layer on this rank, None where unknown. folder: the checkpoint's; quantized: by a recipe.
    """
    empty = list(dict.fromkeys([*lone_experts(trace), *unfilled(model, trace, loaded, check, experts)]))
    if empty:
        more = f" and {len(empty) - _NAMED} more" if len(empty) > _NAMED else ""
        problem = f"it has nothing for {', '.join(empty[:_NAMED])}{more} of vLLM's {type(model).__name__}"
        raise CheckpointError(problem, file=folder, cure=_CURE + (_WHOLE if quantized else "") + _ALLOWED)


def lone_experts(trace: Trace) -> Iterator[str]:
    """Matrices that one expert lacks and its neighbours have, if the model takes that kind."""
    layers: dict[str, dict[str, set[int]]] = {}
    for name, taken in trace.taken.items():
        if taken.region is not None and (expert := EXPERT.search(name)) is not None:
            layers.setdefault(name[: expert.start(1)], {}).setdefault(name[expert.end(1) :], set()).add(int(expert[1]))
    for prefix, kinds in layers.items():
        every = set().union(*kinds.values())
        for suffix, numbers in kinds.items():
            if _FILLED.fullmatch(suffix.rpartition(".")[2]):
                yield from (f"{prefix}{number}{_shown(suffix)}" for number in sorted(every - numbers))


def unfilled(model: torch.nn.Module, trace: Trace, loaded: Collection[str], check: Check, experts: int | None) -> Iterator[str]:
    """The parameters that no tensor reaches, and those of which it reaches a part: `qkv_proj.weight (rows 256 to 319)`."""
    missing: set[str] = set()
    try:
        check(model, set(loaded))
    except ValueError as error:
        missing.update(re.findall(r"'([^']+)'", str(error)))
    reached, unclear = _reached(trace)
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        if not parameter.numel() or (getattr(module, "quant_method", None) is not None and not _FILLED.fullmatch(last)):
            continue
        storage = parameter.untyped_storage().data_ptr()
        if storage not in reached:
            if name in missing:
                yield _shown(name)
            continue
        parts = [] if storage in unclear else list(_untouched(module, last, parameter, reached[storage], experts))
        if parts and not _shares(model.get_submodule(path.rpartition(".")[0])):
            yield f"{_shown(name)} ({', '.join(parts)})"


def _reached(trace: Trace) -> tuple[dict[int, list[Span]], set[int]]:
    """(what of each storage a copy reaches; the storages in which that is not all, because a tensor beside them is not simply copied)."""
    reached: dict[int, list[Span]] = {}
    modules: dict[int, set[str]] = {}
    unclear: set[str] = set()
    known: dict[int, tuple[int, int]] = {}  # thousands of experts have one `like`
    for name, taken in trace.taken.items():
        target = trace.straight.get(name, taken.target)
        if taken.region is not None and (target is None or not taken.once):
            unclear.add(_module(name))
        if target is None:
            continue
        if (place := known.get(id(target.like))) is None:
            extent = sum((size - 1) * stride for size, stride in zip(target.like.shape, target.like.stride(), strict=True))
            place = known[id(target.like)] = (target.like.untyped_storage().data_ptr(), extent)
        storage, extent = place
        reached.setdefault(storage, []).append((target.start, target.start + extent))
        modules.setdefault(storage, set()).add(_module(name))
    return reached, {storage for storage, names in modules.items() if names & unclear}


def _untouched(module: torch.nn.Module, name: str, parameter: torch.Tensor, spans: Sequence[Span], experts: int | None) -> Iterator[str]:
    """The experts, or the parts of a fused matrix, that no copy reaches."""
    rows, widths = parameter.shape[:1], getattr(module, "output_partition_sizes", None) or []
    is_stack = name.startswith(("w13_", "w2_")) and rows == (experts,)
    if not parameter.is_contiguous() or not (is_stack or (len(widths) > 1 and rows == (sum(widths),))):
        return
    touched = [False] * parameter.shape[0]
    for start, stop in spans:
        first, last = ((at - parameter.storage_offset()) // parameter.stride(0) for at in (start, stop))
        touched[max(0, first) : last + 1] = [True] * (min(last + 1, len(touched)) - max(0, first))
    if is_stack:
        yield from (f"expert {number}" for number, is_touched in enumerate(touched) if not is_touched)
        return
    yield from (f"rows {start} to {stop - 1}" for start, stop in pairwise(accumulate(widths, initial=0)) if not any(touched[start:stop]))


def _shares(parent: torch.nn.Module) -> bool:
    """Whether attention uses another layer's keys and values (Gemma 3n, Gemma 4), so that its own projections are not needed."""
    return any(getattr(child, "kv_sharing_target_layer_name", None) is not None for child in parent.children())


def _module(name: str) -> str:
    """The module whose tensors vLLM may fuse: `model.layers.0.self_attn`; one for all experts of a layer."""
    expert = EXPERT.search(name)
    return name[: expert.start(1)] if expert is not None else name.rsplit(".", 2)[0]


def _shown(name: str) -> str:
    """One name for all parts of a weight, because they are missing together."""
    return name.partition("weight_")[0] + "weight" if "weight_" in name else name
