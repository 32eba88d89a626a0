"""The bytes of a model's KV cache: for a token, a request and a block; vLLM's own layout, or a rough estimate of one.

vLLM makes one pool of blocks from layers of several kinds (vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups): layers of one kind form
groups of equal size, and a request takes blocks for every group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from sparkd.units import GIB

# vLLM's defaults for an API server (vllm/engine/arg_utils.py, get_batch_defaults: a device of 70 GiB or more, and a CPU).
BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
SEQUENCES = {"cuda": 1024, "cpu": 128}
# With asynchronous scheduling, vLLM's default, a second batch is in flight (vllm/config/vllm.py, max_concurrent_batches).
BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Serving:
    """The settings of an engine that change its memory. Counts are tokens or requests; kv_dtype `auto` is the model's own.

    draft_layers: further layers of full attention, of the model's own kind, that predict tokens ahead from its hidden states (multi-token
    prediction, EAGLE).
    batches_in_flight: without a pipeline; each further stage adds one.
    unknown: the changes of flags and variables that no formula has (sparkd.vllm.unaccounted_args.changed_by).
    """

    max_model_len: int
    max_num_seqs: int = SEQUENCES["cuda"]
    max_num_batched_tokens: int = BATCH_TOKENS["cuda"]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_dtype: str = "auto"
    prefix_caching: bool = True
    platform: str = "cuda"
    block_tokens: int | None = None
    batches_in_flight: int = BATCHES_IN_FLIGHT
    speculative_tokens: int = 0
    draft_layers: int = 0
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KvCost:
    """The cost of one request.

    block_bytes: of one block of the pool, on one rank.
    blocks: of a request of max_model_len tokens.
    """

    block_bytes: int
    blocks: int
    max_model_len: int

    @property
    def per_request(self) -> int:
        """Bytes of one request of max_model_len tokens."""
        return self.block_bytes * self.blocks

    @property
    def per_token(self) -> float:
        return self.per_request / self.max_model_len

    @property
    def least(self) -> int:
        """Least bytes of a cache that serves one such request: vLLM keeps one block for itself."""
        return self.per_request + self.block_bytes if self.blocks else 0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the layers share the pool, which no length of a request changes.

    groups: (tokens of a block, 0 for a state; window; whether that is a chunk).
    state_blocks: that a request takes of a group of states, None for sparkd's own count.
    """

    block_bytes: int
    groups: tuple[tuple[int, int | None, bool], ...]
    serving: Serving
    state_blocks: int | None = None

    def cost(self, max_model_len: int) -> KvCost:
        blocks = sum(self._blocks(*group, max_model_len) for group in self.groups)
        return KvCost(self.block_bytes, blocks, max_model_len)

    def _blocks(self, block_tokens: int, window: int | None, chunked: bool, max_model_len: int) -> int:
        """The blocks of one group that a request of max_model_len tokens takes."""
        serving = self.serving
        if not block_tokens:
            # With prefix caching a state that can be returned to is kept beside the running one (mamba_cache_mode `align`).
            own = (2 if serving.prefix_caching else 1) + serving.speculative_tokens
            return own if self.state_blocks is None else self.state_blocks
        if window is None:
            return ceil(max_model_len / block_tokens)
        in_flight = (serving.batches_in_flight + serving.pipeline_parallel - 1) * serving.max_num_batched_tokens
        if chunked:
            # It begins with a block (vllm/v1/kv_cache_interface.py, ChunkedLocalAttentionSpec).
            return ceil(min(window + in_flight, max_model_len) / block_tokens)
        return ceil(min(window - 1 + in_flight, max_model_len) / block_tokens) + 1


def sized(size: object, layout: KvLayout, max_model_len: int) -> int | None:
    """Bytes of a cache whose size an entry gives (sparkd.config.engine_args) for requests of max_model_len tokens, with the
    block that vLLM keeps; None for one that takes what is left. `at` is the length of each of so many sequences: a window or a state takes
    no less for a shorter one."""
    if not isinstance(size, Mapping):
        return None
    if "bytes" in size:
        return int(size["bytes"])
    if "blocks" in size:
        return int(size["blocks"]) * layout.block_bytes
    if "tokens" in size:
        return ceil(size["tokens"] * layout.cost(max_model_len).per_token) + layout.block_bytes
    if "sequences" in size:
        tokens = min((size.get("at") or max_model_len) + _lookahead(layout.serving), max_model_len)
        return int(size["sequences"]) * layout.cost(tokens).per_request + layout.block_bytes
    return None


def fitting(size: object, layout: KvLayout, max_model_len: int, room: int) -> dict[str, int] | None:
    """The largest size of the kind that was asked for which `room` bytes hold, and which holds one request of max_model_len tokens; None
    where no size was asked for, or they hold no request."""
    least = layout.cost(max_model_len).least
    way = next((key for key in ("bytes", "tokens", "sequences", "blocks") if key in size), None) if isinstance(size, Mapping) else None
    if way is None or not isinstance(size, Mapping) or not 0 < least <= room:
        return None
    if way == "bytes":
        return {"bytes": most_written(least, room)}
    most = largest(lambda count: (sized({**size, way: count}, layout, max_model_len) or 0) <= room, int(size[way]))
    found = {**size, way: most}
    return found if (sized(found, layout, max_model_len) or 0) >= least else {"sequences": 1}


def longest(size: object, layout: KvLayout, most: int, room: int) -> int:
    """How many tokens, at most `most`, a request may have in a cache of a given size (as `sized` takes it) that has `room` bytes."""

    def fits(tokens: int) -> bool:
        cache, least = sized(size, layout, tokens), layout.cost(tokens).least
        return least <= room if cache is None else least <= cache <= room

    return largest(fits, most)


def _lookahead(serving: Serving) -> int:
    """Tokens that a request has slots for beyond its own, for what is drafted: as workers.vllm.kv.costs.lookahead_of counts them."""
    drafts = serving.speculative_tokens
    steps = 2 if serving.batches_in_flight > 1 else 1
    return max(0, (steps + bool(serving.draft_layers)) * drafts - 1)


def most_written(least: int, most: int) -> int:
    """The largest size from `least` to `most` bytes in tenths of a GiB, in whole MiB where there is none, or else in bytes."""
    sizes = (int(most * 10 // GIB / 10 * GIB), most >> 20 << 20, most)
    return next(size for size in sizes if least <= size <= most)


def largest(fits: Callable[[int], bool], most: int, step: int = 1) -> int:
    """`most`, or the largest multiple of `step` below it that fits, by bisection; 0, which is not tested, where none fits."""
    if most > 0 and fits(most):
        return most
    low, high = 0, (most - 1) // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    return low * step
