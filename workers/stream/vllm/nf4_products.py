"""NF4 layers on a GPU: which tile a product gets, and when a weight is decoded whole. It never holds a kernel.

Importing this module registers sparkd::packed_linear and sparkd::packed_experts for CUDA. bitsandbytes' gemm_4bit is not used: on an H100
it is as fast for one token (0.9 to 1.2 times), takes 1.6 to 3 times as long for 4 to 16, and its scales are float32, which cost a
quarter of a bit more for each weight in groups of 64.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workers.stream.vllm import nf4_kernels
from workers.stream.vllm.cpu_linear import LIBRARY
from workers.stream.vllm.cpu_moe import ACTIVATIONS
from workers.stream.vllm.nf4_kernels import Matrix, Routing
from workers.stream.vllm.symbols import symbol

# Up to this many tokens, experts are multiplied pair by pair: hardly two tokens have the same one, and nothing is sorted.
_PAIRED_TOKENS = 2
# From this many tokens on, a weight is decoded whole and left to torch: decoding it once costs less than once for each tile of tokens.
WHOLE_TOKENS = 65
# Weights decoded whole at a time: 128 MiB in 16 bits. Parts are whole multiples of 256 rows, because torch's kernels like those.
WHOLE_WEIGHTS = 1 << 26
# A GPU with many processors has something to do from about this many programs on.
_PROGRAMS = 1024
_ROWS, _COLUMNS = 64, 128


def _linear(x: Tensor, weight: Tensor, scale: Tensor, _divisor: Tensor | None, bias: Tensor | None, _form: str) -> Tensor:
    n, k = weight.shape[0], x.shape[-1]
    tokens = x.reshape(-1, k)
    words, table = weight.view(torch.int32), _table(x.dtype, x.device)
    if tokens.shape[0] == 1:
        return nf4_kernels.vectors(tokens, Matrix(words, scale, table, bias), 1).view(*x.shape[:-1], n)
    if tokens.shape[0] < WHOLE_TOKENS:
        out = nf4_kernels.linear(tokens, Matrix(words, scale, table, bias), _linear_tile(tokens.shape[0], n, k))
        return out.view(*x.shape[:-1], n)
    rows = max(256, -(-n // -(-n * k // WHOLE_WEIGHTS)) // 256 * 256)
    products = []
    for start in range(0, n, rows):
        part = slice(start, min(n, start + rows))
        whole = torch.empty((part.stop - start, k), dtype=x.dtype, device=x.device)
        nf4_kernels.decoded(Matrix(words[part], scale[part], table), whole)
        products.append(torch.nn.functional.linear(tokens, whole, None if bias is None else bias[part]))
    out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
    return out.view(*x.shape[:-1], n)


def _experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    _w13_divisor: Tensor | None,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    _w2_divisor: Tensor | None,
    w2_bias: Tensor | None,
    _w13_input: Tensor | None,
    _w2_input: Tensor | None,
    expert_map: Tensor | None,
    _form: str,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_on_input: bool,
) -> Tensor:
    top = topk_ids.shape[1]
    pairs = x.shape[0] * top
    table = _table(x.dtype, x.device)
    first, second = (
        Matrix(weight.view(torch.int32), scale, table, bias)
        for weight, scale, bias in ((w13, w13_scale, w13_bias), (w2, w2_scale, w2_bias))
    )
    weights = None if weight_on_input else topk_weights.float().flatten()
    if weight_on_input:
        x = x * topk_weights.to(x.dtype)  # vLLM does so for models with one expert a token
    if x.shape[0] <= _PAIRED_TOKENS:
        chosen = topk_ids.flatten() if expert_map is None else expert_map[topk_ids.flatten().long()]
        hidden = _activated(nf4_kernels.vectors(x, first, pairs, chosen), activation, alpha, beta, limit)
        down = nf4_kernels.vectors(hidden, second, pairs, chosen, weights)
    else:
        experts = w13.shape[0] if expert_map is None else expert_map.shape[0]
        tile = _experts_tile(pairs, experts)
        order = _sorted()(topk_ids.int(), tile[0], experts, expert_map)
        hidden = _activated(nf4_kernels.experts(x, first, Routing(order, pairs, top), tile), activation, alpha, beta, limit)
        down = nf4_kernels.experts(hidden, second, Routing(order, pairs, 1, weights), tile)
    return down.view(x.shape[0], top, -1).sum(1)


def _activated(up: Tensor, activation: str, alpha: float, beta: float, limit: float | None) -> Tensor:
    if activation == "silu" and limit is None:
        hidden = up.new_empty((up.shape[0], up.shape[1] // 2))
        torch.ops._C.silu_and_mul(hidden, up)
        return hidden
    return ACTIVATIONS[activation](up, alpha, beta, limit)


def _linear_tile(tokens: int, n: int, k: int) -> tuple[int, ...]:
    """(tokens, rows, columns, parts, warps, stages). Several programs share a row's columns where there are too few rows."""
    parts = 1
    while parts < 8 and -(-n // _ROWS) * parts < _PROGRAMS and parts * 2 * _COLUMNS <= k:
        parts *= 2
    if tokens <= 32:
        return 16 if tokens <= 16 else 32, _ROWS, _COLUMNS, parts, 2, 2
    return 64, _ROWS, _COLUMNS, parts, 4, 3


def _experts_tile(pairs: int, experts: int) -> tuple[int, ...]:
    """(tokens, rows, columns, warps, stages), by the tokens that an expert gets on average."""
    if pairs <= 4 * experts:
        return 16, _ROWS, _COLUMNS, 2, 2
    if pairs <= 24 * experts:
        return 32, _ROWS, _COLUMNS, 2, 3
    return 128, 128, _COLUMNS, 4, 3


@functools.cache
def _table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return nf4_kernels.table(dtype, device)


@functools.cache
def _sorted() -> Any:
    return symbol("vllm.model_executor.layers.fused_moe.moe_align_block_size", "moe_align_block_size")


LIBRARY.impl("packed_linear", _linear, "CUDA")
LIBRARY.impl("packed_experts", _experts, "CUDA")
