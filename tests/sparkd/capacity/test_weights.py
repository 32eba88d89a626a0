"""What weights take on a rank: each way of cutting a layer by hand, and what must always hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkd.capacity.layers import layers_of
from sparkd.capacity.weights import AHEAD, Weights, inventory, uneven_groups
from sparkd.checkpoint import Shard
from sparkd.checkpoint.shape import shape_of
from sparkd.errors import CheckpointError
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import Tensor, checkpoint_of, dense, mixture
from tests.support.inventories import known, packed_tensors
from tests.support.published_tensors import tensors_of
from workers.load.virtual import VirtualCheckpoint
from workers.quantization.formats import SPELLINGS, Format
from workers.quantization.recipe import QuantizationRecipe

BF16 = QuantizationRecipe.parse("bf16")
W = (512, 512)
FORMATS = ("fp8", "nvfp4", "int4-g32", "int4-g64", "mxfp4")


def held(
    tensors: list[Tensor], ranks: int, recipe: QuantizationRecipe = BF16, config: dict[str, Any] | None = None, stages: int = 1
) -> int:
    """Bytes on the fullest rank."""
    return known(config or dense(), tensors).formatted(recipe).weights(ranks, stages).bytes


@pytest.mark.parametrize(
    ("name", "sides", "of_two", "of_eight"),
    [
        ("model.embed_tokens.weight", (1000, 512), 500 * 512, 125 * 512),
        ("model.layers.0.mlp.down_proj.weight", (512, 1024), 512 * 512, 512 * 128),
        ("model.layers.0.mlp.experts.gate_up_proj", (8, 512, 512), 8 * 256 * 512, 8 * 64 * 512),
        ("model.visual.blocks.0.attn.qkv.weight", (768, 256), 384 * 256, 96 * 256),
        ("model.layers.0.mlp.gate.weight", (8, 512), 8 * 512, 8 * 512),
        ("model.layers.0.input_layernorm.weight", (512,), 512, 512),
    ],
)
def test_ranks_share_matrices_and_hold_the_small_tensors_whole(name: str, sides: tuple[int, ...], of_two: int, of_eight: int) -> None:
    """Elements of 16 bits on one of two and of eight ranks."""
    assert (held([(name, sides, "BF16")], 2), held([(name, sides, "BF16")], 8)) == (2 * of_two, 2 * of_eight)


@pytest.mark.parametrize(("spelling", "bytes_of"), [(name, Format.parse(name).nbytes) for name in (*FORMATS, "fp8-block", "int4-g128")])
def test_a_format_is_counted_by_its_bytes(spelling: str, bytes_of: Any) -> None:
    recipe = QuantizationRecipe.parse(spelling)
    matrix = ("model.layers.0.mlp.gate_proj.weight", (1024, 512), "BF16")

    assert [held([matrix], ranks, recipe) for ranks in (1, 2)] == [bytes_of(1024, 512), -(-bytes_of(1024, 512) // 2)]


def test_experts_one_by_one_are_experts_packed() -> None:
    config = mixture()
    single, packed = known(config, tensors_of(config)), known(config, packed_tensors(config))

    assert len(single.parts) == len(packed.parts) + config["num_hidden_layers"]
    for ranks in (1, 2, 4):
        assert single.formatted(BF16).weights(ranks) == packed.formatted(BF16).weights(ranks)
        assert (
            single.formatted(QuantizationRecipe.parse("mxfp4")).weights(ranks).by_kind
            == packed.formatted(QuantizationRecipe.parse("mxfp4")).weights(ranks).by_kind
        )


def test_layers_that_predict_ahead_are_left_on_the_disk() -> None:
    config = dense(num_nextn_predict_layers=1)
    plain = tensors_of(config)
    ahead: list[Tensor] = [
        ("model.layers.4.eh_proj.weight", (512, 1024), "BF16"),
        ("model.layers.4.shared_head.head.weight", (1000, 512), "BF16"),
    ]
    mtp: list[Tensor] = [("mtp.layers.0.mlp.up_proj.weight", (1024, 512), "BF16"), ("model.mtp.norm.weight", (512,), "BF16")]
    vision: list[Tensor] = [("visual.blocks.7.mlp.linear_fc1.weight", (512, 512), "BF16")]
    found = known(config, plain + ahead + mtp)

    assert found.unloaded[AHEAD] == 2 * (512 * 1024 + 1000 * 512 + 1024 * 512 + 512)
    assert found.formatted(BF16).weights() == known(config, plain).formatted(BF16).weights()
    assert known(config, plain + vision).formatted(BF16).weights().by_kind["vision"] == 2 * 512 * 512
    assert known(dense(), plain + ahead).unloaded == {}


def test_tied_embeddings_are_held_once_and_read_as_the_head() -> None:
    config = dense(tie_word_embeddings=True)
    tied, untied = known(config, tensors_of(config)), known(dense(), tensors_of(dense()))
    matrix = 1000 * 512 * 2

    assert tied.formatted(BF16).weights().bytes + matrix == untied.formatted(BF16).weights().bytes
    assert (
        tied.formatted(BF16).weights().active_bytes
        == untied.formatted(BF16).weights().active_bytes
        == untied.formatted(BF16).weights().bytes - matrix
    )
    # A copy of it on the disk is not loaded, and where nobody says whether they are tied, a head of its own settles it.
    assert known(config, tensors_of(dense())).unloaded == {"lm_head": 1000 * 512 * 2}
    silent = known(dense(tie_word_embeddings=None), tensors_of(dense()))
    assert silent.formatted(BF16).weights() == untied.formatted(BF16).weights() and not silent.shape.tied
    assert known(dense(tie_word_embeddings=None), tensors_of(config)).formatted(BF16).weights() == tied.formatted(BF16).weights()


def test_an_fp8_checkpoint_becomes_another_format_with_its_scales() -> None:
    config = dense(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    stem = "model.layers.0.mlp.gate_proj"
    tensors: list[Tensor] = [(f"{stem}.weight", (1024, 512), "F8_E4M3"), (f"{stem}.weight_scale_inv", (8, 4), "F32")]
    nvfp4 = known(config, tensors).formatted(QuantizationRecipe.parse("nvfp4")).weights()

    assert known(config, tensors).formatted(BF16).weights() == Weights(
        {"mlp": 1024 * 512, "scale": 128}, 1024 * 512 + 128, 1024 * 512 + 128, False
    )
    assert (nvfp4.by_kind, nvfp4.disk_bytes, nvfp4.changed) == ({"mlp": Format("nvfp4").nbytes(1024, 512)}, nvfp4.bytes, True)


def test_a_token_uses_the_experts_that_it_is_routed_to() -> None:
    config = mixture(num_experts=16, num_experts_per_tok=4)
    found = known(config, tensors_of(config)).formatted(BF16).weights()

    rest = found.bytes - found.by_kind["expert"] - found.by_kind["embedding"]
    assert found.active_bytes == rest + found.by_kind["expert"] // 4


def test_a_stage_of_a_pipeline_has_its_share_of_the_layers() -> None:
    layer, matrix = 2 * 512 * 512, 1000 * 512 * 2
    layers: list[Tensor] = [(f"model.layers.{number}.self_attn.q_proj.weight", (512, 512), "BF16") for number in range(5)]
    ends: list[Tensor] = [("model.embed_tokens.weight", (1000, 512), "BF16"), ("lm_head.weight", (1000, 512), "BF16")]
    config = dense(num_hidden_layers=5)

    # Two stages have three layers and two; what is in no layer is counted on each, because it is only a guess.
    assert held(layers, 1, config=config, stages=2) == 3 * layer
    assert held(layers + ends, 1, config=config, stages=2) == 3 * layer + 2 * matrix
    whole = known(config, layers + ends)
    assert whole.formatted(BF16).weights(1, 3).active_bytes == whole.formatted(BF16).weights().active_bytes == 5 * layer + matrix


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_plan_the_list_of_layers_and_the_loader_agree_on_what_a_model_becomes(name: str) -> None:
    model = ARCHITECTURES[name]()
    checkpoint = checkpoint_of(model.entries, model.config)
    checkpoint = replace(checkpoint, shards=(Shard("/model/model.safetensors", 0, 0, 0, ""),))
    whole = inventory(checkpoint, shape_of(checkpoint.config))
    for spelling in SPELLINGS:
        recipe = QuantizationRecipe.parse(spelling)
        listed, made = layers_of(checkpoint, recipe), whole.formatted(recipe)
        assert (listed.result_bytes is None) == (uneven_groups(made) is not None), spelling
        if listed.result_bytes is None:
            with pytest.raises(CheckpointError):
                VirtualCheckpoint(checkpoint, recipe.assign(checkpoint))
            continue
        # An int4 weight of gpt-oss has no tensor with its shape.
        loaded = VirtualCheckpoint(checkpoint, recipe.assign(checkpoint)).output_bytes
        assert listed.result_bytes == pytest.approx(loaded, rel=0 if not name.startswith("gpt_oss") else 0.001), spelling
        if not whole.unloaded:
            assert made.weights().disk_bytes == listed.result_bytes, spelling


def test_fp8_that_keeps_its_precision_beside_quantized_layers_is_dequantized() -> None:
    config = dense(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    names = "model.layers.0.mlp.gate_proj", "visual.blocks.0.attn.proj"
    tensors = [tensor for name in names for tensor in ((f"{name}.weight", W, "F8_E4M3"), (f"{name}.weight_scale_inv", (4, 4), "F32"))]
    checkpoint = checkpoint_of(tensors, config)
    rows = {row.name: (row.format, row.result_bytes) for row in layers_of(checkpoint, QuantizationRecipe.parse("nvfp4")).layers}
    nvfp4 = Format("nvfp4").nbytes(*W)

    assert rows == {
        "model.layers.*.mlp.gate_proj.weight": ("nvfp4", nvfp4),
        "model.layers.*.mlp.gate_proj.weight_scale_inv": ("nvfp4", 0),
        "visual.blocks.*.attn.proj.weight": ("bf16", 2 * 512 * 512),
        "visual.blocks.*.attn.proj.weight_scale_inv": ("bf16", 0),
    }
    weights = known(config, tensors).formatted(QuantizationRecipe.parse("nvfp4")).weights()
    assert weights.by_kind == {"mlp": nvfp4, "vision": 2 * 512 * 512}


def test_packed_experts_in_fp8_that_are_no_packed_experts_are_refused() -> None:
    """A hub's file may have any dimensions under any name."""
    for shape in ((4,), (2, 2, 128, 128)):
        tensors = {
            "model.layers.0.self_attn.q_proj.weight": ("BF16", (128, 128)),
            "model.layers.0.mlp.experts.down_proj.weight": ("F8_E4M3", shape),
        }
        model = known({**dense(), "quantization_config": {"quant_method": "fp8"}}, tensors)
        with pytest.raises(CheckpointError, match="cannot be dequantized here"):
            model.formatted(QuantizationRecipe.parse("nvfp4"))
