"""Owns why a model is not let in, and what would fit instead. Each number that it names satisfies every limit of the node and the entry."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil

from sparkd.capacity.account import Account, Ways, serving_of
from sparkd.capacity.auto_resolve import cache_limit
from sparkd.capacity.fit import AS_STORED, FitRequest, choose, gib, short_cache
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import fitting, longest, sized
from sparkd.capacity.requirement import Requirement
from sparkd.capacity.weights import Inventory, inventory
from sparkd.hardware import GIB, Hardware
from sparkd.models.prequantized import prequantized
from sparkd.models.shape import shape_of
from sparkd.schema.engine_args import EngineArgs
from sparkd.schema.quantize import AUTO
from workers.kv.advice import spelled, written
from workers.quantization.recipe import AS_IT_IS

# How far an account may be from what an engine takes (the bars of tests/bench/footprint.py).
ERROR_SHARE, ERROR_BYTES = 0.05, 300 << 20
_SMALLER = "a smaller context or format"


def too_large(need: Requirement, most_gib: int, where: str) -> str | None:
    """Why no node can ever hold it, with what would fit; None where one can. where: `this node`, most_gib: what it offers."""
    args, known = need.args, need.account
    kept = 0.0 if args.share is not None else (args.margin_bytes or 0) / GIB
    room = int((most_gib - kept) * GIB)
    if known is not None and (short := _short_cache(need, known, room)):
        return short
    if known is not None and args.memory_gib is None and known.surely > room:
        free = f", of which {args.margin_words} keeps {kept:g} free" if kept else ""
        cure = _what_would_fit(need, known, most_gib, room) or f"Choose {_SMALLER}"
        return f"{args.name} does not fit: {known.sentence}; {where} offers {most_gib} GiB{free}. {cure}."
    if known is not None and args.memory_gib is not None and outgrown(need) and need.gib <= most_gib:
        allow = f"Allow it more (memory_gib: {more}), or" if (more := ceil(known.least / GIB)) <= most_gib else ""
        cure = _what_would_fit(need, known, most_gib, int(args.memory_gib * GIB))
        advised = f"{allow}{':' if allow and cure else ''} {cure or f'choose {_SMALLER}'}".strip()
        return f"{args.name} does not fit into memory_gib: {args.memory_gib:g}: {known.sentence}. {advised[0].upper()}{advised[1:]}."
    if short := share_too_large(args, need.gib, need.hardware, most_gib, where):
        return short
    if need.gib > most_gib:
        size = "a smaller size" if isinstance(args.cache, Mapping) else "a size"
        return (
            f"{args.name} asks for {need.gib} GiB of unified memory and {where} offers {most_gib} GiB: choose {_SMALLER}, "
            f"give kv_cache {size}, or set memory_gib to what it really needs."
        )
    return None


def share_too_large(args: EngineArgs, gib: int, hardware: Hardware, most_gib: int, where: str) -> str | None:
    """Why no node can lend the share of its memory that vLLM is to take, with the largest that one can; None where one can, or the gib to
    reserve do not follow from a share. where, most_gib: as in `too_large`."""
    share = args.share if args.memory_gib is None else None
    if share is None or gib <= most_gib or gib != ceil(share * (hardware.memory_bytes / GIB)):
        return None
    most = int(100 * share * most_gib / gib) / 100
    asked = f"{args.name} asks for {gib} GiB of unified memory ({args.share_words})"
    return f"{asked} and {where} offers {most_gib} GiB: choose {most:g} or less."


def outgrown(need: Requirement) -> bool:
    """Whether the model needs more than the memory_gib of its entry, by more than the account may be wrong: of less the engine decides,
    which measures."""
    return need.account is not None and exceeds(need.account, need.args.memory_gib)


def exceeds(known: Account, memory_gib: float | None) -> bool:
    """As `outgrown`, of an account by itself. memory_gib: None is never too little."""
    surely_bytes = known.surely - max(ERROR_SHARE * known.surely, ERROR_BYTES)
    return memory_gib is not None and surely_bytes > memory_gib * GIB


def advice(
    args: EngineArgs, headers: Headers | None, hardware: Hardware, offered_bytes: int, ways: Ways = (1, 1), *, instead_of: int = 0
) -> str:
    """The choices that would fit into offered_bytes of each node instead, split in `ways`; empty where none is known. instead_of:
    the ranks that the entry asks for, where `ways` are fewer: that its own length and format fit is an answer then, too."""
    if headers is None:
        return ""
    model, serving = headers.model, serving_of(args, headers, hardware)
    if serving.unknown:
        return ""
    machine = replace(hardware, memory_bytes=offered_bytes, system_bytes=0)
    wish = FitRequest(serving.max_model_len, 1, ways[0] * ways[1], serving, None, args.enforce_eager, 0, ways=(ways,))
    options = choose(model, machine, wish).options
    own = AS_STORED if args.recipe is None or args.quantize in (None, AUTO) else args.recipe.default.spelling
    if not instead_of and any(option.fits and option.format == own for option in options):
        return ""  # then it is another key that stands in the way
    cures = []
    shorter = next((option.longest for option in options if option.format == own and option.longest), 0)
    if shorter:
        cures.append(f"max_model_len {shorter:,} as it is")
    better = next((option for option in options if option.fits and option.format not in (own, AS_STORED)), None)
    if better is not None and better.footprint is not None:
        cures.append(f"quantize: {better.format} ({gib(better.footprint.total)})")
    if source := next(_fitting(args, model, machine, replace(wish, quantize=AS_IT_IS)), None):
        cures.append(source)
    where = f" one node (tensor_parallel: {ways[0]})" if instead_of else ""
    return f"What would fit{where}: {', or '.join(cures)}" if cures else ""


def _fitting(args: EngineArgs, model: Inventory, machine: Hardware, wish: FitRequest) -> Iterator[str]:
    """The same model on this node, quantized already. It is named and not taken: a request for a model is served by that model."""
    for name, checkpoint in prequantized(args.model, model.checkpoint, {**os.environ, **args.env}):
        best = choose(inventory(checkpoint, shape_of(checkpoint.config)), machine, wish).best
        if best is not None and best.footprint is not None:
            yield f"model: {name}, which is quantized already ({gib(best.footprint.total)})"


def _what_would_fit(need: Requirement, known: Account, most_gib: int, room: int) -> str:
    """In place of a cache of a given size a smaller one, where room bytes hold one request; empty where nothing is known that would."""
    layout, wanted = known.layout, need.args.cache
    left = room - known.fixed
    if less := fitting(wanted, layout, known.max_model_len, left):
        size, cost = sized(less, layout, known.max_model_len) or 0, known.kv
        many = "" if "sequences" in less else f" ({(size - cost.block_bytes) // cost.per_request:,} of {known.max_model_len:,} tokens)"
        shorter = longest(wanted, layout, known.max_model_len, left) if list(wanted or ()) == ["sequences"] else 0
        context = f", or max_model_len {shorter:,} as it is" if shorter else ""
        smaller = written("kv_cache", less) if "blocks" in less else f"a smaller kv_cache, {spelled(less)}"
        return f"What would fit: {smaller}{many}{context}"
    node = replace(need.hardware, memory_bytes=most_gib * GIB, system_bytes=0)
    advised = advice(need.args, need.headers, node, room, need.ways)
    least_cache = advised and known.cache is not None and known.cache > known.kv.least
    return f"{advised}, with kv_cache: {{sequences: 1}}" if least_cache else advised


def _short_cache(need: Requirement, known: Account, room: int) -> str | None:
    """Why a cache of its size would hold no request. room: bytes for the engine."""
    args = need.args
    wanted = args.cache if known.cache is not None else None
    cache = wanted if isinstance(wanted, Mapping) else None
    size = known.cache if known.cache is not None else cache_limit(args, need.platform)
    short = short_cache(cache, size, known.layout, known.max_model_len, room - known.fixed)
    if short is None or args.memory_gib is not None or known.upper is not None:
        return None
    cure = ", or ".join(short.cures) or f"choose {_SMALLER}"
    return f"{args.name} does not fit: {short.reason}. {cure[0].upper()}{cure[1:]}."
