"""Owns what the KV cache of a model costs in bytes: of a token, of a request, of a block. Never measures; the engine's report goes before.

It follows vLLM's way of making one pool of blocks out of layers of several kinds (vllm/v1/core/kv_cache_utils.py, get_kv_cache_groups, and
vllm/platforms/interface.py, _align_hybrid_block_size, of 0.26 to 0.33): layers of one kind form groups of equal size, all groups have pages
of one size, and a request takes blocks for every group.
"""

from __future__ import annotations

from collections.abc import Iterable
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
class _Layer:
    """kind: layers of equal kind may share a group. token_bytes: of attention; page_bytes: of one block."""

    kind: tuple[object, ...]
    token_bytes: int
    page_bytes: int
    block_tokens: int
    window: int | None
    latent: bool


def kv_cost(shape: Shape, serving: Serving) -> KvCost:
    """Of one rank, and of its share of the layers where they are spread over a pipeline."""
    mixers = _stage(shape.mixers, serving.pipeline_parallel) + _draft(shape, serving)
    if not mixers:
        return KvCost(0, 0, 0, serving.max_model_len)
    layers = _unified(_layers(mixers, shape, serving))
    groups = _groups(layers)
    widest = max(sum(layer.page_bytes for layer in group) for group in groups)
    blocks = sum(_blocks(group[0], serving) for group in groups)
    tokens = max((layer.block_tokens for layer in layers if layer.token_bytes), default=0)
    return KvCost(widest, blocks, tokens, serving.max_model_len)


def state_bytes(state: State, shape: Shape, serving: Serving) -> int:
    """One request's state of one layer on one rank (vllm/model_executor/layers/mamba/mamba_utils.py, MambaStateShapeCalculator)."""
    ranks = serving.tensor_parallel
    # Groups that do not divide are given to every rank that has heads of them.
    groups = state.groups if state.groups % ranks == 0 else state.groups + ranks - state.groups
    channels = state.channels + 2 * groups * state.group_size
    matrix = DTYPE_BYTES.get(state.matrix_dtype or shape.dtype, shape.dtype_bytes)
    inputs = channels // ranks * (state.taps + serving.speculative_tokens) * shape.dtype_bytes
    return inputs + state.heads // ranks * state.rows * state.columns * matrix


def token_bytes(attention: Attention, shape: Shape, serving: Serving) -> int:
    """One token of one layer on one rank. Heads that are fewer than the ranks are on several of them."""
    each = DTYPE_BYTES.get(serving.kv_dtype, shape.dtype_bytes)
    heads = attention.heads if attention.latent else max(1, attention.heads // serving.tensor_parallel)
    return heads * (attention.key_dim + attention.value_dim) * each


def _stage(mixers: tuple[Mixer, ...], stages: int) -> tuple[Mixer, ...]:
    """The largest stage's."""
    return mixers[: ceil(len(mixers) / stages)]


def _draft(shape: Shape, serving: Serving) -> tuple[Mixer, ...]:
    whole = next((one for one in shape.mixers if isinstance(one, Attention) and one.window is None), None)
    return (whole,) * serving.draft_layers if whole is not None else ()


def _layers(mixers: Iterable[Mixer], shape: Shape, serving: Serving) -> list[_Layer]:
    mixers = list(mixers)
    attentions = [one for one in mixers if isinstance(one, Attention)]
    states = [one for one in mixers if isinstance(one, State)]
    sizes = LATENT_BLOCK_TOKENS if any(one.latent for one in attentions) else BLOCK_TOKENS
    block = serving.block_tokens or sizes[serving.platform]
    largest = max((state_bytes(one, shape, serving) for one in states), default=0)
    each = max((token_bytes(one, shape, serving) for one in attentions), default=0)
    if largest and each:
        # Blocks of attention grow until a state fits into one, and states are padded to them.
        block *= max(1, ceil(largest / (block * each)))
    padded = max(largest, block * each)
    found = []
    for one in mixers:
        if isinstance(one, State):
            found.append(_Layer(("state", padded), 0, padded, 0, None, False))
        else:
            size = token_bytes(one, shape, serving)
            kind = ("window", one.window, size) if one.window else ("all", size)
            found.append(_Layer(kind, size, block * size, block, one.window, one.latent))
    return found


def _unified(layers: list[_Layer]) -> list[_Layer]:
    """Pages of one size, unless all layers keep all tokens: then one group holds pages of several sizes."""
    largest = max(layer.page_bytes for layer in layers)
    if all(layer.token_bytes and layer.window is None for layer in layers):
        return [replace(layer, kind=("all",)) for layer in layers]
    found = []
    for layer in layers:
        if layer.page_bytes < largest and layer.token_bytes and largest % layer.page_bytes == 0:
            block = layer.block_tokens * (largest // layer.page_bytes)
            found.append(replace(layer, page_bytes=largest, block_tokens=block, kind=(*layer.kind, block)))
        else:
            found.append(replace(layer, page_bytes=largest))
    return found


def _groups(layers: list[_Layer]) -> list[list[_Layer]]:
    """Groups of equal length, so that their blocks come from one pool; what is missing in the last of a kind is padding."""
    kinds: dict[tuple[object, ...], list[_Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    if len(kinds) == 1:
        return [layers]
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    length = most if most < 1.5 * fewest else fewest
    found = []
    for members in kinds.values():
        found += [[members[0]] * length for _ in range(ceil(len(members) / length))]
    return found


def _blocks(layer: _Layer, serving: Serving) -> int:
    """That a request of max_model_len tokens takes of one group."""
    if not layer.token_bytes:
        # With prefix caching a state that can be returned to is kept beside the running one (mamba_cache_mode `align`).
        return (2 if serving.prefix_caching else 1) + serving.speculative_tokens
    if layer.window is None:
        return ceil(serving.max_model_len / layer.block_tokens)
    held = min(layer.window - 1 + serving.batches_in_flight * serving.max_num_batched_tokens, serving.max_model_len)
    return ceil(held / layer.block_tokens) + 1
