"""Owns which keys of config.json sparkd's formulas read for each architecture that the tests compare with vLLM, and which keys change no
size. Any other key that is set may change one, and so may one that is missing: the class of the model then fills it in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Every language model has these.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "max_position_embeddings")
_ROTARY = ("rope_scaling", "rope_parameters", "rope_local_base_freq", "partial_rotary_factor")
_MIXTURE = ("moe_intermediate_size", "num_experts_per_tok")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_DELTA = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim",
    "full_attention_interval|layer_types", "partial_rotary_factor",
)  # fmt: skip
# Keys of nothing that is counted: names, tokens, activations, numbers within a layer, training, sampling.
_NO_SIZE = _words(
    """
    architectures model_type auto_map torch_dtype dtype use_cache return_dict torchscript id2label label2id num_labels problem_type
    tie_word_embeddings hidden_activation hidden_act activation_function initializer_range initializer_factor pretraining_tp
    attn_implementation rope_theta rope_interleave rope_local_base_freq rope_type original_max_position_embeddings initial_context_length
    norm_topk_prob routed_scaling_factor n_group topk_group topk_method scoring_func seq_aux aux_loss_alpha ep_size output_gate_type
    query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping swiglu_limit swiglu_alpha attention_bias mlp_bias use_qk_norm
    use_bidirectional_attention mm_tokens_per_image vision_soft_tokens_per_image max_window_layers moe_router_dtype
    quantization_config compression_config text_config llm_config language_config thinker_config
    top_k top_p temperature do_sample num_beams max_length min_length max_new_tokens repetition_penalty length_penalty typical_p
    """
)
_NO_SIZE_ENDS = ("token_id", "token_ids", "token_index", "_eps", "epsilon", "dropout", "_coef", "version", "_name_or_path", "_token")
_NO_SIZE_BEGINNINGS = ("unsloth", "output_", "_attn")
# These change no size at this value.
_NEUTRAL: Mapping[str, Any] = {"decoder_sparse_step": 1, "moe_layer_freq": 1, "attn_output_gate": True}
# In any other key a list or a mapping would mean a different size for each layer.
_LISTS = ("layer_types", "mlp_layer_types", "mlp_only_layers")
_MAPPINGS = ("rope_scaling", "rope_parameters", "vision_config")
# The kinds of rotary tables that the tests compare with vLLM's (tests/sparkd/capacity/test_against_vllm.py).
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "deepseek_yarn", "proportional")


@dataclass(frozen=True, slots=True)
class _Keys:
    """needs: keys without which the class of the model has a default that the formulas do not have; `a|b` for one of two. may: others that
    the formulas read, or that follow from those."""

    needs: tuple[str, ...]
    may: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        return frozenset(name for key in (*self.needs, *self.may, *_ROTARY) for name in key.split("|"))


KEYS: Mapping[str, _Keys] = {
    "LlamaForCausalLM": _Keys(_SIZES, ("num_key_value_heads", "head_dim")),
    "MistralForCausalLM": _Keys((*_SIZES, "num_key_value_heads"), ("head_dim",)),
    "Qwen3ForCausalLM": _Keys((*_SIZES, "num_key_value_heads", "head_dim"), ("layer_types",)),
    "Qwen3MoeForCausalLM": _Keys((*_SIZES, *_MIXTURE, "num_key_value_heads", "head_dim", "num_experts|num_local_experts")),
    "Qwen3NextForCausalLM": _Keys(
        (*_SIZES, *_MIXTURE, *_DELTA, "num_key_value_heads", "head_dim", "num_experts", "shared_expert_intermediate_size"),
        ("num_nextn_predict_layers",),
    ),
    "Qwen3_5ForConditionalGeneration": _Keys(
        (*_SIZES, *_DELTA, "num_key_value_heads", "head_dim"), ("mtp_num_hidden_layers", "mamba_ssm_dtype", "vision_config")
    ),
    "Qwen3_5MoeForConditionalGeneration": _Keys(
        (*(key for key in _SIZES if key != "intermediate_size"), *_MIXTURE, *_DELTA, "num_key_value_heads", "head_dim", "num_experts",
         "shared_expert_intermediate_size"),
        ("mtp_num_hidden_layers", "mamba_ssm_dtype", "vision_config", "intermediate_size"),
    ),
    "DeepseekV2ForCausalLM": _Keys(
        (*_SIZES, *_MIXTURE, *_LATENT, "n_routed_experts", "n_shared_experts"),
        ("num_key_value_heads", "head_dim", "qk_head_dim", "q_lora_rank", "first_k_dense_replace"),
    ),
    "DeepseekV3ForCausalLM": _Keys(
        (*_SIZES, *_MIXTURE, *_LATENT, "n_routed_experts", "n_shared_experts", "q_lora_rank", "num_nextn_predict_layers"),
        ("num_key_value_heads", "head_dim", "qk_head_dim", "first_k_dense_replace"),
    ),
    "Glm4MoeForCausalLM": _Keys(
        (*_SIZES, *_MIXTURE, "num_key_value_heads", "head_dim", "n_routed_experts", "n_shared_experts", "num_nextn_predict_layers",
         "partial_rotary_factor"),
        ("first_k_dense_replace",),
    ),
    "GptOssForCausalLM": _Keys(
        (*_SIZES, "num_key_value_heads", "head_dim", "sliding_window", "num_local_experts", "num_experts_per_tok|experts_per_token"),
        ("layer_types",),
    ),
    "Gemma3ForConditionalGeneration": _Keys(
        (*_SIZES, "num_key_value_heads", "head_dim", "sliding_window"),
        ("layer_types", "sliding_window_pattern", "_sliding_window_pattern", "vision_config"),
    ),
    "Gemma4ForConditionalGeneration": _Keys(
        (*_SIZES, "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window", "layer_types", "num_kv_shared_layers",
         "hidden_size_per_layer_input"),
        ("num_global_key_value_heads", "attention_k_eq_v", "enable_moe_block", "num_experts", "moe_intermediate_size", "top_k_experts",
         "vocab_size_per_layer_input", "vision_config"),
    ),
}  # fmt: skip
# Keys of needs whose every value but this changes what no formula counts.
_ONLY: Mapping[str, Any] = {"hidden_size_per_layer_input": 0}


def unread(architecture: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> Iterator[str]:
    """The keys of config.json that may change a size and that the formulas of a checked architecture do not read, and those that they lack.
    text: the part of `config` that describes the language model. Nothing of an architecture that no test compares."""
    keys = KEYS.get(architecture)
    if keys is None:
        return
    tables = list(_tables(text))
    stated = {name for place in (text, *tables) for name, value in place.items() if value is not None}
    yield from (key for key in keys.needs if stated.isdisjoint(key.split("|")))
    for place in (config,) if text == config else (config, text):
        yield from (name for name, value in place.items() if not _is_read(name, value, keys.all))
    yield from (str(kind) for table in tables if (kind := table.get("rope_type") or table.get("type") or "default") not in _ROPE_TYPES)


def _is_read(name: str, value: Any, keys: frozenset[str]) -> bool:
    if name in _ONLY:
        return bool(value == _ONLY[name])
    if name in _NEUTRAL:
        return bool(value == _NEUTRAL[name])
    if not value or name in _NO_SIZE or name.endswith(_NO_SIZE_ENDS) or name.startswith(_NO_SIZE_BEGINNINGS):
        return True
    if isinstance(value, list):
        return name in keys and name in _LISTS
    return name in keys and (name in _MAPPINGS or not isinstance(value, Mapping))


def _tables(text: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The tables of its rotary embedding, by themselves or by kinds of layers."""
    for name in ("rope_parameters", "rope_scaling"):
        table = text.get(name)
        if isinstance(table, Mapping):
            yield from [inner for inner in table.values() if isinstance(inner, Mapping)] or [table]
