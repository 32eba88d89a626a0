"""Products with packed weights on a CPU: torch dequantizes each weight when it is used, and multiplies. Nothing dequantized is kept.

vLLM's own CPU kernels need AVX-512 (int4) or AMX (FP8 blocks, experts), and there are none for weight-only FP8, MXFP4 and NVFP4. Each
operator of torch that is defined here is one operation to torch.compile; `nf4_products.py` implements them for a GPU. Importing this module
imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.load.formats import quantizer
from workers.load.formats.fp8 import BLOCK
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import Format

# Rows of a weight that are dequantized at a time: an output head in float32 would be gigabytes.
ROWS = 2 * BLOCK


def product(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, form: str) -> Tensor:
    """x [..., K] times the transpose of a packed weight of N rows, float32 -> float32 [..., N].

    weight, scale: a quantizer's parts.
    divisor: NVFP4's global scale, float32 [1] or [N].
    form: a Format's name, that of its weights.
    """
    name = "weight" if form.startswith("fp8") else "weight_packed"
    scales = scale.split(ROWS // BLOCK if form == "fp8_block" else ROWS)
    divisors = (x.new_ones(1) if divisor is None else divisor).expand(weight.shape[0]).split(ROWS)
    products = []
    for part in zip(weight.split(ROWS), scales, divisors, strict=True):
        named = dict(zip((name, "weight_scale", "weight_global_scale"), part, strict=True))
        products.append(F.linear(x, quantizer(Format(form)).dequantize(named, torch.float32)))
    return torch.cat(products, dim=-1)


def _packed_linear(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    """`product` in x's dtype."""
    out = product(x.float(), weight, scale, divisor, form)
    return (out if bias is None else out + bias).to(x.dtype)


def _packed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Sequence[Any],
    w2: Sequence[Any],
    expert_map: Tensor | None,
    form: str,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_on_input: bool,
) -> Tensor:
    """x [tokens, hidden] -> the weighted sum of the experts that are on this rank, in x's dtype.

    topk_weights, topk_ids: [tokens, k], ids of all ranks.
    w13, w2: packed weight, scale, NVFP4's divisor, bias, divisor of the input, of all experts of this rank; the last three may be None.
    expert_map: id -> expert of this rank, -1 for another rank's.
    weight_on_input: the router's weight scales x, not the result.
    """
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    halves = 1 if activation.endswith("_no_mul") else 2
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in local[local >= 0].unique().tolist():
        tokens, slots = (local == expert).nonzero(as_tuple=True)
        weights = topk_weights[tokens, slots].float().unsqueeze(1)
        rows = x[tokens].float()
        up = _projected(rows * weights if weight_on_input else rows, w13, expert, halves, form)
        down = _projected(ACTIVATIONS[activation](up, alpha, beta, limit), w2, expert, 1, form)
        out.index_add_(0, tokens, down if weight_on_input else down * weights)
    return out.to(x.dtype)


def _projected(rows: Tensor, parts: Sequence[Any], expert: int, halves: int, form: str) -> Tensor:
    """One projection of an expert. Its halves, gate and up, have NVFP4 divisors and grids of 128x128 blocks of their own."""
    weight, scale = parts[0][expert], parts[1][expert]
    divisor, bias, input_divisor = (None if part is None else part[expert] for part in parts[2:])
    if input_divisor is not None:
        rows = rounded_activations(rows, input_divisor.max())
    divisors = [None] * halves if divisor is None else divisor.view(-1).chunk(halves)
    packed = zip(weight.chunk(halves), scale.chunk(halves), divisors, strict=True)
    out = torch.cat([product(rows, *half, form) for half in packed], dim=1)
    return out if bias is None else out + bias


def _silu(x: Tensor, _alpha: float, _beta: float, limit: float | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = _clamped(gate, up, limit)
    return F.silu(gate) * up


def _swiglu_oai(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglu_step(x: Tensor, _alpha: float, _beta: float, limit: float | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=limit) * up.clamp(min=None if limit is None else -limit, max=limit)


def _clamped(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(min=-limit, max=limit))


# The meaning of vLLM's MoEActivation values. Its own functions (fused_moe/activation.py) are operators that its CPU build mostly leaves
# out.
ACTIVATIONS: dict[str, Callable[[Tensor, float, float, float | None], Tensor]] = {
    "silu": _silu,
    "gelu": lambda x, *_: F.gelu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1],
    "gelu_tanh": lambda x, *_: F.gelu(x.chunk(2, dim=-1)[0], approximate="tanh") * x.chunk(2, dim=-1)[1],
    "swigluoai": lambda x, *more: _swiglu_oai(x[..., ::2], x[..., 1::2], *more),
    "swigluoai_uninterleave": lambda x, *more: _swiglu_oai(*x.chunk(2, dim=-1), *more),
    "swiglustep": _swiglu_step,
    "silu_no_mul": lambda x, *_: F.silu(x),
    "gelu_no_mul": lambda x, *_: F.gelu(x),
    "gelu_tanh_no_mul": lambda x, *_: F.gelu(x, approximate="tanh"),
    "relu2_no_mul": lambda x, *_: F.relu(x).square_(),
}

LIBRARY = torch.library.Library("sparkd", "FRAGMENT")
LIBRARY.define("rounded_activations(Tensor x, Tensor divisor) -> Tensor")
LIBRARY.impl("rounded_activations", rounded_activations, "CPU")
torch.library.register_fake("sparkd::rounded_activations", lambda x, _divisor: torch.empty_like(x), lib=LIBRARY)
LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor scale, Tensor? divisor, Tensor? bias, str form) -> Tensor")
LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("sparkd::packed_linear", lambda x, weight, *_more: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=LIBRARY)
LIBRARY.define(
    "packed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor?[] w13, Tensor?[] w2, Tensor? expert_map, str form, "
    "str activation, float alpha, float beta, float? limit, bool weight_on_input) -> Tensor"
)
LIBRARY.impl("packed_experts", _packed_experts, "CPU")
torch.library.register_fake("sparkd::packed_experts", lambda x, *_more: torch.empty_like(x), lib=LIBRARY)
