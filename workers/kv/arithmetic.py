"""Owns the size of the KV cache and the error for a cache that does not fit. Pure: it reads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from workers.kv.advice import OTHER_PROGRAMS, Cure, advised, largest, least_written, most_written

GIB = 2**30
# A first real prompt needs up to a quarter more than a dummy batch of the same size (measured by the authors of vLLM's extensible KV
# cache on a GB200: "more than 25 %" beyond the allocated peak).
PEAK_FACTOR = 1.25
# Bits of a 4-bit weight with its share of the scale of 16 or 32 weights.
FOUR_BITS = 4.5
# Advised lengths and batches are multiples of this.
STEP_TOKENS = 256
_BATCH = ("max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that the engine takes in addition to its weights and the cache.

    graphs: CUDA graphs that are not in memory yet. peak: a passing need of the largest batch.
    reusable: the part of `peak` that the allocator has already reserved and that is free.
    weights: for the message alone, because they are in memory already.
    prefill, decoding: passing needs of the longest prefill and of decoding every sequence, for the message alone. `peak` is the larger of
    the two. Both are 0 if they are not known separately.
    """

    graphs: int = 0
    peak: int = 0
    reusable: int = 0
    weights: int = 0
    prefill: int = 0
    decoding: int = 0

    def with_peaks(self, prefill: int, decoding: int, *, apart: bool = True) -> Demand:
        """The demand with these passing needs. apart: whether the two were measured separately."""
        return replace(self, peak=max(prefill, decoding), prefill=prefill if apart else 0, decoding=decoding if apart else 0)

    @property
    def ahead(self) -> int:
        """The bytes that must stay free for the engine in addition to the cache."""
        return self.graphs + int(max(0, self.peak - self.reusable) * PEAK_FACTOR)

    def figures(self) -> dict[str, int]:
        """The numbers under the names that reports use."""
        return {"graphs_bytes": self.graphs, "peak_bytes": self.peak, "weights_bytes": self.weights}


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """The costs of the model's cache.

    per_request: bytes of one request of max_model_len tokens. least: least bytes of a cache that serves one such request.
    batch_tokens, sequences: of the largest batches (max_num_batched_tokens, max_num_seqs), for the message alone; 0 if unknown.
    of: bytes of a shorter request, which is not proportional if layers keep a state or a window; None if it is proportional.
    weight_bits: of most weights: 16, 8, or 4 for the narrowest and for unknown ones; for the message alone.
    lookahead: extra slots of a request, for drafted tokens.
    shrinks: whether vLLM lowers max_model_len until it fits, as for --max-model-len -1.
    chunked: whether a prompt may be longer than a batch.
    """

    per_request: int
    least: int
    max_model_len: int
    batch_tokens: int = 0
    of: Callable[[int], int] | None = field(default=None, compare=False)
    weight_bits: int = 16
    sequences: int = 0
    lookahead: int = 0
    shrinks: bool = False
    chunked: bool = True

    @property
    def per_token(self) -> float:
        return self.per_request / self.max_model_len

    def request(self, tokens: int) -> int:
        """Bytes of one request of so many tokens, at most max_model_len."""
        if tokens >= self.max_model_len:
            return self.per_request
        return self.of(tokens) if self.of is not None else -int(-self.per_token * tokens // 1)

    @property
    def shortest(self) -> int:
        """Tokens of the request that a cache must hold at least."""
        return min(STEP_TOKENS, self.max_model_len) if self.shrinks else self.max_model_len

    @property
    def floor(self) -> int:
        """Bytes of a cache that holds the shortest request."""
        return self.request(self.shortest) + self.per_block if self.shrinks else self.least

    def shortened(self, max_model_len: int) -> CacheCosts:
        """The costs after vLLM has shortened the context."""
        if max_model_len >= self.max_model_len:
            return self
        per_request = self.request(max_model_len)
        return replace(self, per_request=per_request, least=per_request + self.per_block, max_model_len=max_model_len)

    @property
    def per_block(self) -> int:
        """Bytes of one block of all layers; vLLM keeps one for itself."""
        return self.least - self.per_request


@dataclass(frozen=True, slots=True)
class Reserved:
    """The limit of the whole engine on a node (memory_gib), and the bytes of it that the engine holds already. ranks: number of ranks that
    share the limit and the node's memory."""

    bytes: int
    taken: int
    ranks: int = 1

    def left(self, demand: Demand) -> int:
        """Bytes of the limit that remain for one rank's cache; negative where the engine's demand alone exceeds the limit."""
        return (self.bytes - self.taken) // self.ranks - demand.ahead


@dataclass(frozen=True, slots=True)
class CachePool:
    """A sized cache. bytes: its size. room: bytes that were available for everything. spare: bytes of the room that the request leaves
    free. limit: why `auto` leaves them."""

    bytes: int
    room: int
    margin: int
    demand: Demand
    limit: str = ""

    @property
    def spare(self) -> int:
        return self.room - self.bytes - self.margin - self.demand.ahead

    @property
    def expected_slack(self) -> int:
        """The bytes that should be free when the engine is ready and idle, its allocator's reserve included: the margin, the passing need
        of the largest batch, and the spare."""
        return self.room - self.bytes - self.demand.graphs + self.demand.reusable


class CacheDoesNotFit(Exception):
    """The requested or least cache does not fit. The message is for the user. cures: the cures that it names."""

    def __init__(self, sentence: str, cures: Sequence[Cure] = ()) -> None:
        super().__init__(sentence)
        self.cures = tuple(cures)


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """Limits of the cache. asked: its requested bytes; None for all that is left, within `at_most` and `reserved`. by_blocks: the request
    is in vLLM's blocks. again: the requested bytes with a shorter context; None where they do not depend on it."""

    asked: int | None = None
    at_most: int | None = None
    reserved: Reserved | None = None
    by_blocks: bool = False
    again: Callable[[CacheCosts], int | None] | None = None


def pool(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> CachePool:
    """Size the cache. room: bytes that can be taken at all (MemoryReading.room). Raises CacheDoesNotFit."""
    bounds = bounds or SizeBounds()
    requested, at_most, reserved = bounds.asked, bounds.at_most, bounds.reserved
    again = bounds.again if requested is not None and bounds.again else lambda _need: requested
    case = _Case(room, margin, demand, need, again, at_most, reserved, bounds.by_blocks)
    size, limit = case.size, ""
    if requested is None and need.floor <= size < case.left:
        holds = "" if reserved is None else f"memory_gib is {reserved.bytes / GIB:g} and the engine holds {_gib(reserved.taken)} of it"
        limit = f"at most {_gib(size)} are allowed for it" if size == at_most else holds
    if case.fits:
        return CachePool(size, room, margin, demand, limit)
    one = f"one request of {need.shortest:,} tokens needs {_needed(need)}"
    if requested is not None and requested <= case.left:
        reason = f"The requested KV cache is {_gib(requested)}, and {one}."
    elif requested is None and size < case.left and need.floor <= case.left:
        reason = f"{_what(need)}, and at most {_gib(max(0, size))} were allowed for it."
        reason += _of_memory_gib(reserved, demand) if reserved is not None and size != at_most else ""
    else:
        what = _what(need) if requested is None else f"The requested KV cache needs {_gib(requested)}"
        weights = f" The weights take {_gib(demand.weights)}." if demand.weights else ""
        reason = f"{what} and {_gib(max(0, case.left))} are left: {_sum(case)}.{weights}"
    cures = list(_cures(case))
    raise CacheDoesNotFit(f"{reason} {advised(cures) or 'No setting that is known would make it fit'}.", cures)


def too_little(room: int, floor: int, margin: int, need: CacheCosts, weights: int, learned: Demand | None) -> str:
    """The message where less than `floor` bytes are available before a rehearsal. weights: bytes that the engine holds. learned: the demand
    that earlier starts measured; None where unknown."""
    case = _Case(room, margin, replace(learned or Demand(), weights=weights), need, least_room=floor)
    more = "" if learned is not None else "; CUDA graphs and the largest batch, which are not known yet, come on top"
    holds = f" The engine, its weights included, holds {_gib(weights)}." if weights else ""
    sum_of = f"{_what(need)} and {_gib(0)} are left: {_sum(case)}{more}.{holds}"
    return f"At least {_gib(floor)} must be free before the KV cache can be sized. {sum_of} {advised(_cures(case))}."


def longest(left: int, need: CacheCosts) -> int:
    """The longest request, in tokens, for which `left` bytes suffice, as a multiple of STEP_TOKENS."""
    return largest(lambda tokens: need.request(tokens) <= left - need.per_block, need.max_model_len, STEP_TOKENS)


def smaller_batch(demand: Demand, missing: int, need: CacheCosts) -> dict[str, int]:
    """About how many tokens and sequences a batch may have so that it needs `missing` bytes less: a prefill's peak grows with its tokens, a
    decoding batch's with its sequences. Keys are vLLM's names, only for values that must shrink; empty where no batch is small enough, or
    the batch's need is unknown."""
    peak = demand.peak - missing / PEAK_FACTOR
    if not demand.peak or peak <= 0:
        return {}
    limits = {}
    prefill = demand.prefill or demand.peak
    if prefill > peak:
        tokens = int(need.batch_tokens * peak / prefill) // STEP_TOKENS * STEP_TOKENS
        limits["max_num_batched_tokens"] = tokens
        if need.sequences > tokens:  # vLLM refuses more sequences than a batch has tokens (vllm/config/scheduler.py)
            limits["max_num_seqs"] = tokens
        if need.max_model_len > tokens and not need.chunked:  # without chunked prefill vLLM refuses a prompt longer than a batch
            limits["max_model_len"] = tokens
    if demand.decoding > peak:
        sequences = int(need.sequences * peak / demand.decoding)
        limits["max_num_seqs"] = min(sequences, limits.get("max_num_seqs", sequences))
    return limits if all(limits.values()) else {}


@dataclass(frozen=True, slots=True)
class _Case:
    """The limits that are known when a cache does not fit, so that no advice breaks another limit. asked: the requested bytes for a need;
    least_room: bytes that must be free before a rehearsal; the other fields as in `pool`."""

    room: int
    margin: int
    demand: Demand
    need: CacheCosts
    asked: Callable[[CacheCosts], int | None] = lambda _need: None
    at_most: int | None = None
    reserved: Reserved | None = None
    by_blocks: bool = False
    least_room: int = 0

    @property
    def left(self) -> int:
        return self.room - self.demand.ahead - self.margin

    @property
    def within(self) -> int:
        """`left`, limited by the model's reservation (memory_gib)."""
        return self.left if self.reserved is None else min(self.left, self.reserved.left(self.demand))

    @property
    def size(self) -> int:
        """Bytes of the KV cache; negative where no memory is left for one."""
        asked = self.asked(self.need)
        if asked is not None:
            return asked
        return self.within if self.at_most is None else min(self.within, self.at_most)

    @property
    def fits(self) -> bool:
        return self.need.floor <= self.size <= self.left and self.room >= self.least_room

    def under(self, settings: Mapping[str, Any]) -> _Case:
        """The case of a start with these settings."""
        need, demand, reserved = self.need, self.demand, self.reserved
        freed = _freed(self) if "quantize" in settings else 0
        if reserved is not None:
            limit = int(settings["memory_gib"] * GIB) if "memory_gib" in settings else reserved.bytes
            reserved = replace(reserved, bytes=limit, taken=reserved.taken - freed * reserved.ranks)
        if batch := {name: count for name, count in settings.items() if name in _BATCH}:
            demand = _with_batch(demand, need, batch)
        if "enforce_eager" in settings:
            demand = replace(demand, graphs=0)
        if "max_model_len" in settings:
            need = need.shortened(settings["max_model_len"])
        case = replace(self, room=self.room + freed, need=need, demand=demand, reserved=reserved)
        if "kv_cache" not in settings:
            return case
        size = settings["kv_cache"]
        size_bytes = size["blocks"] * need.per_block if "blocks" in size else size["bytes"]
        return replace(case, asked=lambda _need: size_bytes, at_most=None)

    def of(self, size: int) -> dict[str, Any]:
        """The setting for a cache of `size` bytes: in whole blocks where the request was in blocks, else in bytes."""
        return {"kv_cache": {"blocks": size // self.need.per_block} if self.by_blocks else {"bytes": size}}

    @property
    def least(self) -> dict[str, Any]:
        """The setting for the smallest cache that holds one request."""
        if self.by_blocks:
            return self.of(self.need.floor + self.need.per_block - 1)
        return self.of(least_written(self.need.floor, self.left))

    def enough(self, cure: Cure) -> Iterator[Cure]:
        """The cure, with a larger cache where it needs one too; empty where the cure does not suffice."""
        then = self.under(cure.settings)
        if not then.fits and then.size < then.need.floor and not cure.settings.keys() & {"kv_cache", "max_model_len"}:
            if replace(then, asked=lambda _need: None, at_most=None).fits:
                yield cure.also(then.least)
        elif then.fits:
            yield cure


def _cures(case: _Case) -> Iterator[Cure]:
    """The cures. Each alone suffices."""
    need, demand, asked = case.need, case.demand, case.asked(case.need)
    most = case.within if asked is None else case.left
    if case.size < need.floor <= most:
        yield from case.enough(Cure(case.least))
    elif case.size > most >= need.floor:
        size = most if case.by_blocks else most_written(need.floor, most)
        yield from case.enough(Cure(case.of(size), f"{(size - need.per_block) // need.per_request} of {need.max_model_len:,} tokens"))
    if case.reserved is not None and case.within < need.floor:
        whole = (case.reserved.taken + (need.floor + demand.ahead) * case.reserved.ranks) / GIB
        yield from case.enough(Cure({"memory_gib": math.ceil(whole * 10) / 10}))
    yield from _shorter(case)
    if (missing := max(need.floor, asked or 0) - most) > 0 or case.room < case.least_room:
        yield from _smaller(case, missing)
        yield from replace(case, room=1 << 60).enough(Cure(deed=OTHER_PROGRAMS))


def _shorter(case: _Case) -> Iterator[Cure]:
    """A context for which the cache suffices; with another cache size where the requested one is too large or too small."""
    if tokens := longest(min(case.size, case.left), case.need):
        if case.under(shorter := {"max_model_len": tokens}).fits:
            yield Cure(shorter)
        elif case.asked(case.need) is not None:
            size = case.left if case.by_blocks else most_written(1, case.left)
            settings = case.of(size)
            if 0 < (tokens := longest(size, case.need)) < case.need.max_model_len:
                yield from case.enough(Cure({**settings, "max_model_len": tokens}))


def _smaller(case: _Case, missing: int) -> Iterator[Cure]:
    """Cures that free `missing` bytes of the engine's own demand."""
    demand, need = case.demand, case.need
    if batch := smaller_batch(demand, missing, need):
        yield from case.enough(Cure(batch, "about"))
    elif demand.ahead - demand.graphs > missing and replace(case, demand=replace(demand, peak=0)).fits:
        yield Cure(deed="set a smaller max_num_batched_tokens or max_num_seqs")
    if demand.graphs:
        yield from case.enough(Cure({"enforce_eager": True}, f"no CUDA graphs, which take {_gib(demand.graphs)}"))
    if (freed := _freed(case)) > 0:
        yield from case.enough(Cure({"quantize": "nvfp4"}, f"frees up to {_gib(freed)} of {need.weight_bits}-bit weights"))


def _freed(case: _Case) -> int:
    """Bytes that weights in 4 bits would free."""
    return int(case.demand.weights * (1 - FOUR_BITS / case.need.weight_bits))


def _with_batch(demand: Demand, need: CacheCosts, batch: Mapping[str, int]) -> Demand:
    """The demand of a batch with so many tokens and sequences."""
    tokens, sequences = batch.get("max_num_batched_tokens", need.batch_tokens), batch.get("max_num_seqs", need.sequences)
    if not demand.prefill:
        return replace(demand, peak=demand.peak * tokens // (need.batch_tokens or 1))
    decoding = demand.decoding * sequences // (need.sequences or 1)
    return demand.with_peaks(demand.prefill * tokens // (need.batch_tokens or 1), decoding)


def _what(need: CacheCosts) -> str:
    return f"One request of {need.shortest:,} tokens needs a KV cache of {_needed(need)}"


def _sum(case: _Case) -> str:
    return f"{_gib(case.room)} are free, less {', '.join([*_ahead(case.demand), f'{_gib(case.margin)} of margin'])}"


def _ahead(demand: Demand) -> list[str]:
    parts = [f"{_gib(demand.graphs)} for CUDA graphs"] if demand.graphs else []
    return [*parts, f"{_gib(demand.ahead - demand.graphs)} for the largest batch"] if demand.peak else parts


def _of_memory_gib(reserved: Reserved, demand: Demand) -> str:
    parts = [f"{_gib(reserved.taken)} that the engine holds", *_ahead(demand)]
    share = "" if reserved.ranks == 1 else f" The {reserved.ranks} ranks here share that."
    return f" memory_gib is {reserved.bytes / GIB:g}, less {', '.join(parts)}.{share}"


def _needed(need: CacheCosts) -> str:
    """The least size as text, rounded up, so that a cache which is a block too small does not show the same number."""
    step = GIB // 100 if need.floor < 10 * GIB else GIB // 10
    return _gib(-(-need.floor // step) * step)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"
