"""Which ways of splitting a model are refused, each with the number that breaks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.parallelism import refusal, unfit
from tests.support.checkpoints import Tensor, dense, mixture
from tests.support.facts import lacking
from tests.support.inventories import known, published
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
DELTA = {
    "architectures": ["Qwen3NextForCausalLM"],
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 32,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 32,
}
MLP = "model.layers.0.mlp"


def said(config: dict[str, Any], tensors: list[Tensor], ranks: int, stages: int = 1, quantize: Any = "bf16") -> str | None:
    """As for an architecture whose every key a formula reads."""
    model = known(config, tensors)
    checked = replace(model, shape=replace(model.shape, gaps=(), unread=()))
    return refusal(checked.formatted(QuantizationRecipe.parse(quantize)), ranks, stages)


def names(sentence: str | None, facts: Sequence[str]) -> bool:
    """Whether it refuses and names all of them, or, without facts, refuses nothing."""
    return sentence is None if not facts else lacking(sentence, *facts) == []


@pytest.mark.parametrize(
    ("more", "ranks", "stages", "told"),
    [
        ({}, 1, 1, []),
        ({}, 2, 1, []),
        ({}, 1, 4, []),
        ({}, 1, 5, ["4 layers", "5 stages"]),
        ({}, 3, 1, ["8 attention heads", "3 ranks"]),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, 1, ["6 KV heads", "4 ranks"]),
        (DELTA, 4, 1, []),
        (DELTA, 8, 1, ["4 key heads", "linear attention", "8 ranks"]),
    ],
)
def test_heads_and_layers(more: dict[str, Any], ranks: int, stages: int, told: list[str]) -> None:
    assert names(said(dense(**more), [], ranks, stages), told)


def test_blocks_that_end_within_a_row_are_for_a_cpu_alone() -> None:
    odd: list[Tensor] = [(f"{MLP}.down_proj.weight", (512, 2112), "BF16"), (f"{MLP}.norm.scale", (), "F32")]
    model, recipe = known(dense(), odd), QuantizationRecipe.parse("fp8-block")
    assert names(refusal(model.formatted(recipe), 1, 1), ["2112 columns", f"{MLP}.down_proj.weight", "blocks of 128", "fp8"])
    assert refusal(model.formatted(recipe), 1, 1, "cpu") is None and refusal(model.formatted(QuantizationRecipe.parse("fp8")), 1, 1) is None


def test_a_format_that_ranks_would_tear_is_refused_whatever_vllm_makes_room_for() -> None:
    model = known(dense(), [(f"{MLP}.down_proj.weight", (512, 2112), "BF16")])
    assert unfit(model.formatted(QuantizationRecipe.parse("mxfp4")), 2) is None
    torn = unfit(model.formatted(QuantizationRecipe.parse("mxfp4")), 4)
    assert names(torn, ["2112 columns", f"{MLP}.down_proj.weight", "4 ranks", "groups of 32"])
    # The split itself is vLLM's to judge.
    assert unfit(model.formatted(QuantizationRecipe.parse("bf16")), 3) is None


@pytest.mark.parametrize(
    ("tensor", "ranks", "told"),
    [
        (("model.embed_tokens.weight", (1000, 512), "BF16"), 8, []),
        ((f"{MLP}.gate_proj.weight", (1028, 512), "BF16"), 6, ["1028 rows", f"{MLP}.gate_proj.weight", "6 ranks"]),
        ((f"{MLP}.down_proj.weight", (512, 1028), "BF16"), 6, ["1028 columns", f"{MLP}.down_proj.weight", "6 ranks"]),
        ((f"{MLP}.experts.down_proj", (8, 512, 250), "BF16"), 6, ["250 columns", f"{MLP}.experts.down_proj", "6 ranks"]),
        ((f"{MLP}.experts.gate_up_proj", (8, 500, 512), "BF16"), 6, ["500 rows", f"{MLP}.experts.gate_up_proj", "6 ranks"]),
        ((f"{MLP}.gate.weight", (7, 512), "BF16"), 6, []),
    ],
)
def test_what_is_cut_needs_a_multiple(tensor: Tensor, ranks: int, told: list[str]) -> None:
    config = mixture(num_attention_heads=24, num_key_value_heads=24)

    assert names(said(config, [tensor], ranks), told)
    assert said(config, [tensor], 1, 4) is None


@pytest.mark.parametrize(
    ("quantize", "sides", "ranks", "told"),
    [
        ("nvfp4", (512, 1024), 8, []),
        ("nvfp4", (512, 1056), 4, ["1056 columns", "4 ranks", "groups of 16"]),
        ("fp8", (512, 1056), 4, []),
        ("fp8-block", (512, 1152), 2, ["1152 columns", "2 ranks", "groups of 128"]),
    ],
)
def test_a_group_with_one_scale_is_not_cut(quantize: str, sides: tuple[int, int], ranks: int, told: list[str]) -> None:
    name = f"{MLP}.down_proj.weight"

    assert names(said(dense(), [(name, sides, "BF16")], ranks, quantize=quantize), [name, *told] if told else [])


def test_groups_lie_across_the_columns_and_blocks_across_both() -> None:
    square: list[Tensor] = [(f"{MLP}.up_proj.weight", (1056, 1056), "BF16")]
    blocked: list[Tensor] = [(f"{MLP}.up_proj.weight", (1152, 512), "BF16")]

    assert said(dense(), square, 2, quantize="mxfp4") is None
    told = said(dense(), blocked, 2, quantize="fp8-block")
    assert names(told, ["1152 rows", f"{MLP}.up_proj.weight", "2 ranks", "groups of 128"])


def test_what_is_stored_in_groups_or_blocks_is_not_cut_either() -> None:
    """Qwen3-235B-A22B-FP8's experts of 1536 on eight ranks: 192 of them each."""
    config = published("qwen3-235b-a22b-fp8")
    expert: list[Tensor] = [("model.layers.0.mlp.experts.0.down_proj.weight", (4096, 1536), "F8_E4M3")]
    expert.append(("model.layers.0.mlp.experts.0.down_proj.weight_scale_inv", (32, 12), "BF16"))

    assert said(config, expert, 4) is None
    assert said(config, expert, 8) is None
    assert names(said(config, expert, 32), ["1536 columns", expert[0][0], "32 ranks", "groups of 32"])
    # Beside weights that sparkd quantizes, the blocks stay whole.
    beside = {"layers": {"experts": "bf16", "q_proj": "fp8"}}
    assert names(said(config, expert, 8, quantize=beside), ["1536 columns", expert[0][0], "8 ranks", "groups of 128"])
    # Quantized anew, the stored blocks are nobody's concern.
    assert said(config, expert, 8, quantize="nvfp4") is None
    packed: list[Tensor] = [(f"{MLP}.down_proj.weight", (512, 528), "U8"), (f"{MLP}.down_proj.weight_scale", (512, 66), "F8_E4M3")]
    assert said(dense(**NVFP4), packed, 2) is None
    assert names(said(dense(**NVFP4), packed, 4), ["66 groups", f"{MLP}.down_proj.weight_scale", "4 ranks"])


def test_a_whole_model_divides() -> None:
    config = mixture()
    tensors = tensors_of(config)

    for quantize in ("bf16", "fp8", "nvfp4", "mxfp4", "int4-g32"):
        assert [said(config, tensors, ranks, quantize=quantize) for ranks in (2, 4, 8)] == [None] * 3
    # The experts' 256 columns.
    told = said(config, tensors, 8, quantize="int4-g64")
    assert names(told, ["256 columns", f"{MLP}.experts.0.down_proj.weight", "8 ranks", "groups of 64"])
