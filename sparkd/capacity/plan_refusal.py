"""Owns the sentence of a plan that has no way to serve a model: the cause that stands in the way, and one thing to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparkd.capacity.fit import AS_STORED, FitRequest, Option, doubt_in_short
from sparkd.capacity.parallelism import uneven_heads
from sparkd.capacity.weights import Inventory

_MOST_RANKS = 8


def refusal(options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> dict[str, Any] | None:
    """{"cause": one of fit.Cause, "message": a sentence with the cure}; None where an option fits, or there is none.

    Memory is the cause only where a way could be counted: then it is told of the way that lacks least. Else it is that of the way over the
    fewest nodes.
    """
    if not options or any(option.fits for option in options):
        return None
    counted = [option for option in options if option.footprint is not None]
    option = max(counted, key=_spare) if counted else min(options, key=lambda each: (each.nodes, each.pipeline))
    reason = doubt_in_short(option.reason or "")
    return {"cause": option.cause, "message": f"{_BEGIN[option.cause or 'memory']}{reason}; {_cure(option, options, inventory, wish)}."}


def _spare(option: Option) -> int:
    found = option.footprint
    return 0 if found is None else min(found.free_bytes, found.load_free_bytes)


_BEGIN = {
    "memory": "The memory is too small: ",
    "cache": "The cache is too small: ",
    "length": "The requests are too long: ",
    "links": "The nodes are not linked for it: ",
    "vllm": "vLLM refuses this model: ",
    "split": "The model cannot be split so: ",
    "format": "The weights cannot have this format: ",
    "uncounted": "The model cannot be counted: ",
}


def _cure(option: Option, options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> str:
    match option.cause:
        case "cache":
            return ", or ".join(option.cures) or "choose a smaller format, or share the model by more nodes"
        case "length":
            return f"ask for {inventory.shape.max_len:,} tokens or fewer (--ctx, or max_model_len of the entry)"
        case "links":
            return "run `sparkd fabric` for what is wrong with the cables, or plan for one node"
        case "vllm" if option.nodes == 1:
            return "choose another model, or a vLLM that serves it (engine.runtime)"
        case "vllm":
            return "choose another tensor_parallel, or a vLLM that splits it so (engine.runtime)"
        case "split":
            others = [ranks for ranks in range(1, _MOST_RANKS + 1) if ranks != option.tensor]
            possible = [str(ranks) for ranks in others if not any(uneven_heads(inventory.shape, ranks))]
            return f"choose another tensor_parallel; possible are {', '.join(possible)}"
        case "format":
            return "choose another format (--quantize, or quantize of the entry)"
        case "uncounted":
            return "set memory_gib in its entry; vLLM then sizes the cache"
        case _:
            return _smaller(option, options, inventory, wish)


def _smaller(option: Option, options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> str:
    """One way to need less, or to have more."""
    source = inventory.checkpoint.quantization
    if option.longest:
        return f"ask for {option.longest:,} tokens or fewer (--ctx, or max_model_len of the entry)"
    if wish.limit is not None:
        return "raise that limit of the entry"
    if all(each.format == AS_STORED for each in options) and (source is None or source.requantizable):
        return "choose a smaller format, such as --quantize nvfp4"
    return f"share it by more than {wish.nodes} node{'s' if wish.nodes > 1 else ''} (--nodes), or choose a smaller model"
