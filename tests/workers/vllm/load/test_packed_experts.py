"""Quantized experts on vLLM's CPU backend: its own RoutedExperts and weight loaders around our method, against a plain loop over tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from sparkd.errors import CheckpointError
from tests.support.late import Late
from tests.workers.load.products import assert_near
from workers.load.formats import quantizer
from workers.load.formats.nvfp4 import rounded_activations
from workers.load.trace import Trace, expert_families, inferred_targets, phantoms, place
from workers.load.virtual import OutputTensor
from workers.quantization.formats import Format
from workers.vllm.load import cpu_kernels

config = Late("vllm.config")
gpt_oss = Late("vllm.model_executor.models.gpt_oss")
stock = Late("vllm.model_executor.layers.activation")
packed_layers = Late("workers.vllm.load.packed_layers")

# Those whose products are those of their weights, each in one group size.
FORMATS = [Format.parse(spelling) for spelling in ("nvfp4", "mxfp4", "int4-g32", "nf4-g64", "fp8", "fp8-block")]
each_format = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.spelling)
EXPERTS, HIDDEN, TOP_K = 6, 256, 2
LAYER = itertools.count()


pytestmark = pytest.mark.usefixtures("one_rank")


def on_cpu(form: Format) -> Any:
    """A configuration that gives every layer of experts our method."""

    class OnCpu(Late("vllm.model_executor.layers.quantization.base_config").QuantizationConfig):  # type: ignore[misc]
        def get_name(self) -> Any:
            return "spark"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Any:
            return cls()

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            return packed_layers.PackedMoEMethod(form, layer)

    return OnCpu()


def made(form: Format, *, width: int = 128, activation: str = "silu", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    names = ("up_proj", "down_proj", None) if activation.endswith("_no_mul") else ("gate_proj", "down_proj", "up_proj")
    runner = Late("vllm.model_executor.layers.fused_moe.layer").FusedMoEFactory(
        num_experts=EXPERTS,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=width,
        params_dtype=dtype,
        quant_config=on_cpu(form),
        activation=activation,
        ckpt_names=names,
        prefix=f"layers.{next(LAYER)}.mlp.experts",
        **options,
    )
    return runner.routed_experts


Weights = list[dict[str, Tensor]]
Act = Callable[[Tensor], Tensor]


def filled(layer: Any, form: Format, width: int = 128, factor: float = 0.1) -> Weights:
    """Random experts, loaded under a checkpoint's names, and what they mean. Gate and up differ in magnitude, so NVFP4's divisors do."""
    generator = torch.Generator().manual_seed(1)
    kind = quantizer(form)
    meant: Weights = [{} for _ in range(EXPERTS)]
    emitted = []
    gate = [("gate_proj", (width, HIDDEN), 8 * factor)] if layer.moe_config.is_act_and_mul else []
    for name, shape, scale in [*gate, ("up_proj", (width, HIDDEN), factor), ("down_proj", (HIDDEN, width), factor)]:
        parts = kind.quantize(torch.randn((EXPERTS, *shape), generator=generator) * scale)
        for expert, values in enumerate(kind.dequantize(parts, torch.float32)):
            meant[expert][name] = values
            emitted += [(f"{expert}.{name}.{key}", part[expert]) for key, part in parts.items()]
    loaded = list(layer.load_weights(emitted))
    assert len(loaded) == len(emitted)
    layer.quant_method.process_weights_after_loading(layer)
    return meant


def routed(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn((tokens, HIDDEN), generator=generator).to(dtype)
    scores = torch.rand((tokens, EXPERTS), generator=generator)
    weights, ids = scores.topk(TOP_K)
    return x, weights, ids.int()


def plain(
    x: Tensor, weights: Tensor, ids: Tensor, meant: Weights, act: Callable[[Tensor], Tensor], local: range = range(EXPERTS)
) -> Tensor:
    """Token by token; act: from gate and up side by side, or up alone."""
    out = torch.zeros_like(x)
    for token, slot in itertools.product(range(x.shape[0]), range(ids.shape[1])):
        expert = int(ids[token, slot])
        if expert in local:
            up = torch.cat([meant[expert][name] for name in ("gate_proj", "up_proj") if name in meant[expert]])
            out[token] += weights[token, slot] * linear(act(linear(x[token], up)), meant[expert]["down_proj"])
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def run(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return layer.forward_modular(x=x, topk_weights=weights, topk_ids=ids)


@each_format
def test_vllm_s_weight_loader_says_where_each_expert_goes(form: Format) -> None:
    """Were one operation of it no plain view (trace.py), every rank would read everything, and vLLM would place each tensor."""
    shapes = {"gate_proj": (128, HIDDEN), "up_proj": (128, HIDDEN), "down_proj": (HIDDEN, 128)}
    parts = [
        (f"{expert}.{name}.{suffix}", tuple(part), dtype)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
        for suffix, (dtype, part) in quantizer(form).parts(*shape).items()
        if suffix != "weight_shape"
    ]
    layer, like = made(form), made(form)
    trace = Trace()
    list(layer.load_weights(phantoms(parts, torch.device("cpu"), trace)))
    assert all(traced.once for traced in trace.tensors.values())

    found = expert_families([OutputTensor(f"mlp.experts.{name}", shape, dtype, 0) for name, shape, dtype in parts])
    direct_targets = inferred_targets(found, {f"mlp.experts.{name}": one for name, one in trace.tensors.items()})
    assert {name.split(".")[2] for name in direct_targets} == {"2", "3", "4"}
    assert len(direct_targets) == len(parts) // 2
    for name, shape, dtype in parts:
        tensor = torch.randint(0, 100, shape).to(dtype)
        list(like.load_weights([(name, tensor)]))
        place(direct_targets.get(f"mlp.experts.{name}") or trace.tensors[name].target, tensor)
    for name, parameter in layer.named_parameters():
        if not name.endswith("weight_shape"):
            assert torch.equal(parameter.view(torch.uint8), like.get_parameter(name).view(torch.uint8)), name


@each_format
def test_vllm_loads_and_serves_experts(form: Format) -> None:
    layer = made(form)
    meant = filled(layer, form)
    for tokens in (1, 7):
        x, weights, ids = routed(tokens)
        assert_near(run(layer, x, weights, ids), plain(x, weights, ids, meant, silu_and_mul))


def test_the_answer_has_the_activations_precision() -> None:
    layer = made(Format("nvfp4"), dtype=torch.float16)
    meant = filled(layer, Format("nvfp4"))
    x, weights, ids = routed(3, torch.float16)
    got = run(layer, x, weights, ids)
    assert got.dtype == torch.float16
    assert_near(got, plain(x.float(), weights, ids, meant, silu_and_mul), 2e-2)


def test_fp8_blocks_that_end_short_in_gate_stay_gates() -> None:
    form = Format("fp8_block")
    layer = made(form, width=192)
    meant = filled(layer, form, 192)
    x, weights, ids = routed(3)
    assert_near(run(layer, x, weights, ids), plain(x, weights, ids, meant, silu_and_mul))


def test_activations_in_four_bits_are_rounded_before_each_of_an_experts_products() -> None:
    layer = made(Format("nvfp4_a4"))
    meant = filled(layer, Format("nvfp4_a4"))
    layer.w13_input_global_scale.data.fill_(256.0)
    layer.w2_input_global_scale.data.copy_(torch.tensor([64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0]))
    x, weights, ids = routed(7)
    out = torch.zeros_like(x)
    for token, slot in itertools.product(range(7), range(TOP_K)):
        expert = int(ids[token, slot])
        up = torch.cat([meant[expert]["gate_proj"], meant[expert]["up_proj"]])
        hidden = silu_and_mul(linear(rounded_activations(x[token], torch.tensor(256.0)), up))
        divisor = layer.w2_input_global_scale[expert]
        out[token] += weights[token, slot] * linear(rounded_activations(hidden, divisor), meant[expert]["down_proj"])
    assert_near(run(layer, x, weights, ids), out, 5e-3)


# vLLM's own, for an alpha, a beta and a limit where they take them.
ACTIVATIONS: dict[str, Callable[[], Any]] = {
    "silu": lambda: stock.SiluAndMulWithClamp(2.0),
    "gelu": lambda: stock.GeluAndMul(),
    "gelu_tanh": lambda: stock.GeluAndMul(approximate="tanh"),
    "swigluoai": lambda: stock.SwigluOAIAndMul(1.5, 2.0),
    "swigluoai_uninterleave": lambda: stock.SiluAndMulWithClamp(2.0, 1.5, 1.0),
    "swiglustep": lambda: stock.SwigluStepAndMul(2.0),
    "silu_no_mul": lambda: torch.nn.SiLU(),
    "gelu_no_mul": lambda: stock.GELU(),
    "gelu_tanh_no_mul": lambda: stock.GELUTanh(),
    "relu2_no_mul": lambda: stock.ReLUSquaredActivation(),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_vllms(name: str) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * 3
    own = ACTIVATIONS[name]()
    act = getattr(own, "forward_native", own)
    alpha, beta = (1.5, 1.0) if name.startswith("swigluoai") else (1.0, 0.0)
    assert_near(cpu_kernels.ACTIVATIONS[name](x, alpha, beta, 2.0), act(x))


@pytest.mark.parametrize(
    ("name", "act", "options"),
    [
        (
            "swigluoai_uninterleave",
            lambda: stock.SiluAndMulWithClamp(2.0, 1.5, 0.5).forward_native,
            {"swiglu_limit": 2.0, "swiglu_alpha": 1.5, "swiglu_beta": 0.5},
        ),
        ("relu2_no_mul", lambda: stock.ReLUSquaredActivation().forward_native, {}),
    ],
    ids=["settings", "without a gate"],
)
def test_a_layer_computes_with_its_own(name: str, act: Callable[[], Act], options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith("_no_mul"):
        # vLLM 0.32 builds experts without a gate on a GPU only, whatever their format.
        monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.current_platform", SimpleNamespace(is_cuda_alike=lambda: True))
    form = Format("mxfp4")
    layer = made(form, activation=name, **options)
    meant = filled(layer, form, factor=0.3)
    x, weights, ids = routed(5)
    assert_near(run(layer, x, weights, ids), plain(x, weights, ids, meant, act()))


def test_every_activation_of_vllm_is_built_or_refused_by_name() -> None:
    missing = {one.value for one in Late("vllm.model_executor.layers.fused_moe.activation").MoEActivation} - set(cpu_kernels.ACTIVATIONS)
    assert missing == {"situ", "relu2"}
    assert set(cpu_kernels.ACTIVATIONS) == set(ACTIVATIONS)
    for name in missing:
        with pytest.raises(CheckpointError, match=rf"layers\.\d+\.mlp\.experts: .* {name} "):
            made(Format("nvfp4"), activation=name)


def test_the_routers_weight_may_scale_the_input() -> None:
    layer = made(Format("int4", 64), apply_router_weight_on_input=True)
    meant = filled(layer, Format("int4", 64))
    x, weights, ids = routed(4)
    weights, ids = weights[:, :1], ids[:, :1]
    expected = plain(x * weights, torch.ones_like(weights), ids, meant, silu_and_mul)
    assert_near(run(layer, x, weights, ids), expected)


@each_format
def test_a_rank_of_two_has_its_share_of_every_expert(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = 1
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.get_tensor_model_parallel_rank", lambda: rank)
    layer = made(form, width=256, tp_size=2)
    meant = filled(layer, form, 256)
    mine = slice(rank * 128, rank * 128 + 128)
    share = [
        {"gate_proj": one["gate_proj"][mine], "up_proj": one["up_proj"][mine], "down_proj": one["down_proj"][:, mine]} for one in meant
    ]
    x, weights, ids = routed(4)
    assert_near(run(layer, x, weights, ids), plain(x, weights, ids, share, silu_and_mul))


def test_a_rank_has_its_own_experts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = config.VllmConfig()
    spread.parallel_config.enable_expert_parallel = True
    monkeypatch.setattr("vllm.model_executor.layers.fused_moe.config.get_tensor_model_parallel_rank", lambda: 1)
    with config.set_current_vllm_config(spread):
        layer = made(Format("nvfp4"), tp_size=2)
    assert layer.w13_weight_packed.shape[0] == EXPERTS // 2
    whole = made(Format("nvfp4"))
    meant = filled(whole, Format("nvfp4"))
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(whole, name).data[3:])
    x, weights, ids = routed(9)
    assert_near(run(layer, x, weights, ids), plain(x, weights, ids, meant, silu_and_mul, range(3, 6)))


def test_gpt_oss_gate_and_up_are_interleaved_with_biases() -> None:
    form = Format("mxfp4")
    layer = made(form, activation="swigluoai", has_bias=True, routed_experts_cls=gpt_oss.GptOssRoutedExperts)
    generator = torch.Generator().manual_seed(3)
    kind = quantizer(form)
    meant = []
    for expert in range(EXPERTS):
        one = {}
        for name, shape in (("w13", (256, HIDDEN)), ("w2", (HIDDEN, 128))):
            parts = kind.quantize(torch.randn(shape, generator=generator))
            bias = torch.randn(shape[0], generator=generator).bfloat16()
            for suffix, tensor in ({f"{name}_{key}": part for key, part in parts.items()} | {f"{name}_bias": bias}).items():
                parameter = getattr(layer, suffix)
                assert parameter.weight_loader(parameter, tensor, f"experts.{suffix}", f"gpt_oss_{name}", expert, True)
            one[name], one[f"{name}_bias"] = kind.dequantize(parts, torch.float32), bias.float()
        meant.append(one)
    x, weights, ids = routed(4)
    expected = torch.zeros_like(x)
    act = stock.SwigluOAIAndMul().forward_native
    for token, slot in itertools.product(range(4), range(TOP_K)):
        one = meant[int(ids[token, slot])]
        inner = act(linear(x[token], one["w13"], one["w13_bias"]))
        expected[token] += weights[token, slot] * linear(inner, one["w2"], one["w2_bias"])
    assert_near(run(layer, x, weights, ids), expected)


def test_experts_that_nobody_asked_for_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(Format("nvfp4"))
    filled(layer, Format("nvfp4"))
    seen: list[int] = []
    product = cpu_kernels.product
    monkeypatch.setattr(cpu_kernels, "product", lambda x, weight, *more: seen.append(weight.data_ptr()) or product(x, weight, *more))
    x, weights, _ids = routed(5)
    run(layer, x, weights, torch.tensor([[2, 4]] * 5, dtype=torch.int32))
    gate_and_up = [half for expert in (2, 4) for half in layer.w13_weight_packed[expert].chunk(2)]
    asked = [*gate_and_up, *(layer.w2_weight_packed[expert] for expert in (2, 4))]
    assert sorted(seen) == sorted(part.data_ptr() for part in asked)


def test_torch_compile_sees_one_operator() -> None:
    layer = made(Format("nvfp4"))
    meant = filled(layer, Format("nvfp4"))
    compiled = torch.compile(lambda x, w, i: layer.quant_method.apply(layer, x, w, i, None, None) + 0, backend="eager", fullgraph=True)
    for tokens in (1, 4):
        x, weights, ids = routed(tokens)
        assert_near(compiled(x, weights, ids), plain(x, weights, ids, meant, silu_and_mul))


def test_a_share_that_groups_do_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layers\.\d+\.mlp\.experts: its 192 .* 128 .*int4-g128\b"):
        made(Format("int4", 128), width=384, tp_size=2)
    with pytest.raises(CheckpointError, match=r"192 columns .* 128 .*fp8-block"):
        made(Format("fp8_block"), width=384, tp_size=2)
