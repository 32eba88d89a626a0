"""The class of a tensor by its name: the kind of layer that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

CLASSES = ("embedding", "lm_head", "attention", "mlp", "expert", "router", "norm", "vision", "state_space", "scale", "other")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Components of a dotted name that mark a tower, a projector or a generator of another modality than text.
VISION_PARTS = _words(
    """visual vision vision_model vision_tower vision_encoder vision_embed_tokens vision_embedder vision_projection vit image_newline
    image_encoder patch_embed multi_modal_projector mm_projector multimodal_projector embed_vision embed_audio vision_language_adapter
    audio audio_tower audio_encoder audio_model audio_projector audio_projection_layer speech_encoder speech_projector sound_encoder
    sound_projection radio_model pre_mm_projector_norm patch_merger view_seperator resampler img_processor img_projection connector
    perceiver_resampler vision_proj audio_embed image_embed aligner qformer merger vit_merger mlp_AR vpm apm vision_backbone image_vit
    sam_model projector visual_tokenizer vit_model vit_downsampler vit_large_projector embed_tokens_extend whisper_encoder
    mm_whisper_embeddings mm_streams_embeddings audio_language_adapter audio_adapter speech_adapter vision_adapter talker code2wav
    token2wav tts vocoder audio_tokenizer audio_invert_tower discrete_vision_model time_series mimo_layers mimo_output audio_projection
    vision_embedding resampler_model layerwise_projectors spatial_projectors"""
)
# InternVL's projector, as the first component of a name.
_VISION_ROOTS = _words("mlp1")
# First components that are layers in a text model (BERT, T5), but a tower and its projector in a model whose configuration has a section
# for another modality (Granite Speech, Step-Audio).
_ENCODER_ROOTS = _words("encoder adapter")
_MODALITIES = ("vision", "audio", "speech", "sound", "image", "encoder")
_EMBEDDINGS = _words(
    """embed_tokens tok_embeddings word_embeddings wte wpe embedding embeddings position_embeddings embed_tokens_per_layer
    token_embedding embed_positions embed_in shared"""
)
_HEADS = _words("lm_head output_layer embed_out")
_ROUTERS = _words("gate router shared_expert_gate wg e_score_correction_bias expert_bias tid2eid")
_STATE_SPACE = _words("conv1d q_conv1d k_conv1d v_conv1d A_log D dt_bias x_proj dt_proj in_proj_ba in_proj_a in_proj_b")
_ATTENTION = _words(
    """q_proj k_proj v_proj o_proj qkv_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj wq wk wv wo wqkv Wqkv qkv wq_a wq_b wkv
    wkv_a wkv_b wo_a wo_b query_key_value c_attn in_proj in_proj_qkvz in_proj_qkv in_proj_z out_proj g_proj f_a_proj f_b_proj b_proj
    query key value weights_proj sinks"""
)
_ATTENTION_PARENTS = _words("self_attn attn attention self_attention linear_attn cross_attn indexer")
_MLP = _words(
    """gate_proj up_proj down_proj gate_up_proj w1 w2 w3 fc1 fc2 c_fc c_proj dense_h_to_4h dense_4h_to_h input_linear output_linear wi
    wi_0 wi_1 linear_1 linear_2"""
)
_MLP_PARENTS = _words("mlp ffn feed_forward shared_expert shared_experts shared_mlp block_sparse_moe mixer moe")
# Last components of tensors that quantized checkpoints store beside a weight.
_SCALES = _words(
    """weight_scale weight_scale_inv weight_scale_2 weight_global_scale input_scale input_global_scale weight_shape weight_zero_point
    input_zero_point qzeros scales g_idx weight_g_idx k_scale v_scale q_scale output_scale activation_scale scale scale_inv SCB"""
)
_SCALE_ENDS = ("_scales", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_zero_point")
# The component between a layer and its weight where the layer has adapters (PEFT; for example Phi-4-multimodal).
WRAPPED = "base_layer"
_NORM = re.compile(r"norm|(?:^|_)ln(?:_|$)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def towers_of(config: Mapping[str, Any]) -> frozenset[str]:
    """First components of names that are towers in the model of this config.json but text layers in other models."""
    parts = (key for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping))
    return _ENCODER_ROOTS if any(modality in part for part in parts for modality in _MODALITIES) else frozenset()


def tensor_class(name: str, shape: Sequence[int], towers: Collection[str] = ()) -> str:
    """One of CLASSES, by the tensor's name; three dimensions distinguish packed experts from a single projection of the same name.

    The class `attention` has the large projections of a token mixer (softmax, linear attention, Mamba), `state_space` its small parameters
    and convolutions, `expert` routed experts, one by one or packed, `vision` towers, projectors and generators of any modality but text.

    towers: see `towers_of`.
    """
    return "vision" if towers and name.partition(".")[0] in towers else _class(_NUMBER.sub("0", name), len(shape))


@lru_cache(maxsize=65536)
def _class(name: str, dimensions: int) -> str:
    parts = [part for part in name.split(".") if part != WRAPPED]
    stored = parts[-1]
    leaf = parts[-2] if stored in ("weight", "bias", "weight_packed", "qweight") and len(parts) > 1 else stored
    if VISION_PARTS.intersection(parts) or parts[0] in _VISION_ROOTS:
        return "vision"
    if stored in _SCALES or stored.endswith(_SCALE_ENDS):
        return "norm" if _NORM.search(leaf) else "scale"
    if leaf in _ROUTERS or "router" in parts:
        return "router"
    if leaf in _STATE_SPACE:
        return "state_space"
    if _NORM.search(leaf):
        return "norm"
    if "experts" in parts[:-1] or (dimensions == 3 and leaf in _MLP):
        return "expert"
    if leaf in _EMBEDDINGS:
        return "embedding"
    if leaf in _HEADS or (leaf == "head" and "shared_head" in parts):
        return "lm_head"
    parents = parts[: -2 if leaf is not stored else -1]
    parent = next((part for part in reversed(parents) if not part.isdigit()), "")
    if parent in _ATTENTION_PARENTS:
        return "attention"
    if leaf in _MLP or (parent in _MLP_PARENTS and leaf not in _ATTENTION):
        return "mlp"
    return "attention" if leaf in _ATTENTION else "other"
