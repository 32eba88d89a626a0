"""NF4 layers on a GPU: the tile that a product gets, and when a weight is decoded whole.

Importing this module registers sparkd::packed_linear and sparkd::packed_experts for CUDA. bitsandbytes' gemm_4bit is not used: on an H100
it takes 1.3 to 4 times as long for 1 to 16 tokens, and its scales are float32, which cost a quarter of a bit more for each weight in groups
of 64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from sparkd.errors import CheckpointError
from workers.vllm.load import nf4_kernels
from workers.vllm.load.cpu_kernels import ACTIVATIONS, LIBRARY
from workers.vllm.load.nf4_kernels import Matrix, Routing
from workers.vllm.symbols import symbol

# Up to this many tokens, experts are multiplied pair by pair: hardly two tokens have the same one, and nothing is sorted.
_PAIRED_TOKENS = 4
# From this many tokens on, a weight is decoded whole and left to torch: decoding it once costs less than once for each tile of tokens.
WHOLE_TOKENS = 257
# Weights decoded whole at a time: 128 MiB in 16 bits. Parts are whole multiples of 256 rows, because torch's kernels like those.
WHOLE_WEIGHTS = 1 << 26


def _linear(x: Tensor, weight: Tensor, scale: Tensor, _divisor: Tensor | None, bias: Tensor | None, _form: str) -> Tensor:
    n, k = weight.shape[0], x.shape[-1]
    tokens = _in_two_bytes(x).reshape(-1, k)
    if tokens.shape[0] < WHOLE_TOKENS:
        return nf4_kernels.linear(tokens, Matrix(weight, scale, bias), _linear_tile(tokens.shape[0], n, k)).view(*x.shape[:-1], n)
    rows = n if n * k <= WHOLE_WEIGHTS else max(256, -(-n // -(-n * k // WHOLE_WEIGHTS)) // 256 * 256)
    products = []
    for start in range(0, n, rows):
        part = slice(start, min(n, start + rows))
        whole = torch.empty((part.stop - start, k), dtype=x.dtype, device=x.device)
        nf4_kernels.decoded(Matrix(weight[part], scale[part]), whole)
        products.append(torch.nn.functional.linear(tokens, whole, None if bias is None else bias[part]))
    out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    return out.view(*x.shape[:-1], n)


def _in_two_bytes(x: Tensor) -> Tensor:
    if x.dtype.itemsize != 2:
        raise CheckpointError(f"nf4 computes in bfloat16 or float16 on a GPU, not in {x.dtype}", cure="Leave `dtype` out")
    return x


def _experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Sequence[Any],
    w2: Sequence[Any],
    expert_map: Tensor | None,
    _form: str,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_on_input: bool,
) -> Tensor:
    top = topk_ids.shape[1]
    pairs = _in_two_bytes(x).shape[0] * top
    first, second = (Matrix(weight, scale, bias) for weight, scale, _divisor, bias, _input_divisor in (w13, w2))
    weights = None if weight_on_input else topk_weights.float().flatten()
    if weight_on_input:
        x = x * topk_weights.to(x.dtype)  # vLLM does so for models with one expert a token
    experts = first.packed.shape[0] if expert_map is None else expert_map.shape[0]
    tile = _experts_tile(pairs, experts)
    order: tuple[Tensor, Tensor, Tensor] | Tensor
    if x.shape[0] <= _PAIRED_TOKENS:
        order = topk_ids.int().flatten() if expert_map is None else expert_map[topk_ids.flatten().long()]
    else:
        order = _sorted()(topk_ids.int(), tile[0], experts, expert_map)
    hidden = _activated(nf4_kernels.experts(x, first, Routing(order, pairs, top), tile), activation, alpha, beta, limit)
    down = nf4_kernels.experts(hidden, second, Routing(order, pairs, 1, weights), tile)
    return down.view(x.shape[0], top, second.packed.shape[1]).sum(1)


def _activated(up: Tensor, activation: str, alpha: float, beta: float, limit: float | None) -> Tensor:
    if activation == "silu" and limit is None:
        hidden = up.new_empty((up.shape[0], up.shape[1] // 2))
        torch.ops._C.silu_and_mul(hidden, up)
        return hidden
    return ACTIVATIONS[activation](up, alpha, beta, limit)


def _linear_tile(tokens: int, n: int, k: int) -> tuple[int, ...]:
    """(tokens, rows, columns, parts, warps, stages), the fastest of those tried on an H100. Several programs share a row's columns where
    there are fewer programs than that GPU needs."""
    if tokens <= 8:
        return _shared((8, 32, 256, 2, 3), tokens, n, k, programs=448)
    if tokens <= 16:
        return _shared((16, 64, 128, 2, 3), tokens, n, k, programs=1024)
    return _shared((min(128, triton.next_power_of_2(tokens)), 64, 128, 4, 3), tokens, n, k, programs=224)


def _shared(tile: tuple[int, int, int, int, int], tokens: int, n: int, k: int, programs: int) -> tuple[int, ...]:
    """The tile (tokens, rows, columns, warps, stages) with the parts that give so many programs."""
    wide, rows, columns, warps, stages = tile
    alone = -(-n // rows) * -(-tokens // wide)
    parts = 1
    while parts < 8 and alone * parts < programs and parts * 2 * columns <= k:
        parts *= 2
    return wide, rows, columns, parts, warps, stages


def _experts_tile(pairs: int, experts: int) -> tuple[int, ...]:
    """(tokens, rows, columns, warps, stages), by the tokens that an expert gets on average."""
    average = pairs / experts
    for tokens in (8, 16, 32, 64):
        if average <= 0.75 * tokens:
            return tokens, 64, 128, 4, 3
    return 128, 64, 128, 4, 3


@functools.cache
def _sorted() -> Any:
    return symbol("moe_align_block_size")


LIBRARY.impl("packed_linear", _linear, "CUDA")
LIBRARY.impl("packed_experts", _experts, "CUDA")
