"""Which tensors of published models of several modalities a format changes, and which parts vLLM leaves on the disk.

Names are those of the files on the hub; the classes of vLLM 0.32 say what is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkd.__main__ import exit_code
from tests.support.checkpoints import checkpoint_of, mixture, write
from tests.support.published_tensors import tensors_of
from workers.quantization.recipe import QuantizationRecipe

SIDES = (256, 256)
CHANGED, KEPT = "changed", "kept"
# Architecture: each name, and what becomes of it under a format for all.
MODELS = {
    "Qwen3OmniMoeForConditionalGeneration": {
        "thinker.model.layers.0.self_attn.q_proj": CHANGED,
        "thinker.model.layers.0.mlp.experts.0.gate_proj": CHANGED,
        "thinker.lm_head": KEPT,
        "thinker.audio_tower.layers.0.self_attn.q_proj": KEPT,
        "thinker.visual.blocks.0.attn.qkv": KEPT,
        "talker.model.layers.0.mlp.experts.0.gate_proj": KEPT,
        "code2wav.pre_transformer.layers.0.mlp.gate_proj": KEPT,
    },
    "Phi4MMForCausalLM": {
        "model.layers.0.self_attn.qkv_proj.base_layer": CHANGED,
        "model.layers.0.mlp.down_proj.lora_A.speech": KEPT,
        "model.embed_tokens_extend.audio_embed.encoder.encoders.0.self_attn.linear_q": KEPT,
    },
    "Gemma3nForConditionalGeneration": {
        "model.language_model.layers.0.self_attn.q_proj": CHANGED,
        "model.audio_tower.conformer.0.attention.attn.q_proj": KEPT,
        "model.embed_vision.embedding_projection": KEPT,
        "model.language_model.per_layer_model_projection": KEPT,
    },
    "MiniCPMO": {
        "llm.model.layers.0.self_attn.q_proj": CHANGED,
        "vpm.encoder.layers.0.self_attn.q_proj": KEPT,
        "resampler.attn.in_proj": KEPT,
        "tts.model.layers.0.mlp.gate_proj": KEPT,
    },
}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_format_for_all_changes_the_language_model_alone(architecture: str) -> None:
    names = MODELS[architecture]
    formats = QuantizationRecipe.parse("nvfp4").assign(checkpoint_of((f"{name}.weight", SIDES, "BF16") for name in names))
    assert {name: CHANGED if name in formats else KEPT for name in names} == names


def test_a_rule_that_names_a_part_changes_it() -> None:
    module = "talker.model.layers.0.mlp.gate_proj"
    found = checkpoint_of([(f"{module}.weight", SIDES, "BF16")])
    assert module in QuantizationRecipe.parse({"layers": {"talker": "fp8"}}).assign(found)
    assert module not in QuantizationRecipe.parse({"layers": {"*_proj": "fp8"}}).assign(found)


@pytest.mark.parametrize(
    ("leaves", "size"),
    [
        # Step-3.5: the experts of a layer in one tensor, under a name of their own.
        ({"moe.gate_proj.weight": (8, 512, 512), "moe.down_proj.weight": (8, 512, 512)}, 4 * 2 * 8 * 512 * 512 * 2),
        # DBRX: one matrix for all of them, and no module.
        ({"ffn.experts.mlp.w1": (4096, 512)}, 4 * 4096 * 512 * 2),
        ({"mlp.experts.gate_up_proj": (8, 256, 512), "mlp.experts.gate_up_proj_bias": (128, 512)}, 0),
    ],
)
def test_experts_that_no_format_changes_are_named_at_the_top_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], leaves: dict[str, tuple[int, ...]], size: int
) -> None:
    config = mixture()
    tensors = [each for each in tensors_of(config) if ".experts." not in each[0]]
    tensors += [(f"model.layers.{layer}.{leaf}", sides, "BF16") for layer in range(4) for leaf, sides in leaves.items()]
    folder = str(write(tmp_path / "m", config, tensors))
    assert exit_code(["--json", "plan", "--quick", "--quantize", "nvfp4", folder]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert sum(plan["unknown_experts"].values()) == size
    assert set(plan["unknown_experts"]) == ({f"model.layers.*.{leaf}" for leaf in leaves} if size else set())
    assert exit_code(["--json", "plan", "--quick", "--quantize", "bf16", folder]) == 0
    assert json.loads(capsys.readouterr().out)["unknown_experts"] == {}
