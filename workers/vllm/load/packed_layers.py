"""vLLM's layers whose weights stay packed: of every format on a CPU, of nf4 on a GPU too.

The parameters are a quantizer's parts under their own names, so that vLLM's weight loaders fill them; nothing is repacked. Importing this
module imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sparkd.errors import CheckpointError
from workers.load.formats import quantizer
from workers.load.formats.fp8 import BLOCK
from workers.load.formats.nvfp4 import INPUT_SCALE
from workers.quantization.formats import Format, fitting
from workers.vllm.load.cpu_kernels import ACTIVATIONS
from workers.vllm.symbols import symbol

FusedMoEMethodBase: Any = symbol("FusedMoEMethodBase")

DIVISORS = ("weight_global_scale", INPUT_SCALE)  # of NVFP4, one for each of the matrices that a layer fuses


class PackedScheme:
    """A compressed-tensors scheme (the interface of vLLM's CompressedTensorsScheme) for linear layers of one format.

    It belongs into `layer.scheme`, under CompressedTensorsLinearMethod.
    """

    def __init__(self, form: Format) -> None:
        self.form = form

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    def create_weights(
        self,
        layer: torch.nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        weight_loader: Callable[..., Any],
        **_unused: Any,
    ) -> None:
        """This rank's parameters. Raises CheckpointError where groups do not fit its shard."""
        n, k = sum(output_partition_sizes), input_size_per_partition
        self._check(layer, output_partition_sizes, k)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = k
        layer.output_size_per_partition = n
        layer.weight_block_size = [BLOCK, BLOCK] if self.form.name == "fp8_block" else None
        for name, (dtype, shape) in quantizer(self.form).parts(n, k).items():
            kind, sharded = "ModelWeightParameter", {"input_dim": 1, "output_dim": 0}
            if name in DIVISORS:
                kind, shape, sharded = "PerTensorScaleParameter", (len(output_partition_sizes),), {}
            elif name == "weight_shape":
                kind, sharded = "BasevLLMParameter", {}
            elif name == "weight_scale" and self.form.name == "fp8":
                kind, sharded = "ChannelQuantScaleParameter", {"output_dim": 0}
            elif name == "weight_scale" and self.form.name == "fp8_block":
                kind = "BlockQuantScaleParameter"
            parameter = symbol(kind)(data=torch.empty(shape, dtype=dtype), weight_loader=weight_loader, **sharded)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Plain parameters over the same memory, for torch.compile; one divisor of NVFP4 for each row, and one of the input."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(name, Parameter(parameter.data, requires_grad=False))
        if self.form.rounds_activations:
            # vLLM's own scheme takes the largest too.
            layer.input_global_scale = Parameter(layer.input_global_scale.data.max().view(1), requires_grad=False)
        if self.form.family.has_divisor:
            divisors = layer.weight_global_scale.data.repeat_interleave(torch.tensor(layer.logical_widths))
            layer.weight_global_scale = Parameter(divisors, requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight if self.form.name.startswith("fp8") else layer.weight_packed
        if self.form.rounds_activations:
            x = torch.ops.sparkd.rounded_activations(x, layer.input_global_scale)
        divisor = getattr(layer, "weight_global_scale", None)
        return torch.ops.sparkd.packed_linear(x, weight, layer.weight_scale, divisor, bias, self.form.weight_name)

    def _check(self, layer: torch.nn.Module, partitions: list[int], k: int) -> None:
        where = getattr(layer, "prefix", "") or type(layer).__name__
        if self.form.name == "fp8_block" and hasattr(layer, "org_vocab_size"):
            # VocabParallelEmbedding.weight_loader wants as many rows of every sharded tensor as the vocabulary has.
            raise CheckpointError("vLLM cannot load the scales of fp8-block for an output head", tensor=where, cure="Choose fp8 for it")
        _check_columns(self.form, k, self.form.group or 1, where, "Lower the tensor-parallel size, or give this layer")
        if self.form.name == "fp8_block" and (odd := next((size for size in partitions[:-1] if size % BLOCK), None)):
            raise CheckpointError(
                f"{odd} rows of a fused matrix are not a multiple of the {BLOCK} that share a scale in fp8-block",
                tensor=where,
                cure="Lower the tensor-parallel size, or choose fp8 for this layer",
            )


class PackedMoEMethod(FusedMoEMethodBase):
    """vLLM's method for the experts of one layer, in one format."""

    # GptOssRoutedExperts.weight_loader takes a method that says so for one whose experts arrive packed; it does so for every format here.
    weight_dtype = "mxfp4"

    def __init__(self, form: Format, layer: torch.nn.Module) -> None:
        """layer: as RoutedExperts.__init__ hands it to a quantization configuration: with moe_config, activation and the swiglu_* values.

        Raises CheckpointError for an activation that is not built.
        """
        super().__init__(layer.moe_config)
        self.form = form
        self.activation = _activation(layer)

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
        group = BLOCK if self.form.name == "fp8_block" and self.moe.tp_size > 1 else self.form.group or 1
        for columns in (hidden_size, width):
            cure = "Lower the tensor-parallel size, turn expert parallelism on, or give the experts"
            _check_columns(self.form, columns, group, layer.layer_name, cure)
        kind = {"fp8": "channel", "fp8_block": "block"}.get(self.form.name, "group")
        matrices = 2 if self.moe.is_act_and_mul else 1
        for half, n, k, fused in (("w13", width, hidden_size, matrices), ("w2", hidden_size, width, 1)):
            for name, (dtype, shape) in quantizer(self.form).parts(n, k).items():
                if name in DIVISORS:
                    shape = (fused,) if half == "w13" else ()
                elif name != "weight_shape":
                    shape = (fused * shape[0], *shape[1:])
                parameter = Parameter(torch.empty((num_experts, *shape), dtype=dtype), requires_grad=False)
                split = "tensor" if name in DIVISORS else kind
                for key, value in {**attributes, "is_transposed": False, "quant_method": split}.items():
                    setattr(parameter, key, value)
                layer.register_parameter(f"{half}_{name}", parameter)
            if self.moe.has_bias:
                bias = Parameter(torch.zeros((num_experts, n * fused), dtype=params_dtype), requires_grad=False)
                for key, value in attributes.items():
                    setattr(bias, key, value)
                layer.register_parameter(f"{half}_bias", bias)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: vLLM's modular kernels, which would read it, are not used."""

    def apply(self, layer: torch.nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_shared: Any, **_more: Any) -> Tensor:
        """x [tokens, hidden] -> the weighted sum of this rank's part of the experts that are hit; the layer adds the rest."""
        weight = "weight" if self.form.name.startswith("fp8") else "weight_packed"
        names = (weight, "weight_scale", "weight_global_scale", "bias", INPUT_SCALE)
        w13, w2 = ([getattr(layer, f"{half}_{name}", None) for name in names] for half in ("w13", "w2"))
        on_input = bool(layer.apply_router_weight_on_input)
        more = (layer.expert_map, self.form.weight_name, *self.activation, on_input)
        return torch.ops.sparkd.packed_experts(x, topk_weights, topk_ids, w13, w2, *more)


def _activation(layer: torch.nn.Module) -> tuple[str, float, float, float | None]:
    """(a MoEActivation's value, then alpha, beta and limit of the clamped SwiGLU; limit None clamps nothing).

    The layer's values, then its moe_config's, then vLLM's defaults, as in its ApplyMoEActivationConfig. Raises CheckpointError.
    """
    name = str(getattr(layer.activation, "value", layer.activation))
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"experts with the activation {name} cannot be served quantized on a CPU",
            tensor=layer.layer_name,
            cure="Keep them in bf16, or serve them on a GPU",
        )
    alpha, beta, limit = {"swigluoai": (1.702, 1.0, 7.0), "swiglustep": (1.0, 0.0, 7.0)}.get(name, (1.0, 0.0, None))

    def of_layer(key: str, default: Any) -> Any:
        values = (getattr(place, f"swiglu_{key}", None) for place in (layer, layer.moe_config))
        return next((value for value in values if value is not None), default)

    return name, of_layer("alpha", alpha), of_layer("beta", beta), of_layer("limit", limit)


def _check_columns(form: Format, columns: int, group: int, tensor: str, cure: str) -> None:
    """Raise CheckpointError where a rank's columns are no multiple of the group; `cure` ends with the formats that would fit."""
    if columns % group:
        raise CheckpointError(
            f"its {columns} columns on one rank are not a multiple of the {group} that share a scale in {form.spelling}",
            tensor=tensor,
            cure=f"{cure} {fitting(group, columns, form.name)}",
        )
