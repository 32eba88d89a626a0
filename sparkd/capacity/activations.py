"""Owns the bytes of the largest step: a layer's widest block, and torch's reserve. Never measures; a measured peak overrides it.

Read from vLLM 0.26 (vllm/model_executor/models and layers): a layer holds its input, its residual and the normed row until its block is
done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sparkd.capacity.kv_cache import DRAFTED_REQUESTS, Serving
from sparkd.capacity.weights import Inventory
from sparkd.models.shape import Attention, RecurrentState, Shape, text_config

MIB = 1 << 20
# torch keeps segments that no later block fits into: beside what is held at once so much of it, as eleven engines on an H200 reserved it
# (tests/sparkd/capacity/test_activations.py; one by one 0.1 to 0.7).
FRAGMENTS = 0.6
# cuBLAS's own workspace, from torch's allocator, as torch sets it for Hopper and later (aten/src/ATen/cuda/CublasHandlePool.cpp,
# parseChosenWorkspaceSize: 8 times 4 MiB).
CUBLAS_BYTES = 32 * MIB
# The input, the residual and the normed row.
HELD_ROWS = 3
# The sampler's copies of a row of logits: float32, sorted values, sorted indices in 64 bits, probabilities; and those of a row that prompt
# log-probabilities are computed for, so many rows at a time (workers/vllm/kv/prompt_logprobs.py).
LOGITS_BYTES, LOGPROB_BYTES, LOGPROB_ROWS = 4 + 4 + 8 + 4, 4 + 4, 128
# The sampler's kernel keeps a row of float32 for each request, of at most so many processors (v1/sample/ops/topk_topp_triton.py).
PROCESSORS = 132
# Their norms multiply by one plus a weight in float32, which only a compiler makes one kernel of: three results in float32 at once
# (layernorm.py, GemmaRMSNorm).
_FLOAT_NORMS, _FLOAT_ROWS = ("Gemma", "Qwen3Next", "Qwen3_5"), 3 * 2
# Tokens that a scan of states has in one piece, where the configuration has no word on it (fla/ops/chunk.py; Mamba2Config.chunk_size).
_DELTA_CHUNK, _MAMBA_CHUNK = 64, 256
# No width of a published model comes near it.
_MOST = 1 << 24


class BlockBytes(NamedTuple):
    """Bytes that one block of a layer holds at once on one rank: of the step's tokens, and of the states of its requests."""

    tokens: int
    states: int = 0


def step_bytes(inventory: Inventory, serving: Serving, *, eager: bool) -> int:
    """The bytes of a step of max_num_batched_tokens, beside weights and cache. eager: without a compiler."""
    shape, text = inventory.shape, text_config(inventory.checkpoint.config)
    row = serving.max_num_batched_tokens * shape.dtype_bytes
    is_float = eager and shape.architecture.startswith(_FLOAT_NORMS)
    routed = {part.layer for part in inventory.parts if part.kind == "expert"}
    is_dense = any(part.kind == "mlp" and part.layer not in routed for part in inventory.parts)
    blocks = [_feed(shape, text, serving, is_dense=is_dense), *_mixers(shape, text, serving, is_float=is_float)]
    held = HELD_ROWS * row * shape.hidden + max(block.tokens for block in blocks)
    states = max(block.states for block in blocks)
    kept = _workspace(shape, text, serving) if routed else 0
    if serving.platform == "cuda":
        kept += CUBLAS_BYTES + 4 * shape.vocab * min(1 << (serving.max_num_seqs - 1).bit_length(), PROCESSORS)
        kept += _context(shape, text, serving)
    return kept + max(int((1 + FRAGMENTS) * held) + states, held + _sampling(shape, serving))


def _sampling(shape: Shape, serving: Serving) -> int:
    """A row of logits for each request and each token that was proposed to it, or those of prompt log-probabilities."""
    rows = max(serving.max_num_seqs, min(serving.max_num_seqs, DRAFTED_REQUESTS) * (1 + serving.speculative_tokens))
    return shape.vocab * max(rows * (shape.dtype_bytes + LOGITS_BYTES), LOGPROB_ROWS * (shape.dtype_bytes + LOGPROB_BYTES))


def _feed(shape: Shape, text: Mapping[str, Any], serving: Serving, *, is_dense: bool) -> BlockBytes:
    """The MLP, with its gate and their product; beside routed experts the shared ones and both results."""
    own = _number(text, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    shared = (_number(text, "n_shared_experts") or int(own > 0)) * (own or shape.expert_width)
    inner = (_gates(text) + 1) * max(shape.intermediate if is_dense else 0, shared) // serving.tensor_parallel
    return BlockBytes(serving.max_num_batched_tokens * shape.dtype_bytes * (inner + (0 if is_dense else 2 * shape.hidden)))


def _workspace(shape: Shape, text: Mapping[str, Any], serving: Serving) -> int:
    """Bytes of the workspace that all expert layers share. vLLM never frees it (v1/worker/workspace.py; workspace_shapes of triton_moe.py
    and marlin_moe.py)."""
    inner = max(1, shape.expert_width // serving.tensor_parallel)
    width = max(inner, shape.hidden) + max(_gates(text) * inner, shape.hidden)
    return serving.max_num_batched_tokens * shape.dtype_bytes * shape.active_experts * width


def _mixers(shape: Shape, text: Mapping[str, Any], serving: Serving, *, is_float: bool) -> Iterator[BlockBytes]:
    row, ranks = serving.max_num_batched_tokens * shape.dtype_bytes, serving.tensor_parallel
    heads = max(1, shape.heads // ranks)
    for mixer in dict.fromkeys(mixer for mixer in shape.mixers if mixer is not None):
        if isinstance(mixer, RecurrentState):
            yield (_delta if mixer.key_heads else _mamba)(mixer, shape, text, serving)
        elif mixer.latent:
            # The latent query and keys, the query, the result; keys and values of all heads, keys with their rotary part, the kernel's own.
            nope, rotary, value = _latent(text)
            latent = 2 * _number(text, "q_lora_rank") + 2 * mixer.key_dim - rotary
            yield BlockBytes(row * (latent + heads * (3 * nope + 2 * rotary + 3 * value)))
        else:
            query, keys = heads * mixer.key_dim, max(1, mixer.heads // ranks) * (mixer.key_dim + mixer.value_dim)
            normed = _FLOAT_ROWS * max(query, shape.hidden) if is_float else heads * mixer.value_dim + shape.hidden
            yield BlockBytes(row * (query + keys + normed))


def _mamba(state: RecurrentState, shape: Shape, text: Mapping[str, Any], serving: Serving) -> BlockBytes:
    """mamba_mixer2.py and mamba/ops/ssd_combined.py: the projection and the convolution with what they make, and of each piece the state
    before and after it, in float32; of each request the state that it begins and ends with."""
    ranks = serving.tensor_parallel
    heads, channels = state.heads // ranks, state.channels // ranks
    convolved = channels + 2 * max(1, state.groups // ranks) * state.group_size
    matrix = 4 * heads * state.rows * state.columns
    pieces = _pieces(serving, _number(text, "chunk_size", "mamba_chunk_size") or _MAMBA_CHUNK)
    tokens = serving.max_num_batched_tokens * shape.dtype_bytes * (2 * channels + 2 * convolved + heads)
    return BlockBytes(tokens + 2 * pieces * matrix, 2 * _requests(serving) * matrix)


def _delta(state: RecurrentState, shape: Shape, _text: Mapping[str, Any], serving: Serving) -> BlockBytes:
    """mamba/gdn/qwen_gdn_linear_attn.py and flash_linear_attention/ops/chunk.py: projections and their parts in order (keys and queries
    eight times, values nine), the inverse of a piece's triangle, and a matrix for each piece; of each request two in float32."""
    ranks, width = serving.tensor_parallel, shape.dtype_bytes
    heads, keys = state.heads // ranks, max(1, state.key_heads // ranks) * state.columns
    matrix = heads * state.rows * state.columns
    columns = 8 * keys + 9 * heads * state.rows + heads * (_DELTA_CHUNK + 8 + state.columns)
    tokens = width * (serving.max_num_batched_tokens * columns + _pieces(serving, _DELTA_CHUNK) * matrix)
    return BlockBytes(tokens, 2 * 4 * _requests(serving) * matrix)


def _context(shape: Shape, text: Mapping[str, Any], serving: Serving) -> int:
    """Latent attention multiplies the latent vectors of earlier tokens into keys and values of all heads, so many at a time
    (mla_attention.py, determine_chunked_prefill_workspace_size and _compute_prefill_context), and keeps a place to gather them in."""
    latent = next((mixer for mixer in shape.mixers if isinstance(mixer, Attention) and mixer.latent), None)
    if latent is None:
        return 0
    tokens = max(min(8 * serving.max_model_len, 64 << 10), serving.max_num_seqs)
    nope, rotary, value = _latent(text)
    heads = max(1, shape.heads // serving.tensor_parallel)
    return tokens * shape.dtype_bytes * (heads * (nope + value + nope + rotary) + latent.key_dim)


def _requests(serving: Serving) -> int:
    return min(serving.max_num_seqs, serving.max_num_batched_tokens)


def _pieces(serving: Serving, size: int) -> int:
    """The most pieces of `size` tokens in one batch. The last piece of each request may be shorter."""
    tokens = serving.max_num_batched_tokens
    return -(-tokens // size) + min(serving.max_num_seqs, tokens // size)


def _gates(text: Mapping[str, Any]) -> int:
    """Projections up of an MLP: the gate is one."""
    return 1 if text.get("mlp_hidden_act") == "relu2" else 2


def _latent(text: Mapping[str, Any]) -> tuple[int, int, int]:
    """Elements of a head's keys without and with a position, and of its values."""
    return _number(text, "qk_nope_head_dim"), _number(text, "qk_rope_head_dim"), _number(text, "v_head_dim")


def _number(text: Mapping[str, Any], *keys: str) -> int:
    """The first that is a count, 0 where none is."""
    values = (text.get(key) for key in keys)
    return next((value for value in values if type(value) is int and 0 < value < _MOST), 0)
