"""How large the KV cache may be, and the sentence where it cannot be large enough. Pure: it reads nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from workers.kv.settings import BLOCKS_FLAG

GIB = 2**30
# A margin of 1 GiB, or of 3 % on a large machine: what the driver, other processes and the first minutes of serving take that no
# rehearsal shows.
MARGIN_BYTES, MARGIN_SHARE = GIB, 0.03
# A first real prompt needs up to a quarter more than a dummy batch of the same size (measured by the authors of vLLM's extensible KV
# cache on a GB200: "more than 25 %" beyond the allocated peak).
PEAK_FACTOR = 1.25
# Bits of a weight in 4 bits with its part of a scale for every 16 or 32.
FOUR_BITS = 4.5
# Lengths and batches that are advised are whole ones of these.
STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that the engine takes besides its weights and the cache.

    graphs: CUDA graphs that are not in memory yet. peak: what the largest batch needs for a moment. reusable: of that, already reserved
    by the allocator and free. weights: for the message alone, they are in memory already; and so are prefill and decoding, of which peak is
    the larger: what the longest prefill needs for a moment, and every sequence that decodes; 0 where nobody knows them apart.
    """

    graphs: int = 0
    peak: int = 0
    reusable: int = 0
    weights: int = 0
    prefill: int = 0
    decoding: int = 0

    def with_peaks(self, prefill: int, decoding: int, *, apart: bool = True) -> Demand:
        """apart: whether the two are known apart."""
        return replace(self, peak=max(prefill, decoding), prefill=prefill if apart else 0, decoding=decoding if apart else 0)

    @property
    def ahead(self) -> int:
        """The bytes that must stay free for it beside the cache."""
        return self.graphs + int(max(0, self.peak - self.reusable) * PEAK_FACTOR)

    def figures(self) -> dict[str, int]:
        """As reports have them."""
        return {"graphs_bytes": self.graphs, "peak_bytes": self.peak, "weights_bytes": self.weights}


@dataclass(frozen=True, slots=True)
class CacheCosts:
    """The costs of the model's cache. per_request: bytes of one request of max_model_len tokens. least: bytes below which vLLM cannot serve
    one such request. batch_tokens, sequences: of the largest batches (max_num_batched_tokens, max_num_seqs), for the message alone; 0 where
    nobody knows. of: bytes of a request of fewer tokens, which is no proportion of a long one's where layers keep a state or a window;
    None: it is one. weight_bits: of most weights, 16 or 8, or 4 where they are as narrow as can be or nobody knows; for the message alone.
    lookahead: tokens that a request has slots for beyond its own, for what is drafted. shrinks: vLLM makes max_model_len what fits, which
    it does for --max-model-len -1. chunked: a prompt may be longer than a batch.
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
        """Bytes of a cache that holds it."""
        return self.request(self.shortest) + self.per_block if self.shrinks else self.least

    def shortened(self, max_model_len: int) -> CacheCosts:
        """Where vLLM has made the context shorter."""
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
    """The bytes that the whole engine may take on a node (memory_gib), and those of them that it holds already. ranks: that share it and
    the node's memory."""

    bytes: int
    taken: int
    ranks: int = 1

    def left(self, demand: Demand) -> int:
        """The part of it that a rank's cache may have; negative where the rest does not fit in."""
        return (self.bytes - self.taken) // self.ranks - demand.ahead


@dataclass(frozen=True, slots=True)
class CachePool:
    """bytes: the cache. room: what was there for everything. spare: what of it was not requested. limit: why `auto` leaves that."""

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
        """The bytes that should be left when the engine is ready and idle, its allocator's own reserve included: the margin, what the
        largest batch needs for a moment, and the spare."""
        return self.room - self.bytes - self.demand.graphs + self.demand.reusable


class CacheDoesNotFit(Exception):
    """The sentence is for the user."""


def margin_of(size: int, asked: int | None) -> int:
    """Bytes to leave free of `size` bytes of memory."""
    return asked if asked is not None else max(MARGIN_BYTES, int(size * MARGIN_SHARE))


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """asked: bytes of a cache of a given size; None for all that is left, or `at_most`, or what `reserved` leaves. by_blocks: the size was
    given in vLLM's blocks. again: what would be asked with a shorter context; None: as much."""

    asked: int | None = None
    at_most: int | None = None
    reserved: Reserved | None = None
    by_blocks: bool = False
    again: Callable[[CacheCosts], int | None] | None = None


def pool(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> CachePool:
    """room: bytes that can be taken at all (MemoryReading.room). Raises CacheDoesNotFit."""
    bounds = bounds or SizeBounds()
    requested, at_most, reserved = bounds.asked, bounds.at_most, bounds.reserved
    again = bounds.again if requested is not None and bounds.again else lambda _need: requested
    case = _Case(room, margin, demand, need, again, at_most, reserved, bounds.by_blocks)
    left, limit = case.left, ""
    if requested is not None:
        if requested < need.floor and (cures := _of_too_little(requested, case)):
            least = f"one request of {need.shortest:,} tokens needs {_gib(need.floor, math.ceil)}"
            raise CacheDoesNotFit(f"The requested KV cache is {_gib(requested)}, and {least}. To make it fit: {', or '.join(cures)}.")
        if requested > left:
            raise CacheDoesNotFit(
                _sentence(f"The requested KV cache needs {_gib(requested)}", case, max(requested, need.floor) - left, smaller=True)
            )
        size = requested
    else:
        size = case.within if at_most is None else min(case.within, at_most)  # negative: refused below
        if size < left:
            holds = "" if reserved is None else f"memory_gib is {reserved.bytes / GIB:g} and the engine holds {_gib(reserved.taken)} of it"
            limit = f"at most {_gib(size)} are allowed for it" if size == at_most else holds
    if size < need.floor:
        if size == left or left < need.floor:
            raise CacheDoesNotFit(_sentence(_what(need), case, need.floor - left, most=size))
        raise CacheDoesNotFit(_limited(size, case, by_reserve=requested is None and size != at_most))
    return CachePool(size, room, margin, demand, limit)


def too_little(room: int, floor: int, margin: int, need: CacheCosts, weights: int, learned: Demand | None) -> str:
    """The sentence where less than `floor` is there before anything is tried. weights: bytes that the engine holds. learned: what earlier
    starts needed beside the cache; None where that is unknown."""
    demand = replace(learned or Demand(), weights=weights)
    case = _Case(room, margin, demand, need)
    more = "" if learned is not None else "; CUDA graphs and the largest batch, which are not known yet, come on top"
    missing = max(need.floor - case.left, floor - room)
    sum_of = _sentence(_what(need), case, missing, most=0, more=more, tried=False)
    return f"At least {_gib(floor)} must be free before the KV cache can be sized. {sum_of}"


def longest(left: int, need: CacheCosts) -> int:
    """How many tokens one request may have where `left` bytes are there for it, in steps."""
    steps = range(1, need.max_model_len // STEP_TOKENS + 1)
    return STEP_TOKENS * bisect_right(steps, left - need.per_block, key=lambda step: need.request(step * STEP_TOKENS))


def smaller_batch(demand: Demand, missing: int, need: CacheCosts) -> dict[str, int]:
    """About how many tokens and sequences a batch may have, so that `missing` bytes less are needed for it: a prefill's peak grows with its
    tokens, a decoding batch's with its sequences. By vLLM's names, only what must be smaller; empty where no batch is small enough, or
    its needs are unknown."""
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
        if need.max_model_len > tokens and not need.chunked:  # nor a prompt that is longer than a batch, then
            limits["max_model_len"] = tokens
    if demand.decoding > peak:
        sequences = int(need.sequences * peak / demand.decoding)
        limits["max_num_seqs"] = min(sequences, limits.get("max_num_seqs", sequences))
    return limits if all(limits.values()) else {}


@dataclass(frozen=True, slots=True)
class _Case:
    """The limits that are known when a cache does not fit, so that no advice breaks another limit. asked: bytes of a cache of a given size,
    by the need; the others as in `pool`."""

    room: int
    margin: int
    demand: Demand
    need: CacheCosts
    asked: Callable[[CacheCosts], int | None] = lambda _need: None
    at_most: int | None = None
    reserved: Reserved | None = None
    by_blocks: bool = False

    @property
    def left(self) -> int:
        return self.room - self.demand.ahead - self.margin

    @property
    def within(self) -> int:
        """The part of it that memory_gib leaves."""
        return self.left if self.reserved is None else min(self.left, self.reserved.left(self.demand))

    def fits(self, *, need: CacheCosts | None = None, demand: Demand | None = None, freed: int = 0) -> bool:
        """Whether a start with one of these instead is not refused. freed: bytes of weights that are not there."""
        reserved = self.reserved and replace(self.reserved, taken=self.reserved.taken - freed * self.reserved.ranks)
        then = replace(self, room=self.room + freed, need=need or self.need, demand=demand or self.demand, reserved=reserved)
        size = then.asked(then.need)
        if size is not None:
            return then.need.floor <= size <= then.left
        return then.need.floor <= (then.within if then.at_most is None else min(then.within, then.at_most))

    @property
    def least(self) -> int:
        """A size that holds one request, as the words for it say it."""
        blocks = -(-self.need.floor // self.need.per_block)
        return blocks * self.need.per_block if self.by_blocks else _rounded(self.need.floor, math.ceil)

    @property
    def larger(self) -> str:
        """The further cure where the cache's own size or limit is below one request, whatever is left; empty where it is not."""
        if all(size is None or size >= self.need.floor for size in (self.asked(self.need), self.at_most)):
            return ""
        way = f"{BLOCKS_FLAG} {self.least // self.need.per_block}" if self.by_blocks else f"kv_cache; {_gib(self.least)}"
        return f" with a larger cache ({way} would do)"

    def enough(self, cure: str, **change: Any) -> list[str]:
        """The cure, with a larger cache where that is needed too; none where it does not do. change: see `fits`."""
        if self.fits(**change):
            return [cure]
        free = replace(self, asked=lambda _need: None, at_most=None)
        sized = replace(free, asked=lambda _need: self.least)
        return [cure + self.larger] if self.larger and free.fits(**change) and sized.fits(**change) else []

    def offered(self, size: int) -> int:
        """A size as the words for it say it: they are followed to the letter."""
        return size // self.need.per_block * self.need.per_block if self.by_blocks else _rounded(size, math.floor)


def _of_too_little(size: int, case: _Case) -> list[str]:
    """The cures for a cache whose given size is less than one request."""
    need = case.need
    way = f"{BLOCKS_FLAG} {-(-need.floor // need.per_block)} would do" if case.by_blocks else "kv_cache"
    cures = [f"a larger cache ({way})"] if case.left >= case.least else []
    return cures + _shorter(min(size, case.left), case)


def _shorter(size: int, case: _Case) -> list[str]:
    """A context for which `size` bytes are enough; with a size of its own where the one that was asked for is too large for it, or becomes
    so or too small."""
    if not (tokens := longest(size, case.need)):
        return []
    if case.fits(need=case.need.shortened(tokens)):
        return [f"a shorter context (max_model_len {tokens:,} would fit)"]
    requested, offered = case.asked(case.need), case.offered(case.left)
    if requested is None or not 0 < (tokens := longest(offered, case.need)) < case.need.max_model_len:
        return []
    kind = "a smaller cache" if requested > offered else "a cache of another size"
    return [f"{kind} with a shorter context ({_most(offered, case)} and max_model_len {tokens:,} would fit)"]


def _most(size: int, case: _Case) -> str:
    """A size that is offered, in the words in which it was asked for."""
    return f"{BLOCKS_FLAG} {size // case.need.per_block}" if case.by_blocks else f"up to {_gib(size)}"


def _what(need: CacheCosts) -> str:
    return f"One request of {need.shortest:,} tokens needs a KV cache of {_gib(need.floor, math.ceil)}"


def _limited(size: int, case: _Case, *, by_reserve: bool) -> str:
    """Where a limit is in the way and not the machine. by_reserve: it is memory_gib; else the cache's own."""
    need, demand, reserved = case.need, case.demand, case.reserved
    sum_of, cures = "", []
    larger = _rounded(case.within, math.floor) >= need.floor
    if reserved is not None and by_reserve:
        parts = [f"{_gib(reserved.taken)} that the engine holds", *_ahead(demand)]
        share = "" if reserved.ranks == 1 else f" The {reserved.ranks} ranks here share that."
        sum_of = f" memory_gib is {reserved.bytes / GIB:g}, less {', '.join(parts)}.{share}"
    if reserved is not None and not larger:
        more = (reserved.taken + (case.least + demand.ahead) * reserved.ranks) / GIB
        cures.append(f"a larger memory_gib ({math.ceil(more * 10) / 10:g} would fit){case.larger}")
    elif larger:
        cures.append(f"a larger cache (kv_cache; up to {_gib(case.within, math.floor)} would fit)")
    cures += _shorter(size, case)
    if by_reserve:
        cures += _smaller(case, need.floor - size)
    return f"{_what(need)}, and at most {_gib(max(0, size))} were allowed for it.{sum_of} To make it fit: {', or '.join(cures)}."


def _ahead(demand: Demand) -> list[str]:
    parts = [f"{_gib(demand.graphs)} for CUDA graphs"] if demand.graphs else []
    return [*parts, f"{_gib(demand.ahead - demand.graphs)} for the largest batch"] if demand.peak else parts


def _sentence(
    what: str, case: _Case, missing: int, *, smaller: bool = False, most: int | None = None, more: str = "", tried: bool = True
) -> str:
    """missing: bytes. smaller: the cache was given a size, which is too large. most: what it may have, where less than what is left.
    more: what else there is to the sum. tried: False where too little is left to begin, and the weights are known with all that the engine
    holds."""
    demand, need, left = case.demand, case.need, case.left
    holds = "The weights take" if tried else "The engine, its weights included, holds"
    weights = f" {holds} {_gib(demand.weights)}." if demand.weights else ""
    sum_of = f"{_gib(case.room)} are free, less {', '.join([*_ahead(demand), f'{_gib(case.margin)} of margin'])}{more}."
    offered = case.offered(left)
    if smaller and offered >= need.floor:
        requests = (offered - need.per_block) // need.per_request
        cures = [f"a smaller cache ({_most(offered, case)} would fit, which is {requests} of {need.max_model_len:,} tokens)"]
    else:
        cures = _shorter(left if most is None else min(left, most), case)
    cures += [*_smaller(case, missing), f"ending other programs that use memory{case.larger}"]
    return f"{what} and {_gib(max(0, left) if tried else 0)} are left: {sum_of}{weights} To make it fit: {', or '.join(cures)}."


def _smaller(case: _Case, missing: int) -> list[str]:
    """A cure that frees `missing` bytes of the engine's own, and is enough."""
    demand, need = case.demand, case.need
    cures: list[str] = []
    if demand.ahead - demand.graphs > missing:
        batch = smaller_batch(demand, missing, need)
        fits = [f"{name} {count:,}" for name, count in batch.items()]
        how = f"{' and '.join(fits)} would about fit" if fits else "max_num_batched_tokens, max_num_seqs"
        then = _with_batch(demand, need, batch) if batch else replace(demand, peak=0)
        cures += case.enough(f"a smaller batch ({how})", demand=then)
    if demand.graphs > missing:
        cures += case.enough(f"no CUDA graphs (enforce_eager: true frees {_gib(demand.graphs)})", demand=replace(demand, graphs=0))
    freed = int(demand.weights * (1 - FOUR_BITS / need.weight_bits))
    if freed > missing and need.weight_bits > FOUR_BITS:
        cures += case.enough(f"4-bit weights (quantize: nvfp4 frees up to {_gib(freed)} of {need.weight_bits}-bit ones)", freed=freed)
    return cures


def _with_batch(demand: Demand, need: CacheCosts, batch: dict[str, int]) -> Demand:
    """With so many tokens and sequences."""
    tokens, sequences = batch.get("max_num_batched_tokens", need.batch_tokens), batch.get("max_num_seqs", need.sequences)
    if not demand.prefill:
        return replace(demand, peak=demand.peak * tokens // (need.batch_tokens or 1))
    decoding = demand.decoding * sequences // (need.sequences or 1)
    return demand.with_peaks(demand.prefill * tokens // (need.batch_tokens or 1), decoding)


def _rounded(size: int, way: Callable[[Any], int]) -> int:
    """Bytes of what `_gib` says of it."""
    unit = 100 if size < 10 * GIB else 10
    return int(Fraction(way(Fraction(size * unit, GIB)), unit) * GIB)


def _gib(size: int, way: Callable[[Any], int] = round) -> str:
    """way: math.floor for what there is room for, math.ceil for what is needed, where somebody may take the number as it stands."""
    unit, decimals = (100, 2) if size < 10 * GIB else (10, 1)
    return f"{way(Fraction(size * unit, GIB)) / unit:.{decimals}f} GiB"
