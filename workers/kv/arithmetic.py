"""Computes the size of the KV cache, and the error for a cache that does not fit. Pure: it reads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from workers.kv.settings import BLOCKS_FLAG

GIB = 2**30
# A first real prompt needs up to a quarter more than a dummy batch of the same size (measured by the authors of vLLM's extensible KV
# cache on a GB200: "more than 25 %" beyond the allocated peak).
PEAK_FACTOR = 1.25
# Bits of a 4-bit weight with its share of the scale of 16 or 32 weights.
FOUR_BITS = 4.5
# The shortest context that is worth serving.
STEP_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that the engine takes in addition to its weights and the cache.

    graphs: CUDA graphs that are not in memory yet.
    peak: a passing need of the largest batch.
    reusable: the part of `peak` that the allocator has already reserved and that is free.
    weights: for the message alone, because they are in memory already.
    """

    graphs: int = 0
    peak: int = 0
    reusable: int = 0
    weights: int = 0

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

    per_request: bytes of one request of max_model_len tokens.
    least: least bytes of a cache that serves one such request.
    of: bytes of a shorter request, which is not proportional if layers keep a state or a window; None if it is proportional.
    weight_bits: of most weights: 16, 8, or 4 for the narrowest and for unknown ones; for the message alone.
    lookahead: extra slots of a request, for drafted tokens.
    shrinks: whether vLLM lowers max_model_len until it fits, as for --max-model-len -1.
    """

    per_request: int
    least: int
    max_model_len: int
    of: Callable[[int], int] | None = field(default=None, compare=False)
    weight_bits: int = 16
    lookahead: int = 0
    shrinks: bool = False

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
    """A sized cache.

    bytes: its size.
    room: bytes that were available for everything.
    spare: bytes of the room that the request leaves free.
    limit: why `auto` leaves them.
    """

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
    """The requested or least cache does not fit. The message is for the user."""


@dataclass(frozen=True, slots=True)
class SizeBounds:
    """Limits of the cache.

    asked: its requested bytes; None for all that is left, within `at_most` and `reserved`.
    by_blocks: the request is in vLLM's blocks.
    """

    asked: int | None = None
    at_most: int | None = None
    reserved: Reserved | None = None
    by_blocks: bool = False

    def setting(self, size: int, need: CacheCosts, *, least: bool) -> str:
        """A cache of that size in the words of the request. least: round up, else down."""
        unit, text = (need.per_block, f"{BLOCKS_FLAG} %d") if self.by_blocks else (1 << 20, "kv_cache: {bytes: %dMiB}")
        return text % (-(-size // unit) if least else size // unit)


def pool(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds | None = None) -> CachePool:
    """Size the cache. room: bytes that can be taken at all (MemoryReading.room). Raises CacheDoesNotFit."""
    bounds = bounds or SizeBounds()
    at_most, reserved = bounds.at_most, bounds.reserved
    left = room - demand.ahead - margin
    size, limit = bounds.asked, ""
    if size is None:
        within = left if reserved is None else min(left, reserved.left(demand))
        size = within if at_most is None else min(within, at_most)
        holds = "" if reserved is None else f"memory_gib is {reserved.bytes / GIB:g} and the engine holds {_gib(reserved.taken)} of it"
        limit = "" if size == left else f"at most {_gib(size)} are allowed for it" if size == at_most else holds
    if need.floor <= size <= left:
        return CachePool(size, room, margin, demand, limit)
    raise CacheDoesNotFit(_refusal(room, demand, margin, need, bounds, size))


def too_little(room: int, floor: int, need: CacheCosts, weights: int) -> str:
    """The message where less than `floor` bytes are available before a rehearsal. weights: bytes that the engine holds."""
    holds = f" The engine holds {_gib(weights)}, its weights included." if weights else ""
    reason = f"At least {_gib(floor)} must be free before the KV cache can be sized, but only {_gib(room)} are.{holds}"
    return f"{reason} {_advice(_narrower(weights, need), floor - room)}"


def _refusal(room: int, demand: Demand, margin: int, need: CacheCosts, bounds: SizeBounds, size: int) -> str:
    one, left = f"One request of {need.shortest:,} tokens needs a KV cache of {_needed(need)}", room - demand.ahead - margin
    if size < need.floor <= left:
        return f"{one}, but {_too_small(size, demand, need, bounds)} or more."
    what = one if bounds.asked is None else f"The requested KV cache is {_gib(bounds.asked)}"
    ahead = ", ".join([*_ahead(demand), f"{_gib(margin)} of margin"])
    weights = f" The weights take {_gib(demand.weights)}." if demand.weights else ""
    reason = f"{what}, but only {_gib(max(0, left))} are available ({_gib(room)} free, minus {ahead}).{weights}"
    if need.floor <= left:
        return f"{reason} Set {bounds.setting(left, need, least=False)} or less."
    levers = {
        **_narrower(demand.weights, need),
        "a smaller max_num_batched_tokens or max_num_seqs": demand.ahead - demand.graphs,
        "enforce_eager: true": demand.graphs,
        "a smaller max_model_len": need.floor - need.request(min(STEP_TOKENS, need.shortest)),
    }
    return f"{reason} {_advice(levers, max(need.floor, bounds.asked or 0) - left)}"


def _too_small(size: int, demand: Demand, need: CacheCosts, bounds: SizeBounds) -> str:
    """Which limit allows less than one request needs, and the setting with the least that suffices."""
    setting, reserved = bounds.setting(need.floor, need, least=True), bounds.reserved
    if bounds.asked is not None:
        return f"{_gib(size)} are requested. Set {setting}"
    if reserved is None or size == bounds.at_most:
        return f"at most {_gib(size)} are allowed for it. Set {setting}"
    parts = ", ".join([f"{_gib(reserved.taken)} that the engine holds", *_ahead(demand)])
    share = "" if reserved.ranks == 1 else f", shared by {reserved.ranks} ranks"
    whole = (reserved.taken + (need.floor + demand.ahead) * reserved.ranks) / GIB
    least = f"Set memory_gib: {math.ceil(whole * 10) / 10}"
    return f"memory_gib leaves {_gib(max(0, size))} ({reserved.bytes / GIB:g} GiB, minus {parts}{share}). {least}"


def _advice(levers: Mapping[str, int], missing: int) -> str:
    """The missing bytes, and the lever that frees most. levers: the bytes that each setting frees at most."""
    lever = max(levers, key=levers.__getitem__)
    if levers[lever] < missing:
        return f"{_gib(missing)} are missing, more than one setting frees. End other programs that use memory, or serve a smaller model."
    return f"{_gib(missing)} are missing. Set {lever}, which frees up to {_gib(levers[lever])}; `sparkd plan` shows what fits."


def _narrower(weights: int, need: CacheCosts) -> dict[str, int]:
    """The lever of narrower weights."""
    return {"quantize: nvfp4": int(weights * (1 - FOUR_BITS / need.weight_bits))}


def _ahead(demand: Demand) -> list[str]:
    parts = [f"{_gib(demand.graphs)} for CUDA graphs"] if demand.graphs else []
    return [*parts, f"{_gib(demand.ahead - demand.graphs)} for the largest batch"] if demand.peak else parts


def _needed(need: CacheCosts) -> str:
    """The least size as text, rounded up, so that a cache which is a block too small does not show the same number."""
    step = GIB // 100 if need.floor < 10 * GIB else GIB // 10
    return _gib(-(-need.floor // step) * step)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"
