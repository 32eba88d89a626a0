"""Owns why a load, a check and a plan refuse a model, and what would fit instead.

Each number satisfies every limit of the node and the entry, so that a restart with a cure is not refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from sparkd.capacity.account import Account, cache_limit, serving_of
from sparkd.capacity.evidence import Ways
from sparkd.capacity.fit import Cause, FitRequest, Option, choose, doubt_in_short, gib, short_cache
from sparkd.capacity.formats import AS_STORED
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import KvLayout, fitting, longest, sized
from sparkd.capacity.weights import Inventory, even_formats, inventory, possible_ranks
from sparkd.checkpoint.prequantized import prequantized
from sparkd.checkpoint.shape import shape_of
from sparkd.config.engine_args import EngineArgs
from sparkd.config.kv_cache import written
from sparkd.config.quantize import is_open
from sparkd.errors import CheckpointError
from sparkd.hardware import GIB, Hardware
from workers.quantization.recipe import AS_IT_IS

if TYPE_CHECKING:
    from sparkd.capacity.requirement import Requirement

# How far an account may be from what an engine takes.
ERROR_SHARE, ERROR_BYTES = 0.05, 300 << 20
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


@dataclass(frozen=True, slots=True)
class Cure:
    """One way to make a model or cache fit. settings: keys of the model's entry with values that suffice; a cache size in blocks is a flag
    instead. effect: their effect, in words. deed: a further or other action, without a number."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: str = ""
    deed: str = ""

    def __str__(self) -> str:
        settings = " and ".join(written(key, value) for key, value in self.settings.items())
        words = " and ".join(filter(None, (self.deed, settings and f"set {settings}")))
        return f"{words} ({self.effect})" if self.effect else words

    def also(self, settings: Mapping[str, Any]) -> Cure:
        return replace(self, settings={**self.settings, **settings})


_SMALLER = Cure(deed="choose a smaller context or format")


def advised(cures: Iterable[Cure]) -> str:
    """The sentence that names the cures, without a full stop; empty without cures."""
    words = ", or ".join(map(str, cures))
    return f"To make it fit: {words}" if words else ""


@dataclass(frozen=True, slots=True)
class FitRefusal:
    """reason: without a full stop. cures: each alone would suffice. cause: the limit that the model exceeds."""

    reason: str
    cures: tuple[Cure, ...]
    cause: Cause = "memory"

    @property
    def message(self) -> str:
        return f"{self.reason}. {advised(self.cures)}."

    def to_json(self) -> dict[str, str]:
        return {"cause": self.cause, "message": self.message}


def too_large(need: Requirement, most_gib: int, where: str) -> FitRefusal | None:
    """The reason why no node can ever hold the model; None if one can. where: `this node`; most_gib: the most that it offers."""
    args, known = need.args, need.account
    kept = 0.0 if args.share is not None else (args.margin_bytes or 0) / GIB
    room = int((most_gib - kept) * GIB)
    if known is not None and (short := _short_cache(need, known, room)):
        return short
    if known is not None and args.memory_gib is None and known.surely > room:
        free = f", of which {args.margin_words} keeps {kept:g} free" if kept else ""
        reason = f"{args.name} does not fit: {known.sentence}; {where} offers {most_gib} GiB{free}"
        return FitRefusal(reason, tuple(_cures(need, known, most_gib, room)) or (_SMALLER,))
    if known is not None and args.memory_gib is not None and outgrown(known, args.memory_gib) and need.gib <= most_gib:
        larger = [cure for cure in [more_memory(known)] if cure.settings["memory_gib"] <= most_gib]
        cures = (*larger, *_cures(need, known, most_gib, int(args.memory_gib * GIB)))
        return FitRefusal(f"{args.name} does not fit into memory_gib: {args.memory_gib:g}: {known.sentence}", cures or (_SMALLER,))
    if short := share_too_large(args, need.gib, need.hardware, most_gib, where):
        return short
    if need.gib > most_gib:
        size = Cure(deed=f"give kv_cache {'a smaller size' if isinstance(args.cache, Mapping) else 'a size'}")
        reason = f"{args.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB"
        return FitRefusal(reason, (_SMALLER, size, Cure(deed="set memory_gib to its real need")))
    return None


def share_too_large(args: EngineArgs, gib: int, hardware: Hardware, most_gib: int, where: str) -> FitRefusal | None:
    """Why no node can lend the share of its memory that vLLM takes, with the largest possible share.

    None if a node can, or if the GiB to reserve do not follow from a share. where, most_gib: as in `too_large`.
    """
    share = args.share if args.memory_gib is None else None
    if share is None or gib <= most_gib or gib != ceil(share * (hardware.memory_bytes / GIB)):
        return None
    reason = f"{args.name} asks for {gib} GiB of unified memory ({args.share_words}) and {where} offers {most_gib} GiB"
    return FitRefusal(reason, (Cure(deed=f"choose {int(100 * share * most_gib / gib) / 100:g} or less"),))


def refusal(options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> FitRefusal | None:
    """The refusal of a plan; None if an option fits, or without options.

    If an option could be counted, the cause is that of the option that lacks least. Otherwise it is that of the option on the fewest nodes.
    """
    if not options or any(option.fits for option in options):
        return None
    counted = [option for option in options if option.footprint is not None]
    option = max(counted, key=_spare) if counted else min(options, key=lambda each: (each.nodes, each.pipeline))
    cause = option.cause or "memory"
    reason = f"{_BEGIN[cause]}{doubt_in_short(option.reason or '')}"
    return FitRefusal(reason, tuple(_plan_cures(option, options, inventory, wish)), cause)


def cache_cures(cache: Mapping[str, Any] | None, size: int, layout: KvLayout, tokens: int, room: int | None = None) -> Iterator[Cure]:
    """In place of a cache that holds no request of `tokens` tokens, one that does, and a length for which it is enough. cache, size: as in
    sparkd.capacity.fit.short_cache. room: the most bytes that a cache may have, None for one that no other limit keeps from growing."""
    cost = layout.cost(tokens)
    if room is None or cost.least <= room:
        blocks, own = {"blocks": cost.blocks + 1}, {"tokens": tokens}
        yield Cure({"kv_cache": blocks if "blocks" in (cache or ()) else own if "tokens" in (cache or ()) else {"sequences": 1}})
    # The bytes of a cache in tokens or requests follow from the length.
    if shorter := longest(cache, layout, tokens, size if room is None else room, limit=size if cache is None else None):
        yield Cure({"max_model_len": shorter})


def more_memory(known: Account) -> Cure:
    return Cure({"memory_gib": ceil(known.least / GIB)})


def outgrown(known: Account | None, memory_gib: float | None) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the account may be wrong: of less the engine decides,
    which measures. None is never too much, or too little."""
    if known is None or memory_gib is None:
        return False
    return known.surely - max(ERROR_SHARE * known.surely, ERROR_BYTES) > memory_gib * GIB


def advice(
    args: EngineArgs, headers: Headers | None, hardware: Hardware, offered_bytes: int, ways: Ways = (1, 1), *, instead_of: int = 0
) -> Iterator[Cure]:
    """The choices that would fit into offered_bytes of each node instead, split in `ways`. instead_of: the ranks that the entry asks for,
    where `ways` are fewer: that its own length and format fit is an answer then, too."""
    if headers is None:
        return
    model, serving = headers.model, serving_of(args, headers, hardware)
    if serving.unknown:
        return
    machine = replace(hardware, memory_bytes=offered_bytes, system_bytes=0)
    wish = FitRequest(serving.max_model_len, 1, ways[0] * ways[1], serving, None, args.enforce_eager, 0, ways=(ways,))
    options = choose(model, machine, wish).options
    own = AS_STORED if args.recipe is None or args.quantize is None or is_open(args.quantize) else args.recipe.default.spelling
    if not instead_of and any(option.fits and option.format == own for option in options):
        return  # then it is another key that stands in the way
    split = {"tensor_parallel": ways[0]} if instead_of else {}
    if shorter := next((option.longest for option in options if option.format == own and option.longest), 0):
        yield Cure({**split, "max_model_len": shorter})
    better = next((option for option in options if option.fits and option.format not in (own, AS_STORED)), None)
    if better is not None and better.footprint is not None:
        yield Cure({**split, "quantize": better.format}, gib(better.footprint.total))
    # The same model, quantized already. It is named and not taken: a request for a model is served by that model.
    for name, checkpoint in prequantized(args.model, model.checkpoint, {**os.environ, **args.env}):
        best = choose(inventory(checkpoint, shape_of(checkpoint.config)), machine, replace(wish, quantize=AS_IT_IS)).best
        if best is not None and best.footprint is not None:
            yield Cure({**split, "model": name}, f"quantized already, {gib(best.footprint.total)}")
            return


def _cures(need: Requirement, known: Account, most_gib: int, room: int) -> Iterator[Cure]:
    """In place of a cache of a given size a smaller one, where room bytes hold one request; else another choice."""
    layout, wanted, tokens = known.layout, need.args.cache, known.max_model_len
    left = room - known.fixed
    if less := fitting(wanted, layout, tokens, left):
        size, cost = sized(less, layout, tokens) or 0, known.kv
        yield Cure({"kv_cache": less}, f"{(size - cost.block_bytes) // cost.per_request:,} of {tokens:,} tokens")
        if list(wanted or ()) == ["sequences"] and (shorter := longest(wanted, layout, tokens, left)):
            yield Cure({"max_model_len": shorter})
        return
    node = replace(need.hardware, memory_bytes=most_gib * GIB, system_bytes=0)
    least_cache = {"kv_cache": {"sequences": 1}} if known.cache is not None and known.cache > known.kv.least else {}
    for cure in advice(need.args, need.headers, node, room, need.ways):
        yield cure.also(least_cache)


def _short_cache(need: Requirement, known: Account, room: int) -> FitRefusal | None:
    """Why a cache of its size would hold no request. room: bytes for the engine."""
    args, tokens = need.args, known.max_model_len
    wanted = args.cache if known.cache is not None else None
    cache = wanted if isinstance(wanted, Mapping) else None
    size = known.cache if known.cache is not None else cache_limit(args, need.platform)
    short = short_cache(cache, size, known.kv)
    if size is None or short is None or args.memory_gib is not None or known.upper is not None:
        return None
    cures = tuple(cache_cures(cache, size, known.layout, tokens, room - known.fixed))
    return FitRefusal(f"{args.name} does not fit: {short}", cures or (_SMALLER,))


def _spare(option: Option) -> int:
    found = option.footprint
    return 0 if found is None else min(found.free_bytes, found.load_free_bytes)


def _plan_cures(option: Option, options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> Iterator[Cure]:
    source, needed = inventory.checkpoint.quantization, option.footprint
    match option.cause:
        case "cache" if needed is not None:
            size = needed.parts["kv"] if wish.cache is not None else wish.cache_limit or 0
            cures = list(cache_cures(wish.cache, size, needed.layout, option.serving.max_model_len, needed.room))
            yield from cures or [_SMALLER]
        case "length":
            yield Cure({"max_model_len": inventory.shape.max_len}, "--ctx")
        case "links":
            yield Cure(deed="run `sparkd fabric` to check the cables")
            yield Cure(deed="plan for one node")
        case "vllm":
            whole = option.nodes == 1
            yield Cure(deed="choose another model" if whole else "choose another tensor_parallel")
            yield Cure(deed=f"choose a vLLM that {'serves it' if whole else 'splits it so'} (engine.runtime)")
        case "split":
            yield Cure(deed=f"choose another tensor_parallel: {possible_ranks(inventory.shape, option.tensor)}")
        case "format":
            yield Cure(deed=f"choose {_even(inventory, wish) or 'another format'} (--quantize, or quantize of the entry)")
        case "uncounted":
            yield Cure(deed="set memory_gib in its entry; vLLM then sizes the cache")
        case _ if option.longest:
            yield Cure({"max_model_len": option.longest}, "--ctx")
        case _ if wish.limit is not None:
            yield Cure(deed="raise that limit of the entry")
        case _ if all(each.format == AS_STORED for each in options) and (source is None or source.requantizable):
            yield Cure(deed="choose a smaller format, such as --quantize nvfp4")
        case _:
            yield Cure(deed=f"share it by more than {wish.nodes} node{'s' if wish.nodes > 1 else ''} (--nodes)")
            yield Cure(deed="choose a smaller model")


def _even(inventory: Inventory, wish: FitRequest) -> str | None:
    """The formats whose groups divide the columns that those of the request do not."""
    try:
        return None if wish.quantize is None else even_formats(inventory.formatted(wish.quantize))
    except CheckpointError:
        return None
