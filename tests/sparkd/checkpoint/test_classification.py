"""Which kind of layer a tensor belongs to, by the names that published checkpoints give."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkd.checkpoint import CLASSES, tensor_class

NAMES = {
    "Llama, Qwen": {
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.self_attn.q_proj.weight": "attention",
        "model.layers.0.self_attn.q_proj.bias": "attention",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.0.mlp.down_proj.weight": "mlp",
        "model.norm.weight": "norm",
        "lm_head.weight": "lm_head",
    },
    "Phi, GPT-NeoX, Falcon": {
        "model.layers.0.self_attn.qkv_proj.weight": "attention",
        "model.layers.0.mlp.down_proj.base_layer.weight": "mlp",
        "gpt_neox.layers.0.attention.dense.weight": "attention",
        "gpt_neox.layers.0.mlp.dense_h_to_4h.weight": "mlp",
        "transformer.h.0.ln_1.weight": "norm",
        "transformer.wte.weight": "embedding",
    },
    "Gemma": {
        "language_model.model.layers.0.pre_feedforward_layernorm.weight": "norm",
        "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": "vision",
        "multi_modal_projector.mm_input_projection_weight": "vision",
        "model.language_model.embed_tokens_per_layer.weight": "embedding",
    },
    "Qwen3-MoE, Qwen3-Next": {
        "model.layers.0.mlp.gate.weight": "router",
        "model.layers.0.mlp.experts.127.up_proj.weight": "expert",
        "model.layers.0.mlp.shared_expert.up_proj.weight": "mlp",
        "model.layers.0.mlp.shared_expert_gate.weight": "router",
        "model.layers.0.linear_attn.in_proj_qkvz.weight": "attention",
        "model.layers.0.linear_attn.in_proj_ba.weight": "state_space",
        "model.layers.0.linear_attn.conv1d.weight": "state_space",
        "model.layers.0.linear_attn.A_log": "state_space",
        "model.layers.0.linear_attn.norm.weight": "norm",
        "mtp.fc.weight": "other",
        "mtp.layers.0.mlp.experts.3.gate_proj.weight": "expert",
    },
    "Qwen3.5": {
        "model.language_model.layers.0.linear_attn.in_proj_z.weight": "attention",
        "model.language_model.layers.0.linear_attn.in_proj_a.weight": "state_space",
        "model.visual.blocks.0.attn.qkv.weight": "vision",
    },
    "gpt-oss": {
        "model.layers.0.self_attn.sinks": "attention",
        "model.layers.0.mlp.router.weight": "router",
        "model.layers.0.mlp.experts.gate_up_proj_blocks": "expert",
        "model.layers.0.mlp.experts.gate_up_proj_scales": "scale",
        "model.layers.0.mlp.experts.gate_up_proj_bias": "expert",
    },
    "DeepSeek": {
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": "attention",
        "model.layers.0.self_attn.kv_b_proj.weight_scale_inv": "scale",
        "model.layers.0.self_attn.indexer.wq_b.weight": "attention",
        "model.layers.3.mlp.gate.e_score_correction_bias": "router",
        "model.layers.3.mlp.shared_experts.down_proj.weight": "mlp",
        "model.layers.61.shared_head.head.weight": "lm_head",
        "model.layers.61.eh_proj.weight": "other",
    },
    "Mixtral": {
        "model.layers.0.block_sparse_moe.gate.weight": "router",
        "model.layers.0.block_sparse_moe.experts.7.w1.weight": "expert",
    },
    "Nemotron-H, Mamba": {
        "backbone.embeddings.weight": "embedding",
        "backbone.layers.0.norm.weight": "norm",
        "backbone.layers.0.mixer.in_proj.weight": "attention",
        "backbone.layers.0.mixer.conv1d.bias": "state_space",
        "backbone.layers.0.mixer.D": "state_space",
        "backbone.layers.0.mixer.x_proj.weight": "state_space",
        "backbone.layers.1.mixer.gate.weight": "router",
        "backbone.layers.1.mixer.experts.0.up_proj.weight": "expert",
        "backbone.layers.1.mixer.shared_experts.down_proj.weight": "mlp",
        "backbone.layers.1.mixer.fc1_latent_proj.weight": "mlp",
        "backbone.norm_f.weight": "norm",
    },
    "Hunyuan, Granite, InternVL, Whisper": {
        "model.layers.0.mlp.gate.wg.weight": "router",
        "model.layers.0.block_sparse_moe.router.layer.weight": "router",
        "mlp1.1.weight": "vision",
        "audio_tower.layers.0.fc1.weight": "vision",
    },
    "stored quantized": {
        "model.layers.0.mlp.down_proj.weight_packed": "mlp",
        "model.layers.0.mlp.down_proj.qweight": "mlp",
        "model.layers.0.mlp.down_proj.qzeros": "scale",
        "model.layers.0.mlp.down_proj.weight_scale_2": "scale",
        "model.layers.0.mlp.down_proj.input_scale": "scale",
        "model.layers.0.mlp.experts.0.down_proj.weight_global_scale": "scale",
        "model.layers.0.self_attn.k_scale": "scale",
        "lm_head.weight_scale": "scale",
    },
    "anything else": {"score.weight": "other", "weight": "other", "": "other", "rotary.inv_freq": "other"},
}


@pytest.mark.parametrize("family", NAMES)
def test_the_class_of_a_name(family: str) -> None:
    vectors = ("bias", "norm.weight", "A_log", ".D", "sinks")
    found = {name: tensor_class(name, (64,) if name.endswith(vectors) else (64, 64)) for name in NAMES[family]}
    assert found == NAMES[family]


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.moe.gate_proj.weight", "m.3.b.input_linear.weight"]
)
def test_three_dimensions_are_packed_experts(name: str) -> None:
    assert tensor_class(name, (8, 64, 64)) == "expert"


def test_every_class_occurs() -> None:
    assert {kind for names in NAMES.values() for kind in names.values()} == set(CLASSES)


def test_this_module_stands_for_itself() -> None:
    """It is imported inside foreign Python environments."""
    text = (Path(__file__).parents[3] / "sparkd" / "checkpoint" / "classification.py").read_text()

    assert {line for line in text.splitlines() if line.startswith(("import ", "from "))} == {
        "from __future__ import annotations",
        "import re",
        "from collections.abc import Collection, Mapping, Sequence",
        "from functools import lru_cache",
        "from typing import Any",
    }
