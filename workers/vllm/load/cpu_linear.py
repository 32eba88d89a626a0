"""Linear layers on vLLM's CPU backend whose weights are decoded a few rows at a time. Never quantizes, never keeps a decoded weight.

vLLM's own CPU kernels need AVX-512 (int4) or AMX (FP8 blocks), and there are none for weight-only FP8, MXFP4 and NVFP4. The kernels here
run wherever torch does. NF4, which vLLM does not have, gets its scheme here for a GPU too. Importing this module imports no vLLM:
`packed_scheme` and `register_cpu_linear_kernels` do, and name what is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from sparkd.errors import CheckpointError
from workers.load.formats.nf4 import LEVELS
from workers.load.formats.nvfp4 import rounded_activations
from workers.quantization.formats import Format, fitting
from workers.vllm.symbols import symbol

BLOCK = 128
# The magnitudes of E2M1 by code; the fourth bit is the sign (OCP Microscaling Formats v1.0, section 5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Weights decoded at a time: 4 MiB of float32 and at most 4 MiB of indices stay in the last cache level. Measured on 4096x4096 (Zen 3, two
# threads): 1.8e9 weights a second at 2**20, 0.2e9 at 2**22 and above, where the allocator gives the pages back and faults them each time.
CHUNK_WEIGHTS = 1 << 20
# Below this many tokens a multiplication is bound by reading the weights: rounding them to bfloat16 first would be one more pass.
BF16_TOKENS = 16
# An E4M3 code moved into a float16 has an exponent that is 8 too small: the biases are 7 and 15.
_E4M3_IN_F16 = 256.0

# Name, vLLM's parameter class, shape, dtype, how it is sharded.
_Parameter = tuple[str, str, tuple[int, ...], torch.dtype, dict[str, Any]]


def packed_scheme(form: Format) -> PackedScheme | None:
    """The scheme that serves a linear layer of this format on a CPU, or on a GPU for nf4; None where vLLM's own compressed-tensors scheme
    does.

    The result belongs into `layer.scheme`, under CompressedTensorsLinearMethod. Raises MissingSymbol.
    """
    if form.name == "bf16" or (form.name == "int4" and _has_stock_int4()):
        return None
    return PackedScheme(form)


@functools.cache
def register_cpu_linear_kernels() -> None:
    """Gives vLLM's own NVFP4, MXFP4 and INT4 schemes a kernel on a CPU.

    For checkpoints quantized elsewhere, and for int4 shapes that vLLM's kernel refuses. Idempotent. Raises MissingSymbol.
    """
    register, cpu = symbol("register_linear_kernel"), symbol("PlatformEnum").CPU
    for kernel, kind in ((SparkNvfp4Kernel, "nvfp4"), (SparkMxfp4Kernel, "mxfp4"), (SparkInt4Kernel, "mp")):
        register(kernel, cpu, kind)


class PackedScheme:
    """A compressed-tensors scheme (the interface of vLLM's CompressedTensorsScheme) for one format."""

    def __init__(self, form: Format) -> None:
        self.form = form
        self.group_size = form.group or 1

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
        """This rank's parameters, under the names of compressed-tensors. Raises CheckpointError where groups do not fit its shard."""
        n, k = sum(output_partition_sizes), input_size_per_partition
        self._check(layer, output_partition_sizes, k)
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = k
        layer.output_size_per_partition = n
        layer.weight_block_size = [BLOCK, BLOCK] if self.form.name == "fp8_block" else None
        for name, kind, shape, dtype, more in _parameters(self.form.name, output_partition_sizes, k, self.group_size):
            parameter = symbol(kind)(data=torch.empty(shape, dtype=dtype), weight_loader=weight_loader, **more)
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing is repacked: plain parameters over the same memory, for torch.compile; NVFP4's divisor for each row where they differ."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            layer.register_parameter(name, Parameter(parameter.data, requires_grad=False))
        if self.form.rounds_activations:
            # vLLM's own scheme takes the largest too.
            layer.input_global_scale = Parameter(layer.input_global_scale.data.max().view(1), requires_grad=False)
        if self.form.weight_name == "nvfp4":
            divisors = layer.weight_global_scale.data
            if bool((divisors == divisors[0]).all()):
                divisors = divisors[:1]
            else:
                divisors = divisors.repeat_interleave(torch.tensor(layer.logical_widths)).unsqueeze(1)
            layer.weight_global_scale = Parameter(divisors.clone(), requires_grad=False)

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = layer.weight if self.form.name.startswith("fp8") else layer.weight_packed
        if self.form.rounds_activations:
            x = torch.ops.sparkd.rounded_activations(x, layer.input_global_scale)
        return packed_linear(x, weight, layer.weight_scale, getattr(layer, "weight_global_scale", None), bias, self.form.weight_name)

    def _check(self, layer: torch.nn.Module, partitions: list[int], k: int) -> None:
        where = getattr(layer, "prefix", "") or type(layer).__name__
        if self.form.name == "fp8_block" and hasattr(layer, "org_vocab_size"):
            # VocabParallelEmbedding.weight_loader wants as many rows of every sharded tensor as the vocabulary has.
            raise CheckpointError("vLLM cannot load the scales of fp8-block for an output head", tensor=where, cure="Choose fp8 for it")
        if k % self.group_size:
            raise CheckpointError(
                f"its {k} columns on one rank are not a multiple of the {self.group_size} that share a scale in {self.form.spelling}",
                tensor=where,
                cure=f"Lower the tensor-parallel size, or give this layer {fitting(self.group_size, k, self.form.name)}",
            )
        if self.form.name == "fp8_block" and (odd := next((size for size in partitions[:-1] if size % BLOCK), None)):
            raise CheckpointError(
                f"{odd} rows of a fused matrix are not a multiple of the {BLOCK} that share a scale in fp8-block",
                tensor=where,
                cure="Lower the tensor-parallel size, or choose fp8 for this layer",
            )


class _Kernel:
    """Answer vLLM's question to a linear kernel class before it uses one."""

    def __init__(self, config: Any, **_names: Any) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    def input_quant_key(self) -> None:
        """None: activations arrive in their own precision."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing is repacked."""


class SparkNvfp4Kernel(_Kernel):
    """NVFP4 as vLLM's schemes prepare it: `weight`, `weight_scale`, and `weight_global_scale` as a factor. Activations stay as they are."""

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, layer.weight, layer.weight_scale, layer.weight_global_scale.reciprocal().view(-1), bias, "nvfp4")


class SparkMxfp4Kernel(_Kernel):
    """MXFP4 as vLLM's schemes prepare it: `weight`, `weight_scale`."""

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return packed_linear(x, layer.weight, layer.weight_scale, None, bias, "mxfp4")


class SparkInt4Kernel(_Kernel):
    """Symmetric INT4 in the layout of a compressed-tensors checkpoint: for shapes that vLLM's own kernel does not take."""

    def __init__(self, config: Any, w_q_param_name: str, w_s_param_name: str, **_names: Any) -> None:
        super().__init__(config)
        self._names = w_q_param_name, w_s_param_name

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        if str(config.weight_type) != "uint4b8" or config.zero_points:
            return False, "only symmetric INT4 (uint4b8) is built"
        if config.group_size < 2 or config.partition_weight_shape[0] % config.group_size or config.group_size % 2:
            return False, f"groups of {config.group_size} do not divide {config.partition_weight_shape[0]} columns"
        return True, None

    def apply_weights(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, scale = (getattr(layer, name) for name in self._names)
        return packed_linear(x, weight, scale, None, bias, "int4")


def packed_linear(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    """x [..., K] times the transpose of a packed weight of N rows -> [..., N] in x's dtype.

    weight, scale: as in a compressed-tensors checkpoint, see _parameters. divisor: NVFP4's global scale, float32 [1] or [N, 1].
    form: a Format's name. One operator to torch.compile, which neither traces nor unrolls the loop over the rows.
    """
    return torch.ops.sparkd.packed_linear(x, weight, scale, divisor, bias, form)


def matmul(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """x [M, K], float32 -> [M, N], float32. Decodes at most CHUNK_WEIGHTS weights at a time. dtype: the model's, whose precision stays."""
    n, k = weight.shape[0], x.shape[1]
    rows = min(n, _rows_at_a_time(n, k))
    narrow = dtype == torch.bfloat16 and _multiplies_bf16(x.shape[0])
    if narrow:
        x = x.bfloat16()
    if rows == n:
        decoded = decode(weight, scale, divisor, form, k)
        return linear(x, decoded.bfloat16() if narrow else decoded).float()
    out = torch.empty((x.shape[0], n), dtype=torch.float32)
    for start in range(0, n, rows):
        at = slice(start, min(n, start + rows))
        scales = scale[start // BLOCK : -(-at.stop // BLOCK)] if form == "fp8_block" else scale[at]
        decoded = decode(weight[at], scales, divisor[at] if divisor is not None and divisor.dim() > 1 else divisor, form, k)
        out[:, at] = linear(x, decoded.bfloat16() if narrow else decoded)
    return out


def decode(weight: Tensor, scale: Tensor, divisor: Tensor | None, form: str, k: int) -> Tensor:
    """The weights [N, k] in float32, exactly as formats.quantizer(...).dequantize gives them."""
    if form == "fp8":
        return _e4m3(weight).mul_(scale * _E4M3_IN_F16)
    if form == "fp8_block":
        return _scale_blocks(_e4m3(weight), scale * _E4M3_IN_F16)
    codes = weight.view(torch.uint8)
    # gather runs on all threads; index_select on a vector does not, and elementwise arithmetic on the nibbles takes as long in five passes.
    pairs = _pairs(form).expand(codes.shape[0], 256)
    values = torch.gather(pairs, 1, codes.to(torch.int64)).view(torch.float32).unflatten(1, (scale.shape[1], -1))
    if form == "nvfp4":
        scale = _e4m3(scale).mul_(_E4M3_IN_F16).div_(divisor)
    elif form == "mxfp4":
        exponent = scale.to(torch.int32)
        scale = torch.where(exponent > 0, exponent << 23, 1 << 22).view(torch.float32)  # 2**-127 is a float32 subnormal
    return values.mul_(scale.to(torch.float32).unsqueeze(-1)).flatten(1)


def _packed_linear(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    out = matmul(x.reshape(-1, x.shape[-1]).float(), weight, scale, divisor, form, x.dtype)
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


def _packed_linear_shape(x: Tensor, weight: Tensor, scale: Tensor, divisor: Tensor | None, bias: Tensor | None, form: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


LIBRARY = torch.library.Library("sparkd", "FRAGMENT")
LIBRARY.define("rounded_activations(Tensor x, Tensor divisor) -> Tensor")
LIBRARY.impl("rounded_activations", rounded_activations, "CPU")
torch.library.register_fake("sparkd::rounded_activations", lambda x, _divisor: torch.empty_like(x), lib=LIBRARY)
LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor scale, Tensor? divisor, Tensor? bias, str form) -> Tensor")
LIBRARY.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("sparkd::packed_linear", _packed_linear_shape, lib=LIBRARY)


def _rows_at_a_time(n: int, k: int) -> int:
    """As even as whole scale blocks of rows allow, so that no short rest is left to its own overhead."""
    chunks = -(-n * k // CHUNK_WEIGHTS)
    return -(-n // chunks // BLOCK) * BLOCK if chunks else n


def _e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, divided by 256. torch's own conversion takes 2.5 ns a value on AVX2, this 0.2.

    The seven low bits become float16's exponent and mantissa as they are, subnormals included; a NaN becomes 480.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return bits.view(torch.float16).to(torch.float32)


def _scale_blocks(values: Tensor, scale: Tensor) -> Tensor:
    """values [N, K] times scale [ceil(N/128), ceil(K/128)], in place."""
    n, k = values.shape
    columns = scale.repeat_interleave(BLOCK, dim=1)[:, :k]
    whole = n // BLOCK * BLOCK
    values[:whole].view(-1, BLOCK, k).mul_(columns[: n // BLOCK].unsqueeze(1))
    if whole < n:
        values[whole:].mul_(columns[-1])
    return values


@functools.cache
def _pairs(form: str) -> Tensor:
    """The values of the two codes of each byte in the order of their columns: two float32 as one int64, [1, 256]."""
    tables = {"int4": range(-8, 8), "nf4": LEVELS}
    table = torch.tensor([*tables.get(form, (*E2M1, *(-value for value in E2M1)))], dtype=torch.float32)
    byte = torch.arange(256)
    nibbles = (byte >> 4, byte & 15) if form == "nf4" else (byte & 15, byte >> 4)
    return torch.stack([table[nibble] for nibble in nibbles], dim=1).view(torch.int64).view(1, 256)


@functools.cache
def has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16: elsewhere torch does it value by value (28 ms against 3.3 ms for 256x576x1536 on AVX2)."""
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("amx_bf16", "avx512_bf16", "bf16"))


def _multiplies_bf16(tokens: int) -> bool:
    return tokens >= BF16_TOKENS and has_bf16()


@functools.cache
def _has_stock_int4() -> bool:
    """vLLM's AVX2 build leaves cpu_gemm_wna16 out, and the kernel class that calls it does not look."""
    symbol("custom_ops")  # registers the kernels
    return hasattr(torch.ops._C, "cpu_gemm_wna16")


def _parameters(form: str, partitions: list[int], k: int, group: int) -> list[_Parameter]:
    """One rank's layer: the tensors of a compressed-tensors checkpoint."""
    n = sum(partitions)
    both = {"input_dim": 1, "output_dim": 0}
    if form == "fp8":
        return [
            ("weight", "ModelWeightParameter", (n, k), torch.float8_e4m3fn, both),
            ("weight_scale", "ChannelQuantScaleParameter", (n, 1), torch.float32, {"output_dim": 0}),
        ]
    if form == "fp8_block":
        return [
            ("weight", "ModelWeightParameter", (n, k), torch.float8_e4m3fn, both),
            ("weight_scale", "BlockQuantScaleParameter", (-(-n // BLOCK), -(-k // BLOCK)), torch.float32, both),
        ]
    if form == "int4":
        return [
            ("weight_packed", "PackedvLLMParameter", (n, k // 8), torch.int32, {**both, "packed_dim": 1, "packed_factor": 8}),
            ("weight_scale", "GroupQuantScaleParameter", (n, k // group), torch.bfloat16, both),
            ("weight_shape", "BasevLLMParameter", (2,), torch.int64, {}),
        ]
    packed: _Parameter = ("weight_packed", "ModelWeightParameter", (n, k // 2), torch.uint8, both)
    if form == "nf4":
        return [packed, ("weight_scale", "GroupQuantScaleParameter", (n, k // group), torch.bfloat16, both)]
    if form == "mxfp4":
        return [packed, ("weight_scale", "GroupQuantScaleParameter", (n, k // group), torch.uint8, both)]
    scales = ("weight_global_scale", "input_global_scale") if form == "nvfp4_a4" else ("weight_global_scale",)
    return [
        packed,
        ("weight_scale", "GroupQuantScaleParameter", (n, k // group), torch.float8_e4m3fn, both),
        *((name, "PerTensorScaleParameter", (len(partitions),), torch.float32, {}) for name in scales),
    ]
