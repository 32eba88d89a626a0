"""Why a load, a check and a plan refuse a model, and the one change that helps most.

Its number satisfies every limit of the node and the entry, so that a restart with it is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from sparkd.capacity.account import Account, cache_limit, serving_of
from sparkd.capacity.evidence import Ways
from sparkd.capacity.fit import DEFAULT_CONTEXT, Cause, Option, choose, doubt_in_short, gib, short_cache
from sparkd.capacity.footprint import FitRequest
from sparkd.capacity.formats import AS_STORED
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import KvLayout, fitting, longest, sized
from sparkd.capacity.weights import Inventory, even_formats, possible_ranks
from sparkd.config.engine_args import EngineArgs
from sparkd.config.kv_cache import written
from sparkd.config.quantize import is_open
from sparkd.errors import CheckpointError
from sparkd.hardware import Hardware
from sparkd.units import GIB

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
    """One way to make a model or cache fit.

    settings: keys of the model's entry with values that suffice; a cache size in blocks is a flag instead.
    effect: their effect, in words.
    deed: another action, without a number.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    effect: str = ""
    deed: str = ""

    def __str__(self) -> str:
        words = self.deed or f"set {' and '.join(written(key, value) for key, value in self.settings.items())}"
        return f"{words} ({self.effect})" if self.effect else words


_SMALLER = Cure(deed="choose a smaller context or format")


def advised(cure: Cure | None) -> str:
    """The sentence that names the cure, without a full stop; empty without one."""
    return "" if cure is None else f"To make it fit: {cure}"


@dataclass(frozen=True, slots=True)
class FitRefusal:
    """reason: without a full stop. cure: the largest lever. cause: the limit that the model exceeds."""

    reason: str
    cure: Cure
    cause: Cause = "memory"

    @property
    def message(self) -> str:
        return f"{self.reason}. {advised(self.cure)}."

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
        return FitRefusal(reason, _cure(need, known, most_gib, room))
    if known is not None and args.memory_gib is not None and outgrown(known, args.memory_gib) and need.gib <= most_gib:
        least_gib = ceil(known.least / GIB)
        smaller = least_gib > most_gib
        cure = _cure(need, known, most_gib, int(args.memory_gib * GIB)) if smaller else Cure({"memory_gib": least_gib})
        return FitRefusal(f"{args.name} does not fit into memory_gib: {args.memory_gib:g}: {known.sentence}", cure)
    if short := share_too_large(args, need.gib, need.hardware, most_gib, where):
        return short
    if need.gib > most_gib:
        size = Cure(deed=f"give kv_cache {'a smaller size' if isinstance(args.cache, Mapping) else 'a size'}, or set memory_gib")
        return FitRefusal(f"{args.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB", size)
    return None


def share_too_large(args: EngineArgs, gib: int, hardware: Hardware, most_gib: int, where: str) -> FitRefusal | None:
    """Why no node can lend the share of its memory that vLLM takes, with the largest possible share.

    None if a node can, or if the GiB to reserve do not follow from a share. where, most_gib: as in `too_large`.
    """
    share = args.share if args.memory_gib is None else None
    if share is None or gib <= most_gib or gib != ceil(share * (hardware.memory_bytes / GIB)):
        return None
    reason = f"{args.name} asks for {gib} GiB of unified memory ({args.share_words}) and {where} offers {most_gib} GiB"
    return FitRefusal(reason, Cure(deed=f"choose {int(100 * share * most_gib / gib) / 100:g} or less"))


def refusal(options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> FitRefusal | None:
    """The refusal of a plan; None if an option fits, or without options.

    If an option could be counted, the cause is that of the option that lacks least. Otherwise it is that of the option on the fewest nodes.
    """
    if not options or any(option.fits for option in options):
        return None
    counted = [(option, option.footprint) for option in options if option.footprint is not None]
    fewest = min(options, key=lambda option: (option.nodes, option.pipeline))
    option = max(counted, key=lambda pair: min(pair[1].free_bytes, pair[1].load_free_bytes))[0] if counted else fewest
    reason = f"{_BEGIN[option.cause or 'memory']}{doubt_in_short(option.reason or '')}"
    return FitRefusal(reason, _plan_cure(option, options, inventory, wish), option.cause or "memory")


def outgrown(known: Account | None, memory_gib: float | None) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the account may be wrong: of less the engine decides,
    which measures. None is never too much, or too little."""
    if known is None or memory_gib is None:
        return False
    return known.surely - max(ERROR_SHARE * known.surely, ERROR_BYTES) > memory_gib * GIB


def advice(
    args: EngineArgs, headers: Headers | None, hardware: Hardware, offered_bytes: int, ways: Ways = (1, 1), *, instead_of: int = 0
) -> Cure | None:
    """The choice that would fit into offered_bytes of each node instead, split in `ways`: as for `auto`, a shorter request where enough of
    it is left, else another format. instead_of: the ranks that the entry asks for, where `ways` are fewer: that its own length and format
    fit is an answer then, too."""
    if headers is None:
        return None
    serving = serving_of(args, headers, hardware)
    if serving.unknown:
        return None
    machine = replace(hardware, memory_bytes=offered_bytes, system_bytes=0)
    wish = FitRequest(serving.max_model_len, 1, ways[0] * ways[1], serving, None, args.enforce_eager, 0, ways=(ways,))
    options = choose(headers.model, machine, wish).options
    own = AS_STORED if args.recipe is None or args.quantize is None or is_open(args.quantize) else args.recipe.default.spelling
    if not instead_of and any(option.fits and option.format == own for option in options):
        return None  # then it is another key that stands in the way
    split = {"tensor_parallel": ways[0]} if instead_of else {}
    shorter = next((option.longest for option in options if option.format == own and option.longest), 0)
    better = next((option for option in options if option.fits and option.format not in (own, AS_STORED)), None)
    if better is not None and better.footprint is not None and shorter < min(DEFAULT_CONTEXT, serving.max_model_len):
        return Cure({**split, "quantize": better.format}, gib(better.footprint.total))
    return Cure({**split, "max_model_len": shorter}) if shorter else None


def _cure(need: Requirement, known: Account, most_gib: int, room: int) -> Cure:
    """In place of a cache of a given size a smaller one, where room bytes hold one request; else another choice."""
    layout, wanted, tokens = known.layout, need.args.cache, known.max_model_len
    if less := fitting(wanted, layout, tokens, room - known.fixed):
        size, cost = sized(less, layout, tokens) or 0, known.kv
        return Cure({"kv_cache": less}, f"{(size - cost.block_bytes) // cost.per_request:,} of {tokens:,} tokens")
    node = replace(need.hardware, memory_bytes=most_gib * GIB, system_bytes=0)
    cure = advice(need.args, need.headers, node, room, need.ways)
    if cure is not None and known.cache is not None and known.cache > known.kv.least:
        return replace(cure, settings={**cure.settings, "kv_cache": {"sequences": 1}})
    return cure or _SMALLER


def _short_cache(need: Requirement, known: Account, room: int) -> FitRefusal | None:
    """Why a cache of its size would hold no request. room: bytes for the engine."""
    args, tokens = need.args, known.max_model_len
    wanted = args.cache if known.cache is not None else None
    cache = wanted if isinstance(wanted, Mapping) else None
    size = known.cache if known.cache is not None else cache_limit(args, need.platform)
    short = short_cache(cache, size, known.kv)
    if size is None or short is None or args.memory_gib is not None or known.upper is not None:
        return None
    return FitRefusal(f"{args.name} does not fit: {short}", _cache_cure(cache, size, known.layout, tokens, room - known.fixed))


def _cache_cure(cache: Mapping[str, Any] | None, size: int, layout: KvLayout, tokens: int, room: int) -> Cure:
    """In place of a cache that holds no request of `tokens` tokens, one that does, else a length for which it is enough.

    cache, size: as in sparkd.capacity.fit.short_cache.
    room: the most bytes that a cache may have.
    """
    cost = layout.cost(tokens)
    if cost.least <= room:
        blocks, own = {"blocks": cost.blocks + 1}, {"tokens": tokens}
        return Cure({"kv_cache": blocks if "blocks" in (cache or ()) else own if "tokens" in (cache or ()) else {"sequences": 1}})
    # The bytes of a cache in tokens or requests follow from the length.
    shorter = longest(cache, layout, tokens, room, limit=size if cache is None else None)
    return Cure({"max_model_len": shorter}) if shorter else _SMALLER


def _plan_cure(option: Option, options: Sequence[Option], inventory: Inventory, wish: FitRequest) -> Cure:
    source, needed = inventory.checkpoint.quantization, option.footprint
    match option.cause:
        case "cache" if needed is not None:
            size = needed.parts["kv"] if wish.cache is not None else wish.cache_limit or 0
            return _cache_cure(wish.cache, size, needed.layout, option.serving.max_model_len, needed.room)
        case "length":
            return Cure({"max_model_len": inventory.shape.max_len}, "--ctx")
        case "links":
            return Cure(deed="run `sparkd fabric` to check the cables")
        case "vllm":
            return Cure(deed="choose another model" if option.nodes == 1 else "choose another tensor_parallel")
        case "split":
            return Cure(deed=f"choose another tensor_parallel: {possible_ranks(inventory.shape, option.tensor)}")
        case "format":
            return Cure(deed=f"choose {_even(inventory, wish) or 'another format'} (--quantize, or quantize of the entry)")
        case "uncounted":
            return Cure(deed="set memory_gib in its entry; vLLM then sizes the cache")
        case _ if option.longest:
            return Cure({"max_model_len": option.longest}, "--ctx")
        case _ if wish.limit is not None:
            return Cure(deed="raise that limit of the entry")
        case _ if all(other.format == AS_STORED for other in options) and (source is None or source.requantizable):
            return Cure(deed="choose a smaller format, such as --quantize nvfp4")
        case _:
            return Cure(deed=f"share it by more than {wish.nodes} node{'s' if wish.nodes > 1 else ''} (--nodes)")


def _even(inventory: Inventory, wish: FitRequest) -> str | None:
    """The formats whose groups divide the columns that those of the request do not."""
    try:
        return None if wish.quantize is None else even_formats(inventory.formatted(wish.quantize))
    except CheckpointError:
        return None
