"""How fast a quantized layer multiplies on this GPU, beside BF16. Never asserts.

    python -m tests.bench.products [--only REGEX]

Microseconds of one product inside a CUDA graph, over as many copies of the weights as do not fit into the GPU's cache. The columns are
tokens: 1, 16 and 256 stand for decoding with as many requests, 4096 for a prefill. Layers are [N, K]; the experts are 128 of 2048 x 768, of
which each token takes 8. sparkd's quantizers make all weights. vLLM's kernels multiply them, and sparkd's operators multiply NF4. INT4 goes
through Marlin, which vLLM chooses on a GB10; on Hopper GPUs it prefers Machete.

The distance is that of 16 tokens' products from those of the decoded weights. It is rounding to BF16, about 0.002, except for FP8, whose
activations are rounded to FP8 too. A kind that fails prints the first line of its error instead of its times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.bench.arguments import Parser, pattern
from workers.load.formats import quantizer
from workers.quantization.formats import Format

LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 2048))
TOKENS = (1, 4, 16, 64, 256, 4096)
EXPERTS, HIDDEN, WIDTH, TOP = 128, 2048, 768, 8
KINDS = ("linear", "experts")
# More than the cache of any GPU that this runs on.
COPIES_BYTES = 120_000_000
# The tokens whose products are compared with those of the decoded weights.
COMPARED = 16
Parts = Mapping[str, Tensor]
Product = Callable[[Tensor], Tensor]
Products = Sequence[Callable[[], Any]]


def main() -> int:
    arguments = Parser("tests.bench.products", __doc__, only="^linear$")
    arguments.add_argument("--only", type=pattern, default="", metavar="REGEX", help="linear or experts")
    options = arguments.parse_args()
    chosen = arguments.chosen(KINDS, options.only)
    if not torch.cuda.is_available():
        print("This machine has no GPU.")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, microseconds a product\n")
    print("| what | kind | " + " | ".join(map(str, TOKENS)) + " | distance |\n|" + "---|" * (len(TOKENS) + 3))
    if "linear" in chosen:
        for n, k in LAYERS:
            linear(n, k)
    if "experts" in chosen:
        experts()
    return 0


def microseconds(products: Products) -> float:
    """The best of seven replays of a graph of all of them, for one."""
    for product in products[:2]:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    best = float("inf")
    for _ in range(8):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        best = min(best, first.elapsed_time(last) * 1000 / len(products))
    return best


def row(what: str, kind: str, measure: Callable[[], tuple[list[float], float]]) -> None:
    """Print what `measure` gives: the times and the distance."""
    try:
        times, distance = measure()
        cells = [*(f"{time:.1f}" for time in times), f"{distance:.4f}"]
    except Exception as error:  # noqa: BLE001 - a kernel that this release of vLLM lacks must not end the table
        reason = str(error).strip().partition("\n")[0]
        cells = [f"{type(error).__name__}: {reason}", *[""] * len(TOKENS)]
    print(f"| {what} | {kind} | {' | '.join(cells)} |", flush=True)


def linear(n: int, k: int) -> None:
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    tokens = {count: torch.randn(count, k, device="cuda", dtype=torch.bfloat16) for count in TOKENS}
    for spelling, (kernel, product) in LINEAR.items():
        row(f"{n} x {k}", f"{spelling}, {kernel}", partial(_linear, Format.parse(spelling), product, weight, tokens))


def _linear(
    form: Format, product: Callable[[Parts, int, int], Product], weight: Tensor, tokens: Mapping[int, Tensor]
) -> tuple[list[float], float]:
    n, k = weight.shape
    parts = quantizer(form).quantize(weight)
    copies = [product(parts, n, k) for _ in range(max(2, COPIES_BYTES // form.nbytes(n, k)))]
    times = [microseconds([partial(copy, x) for copy in copies]) for x in tokens.values()]
    x = tokens[COMPARED]
    return times, _distance(copies[0](x), x.float() @ quantizer(form).dequantize(parts, torch.float32).T)


def _distance(made: Tensor, meant: Tensor) -> float:
    return float((made.float() - meant).norm() / meant.norm())


def _bf16(parts: Parts, n: int, k: int) -> Product:
    weight = parts["weight"].clone()
    return lambda x: torch.nn.functional.linear(x, weight)


def _fp4(parts: Parts, n: int, k: int) -> Product:
    """NVFP4 or MXFP4: vLLM tells them apart by the scale for the whole tensor, which MXFP4 has not."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import apply_fp4_marlin_linear, prepare_fp4_layer_for_marlin

    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype = n, k, torch.bfloat16
    layer.weight = torch.nn.Parameter(parts["weight_packed"], requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(parts["weight_scale"], requires_grad=False)
    if "weight_global_scale" in parts:
        layer.weight_global_scale = torch.nn.Parameter((1 / parts["weight_global_scale"]).max(), requires_grad=False)
    prepare_fp4_layer_for_marlin(layer)
    packed, scale, whole = layer.weight, layer.weight_scale, getattr(layer, "weight_global_scale", None)
    space = marlin_make_workspace_new(torch.device("cuda"))
    return lambda x: apply_fp4_marlin_linear(x, packed, scale, whole, space, n, k)


def _int4(parts: Parts, n: int, k: int) -> Product:
    """As MarlinLinearKernel prepares it (vLLM's kernels/linear/mixed_precision/marlin.py)."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils
    from vllm.scalar_type import scalar_types

    none = torch.empty(0, dtype=torch.int, device="cuda")
    group = k // parts["weight_scale"].shape[1]
    packed = _call(
        _custom_ops.gptq_marlin_repack,
        b_q_weight=parts["weight_packed"].t().contiguous(),
        perm=none,
        size_k=k,
        size_n=n,
        num_bits=4,
    )
    scale = marlin_utils.marlin_permute_scales(parts["weight_scale"].t().contiguous(), size_k=k, size_n=n, group_size=group)
    fixed = {
        "weight": packed,
        "weight_scale": scale,
        "weight_zp": none,
        "g_idx": none,
        "g_idx_sort_indices": none,
        "workspace": marlin_utils.marlin_make_workspace_new(torch.device("cuda")),
        "wtype": scalar_types.uint4b8,
        "output_size_per_partition": n,
        "input_size_per_partition": k,
        "is_k_full": True,
    }
    return lambda x: _call(marlin_utils.apply_gptq_marlin_linear, input=x, **fixed)


def _fp8(parts: Parts, n: int, k: int) -> Product:
    from vllm import _custom_ops

    # CUTLASS wants [K, N] in columns.
    weight, scale = parts["weight"].clone().t(), parts["weight_scale"].clone()

    def product(x: Tensor) -> Tensor:
        rounded, token_scale = _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        return _custom_ops.cutlass_scaled_mm(rounded, weight, scale_a=token_scale, scale_b=scale, out_dtype=x.dtype)

    return product


def _nf4(parts: Parts, n: int, k: int) -> Product:
    import workers.vllm.load.nf4_products  # noqa: F401 - registers the operators

    packed, scale = parts["weight_packed"].clone(), parts["weight_scale"].clone()
    return lambda x: torch.ops.sparkd.packed_linear(x, packed, scale, None, None, "nf4")


def _call(function: Callable[..., Tensor], **arguments: Any) -> Tensor:
    """Pass those arguments that this release's function takes: Marlin's take the order of columns in vLLM 0.26, and none in 0.32."""
    taken = inspect.signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in taken})


# By spelling, the kernel, and a function that copies a weight for it. fp8-block is left out: vLLM chooses among four kernels for it.
LINEAR: Mapping[str, tuple[str, Callable[[Parts, int, int], Product]]] = {
    "bf16": ("cuBLAS", _bf16),
    "nvfp4": ("Marlin", _fp4),
    "mxfp4": ("Marlin", _fp4),
    "int4-g128": ("Marlin", _int4),
    "fp8": ("CUTLASS", _fp8),
    "nf4-g64": ("sparkd", _nf4),
}


def experts() -> None:
    up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) * 0.02
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16) * 0.02
    tokens = {count: torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16) for count in TOKENS}
    routed = {
        count: [
            torch.stack([torch.randperm(EXPERTS, device="cuda")[:TOP] for _ in range(count)]).int() for _ in range(8 if count < 65 else 2)
        ]
        for count in TOKENS
    }
    weights = {count: torch.softmax(torch.randn(count, TOP, device="cuda"), 1) for count in TOKENS}

    def measured(form: Format, build: Callable[[Parts, Parts], Callable[[Tensor, Tensor, Tensor], Tensor]]) -> tuple[list[float], float]:
        parts = quantizer(form).quantize(up), quantizer(form).quantize(down)
        product = build(*parts)
        times = [microseconds([partial(product, tokens[c], weights[c], i) for i in routed[c]]) for c in TOKENS]
        x, scores, chosen = tokens[COMPARED], weights[COMPARED], routed[COMPARED][0]
        first, second = (quantizer(form).dequantize(each, torch.float32) for each in parts)
        meant = torch.zeros(COMPARED, HIDDEN, device="cuda")
        for token in range(COMPARED):
            for place, expert in enumerate(chosen[token].tolist()):
                gate, value = (first[expert] @ x[token].float()).chunk(2)
                meant[token] += scores[token, place] * (second[expert] @ (torch.nn.functional.silu(gate) * value))
        return times, _distance(product(x, scores, chosen), meant)

    row(f"{EXPERTS} experts", "nvfp4, Marlin", partial(measured, Format.parse("nvfp4"), _marlin_experts))
    row(f"{EXPERTS} experts", "nf4-g64, sparkd", partial(measured, Format.parse("nf4-g64"), _nf4_experts))


def _nf4_experts(up: Parts, down: Parts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    import workers.vllm.load.nf4_products  # noqa: F401 - registers the operators

    w13, w2 = ([each["weight_packed"], each["weight_scale"], None, None, None] for each in (up, down))

    def product(x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return torch.ops.sparkd.packed_experts(x, scores, chosen, w13, w2, None, "nf4", "silu", 1.0, 0.0, None, False)

    return product


def _marlin_experts(up: Parts, down: Parts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin
    from vllm.scalar_type import scalar_types

    layer: Any = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=WIDTH, params_dtype=torch.bfloat16
    )
    packed = [
        part for each in (up, down) for part in (each["weight_packed"], each["weight_scale"], 1 / each["weight_global_scale"].view(-1))
    ]
    w13, w13_scale, w13_global, w2, w2_scale, w2_global = prepare_nvfp4_moe_layer_for_marlin(layer, *packed, True)

    def product(x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return fused_marlin_moe(
            x, w13, w2, None, None, w13_scale, w2_scale, scores, chosen, scalar_types.float4_e2m1f.id,
            global_num_experts=EXPERTS, global_scale1=w13_global, global_scale2=w2_global,
        )  # fmt: skip

    return product


if __name__ == "__main__":
    raise SystemExit(main())
