"""Owns what the KV cache of a model costs in bytes: of a token, of a request, of a block. Never measures; the engine's report goes before.

It follows vLLM's way of making one pool of blocks out of layers of several kinds (vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups, and
vllm/platforms/interface.py, _align_hybrid_block_size, of 0.26 to 0.33): layers of one kind form groups of equal size, all groups have pages
of one size, and a request takes blocks for every group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from sparkd.model_shape import DTYPE_BYTES, Attention, Mixer, Shape, State

# Of attention kernels, tokens (vllm/v1/attention/backends: get_supported_kernel_block_sizes; platforms/cpu.py for a CPU).
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
LATENT_BLOCK_TOKENS = {"cuda": 64, "cpu": 16}
# vLLM's own where nobody says, for an API server (vllm/engine/arg_utils.py, get_batch_defaults: a device of 70 GiB or more, and a CPU).
BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}
SEQUENCES = {"cuda": 1024, "cpu": 128}
# With asynchronous scheduling, vLLM's default, a second batch is in flight (vllm/config/vllm.py, max_concurrent_batches).
BATCHES_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class Serving:
    """What of an engine's configuration bears on its memory. Counts of tokens and requests; kv_dtype: `auto` is the model's own.

    draft_layers: further layers of full attention, of the model's own kind, that predict tokens ahead (multi-token prediction).
    batches_in_flight: without a pipeline; each further stage has one more.
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


@dataclass(frozen=True, slots=True)
class KvCost:
    """block_bytes: one block of the pool, on one rank. blocks: of a request of max_model_len tokens. block_tokens: of full attention."""

    block_bytes: int
    blocks: int
    block_tokens: int
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
        """Bytes below which vLLM serves not one such request: it keeps a block for itself."""
        return self.per_request + self.block_bytes if self.blocks else 0

    def requests(self, pool_bytes: int) -> float:
        """Of max_model_len tokens, as vLLM's "maximum concurrency" counts them."""
        return pool_bytes // self.block_bytes / self.blocks if self.blocks else float("inf")

    def tokens(self, pool_bytes: int) -> int:
        return int(self.requests(pool_bytes) * self.max_model_len) if self.blocks else 0


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the layers share the pool, which no length of a request changes. groups: (tokens of a block, 0 for a state; window)."""

    block_bytes: int
    groups: tuple[tuple[int, int | None], ...]
    serving: Serving

    def cost(self, max_model_len: int) -> KvCost:
        blocks = sum(_blocks(tokens, window, self.serving, max_model_len) for tokens, window in self.groups)
        return KvCost(self.block_bytes, blocks, max((tokens for tokens, _ in self.groups), default=0), max_model_len)


@dataclass(frozen=True, slots=True)
class _Layer:
    """kind: layers of equal kind may share a group. page_bytes: of one block. block_tokens: 0 for a state. stage: of the pipeline."""

    kind: tuple[object, ...]
    page_bytes: int
    block_tokens: int
    window: int | None
    stage: int


def kv_cost(shape: Shape, serving: Serving) -> KvCost:
    """Of one rank, of the fullest stage where the layers are spread over a pipeline."""
    return kv_layout(shape, serving).cost(serving.max_model_len)


def kv_layout(shape: Shape, serving: Serving) -> KvLayout:
    """max_model_len of `serving` is not looked at."""
    layers = _layers(shape, serving)
    if not layers:
        return KvLayout(0, (), serving)
    groups = _groups(_unified(layers))
    return KvLayout(_block_bytes(groups), tuple((group[0].block_tokens, group[0].window) for group in groups), serving)


def stages_of(layers: int, stages: int) -> list[int]:
    """The stage of each layer (vllm/distributed/utils.py, get_pp_indices): what is left over goes to the middle, from its end."""
    sizes = [layers // stages] * stages
    for number in range(layers % stages):
        sizes[-2 - number] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def state_bytes(state: State, shape: Shape, serving: Serving) -> int:
    """One request's state of one layer on one rank (vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator)."""
    ranks = serving.tensor_parallel
    # Groups that do not divide are given to every rank that has heads of them.
    groups = state.groups if state.groups % ranks == 0 else ranks
    channels = state.channels + 2 * groups * state.group_size
    matrix = DTYPE_BYTES.get(state.matrix_dtype or shape.dtype, shape.dtype_bytes)
    inputs = channels // ranks * (state.taps + serving.speculative_tokens) * shape.dtype_bytes
    return inputs + state.heads // ranks * state.rows * state.columns * matrix


def token_bytes(attention: Attention, shape: Shape, serving: Serving) -> int:
    """One token of one layer on one rank."""
    heads, key_dim, value_dim = _on_rank(attention, serving)
    return heads * (key_dim + value_dim) * DTYPE_BYTES.get(serving.kv_dtype, shape.dtype_bytes)


def _on_rank(attention: Attention, serving: Serving) -> tuple[int, int, int]:
    """Heads, and their dimensions. Heads that are fewer than the ranks are on several of them."""
    heads = attention.heads if attention.latent else max(1, attention.heads // serving.tensor_parallel)
    return heads, attention.key_dim, attention.value_dim


def _layers(shape: Shape, serving: Serving) -> list[_Layer]:
    placed = [*zip(shape.mixers, stages_of(len(shape.mixers), serving.pipeline_parallel), strict=True)]
    placed += [(one, serving.pipeline_parallel - 1) for one in _draft(shape, serving)]
    attentions = {one: token_bytes(one, shape, serving) for one, _ in placed if isinstance(one, Attention)}
    states = {one: state_bytes(one, shape, serving) for one, _ in placed if isinstance(one, State)}
    sizes = LATENT_BLOCK_TOKENS if any(one.latent for one in attentions) else BLOCK_TOKENS
    block = serving.block_tokens or sizes[serving.platform]
    largest, each = max(states.values(), default=0), max(attentions.values(), default=0)
    if largest and each:
        # Blocks of attention grow until a state fits into one, and states are padded to them.
        block *= ceil(largest / (block * each))
    padded = max(largest, block * each)
    found = []
    for one, stage in placed:
        if isinstance(one, State):
            found.append(_Layer((one,), padded, 0, None, stage))
        elif one is not None:
            found.append(_Layer((one.window, _on_rank(one, serving)), block * attentions[one], block, one.window, stage))
    return found


def _draft(shape: Shape, serving: Serving) -> tuple[Mixer, ...]:
    whole = next((one for one in shape.mixers if isinstance(one, Attention) and one.window is None), None)
    return (whole,) * serving.draft_layers if whole is not None else ()


def _unified(layers: list[_Layer]) -> list[_Layer]:
    """Pages of one size, unless all layers keep the same tokens: then one group holds pages of several sizes."""
    if len({layer.window for layer in layers}) == 1 and all(layer.block_tokens for layer in layers):
        return [replace(layer, kind=()) for layer in layers]
    largest = max(layer.page_bytes for layer in layers)
    return [_widened(layer, largest) for layer in layers]


def _widened(layer: _Layer, page_bytes: int) -> _Layer:
    """More tokens in a block where that makes a whole page, else padding."""
    times = 1 if page_bytes % layer.page_bytes else page_bytes // layer.page_bytes
    block = layer.block_tokens * times
    return replace(layer, page_bytes=page_bytes, block_tokens=block, kind=(*layer.kind, block))


def _groups(layers: Sequence[_Layer]) -> list[list[_Layer]]:
    """Groups of equal length, so that their blocks come from one pool; what is missing in the last of a kind is padding."""
    kinds: dict[tuple[object, ...], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    length = most if most < 1.5 * fewest else fewest
    found = []
    for members in kinds.values():
        count = ceil(len(members) / length)
        found += [members[number::count] for number in range(count)]
    return found


def _block_bytes(groups: Sequence[Sequence[_Layer]]) -> int:
    """Of the stage and the group that have most: all stages have equally many blocks."""
    sums: dict[tuple[int, int], int] = {}
    for number, group in enumerate(groups):
        for layer in group:
            sums[number, layer.stage] = sums.get((number, layer.stage), 0) + layer.page_bytes
    return max(sums.values())


def _blocks(block_tokens: int, window: int | None, serving: Serving, max_model_len: int) -> int:
    """That a request of max_model_len tokens takes of one group."""
    if not block_tokens:
        # With prefix caching a state that can be returned to is kept beside the running one (mamba_cache_mode `align`).
        return (2 if serving.prefix_caching else 1) + serving.speculative_tokens
    if window is None:
        return ceil(max_model_len / block_tokens)
    batches = serving.batches_in_flight + serving.pipeline_parallel - 1
    held = min(window - 1 + batches * serving.max_num_batched_tokens, max_model_len)
    return ceil(held / block_tokens) + 1
