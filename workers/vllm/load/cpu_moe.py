"""Experts on vLLM's CPU backend that stay packed: those that are hit are decoded, a few rows at a time. Never routes, never adds up ranks.

vLLM's own 4-bit and FP8 experts on a CPU need AMX, and none of them is NVFP4 or weight-only FP8. Importing this module imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from sparkd.errors import CheckpointError
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import Format, fitting
from workers.vllm.load.cpu_linear import BLOCK, LIBRARY, matmul
from workers.vllm.symbols import symbol

FusedMoEMethodBase: Any = symbol("FusedMoEMethodBase")


def packed_moe_method(form: Format, layer: torch.nn.Module) -> PackedMoEMethod | None:
    """The method that serves a RoutedExperts of this format on a CPU, or on a GPU for nf4; None where vLLM's own compressed-tensors method
    does.

    layer: as RoutedExperts.__init__ hands it to a quantization configuration: with moe_config, activation and the swiglu_* values. Raises
    CheckpointError for an activation that is not built.
    """
    if form.name == "bf16" or (form.name == "int4" and _has_stock_int4(form, layer)):
        return None
    return PackedMoEMethod(form, layer.moe_config, Activation.of(layer))


@dataclass(frozen=True, slots=True)
class Activation:
    """name: a MoEActivation's value. alpha, beta, limit: of the clamped SwiGLU; limit None clamps nothing."""

    name: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @staticmethod
    def of(layer: torch.nn.Module) -> Activation:
        """The layer's values, then its moe_config's, then vLLM's defaults, as its ApplyMoEActivationConfig. Raises CheckpointError."""
        name = str(getattr(layer.activation, "value", layer.activation))
        if name not in ACTIVATIONS:
            raise CheckpointError(
                f"experts with the activation {name} cannot be served quantized on a CPU",
                tensor=layer.layer_name,
                cure="Keep them in bf16, or serve them on a GPU",
            )

        def said(key: str) -> Any:
            values = (getattr(place, f"swiglu_{key}", None) for place in (layer, layer.moe_config))
            return next((value for value in values if value is not None), default[key])

        default = {"alpha": 1.702, "beta": 1.0, "limit": 7.0} if name == "swigluoai" else {"alpha": 1.0, "beta": 0.0, "limit": None}
        if name == "swiglustep":
            default["limit"] = 7.0
        return Activation(name, said("alpha"), said("beta"), said("limit"))


_SCALES = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.uint8, "nf4": torch.bfloat16}


class PackedMoEMethod(FusedMoEMethodBase):
    """Parameters as vLLM's compressed-tensors methods make them, so that its weight loaders fill them; nothing is repacked."""

    # GptOssRoutedExperts.weight_loader takes a method that says so for one whose experts arrive packed; it does so for every format here.
    weight_dtype = "mxfp4"

    def __init__(self, form: Format, moe_config: Any, activation: Activation) -> None:
        super().__init__(moe_config)
        self.form = form
        self.activation = activation
        self.group_size = form.group or 1

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """One rank's experts. Raises CheckpointError where groups do not fit its share."""
        width = intermediate_size_per_partition
        self._check(layer, hidden_size, width)
        halves = 2 if self.moe.is_act_and_mul else 1
        for half, n, k, parts in (("w13", halves * width, hidden_size, halves), ("w2", hidden_size, width, 1)):
            for name, (kind, shape, dtype) in self._parameters(n, k, parts).items():
                parameter = Parameter(torch.empty((num_experts, *shape), dtype=dtype), requires_grad=False)
                for key, value in {**attributes, "is_transposed": False, "quant_method": kind}.items():
                    setattr(parameter, key, value)
                layer.register_parameter(f"{half}_{name}", parameter)
            if self.moe.has_bias:
                bias = Parameter(torch.zeros((num_experts, n), dtype=params_dtype), requires_grad=False)
                for key, value in attributes.items():
                    setattr(bias, key, value)
                layer.register_parameter(f"{half}_bias", bias)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: vLLM's modular kernels, which would read it, are not used."""

    def apply(self, layer: torch.nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_shared: Any, **_more: Any) -> Tensor:
        """x [tokens, hidden] -> the weighted sum of this rank's part of the experts that are hit; the layer adds the rest."""
        tensors = [getattr(layer, f"{half}_{name}", None) for half in ("w13", "w2") for name in (*self._names(), "bias")]
        return torch.ops.sparkd.packed_experts(
            x,
            topk_weights,
            topk_ids,
            *tensors,
            *(getattr(layer, f"{half}_input_global_scale", None) for half in ("w13", "w2")),
            layer.expert_map,
            self.form.weight_name,
            self.activation.name,
            self.activation.alpha,
            self.activation.beta,
            self.activation.limit,
            bool(layer.apply_router_weight_on_input),
        )

    def _names(self) -> tuple[str, str, str]:
        return "weight" if self.form.name.startswith("fp8") else "weight_packed", "weight_scale", "weight_global_scale"

    def _parameters(self, n: int, k: int, parts: int) -> dict[str, tuple[str, tuple[int, ...], torch.dtype]]:
        """Suffix -> (how vLLM's weight loader shards it, shape of one expert, dtype). parts: matrices that are fused, gate and up."""
        match self.form.name:
            case "fp8":
                return {"weight": ("", (n, k), torch.float8_e4m3fn), "weight_scale": ("channel", (n, 1), torch.float32)}
            case "fp8_block":
                blocks = (parts * -(-n // parts // BLOCK), -(-k // BLOCK))
                return {"weight": ("", (n, k), torch.float8_e4m3fn), "weight_scale": ("block", blocks, torch.float32)}
            case "int4":
                return {
                    "weight_packed": ("group", (n, k // 8), torch.int32),
                    "weight_scale": ("group", (n, k // self.group_size), torch.bfloat16),
                    "weight_shape": ("", (2,), torch.int64),
                }
        parameters: dict[str, tuple[str, tuple[int, ...], torch.dtype]] = {
            "weight_packed": ("", (n, k // 2), torch.uint8),
            "weight_scale": ("group", (n, k // self.group_size), _SCALES[self.form.weight_name]),
        }
        if self.form.weight_name == "nvfp4":
            parameters["weight_global_scale"] = ("tensor", (parts,) if parts > 1 else (), torch.float32)
        if self.form.rounds_activations:
            parameters["input_global_scale"] = parameters["weight_global_scale"]
        return parameters

    def _check(self, layer: torch.nn.Module, hidden: int, width: int) -> None:
        group = BLOCK if self.form.name == "fp8_block" and self.moe.tp_size > 1 else self.group_size
        if odd := next((size for size in (hidden, width) if size % group), None):
            raise CheckpointError(
                f"{odd} columns of its experts on one rank are not a multiple of the {group} that share a scale in {self.form.spelling}",
                tensor=layer.layer_name,
                cure="Lower the tensor-parallel size, turn expert parallelism on, or give the experts "
                f"{fitting(group, odd, self.form.name)}",
            )


def experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    up: Callable[[Tensor, int], Tensor],
    down: Callable[[Tensor, int], Tensor],
    expert_map: Tensor | None,
    weight_on_input: bool,
) -> Tensor:
    """x [tokens, hidden] float32 -> float32 [tokens, hidden]; each expert that is hit is called once, with all its tokens.

    up, down: (tokens, local expert) -> what that expert's projection gives, up with its activation. topk_weights, topk_ids: [tokens, k],
    ids of all ranks. expert_map: id -> local expert, -1 for another rank's. weight_on_input: the router's weight scales x, not the result.
    """
    local = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    order = local.flatten().argsort(stable=True)
    hit, counts = torch.unique_consecutive(local.flatten()[order], return_counts=True)
    out = torch.zeros_like(x)
    for expert, places in zip(hit.tolist(), order.split(counts.tolist()), strict=True):
        if expert < 0:
            continue
        tokens = places // topk_ids.shape[1]
        weights = topk_weights.flatten()[places].float().unsqueeze(1)
        rows = x[tokens] * weights if weight_on_input else x[tokens]
        product = down(up(rows, expert), expert)
        out.index_add_(0, tokens, product if weight_on_input else product.mul_(weights))
    return out


def _packed_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w13_divisor: Tensor | None,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_scale: Tensor,
    w2_divisor: Tensor | None,
    w2_bias: Tensor | None,
    w13_input: Tensor | None,
    w2_input: Tensor | None,
    expert_map: Tensor | None,
    form: str,
    activation: str,
    alpha: float,
    beta: float,
    limit: float | None,
    weight_on_input: bool,
) -> Tensor:
    act = ACTIVATIONS[activation]

    def up(rows: Tensor, expert: int) -> Tensor:
        divisor = None if w13_divisor is None else _by_row(w13_divisor[expert], w13.shape[1])
        rows = rows if w13_input is None else rounded_activations(rows, w13_input[expert].max())
        product = _gate_up(rows, w13[expert], w13_scale[expert], divisor, form, x.dtype)
        return act(product if w13_bias is None else product.add_(w13_bias[expert]), alpha, beta, limit)

    def down(rows: Tensor, expert: int) -> Tensor:
        rows = rows if w2_input is None else rounded_activations(rows, w2_input[expert])
        product = matmul(rows, w2[expert], w2_scale[expert], None if w2_divisor is None else w2_divisor[expert].view(1), form, x.dtype)
        return product if w2_bias is None else product.add_(w2_bias[expert])

    return experts(x.float(), topk_weights, topk_ids, up, down, expert_map, weight_on_input).to(x.dtype)


def _packed_experts_shape(x: Tensor, *_more: Any) -> Tensor:
    return torch.empty_like(x)


LIBRARY.define(
    "packed_experts(Tensor x, Tensor topk_weights, Tensor topk_ids, "
    "Tensor w13, Tensor w13_scale, Tensor? w13_divisor, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? w2_divisor, Tensor? w2_bias, "
    "Tensor? w13_input, Tensor? w2_input, "
    "Tensor? expert_map, str form, str activation, float alpha, float beta, float? limit, bool weight_on_input) -> Tensor"
)
LIBRARY.impl("packed_experts", _packed_experts, "CPU")
torch.library.register_fake("sparkd::packed_experts", _packed_experts_shape, lib=LIBRARY)


def _gate_up(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """x times gate and up. Their 128x128 blocks are two grids: where the first ends short, the second starts inside one of the whole."""
    n = weight.shape[0]
    if form == "fp8_block" and scale.shape[0] != -(-n // BLOCK):
        pairs = zip(weight.chunk(2), scale.chunk(2), strict=True)
        return torch.cat([matmul(x, half, scales, None, form, dtype) for half, scales in pairs], dim=1)
    return matmul(x, weight, scale, divisor, form, dtype)


def _by_row(divisors: Tensor, n: int) -> Tensor:
    """NVFP4's divisors of gate and up as one, [1], or as one for each row, [n, 1]."""
    if divisors.numel() == 1 or bool(divisors[0] == divisors[1]):
        return divisors.view(-1)[:1]
    return divisors.repeat_interleave(n // 2).unsqueeze(1)


def _silu(x: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = _clamped(gate, up, limit)
    return F.silu(gate) * up


def _swiglu_oai(gate: Tensor, up: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    gate, up = _clamped(gate, up, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def _swiglu_step(x: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
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


def _has_stock_int4(form: Format, layer: torch.nn.Module) -> bool:
    """Whether vLLM's AMX experts take this layer: they know no group of 32, no bias, no router weight on the input (cpu_moe.py of 0.32)."""
    if not torch.cpu.get_capabilities().get("amx_tile", False) or form.group_size == 32:
        return False
    moe = layer.moe_config
    if moe.has_bias or layer.apply_router_weight_on_input or moe.in_dtype != torch.bfloat16 or moe.use_ep:
        return False
    experts = symbol("CPUExpertsInt4")
    setup = (moe, symbol("kInt4Static"), None, symbol("FusedMoEActivationFormat").Standard)
    return bool(experts.is_supported_config(experts, *setup)[0])
