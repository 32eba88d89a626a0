"""Why a load, a check and a plan refuse a model, and the one change that helps most.

Its number satisfies every limit of the node and the entry, so that a restart with it is not refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from sparkd.capacity.evidence import GUESS
from sparkd.capacity.fit import (
    DEFAULT_CONTEXT,
    Cause,
    Option,
    doubt_in_short,
    fitted,
    it_needs,
    serving_of,
    short_cache,
    single_formats,
    source_of,
)
from sparkd.capacity.footprint import Footprint, cache_of, limit_of, room_of
from sparkd.capacity.formats import AS_STORED
from sparkd.capacity.kv_cache import fitting, longest
from sparkd.config.engine_args import EngineArgs
from sparkd.config.kv_cache import written
from sparkd.config.quantize import AUTO, is_open
from sparkd.errors import DoesNotFit
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
    deed: another action, without a number.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    deed: str = ""

    def __str__(self) -> str:
        return self.deed or f"set {' and '.join(written(key, value) for key, value in self.settings.items())}"


_SMALLER = Cure(deed="choose a smaller context or format")


@dataclass(frozen=True, slots=True)
class FitRefusal:
    """Why a model does not fit.

    reason: without a full stop, and without the model's name, which stands before it wherever it is shown.
    cure: the largest lever.
    cause: the limit that the model exceeds.
    """

    reason: str
    cure: Cure
    cause: Cause = "memory"

    @property
    def message(self) -> str:
        return f"{self.reason}. To make it fit: {self.cure}."

    @property
    def failure(self) -> str:
        """The reason of a load that fails so: a length has the name that vLLM's own refusal of it has."""
        return "ContextTooLong" if self.cause == "length" else DoesNotFit.__name__

    def to_json(self) -> dict[str, str]:
        return {"cause": self.cause, "message": self.message}


def too_large(need: Requirement, most_gib: int, where: str) -> FitRefusal | None:
    """The reason why no node can ever hold the model; None if one can.

    most_gib: the most that a node offers.
    where: the node, in words.
    """
    args, option, known = need.args, need.option, need.known
    if option is not None and option.cause in ("length", "vllm"):
        return FitRefusal(_reason(option), _cure(option, [option], 1), option.cause)
    if option is not None and known is not None and (lacks := _lacks(option, known, need.gib, most_gib, where)):
        return lacks
    if share := share_too_large(args, need.gib, need.node, most_gib, where):
        return share
    if need.gib > most_gib:
        size = Cure(deed=f"give kv_cache {'a smaller size' if isinstance(args.cache, Mapping) else 'a size'}, or set memory_gib")
        return FitRefusal(f"{_BEGIN['memory']}it asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB", size)
    return None


def _lacks(option: Option, known: Footprint, gib: int, most_gib: int, where: str) -> FitRefusal | None:
    """Why the footprint is more than a node can hold, or than the entry allows. gib: to reserve."""
    args, needs = option.args, it_needs(option.args, known)
    if args.memory_gib is not None:
        if gib > most_gib or not outgrown(known, args.memory_gib):
            return None
        least_gib = ceil(known.least / GIB)
        cure = _smaller(option, known, int(args.memory_gib * GIB)) if least_gib > most_gib else Cure({"memory_gib": least_gib})
        return FitRefusal(f"{_BEGIN['memory']}its entry has memory_gib: {args.memory_gib:g}, and {needs}", cure or _SMALLER)
    kept = 0.0 if args.share is not None else (args.margin_bytes or 0) / GIB
    room = int((most_gib - kept) * GIB)
    if known.sureness != GUESS and (short := short_cache(args, known)):
        return FitRefusal(f"{_BEGIN['cache']}{short}", _cache_cure(option, known, room - known.fixed), "cache")
    if known.surely <= room:
        return None
    free = f", of which kv_margin_gib keeps {kept:g} free" if kept else ""
    reason = f"{_BEGIN['memory']}{needs}; {where} offers {most_gib} GiB{free}"
    return FitRefusal(reason, _smaller(option, known, room) or _SMALLER)


def _reason(option: Option) -> str:
    return f"{_BEGIN[option.cause or 'memory']}{doubt_in_short(option.reason or '')}"


def share_too_large(args: EngineArgs, gib: int, hardware: Hardware, most_gib: int, where: str) -> FitRefusal | None:
    """Why no node can lend the share of its memory that vLLM takes, with the largest possible share.

    None if a node can, or if the GiB to reserve do not follow from a share. where, most_gib: as in `too_large`.
    """
    share = args.share if args.memory_gib is None else None
    if share is None or gib <= most_gib or gib != ceil(share * (hardware.memory_bytes / GIB)):
        return None
    reason = f"{_BEGIN['memory']}it asks for {gib} GiB of unified memory ({args.share_words}) and {where} offers {most_gib} GiB"
    return FitRefusal(reason, Cure(deed=f"choose {int(100 * share * most_gib / gib) / 100:g} or less"))


def refusal(options: Sequence[Option], nodes: int, *, is_open: bool = False) -> FitRefusal | None:
    """The refusal of a plan over so many nodes; None if an option fits, or without options.

    If an option could be counted, the cause is that of the option that lacks least. Otherwise it is that of the option on the fewest nodes.

    is_open: whether the options have every format already.
    """
    if not options or any(option.fits for option in options):
        return None
    counted = [(option, option.footprint) for option in options if option.footprint is not None]
    fewest = min(options, key=lambda option: (option.nodes, option.ways[1]))
    option = max(counted, key=lambda pair: min(pair[1].free_bytes, pair[1].load_free_bytes))[0] if counted else fewest
    cure = None
    if option.cause == "memory" and option.footprint is not None and not is_open:
        cure = _smaller(option, option.footprint, max(0, room_of(option.args, option.node)))
    return FitRefusal(_reason(option), cure or _cure(option, options, nodes), option.cause or "memory")


def outgrown(known: Footprint | None, memory_gib: float | None) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the footprint may be wrong. Otherwise the engine decides,
    which measures."""
    if known is None or memory_gib is None:
        return False
    return known.surely - max(ERROR_SHARE * known.surely, ERROR_BYTES) > memory_gib * GIB


def advice(option: Option, room: int) -> Cure | None:
    """The choice that would fit into `room` bytes of each node instead: as for `auto`, a shorter request where enough of it is left, else
    another format."""
    args, headers = option.args, option.headers
    serving = serving_of(args, headers, option.node)
    if serving.unknown:
        return None
    node = replace(option.node, memory_bytes=room, system_bytes=0)
    unlimited = replace(args, cache=AUTO, margin_bytes=0, share=None).with_keys(max_model_len=serving.max_model_len, memory_gib="auto")
    options = [fitted(candidate, node, option.ways) for candidate in single_formats(source_of(unlimited, headers, node))]
    own = AS_STORED if args.spec.quantize is None or is_open(args.spec.quantize) else args.recipe.default.spelling
    if any(other.fits and other.format == own for other in options):
        return None  # then it is another key that stands in the way
    shorter = next((other.longest for other in options if other.format == own and other.longest), 0)
    better = next((other for other in options if other.fits and other.format not in (own, AS_STORED)), None)
    if better is not None and shorter < min(DEFAULT_CONTEXT, serving.max_model_len):
        return Cure({"quantize": better.format})
    return Cure({"max_model_len": shorter}) if shorter else None


def _smaller(option: Option, known: Footprint, room: int) -> Cure | None:
    """In place of a cache of a given size a smaller one, where room bytes hold one request; else another choice."""
    if less := fitting(option.args.cache, known.layout, known.kv.max_model_len, room - known.fixed):
        return Cure({"kv_cache": less})
    cure = advice(option, room)
    if cure is not None and known.cache is not None and known.cache > known.kv.least:
        return replace(cure, settings={**cure.settings, "kv_cache": {"sequences": 1}})
    return cure


def _cache_cure(option: Option, known: Footprint, room: int) -> Cure:
    """In place of a cache that holds no request of full length, one that does, else a length for which it is enough.

    room: the most bytes that a cache may have.
    """
    cost, cache = known.kv, cache_of(option.args, option.node.platform) or {}
    if cost.least <= room:
        blocks, own = {"blocks": cost.blocks + 1}, {"tokens": cost.max_model_len}
        return Cure({"kv_cache": blocks if "blocks" in cache else own if "tokens" in cache else {"sequences": 1}})
    # The bytes of a cache in tokens or requests follow from the length.
    shorter = longest(cache, known.layout, cost.max_model_len, room)
    return Cure({"max_model_len": shorter}) if shorter else _SMALLER


def _cure(option: Option, options: Sequence[Option], nodes: int) -> Cure:
    """The largest lever for an option that does not fit. options: all that were tried, over at most so many nodes."""
    model, needed = option.headers.model, option.footprint
    source = model.checkpoint.quantization
    match option.cause:
        case "cache" if needed is not None:
            return _cache_cure(option, needed, needed.room)
        case "length":
            return Cure({"max_model_len": option.longest})
        case "links":
            return Cure(deed="run `sparkd fabric` to check the cables")
        case "vllm":
            return Cure(deed="choose another model" if option.nodes == 1 else "choose another tensor_parallel")
        case "split":
            return Cure(deed=f"choose a tensor_parallel that divides its {model.shape.heads} attention heads")
        case "format":
            return Cure(deed="choose another format (--quantize, or quantize of the entry)")
        case "uncounted":
            return Cure(deed="set memory_gib in its entry; vLLM then sizes the cache")
        case _ if option.longest:
            return Cure({"max_model_len": option.longest})
        case _ if limit_of(option.args, option.node) is not None:
            return Cure(deed="raise that limit of the entry")
        case _ if all(other.format == AS_STORED for other in options) and (source is None or source.requantizable):
            return Cure(deed="choose a smaller format, such as --quantize nvfp4")
        case _:
            return Cure(deed=f"share it by more than {nodes} node{'s' if nodes > 1 else ''} (--nodes)")
