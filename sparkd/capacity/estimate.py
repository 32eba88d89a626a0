"""A rough estimate of what a model takes beside its weights, where neither vLLM nor an earlier start tells. Its numbers are a guess."""

from __future__ import annotations

from collections import Counter
from math import ceil

from sparkd.capacity.kv_cache import KvLayout, Serving
from sparkd.checkpoint.shape import DTYPE_BYTES, Attention, Shape
from sparkd.hardware import Hardware
from sparkd.units import GIB

MIB = 1 << 20
# Block sizes of attention kernels, tokens (vllm/v1/attention/backends: get_supported_kernel_block_sizes; platforms/cpu.py for a CPU).
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
# From this many requests on vLLM drafts nothing: sparkd's recipes set this limit.
DRAFTED_REQUESTS = 32
# CUDA's context, cuBLAS workspaces and what else the driver holds for a process: 0.35 GiB as vLLM logged it ("non-torch") for one rank.
CONTEXT_BYTES = 350 * MIB
# NCCL's buffers and channels, for each rank of a group: 0.5 to 1 GiB in the logs of two Sparks.
NCCL_BYTES = 768 * MIB
# The engine's processes on the host: Python, torch and vLLM three times (API, core, worker); 1.7 GiB together as measured on a CPU build,
# a CUDA build's libraries add about as much.
PROCESS_BYTES = {"cuda": 3 * GIB, "cpu": int(1.7 * GIB)}
# FULL_AND_PIECEWISE graphs of vLLM: 0.26 GiB were logged for 51 sizes of an 87 GiB model; a share for each layer and size.
GRAPH_LAYER_BYTES = 110_000
LARGEST_GRAPH = 512
# Tables of sines of another length, masks and the like, that a class keeps beside its parameters, in small models too.
TABLE_BYTES = 16 * MIB
# Rows of the hidden width that a step holds for each token, with what torch reserves: 20 to 75 for the models in the recipes.
STEP_ROWS = 40
# The sampler's copies of a row of logits: float32, sorted values, sorted indices in 64 bits, probabilities.
LOGITS_BYTES = 4 + 4 + 8 + 4
# Encoders of images and sound are profiled with their largest input; 1 GiB covers those of the models in the recipes.
ENCODER_BYTES = GIB


def kv_layout(shape: Shape, serving: Serving) -> KvLayout:
    """A rough estimate of the cache of one rank: keys and values of all layers, those with a window in groups of their own, and states in
    blocks of that size. max_model_len of `serving` is not looked at."""
    whole = next((one for one in shape.attentions if one is not None and one.window is None), None)
    sizes: Counter[int | None] = Counter()
    for one in (*shape.attentions, *[whole] * serving.draft_layers):
        if one is not None:
            sizes[one.window] += token_bytes(one, shape, serving)
    block, state_bytes = serving.block_tokens or BLOCK_TOKENS[serving.platform], shape.state_bytes // serving.tensor_parallel
    each = min(sizes.values(), default=ceil(state_bytes / block))
    if not each:
        return KvLayout(0, (), serving)
    groups = [(block, window, False) for window, size in sizes.items() for _ in range(ceil(size / each))]
    groups += [(0, None, False)] * ceil(state_bytes / (each * block))
    return KvLayout(ceil(each / serving.pipeline_parallel) * block, tuple(groups), serving)


def token_bytes(attention: Attention, shape: Shape, serving: Serving) -> int:
    """One token of one layer on one rank. Heads that are fewer than the ranks are on several of them."""
    heads = attention.heads if attention.latent else max(1, attention.heads // serving.tensor_parallel)
    return heads * (attention.key_dim + attention.value_dim) * DTYPE_BYTES.get(serving.kv_dtype, shape.dtype_bytes)


def step_bytes(shape: Shape, serving: Serving, *, images: bool) -> int:
    """The largest step, beside weights and cache. A step of single tokens takes what its logits do.

    images: whether the model has an encoder.
    """
    rows = max(serving.max_num_seqs, min(serving.max_num_seqs, DRAFTED_REQUESTS) * (1 + serving.speculative_tokens))
    batch = STEP_ROWS * serving.max_num_batched_tokens * shape.hidden * shape.dtype_bytes
    return max(batch, rows * shape.vocab * (shape.dtype_bytes + LOGITS_BYTES)) + (ENCODER_BYTES if images else 0)


def graph_bytes(shape: Shape, serving: Serving, hardware: Hardware, *, eager: bool) -> int:
    """CUDA graphs of one rank."""
    if eager or hardware.platform != "cuda":
        return 0
    return GRAPH_LAYER_BYTES * graph_sizes(serving) * ceil(shape.layers / serving.pipeline_parallel)


def context_bytes(hardware: Hardware, ranks: int) -> int:
    """The bytes that CUDA and NCCL hold on each of `ranks`."""
    if hardware.platform != "cuda":
        return 0
    return CONTEXT_BYTES + (NCCL_BYTES if ranks > 1 else 0)


def process_bytes(hardware: Hardware) -> int:
    """The engine's processes. On a discrete GPU they are in the host's memory, which is not counted."""
    return PROCESS_BYTES[hardware.platform] if hardware.unified or hardware.platform != "cuda" else 0


def graph_sizes(serving: Serving) -> int:
    """How many sizes of a batch vLLM captures: 1, 2, 4, each 8 up to 256 and each 16 up to twice what max_num_seqs requests decode at once
    (vllm/config/vllm.py, _set_cudagraph_sizes; a data center's Blackwell goes to 1,024)."""
    most = min(2 * serving.max_num_seqs * (1 + serving.speculative_tokens), serving.max_num_batched_tokens, LARGEST_GRAPH)
    return sum(size <= most for size in (1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH + 1, 16)))


def weights_doubt(weight_bytes: int) -> int:
    """By how much a guess of the weights may be too low."""
    return weight_bytes // 50 + TABLE_BYTES


def cache_doubt(cache_bytes: int) -> int:
    """By how much a guess of the cache may be too low."""
    return cache_bytes // 10
