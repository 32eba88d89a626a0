"""Owns what is `auto` in a model's entry once it is known how much it may take: its format, and its longest context. Never says whether the
model is let in (sparkd.capacity.account), and reserves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from sparkd.capacity.account import NOTHING, Account, Evidence, Ways, account, consulted, illegal
from sparkd.capacity.fit import AS_STORED, CONTEXT_STEP, DEFAULT_CONTEXT, recipes
from sparkd.capacity.footprint import PROCESS_BYTES
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import largest
from sparkd.capacity.parallelism import uneven_groups
from sparkd.capacity.weights import Inventory
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import GIB, Hardware
from sparkd.models.prequantized import prequantized
from sparkd.schema.engine_args import EngineArgs
from sparkd.schema.quantize import AUTO
from workers.kv.arithmetic import margin_of
from workers.kv.settings import CPU_KV_CACHE_GIB
from workers.quantization.recipe import AS_IT_IS

# A model in one of the ways that come into question.
Candidate = tuple[EngineArgs, Headers]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take on each of its nodes. engine: in all; cache: of its cache, None for as much as is left."""

    engine: int
    cache: int | None = None

    def holds(self, known: Account) -> bool:
        """Whether a request of full length has its place, in the cache that was asked for too."""
        caches = [size for size in (self.cache, known.cache) if size is not None]
        return known.least <= self.engine and all(known.kv.least <= size for size in caches)


def room_of(args: EngineArgs, hardware: Hardware, free_bytes: int) -> Room:
    """free_bytes: what the other models leave of what a node lends. memory_gib is the engine's own limit; kv_margin_gib stays free beside
    the engine; of a gpu_memory_utilization vLLM takes all but what its processes hold on the host."""
    own = free_bytes if args.memory_gib is None else int(args.memory_gib * GIB)
    if args.share is not None:
        beside = PROCESS_BYTES[hardware.platform] if hardware.unified else 0
        return Room(min(free_bytes, own, int(args.share * hardware.memory_bytes) + beside))
    margin = margin_of(hardware.memory_bytes, args.margin_bytes)
    return Room(min(free_bytes - margin, own), cache_limit(args, hardware.platform))


def cache_limit(args: EngineArgs, platform: str) -> int | None:
    """Bytes that a cache of no given size may take at most: of a CPU's memory, so much as sparkd.schema.kv_cache.sizing_of allows it."""
    if platform != "cpu" or args.cache is not None or args.vllm_sizes:
        return None
    return args.cpu_space_bytes or CPU_KV_CACHE_GIB * GIB


def neighbours(args: EngineArgs, headers: Headers) -> tuple[Candidate, ...]:
    """Each checkpoint of the same model that this machine has in four or eight bits, which `quantize: auto` may take before anything is
    quantized here. Trust in code belongs to the entry's own repository: with it there is none."""
    if args.quantize != AUTO or args.trusts_code:
        return ()
    names = [name for name, _ in prequantized(args.model, headers.model.checkpoint, {**os.environ, **args.env})]
    others = [replace(args, model=name, revision=None, quantize=None, recipe=AS_IT_IS) for name in names]
    return tuple((other, there) for other in others if (there := headers_here(other)) is not None)


def resolved(
    args: EngineArgs,
    headers: Headers,
    hardware: Hardware,
    free_bytes: int,
    ways: Ways = (1, 1),
    evidence: Evidence = NOTHING,
    others: Iterable[Candidate] = (),
) -> EngineArgs:
    """With `quantize: auto` and `max_model_len: auto` decided: the best format in which a request of the asked length fits into free_bytes
    and the entry's own limits, and the longest context that fits, at most the model's own. Where nothing fits, as small as can be: what
    refuses it says so. evidence: as in sparkd.capacity.account.account, which counts here too. others: see `neighbours`.

    Beside flags that leave an account a guess, a format is chosen by that, and a length of `auto` is left to vLLM, which measures. Raises
    CheckpointError as sparkd.capacity.account.account.
    """
    if AUTO not in (args.quantize, args.max_model_len) or args.recipe is None:
        return args
    plain = args.undecided()
    known = consulted(plain, headers.model, args.recipe, hardware, ways, evidence).completed(headers.model)
    room = room_of(args, hardware, free_bytes)

    def at(one: Candidate, tokens: int) -> Account | None:
        try:
            return account(replace(one[0], max_model_len=tokens), one[1], hardware, evidence, ways, guesses=True)
        except CheckpointError:
            return None  # of a neighbour: the entry's own files were judged above

    def fits(one: Candidate, tokens: int) -> bool:
        found = at(one, tokens)
        return found is not None and room.holds(found)

    most = args.max_model_len if isinstance(args.max_model_len, int) else known.shape.max_len
    step = CONTEXT_STEP if args.max_model_len == AUTO else most
    enough = min(most, DEFAULT_CONTEXT) if args.max_model_len == AUTO else most
    ranked = [
        (one, there)
        for one, there in _ranked(list(_formats(args, plain, known)), headers, others)
        if illegal(one, there, hardware, ways, evidence) is None
    ]
    found = [(one, largest(partial(fits, one), most, step)) for one in ranked]
    best = next((pair for pair in found if pair[1] >= enough), None)
    best = best or max(found, key=lambda pair: pair[1], default=((plain, headers), 0))
    if not best[1] and found:
        best = min(found, key=lambda pair: _least(at(pair[0], min(most, CONTEXT_STEP))))
    (one, there), tokens = best
    chosen = replace(one, max_model_len=tokens)
    if args.max_model_len != AUTO or not tokens or account(chosen, there, hardware, evidence, ways) is None:
        return one
    return chosen


def _least(known: Account | None) -> float:
    return float("inf") if known is None else known.least


def _ranked(own: Iterable[EngineArgs], headers: Headers, others: Iterable[Candidate]) -> Iterator[Candidate]:
    """As it is stored, then as others have quantized it, who had data to calibrate with, then by ourselves (sparkd.capacity.fit.rank)."""
    yield from ((one, headers) for one in own if one.quantize is None)
    yield from others
    yield from ((one, headers) for one in own if one.quantize is not None)


def _formats(args: EngineArgs, plain: EngineArgs, known: Inventory) -> Iterator[EngineArgs]:
    """The entry in each format whose groups are whole, best first."""
    requested = None if args.quantize == AUTO else args.recipe
    for name, recipe in recipes(known, requested):
        try:
            if next(uneven_groups(known, recipe), None):
                continue
        except (CheckpointError, ConfigError):
            continue
        yield plain.quantized(recipe) if args.quantize == AUTO and name != AS_STORED else plain
