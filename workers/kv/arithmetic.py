"""How large the KV cache may be, and the sentence where it cannot be large enough. Pure: it reads nothing and asks nobody."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace

GIB = 2**30
# A margin of 1 GiB, or of 3 % on a large machine: what the driver, other processes and the first minutes of serving take that no
# rehearsal shows.
MARGIN_BYTES, MARGIN_SHARE = GIB, 0.03
# A first real prompt needs up to a quarter more than a dummy batch of the same size (measured by the authors of vLLM's extensible KV
# cache on a GB200: "more than 25 %" beyond the allocated peak).
PEAK_FACTOR = 1.25
# Bits of a weight in 4 bits with its part of a scale for every 16 or 32.
FOUR_BITS = 4.5
# vLLM's own way to give the cache a size.
BLOCKS_FLAG = "--num-gpu-blocks-override"
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
        """What must stay free for it beside the cache."""
        return self.graphs + int(max(0, self.peak - self.reusable) * PEAK_FACTOR)

    def figures(self) -> dict[str, int]:
        """As reports have them."""
        return {"graphs_bytes": self.graphs, "peak_bytes": self.peak, "weights_bytes": self.weights}


@dataclass(frozen=True, slots=True)
class Need:
    """What the model's cache costs. per_request: bytes of one request of max_model_len tokens. least: bytes below which vLLM cannot serve
    one such request. batch_tokens, sequences: of the largest batches (max_num_batched_tokens, max_num_seqs), for the message alone; 0 where
    nobody knows. of: bytes of
    a request of fewer tokens, which is no proportion of a long one's where layers keep a state or a window; None: it is one. weight_bits:
    of most weights, 16 or 8, or 4 where they are as narrow as can be or nobody knows; for the message alone. lookahead:
    tokens that a request has slots for beyond its own, for what is drafted. shrinks: vLLM makes max_model_len what fits, which it does for
    --max-model-len -1.
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

    def shortened(self, max_model_len: int) -> Need:
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
    """What the whole engine may take on a node (memory_gib), and what its processes and weights hold of that already. ranks: that share it
    and the node's memory."""

    bytes: int
    taken: int
    ranks: int = 1

    def left(self, demand: Demand) -> int:
        """Of it, what a rank's cache may have; negative where the rest does not fit in."""
        return (self.bytes - self.taken) // self.ranks - demand.ahead


@dataclass(frozen=True, slots=True)
class Pool:
    """bytes: the cache. room: what was there for everything. spare: of it, what nobody asked for (0 for `auto`). limit: why `auto` leaves
    something over; empty where it does not."""

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
        """What should be left when the engine is ready and idle, its allocator's own reserve included: the margin, what the largest batch
        needs for a moment, and the spare."""
        return self.room - self.bytes - self.demand.graphs + self.demand.reusable


class DoesNotFit(Exception):
    """The sentence is for the user."""


def margin_of(size: int, asked: int | None) -> int:
    """Bytes to leave free of `size` bytes of memory."""
    return asked if asked is not None else max(MARGIN_BYTES, int(size * MARGIN_SHARE))


def pool(
    room: int,
    demand: Demand,
    margin: int,
    need: Need,
    asked: int | None = None,
    at_most: int | None = None,
    reserved: Reserved | None = None,
    by_blocks: bool = False,
    again: Callable[[Need], int | None] | None = None,
) -> Pool:
    """asked: bytes of a cache of a given size; None for all that is left, or `at_most`, or what `reserved` leaves. by_blocks: the size was
    given in vLLM's blocks. again: what would be asked with a shorter context; None: as much. Raises DoesNotFit.

    room: bytes that can be taken at all (Reading.room).
    """
    left, limit = room - demand.ahead - margin, ""
    if asked is not None:
        if asked < need.floor and (cures := _of_too_little(asked, left, need, by_blocks)):
            one = f"one request of {need.shortest:,} tokens needs {_gib(need.floor)}"
            raise DoesNotFit(f"The KV cache that was asked for is {_gib(asked)}, and {one}. What helps: {', or '.join(cures)}.")
        if asked > left:
            what = f"The KV cache that was asked for needs {_gib(asked)}"
            then = asked if again is None else again(need.shortened(longest(left, need) or need.max_model_len))
            # Of a size in bytes a shorter context takes nothing.
            smaller = left >= need.floor or (then or 0) > left
            raise DoesNotFit(_sentence(what, room, left, demand, margin, need, missing=asked - left, smaller=smaller, by_blocks=by_blocks))
        size = asked
    else:
        within = left if reserved is None else reserved.left(demand)
        size = min(left, within) if at_most is None else min(left, within, at_most)  # negative: refused below
        if size < left:
            holds = "" if reserved is None else f"memory_gib is {reserved.bytes / GIB:g} and the engine holds {_gib(reserved.taken)} of it"
            limit = f"at most {_gib(size)} are allowed for it" if size == at_most else holds
    if size < need.floor:
        what = _what(need)
        if size == left or left < need.floor:
            raise DoesNotFit(_sentence(what, room, left, demand, margin, need, need.floor - left, most=size))
        by_reserve = reserved if asked is None and size != at_most else None
        raise DoesNotFit(_limited(what, size, demand, need, by_reserve, left))
    return Pool(size, room, margin, demand, limit)


def too_little(room: int, floor: int, margin: int, need: Need, weights: int, learned: Demand | None) -> str:
    """The sentence where less than `floor` is there before anything is tried. weights: bytes that the engine holds. learned: what earlier
    starts needed beside the cache; None where nobody knows."""
    demand = replace(learned or Demand(), weights=weights)
    left = room - demand.ahead - margin
    more = "" if learned is not None else "; CUDA graphs and the largest batch, which nobody knows yet, come on top"
    told = _sentence(_what(need), room, min(left, 0), demand, margin, need, max(need.floor - left, floor - room), more=more)
    return f"Under {_gib(floor)} nothing is tried. {told}".replace("The weights take", "The engine, its weights included, holds", 1)


def longest(left: int, need: Need) -> int:
    """How many tokens one request may have where `left` bytes are there for it, in steps."""
    steps = range(1, need.max_model_len // STEP_TOKENS + 1)
    return STEP_TOKENS * bisect_right(steps, left - need.per_block, key=lambda step: need.request(step * STEP_TOKENS))


def smaller_batch(demand: Demand, missing: int, need: Need) -> dict[str, int]:
    """About how many tokens and sequences a batch may have, so that `missing` bytes less are needed for it: a prefill's peak grows with its
    tokens, a decoding batch's with its sequences. By vLLM's names, only what must be smaller; empty where no batch is small enough, or
    nobody knows what one needs."""
    peak = demand.peak - missing / PEAK_FACTOR
    if not demand.peak or peak <= 0:
        return {}
    found = {}
    prefill = demand.prefill or demand.peak
    if prefill > peak:
        tokens = int(need.batch_tokens * peak / prefill) // STEP_TOKENS * STEP_TOKENS
        found["max_num_batched_tokens"] = tokens
        if need.sequences > tokens:  # vLLM refuses more sequences than a batch has tokens (vllm/config/scheduler.py)
            found["max_num_seqs"] = tokens
    if demand.decoding > peak:
        sequences = int(need.sequences * peak / demand.decoding)
        found["max_num_seqs"] = min(sequences, found.get("max_num_seqs", sequences))
    return found if all(found.values()) else {}


def _of_too_little(asked: int, left: int, need: Need, by_blocks: bool) -> list[str]:
    """What helps a cache whose given size is less than one request, where `left` bytes are there for it."""
    way = f"{BLOCKS_FLAG} {-(-need.floor // need.per_block)} would do" if by_blocks else "kv_cache"
    cures = [f"a larger cache ({way})"] if left >= need.floor else []
    if tokens := longest(min(asked, left), need):
        cures.append(f"a shorter context (max_model_len {tokens:,} would fit)" if asked <= left else _both(left, tokens, need, by_blocks))
    return cures


def _both(left: int, tokens: int, need: Need, by_blocks: bool) -> str:
    """What helps where a request is too long and the size that was asked for too large."""
    return f"a smaller cache with a shorter context ({_most(left, need, by_blocks)} and max_model_len {tokens:,} would fit)"


def _most(left: int, need: Need, by_blocks: bool) -> str:
    """The size that there is room for, in the words in which it was asked for."""
    return f"{BLOCKS_FLAG} {left // need.per_block}" if by_blocks else f"up to {_gib(left)}"


def _what(need: Need) -> str:
    return f"One request of {need.shortest:,} tokens needs a KV cache of {_gib(need.floor)}"


def _limited(what: str, size: int, demand: Demand, need: Need, reserved: Reserved | None, left: int) -> str:
    """Where a limit is in the way and not the machine, which has `left` bytes for the cache. reserved: None where the limit is the cache's
    own."""
    missing = need.floor - size
    if reserved is None:
        sum_of, cures = "", [f"a larger cache (kv_cache; up to {_gib(left)} would fit)"]
    else:
        parts = [f"{_gib(reserved.taken)} that the engine holds", *_ahead(demand)]
        share = "" if reserved.ranks == 1 else f" The {reserved.ranks} ranks here share that."
        sum_of = f" memory_gib is {reserved.bytes / GIB:g}, less {', '.join(parts)}.{share}"
        more = (reserved.taken + (need.floor + demand.ahead) * reserved.ranks) / GIB
        cures = [f"a larger memory_gib ({math.ceil(more * 10) / 10:g} would fit)"]
    if tokens := longest(size, need):
        cures.append(f"a shorter context (max_model_len {tokens:,} would fit)")
    if reserved is not None:
        cures += _smaller(demand, need, missing)
    return f"{what}, and at most {_gib(max(0, size))} were allowed for it.{sum_of} What helps: {', or '.join(cures)}."


def _ahead(demand: Demand) -> list[str]:
    parts = [f"{_gib(demand.graphs)} for CUDA graphs"] if demand.graphs else []
    return [*parts, f"{_gib(demand.ahead - demand.graphs)} for the largest batch"] if demand.peak else parts


def _sentence(
    what: str,
    room: int,
    left: int,
    demand: Demand,
    margin: int,
    need: Need,
    missing: int,
    *,
    smaller: bool = False,
    by_blocks: bool = False,
    most: int | None = None,
    more: str = "",
) -> str:
    """missing: bytes. smaller: whether the cache must be smaller than was asked for; by_blocks: whose size was given in
    vLLM's blocks. most: what the cache may have, where that is less than
    `left`. more: what else there is to the sum."""
    weights = f" The weights take {_gib(demand.weights)}." if demand.weights else ""
    sum_of = f"{_gib(room)} are there, less {', '.join([*_ahead(demand), f'{_gib(margin)} of margin'])}{more}."
    cures: list[str] = []
    if smaller and left < need.floor:
        cures += [_both(left, tokens, need, by_blocks)] if (tokens := longest(left, need)) else []
    elif smaller:
        requests = (left - need.per_block) // need.per_request
        cures.append(f"a smaller cache ({_most(left, need, by_blocks)} would fit, which is {requests} of {need.max_model_len:,} tokens)")
    elif tokens := longest(left if most is None else min(left, most), need):
        cures.append(f"a shorter context (max_model_len {tokens:,} would fit)")
    cures += [*_smaller(demand, need, missing), "ending what else uses the memory"]
    return f"{what} and {_gib(max(0, left))} are left: {sum_of}{weights} What helps: {', or '.join(cures)}."


def _smaller(demand: Demand, need: Need, missing: int) -> list[str]:
    """What frees `missing` bytes of the engine's own."""
    cures: list[str] = []
    if demand.ahead - demand.graphs > missing:
        fits = [f"{name} {count:,}" for name, count in smaller_batch(demand, missing, need).items()]
        how = f"{' and '.join(fits)} would about fit" if fits else "max_num_batched_tokens, max_num_seqs"
        cures.append(f"a smaller batch ({how})")
    if demand.graphs > missing:
        cures.append(f"no CUDA graphs (enforce_eager: true frees {_gib(demand.graphs)})")
    if (freed := int(demand.weights * (1 - FOUR_BITS / need.weight_bits))) > missing and need.weight_bits > FOUR_BITS:
        cures.append(f"4-bit weights (quantize: nvfp4 frees up to {_gib(freed)} of {need.weight_bits}-bit ones)")
    return cures


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size < 10 * GIB else f"{size / GIB:.1f} GiB"
