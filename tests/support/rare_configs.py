"""Configurations of kinds that sparkd has no formula for, or spells in another way: as their publishers write them, with fewer layers.

Never reads a file. Each is {file name: its JSON}, as sparkd.inquiry.model_answers.ModelQuestion has them.
UNANSWERED are those that need code of their own, REFUSED those that vLLM 0.32 does not serve so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sparkd.checkpoint.tensors import TensorRef
from sparkd.inquiry.model_answers import SPARK, ModelQuestion

_PLAIN: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_LATENT: Mapping[str, Any] = {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 16,
}
# No question runs their code.
_OWN_CODE: Mapping[str, Any] = {"auto_map": {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}}
_GROUPS = (8, 16, None, 8)


def _config(architecture: str, kind: str, **more: Any) -> dict[str, Any]:
    given = {**_PLAIN, "architectures": [architecture], "model_type": kind, "num_hidden_layers": 4, **more}
    return {key: value for key, value in given.items() if value is not None}


def _linear(kinds: list[str], **more: Any) -> dict[str, Any]:
    return {"layer_types": kinds, "num_hidden_layers": len(kinds), **more}


_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # Two attentions in each layer.
    "longcat-flash": _config(
        "LongcatFlashForCausalLM", "longcat_flash", **_LATENT, num_layers=4, num_hidden_layers=None, ffn_hidden_size=2816,
        expert_ffn_hidden_size=512, n_routed_experts=16, zero_expert_num=8, zero_expert_type="identity", moe_topk=4,
        routed_scaling_factor=6.0, mla_scale_q_lora=True, mla_scale_kv_lora=True, attention_method="MLA", head_dim=64,
    ),
    # Latent in its configuration, keys and values of all heads in vLLM.
    "minicpm3": _config(
        "MiniCPM3ForCausalLM", "minicpm3", **_LATENT, scale_emb=12, scale_depth=1.4, dim_model_base=256, head_dim=192
    ),
    "mimo-v2-flash": _config(
        "MiMoV2FlashForCausalLM", "mimo_v2_flash", num_hidden_layers=6, head_dim=192, v_head_dim=128, swa_num_attention_heads=16,
        swa_num_key_value_heads=8, swa_head_dim=192, swa_v_head_dim=128, partial_rotary_factor=0.334, rope_theta=5_000_000,
        swa_rope_theta=10_000, sliding_window=128, sliding_window_size=128, hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1, 1, 1], add_swa_attention_sink_bias=True, add_full_attention_sink_bias=False, n_routed_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=512, scoring_func="sigmoid", topk_method="noaux_tc", n_group=1, topk_group=1,
        norm_topk_prob=True, layernorm_epsilon=1e-5, attention_value_scale=0.707,
    ),
    "decilm": _config(
        "DeciLMForCausalLM", "nemotron-nas", **_OWN_CODE, num_key_value_heads=None, intermediate_size=None,
        block_configs=[
            {
                "attention": {"n_heads_in_group": group, "no_op": group is None, "replace_with_linear": False},
                "ffn": {"ffn_mult": 2.625, "no_op": False, "replace_with_linear": False},
            }
            for group in _GROUPS
        ],
    ),
    "jamba": _config(
        "JambaForCausalLM", "jamba", num_hidden_layers=8, attn_layer_period=8, attn_layer_offset=4, expert_layer_period=2,
        expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=64,
        mamba_conv_bias=True, mamba_proj_bias=False, use_mamba_kernels=True,
    ),
    "lfm2": _config(
        "Lfm2ForCausalLM", "lfm2", **_linear(["conv", "conv", "full_attention", "conv", "full_attention", "conv"]), conv_L_cache=3,
        conv_bias=False, conv_dim=1024, block_dim=1024, block_ff_dim=2816, block_multiple_of=256, block_auto_adjust_ff_dim=True,
        norm_eps=1e-5,
    ),
    "mamba-2": {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 4, "num_heads": 32,
        "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4, "expand": 2, "chunk_size": 256, "vocab_size": 32_000,
        "torch_dtype": "bfloat16", "use_conv_bias": True, "rms_norm": True, "tie_word_embeddings": False,
    },
    "bert": {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 12,
        "intermediate_size": 1536, "max_position_embeddings": 512, "vocab_size": 30_522, "type_vocab_size": 2, "hidden_act": "gelu",
        "torch_dtype": "float32", "layer_norm_eps": 1e-12, "position_embedding_type": "absolute",
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 384, "encoder_layers": 4,
        "decoder_layers": 4, "encoder_attention_heads": 6, "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
        "num_mel_bins": 80, "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51_865, "num_hidden_layers": 4,
        "torch_dtype": "float16",
    },
    # n_heads and no word on how many keys.
    "dbrx": {
        "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 1024, "n_heads": 16, "n_layers": 4, "max_seq_len": 32_768,
        "vocab_size": 32_000, "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 500_000.0}, "torch_dtype": "bfloat16",
        "ffn_config": {"ffn_hidden_size": 1024, "moe_num_experts": 4, "moe_top_k": 2}, "tie_word_embeddings": False,
    },
    # No number of layers, one word for each.
    "nemotron-h-listed": _config(
        "NemotronHForCausalLM", "nemotron_h", num_hidden_layers=None, layers_block_type=["mamba", "moe", "attention", "mamba"],
        mamba_num_heads=32, mamba_head_dim=64, n_groups=8, ssm_state_size=128, conv_kernel=4, chunk_size=128, expand=2, head_dim=128,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=512, moe_shared_expert_intermediate_size=1024,
        n_shared_experts=1, mlp_hidden_act="relu2", mamba_hidden_act="silu", use_conv_bias=True, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, layer_norm_epsilon=1e-5,
    ),
    "llama-4-text": {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text", "hidden_size": 1024, "intermediate_size": 1024, "intermediate_size_mlp": 2048,
            "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "attention_chunk_size": 8192,
            "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "vocab_size": 32_000,
            "max_position_embeddings": 65_536, "use_qk_norm": True, "torch_dtype": "bfloat16",
        },
        "vision_config": {
            "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 336,
            "patch_size": 14, "vision_output_dim": 512, "projector_input_dim": 512, "projector_output_dim": 512,
        },
        "torch_dtype": "bfloat16",
    },
    "kimi-linear": _config(
        "KimiLinearForCausalLM", "kimi_linear", **_LATENT, head_dim=72, mla_use_nope=True, first_k_dense_replace=1,
        linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 16, "head_dim": 64, "short_conv_kernel_size": 4},
        num_experts=8, num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=512, moe_renormalize=True,
        moe_router_activation_func="sigmoid", num_expert_group=1, topk_group=1, use_grouped_topk=True, routed_scaling_factor=2.4,
        moe_layer_freq=1, num_nextn_predict_layers=0,
    ),
    "falcon-h1": _config(
        "FalconH1ForCausalLM", "falcon_h1", mamba_n_heads=16, mamba_d_head=64, mamba_n_groups=2, mamba_d_state=128, mamba_d_conv=4,
        mamba_d_ssm=1024, mamba_chunk_size=128, mamba_expand=2, mamba_rms_norm=False, mamba_conv_bias=True, head_dim=64,
    ),
    "deepseek-v3.2": _config(
        "DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, index_topk=2048, index_head_dim=128, index_n_heads=16, n_routed_experts=8,
        num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=512, first_k_dense_replace=1, n_group=1, topk_group=1,
        scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5, moe_layer_freq=1,
    ),
    # An architecture that is known, with layers that differ.
    "llama-per-layer": _config(
        "LlamaForCausalLM", "llama", per_layer_config={"1": {"num_key_value_heads": 2}, "2": {"num_key_value_heads": 8}}
    ),
    # Weights and cache in FP8: `auto` is FP8 to vLLM.
    "modelopt-fp8-cache": _config(
        "LlamaForCausalLM", "llama",
        quantization_config={
            "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"],
            "producer": {"name": "modelopt", "version": "0.29.0"},
        },
    ),
    # A text model that leaves all but its width to its class.
    "qwen2-vl-defaults": {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "torch_dtype": "bfloat16",
        "text_config": {"model_type": "qwen2_vl_text", "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2},
        "vision_config": {"depth": 2, "embed_dim": 128, "num_heads": 2, "hidden_size": 1024},
    },
    "nothing-said": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen2-windows": _config(
        "Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=4096, max_window_layers=2
    ),
}  # fmt: skip

RARE: Mapping[str, Mapping[str, bytes]] = {
    **{name: {"config.json": json.dumps(config).encode()} for name, config in _CONFIGS.items()},
    "mistral-params": {
        "params.json": json.dumps(
            {
                "dim": 1024, "n_layers": 4, "head_dim": 64, "hidden_dim": 2816, "n_heads": 16, "n_kv_heads": 4, "norm_eps": 1e-5,
                "rope_theta": 1e6, "vocab_size": 32_000, "max_seq_len": 32_768, "tied_embeddings": False,
            }
        ).encode()
    },
}  # fmt: skip
UNANSWERED = ("decilm",)
REFUSED = ("llama-per-layer", "qwen2-windows")


def question_of(name: str) -> ModelQuestion:
    """vLLM takes a folder for one of Mistral's by the names of its files of weights."""
    mistral = TensorRef("tok_embeddings.weight", "BF16", (32_000, 1024), "consolidated.safetensors", 0, 2 * 32_000 * 1024)
    return ModelQuestion(files=RARE[name], tensors=(mistral,) if "params.json" in RARE[name] else (), platform=SPARK)
