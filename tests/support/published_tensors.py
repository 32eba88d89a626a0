"""Owns which tensors published models of each family have, by the names on the hub, before anything is quantized. Never reads a file.

Names and shapes are those of transformers' classes (modeling_*.py) with what the hub's files have besides: layers that predict tokens
ahead, experts one by one where the publisher keeps them so. tests/fixtures/totals.yaml says how many values each model must come to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.support.checkpoints import Tensor
from tests.support.published_towers import clipped_tower, patches, qwen_tower, siglip_tower

Config = Mapping[str, Any]


def tensors_of(config: Config) -> list[Tensor]:
    """config: config.json; one that names no model type is read as Llama's. Raises KeyError for a model type that is not here."""
    rows = _FAMILIES[config.get("model_type") or _language(config).get("model_type", "llama")](config)
    return [Tensor(name, tuple(shape), *dtype) for name, shape, *dtype in rows]


Rows = Iterator[tuple[Any, ...]]


def _dense(config: Config) -> Rows:
    """Llama, Mistral, Qwen3."""
    yield from _ends(config)
    for base in _layers(config):
        yield from _norms(base, config)
        yield from _attention(f"{base}.self_attn", config, head_norms=config.get("model_type") == "qwen3")
        yield from _gated(f"{base}.mlp", config["hidden_size"], config["intermediate_size"])


def _qwen3_moe(config: Config) -> Rows:
    yield from _ends(config)
    for base in _layers(config):
        yield from _norms(base, config)
        yield from _attention(f"{base}.self_attn", config, head_norms=True)
        yield from _routed(f"{base}.mlp", config, config["num_experts"])


def _qwen3_next(config: Config) -> Rows:
    """Also Qwen3-Coder-Next, which has no layer ahead."""
    yield from _ends(config)
    for number, base in enumerate(_layers(config)):
        yield from _qwen_layer(base, config, full=_is_full(config, number), fused=True)
    if "mlp_only_layers" in config:
        yield from _qwen_ahead(config, fused=True)


def _qwen3_5(config: Config) -> Rows:
    text = config["text_config"]
    yield from _ends(text, "model.language_model", "lm_head")
    for number, base in enumerate(_layers(text, "model.language_model")):
        yield from _qwen_layer(base, text, full=_is_full(text, number), fused=False)
    yield from _qwen_ahead(text, fused=False)
    if "vision_config" in config:
        yield from qwen_tower("model.visual", config["vision_config"])


def _qwen_ahead(text: Config, *, fused: bool) -> Rows:
    """One layer of full attention that predicts a token ahead; embedding and head are the model's."""
    hidden = text["hidden_size"]
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield f"mtp.{name}.weight", (hidden,)
    yield from _qwen_layer("mtp.layers.0", text, full=True, fused=fused)


def _qwen_layer(base: str, text: Config, *, full: bool, fused: bool) -> Rows:
    """fused: as Qwen3-Next stores it; Qwen3.5 has its delta nets' projections apart and its experts in one tensor."""
    hidden = text["hidden_size"]
    yield from _norms(base, text)
    if full:
        yield from _attention(f"{base}.self_attn", text, head_norms=True, gated=True)
    else:
        yield from _delta_net(f"{base}.linear_attn", text, fused=fused)
    if "num_experts" not in text:
        yield from _gated(f"{base}.mlp", hidden, text["intermediate_size"])
        return
    yield from _routed(f"{base}.mlp", text, text["num_experts"], packed=not fused)
    yield from _gated(f"{base}.mlp.shared_expert", hidden, text["shared_expert_intermediate_size"])
    yield f"{base}.mlp.shared_expert_gate.weight", (1, hidden)


def _delta_net(module: str, text: Config, *, fused: bool) -> Rows:
    hidden, heads, dim = text["hidden_size"], text["linear_num_value_heads"], text["linear_value_head_dim"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * dim
    # Qwen3.5 keeps these two in float32 (totals.yaml: 4,800 such values in 30 layers of 32 heads).
    exact = "BF16" if fused else "F32"
    yield f"{module}.A_log", (heads,), exact
    yield f"{module}.norm.weight", (dim,), exact
    yield f"{module}.dt_bias", (heads,)
    yield f"{module}.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    if fused:
        yield f"{module}.in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield f"{module}.in_proj_ba.weight", (2 * heads, hidden)
    else:
        rows = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        yield from ((f"{module}.{name}.weight", (count, hidden)) for name, count in rows.items())
    yield f"{module}.out_proj.weight", (hidden, values)


def _gpt_oss(config: Config) -> Rows:
    """Experts as published, in MXFP4 (OCP MX v1.0: blocks of 32 with one exponent)."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield from _ends(config)
    for base in _layers(config):
        yield from _norms(base, config)
        yield from _attention(f"{base}.self_attn", config, biases="qkvo")
        yield f"{base}.self_attn.sinks", (config["num_attention_heads"],)
        yield f"{base}.mlp.router.weight", (experts, hidden)
        yield f"{base}.mlp.router.bias", (experts,)
        for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            yield f"{base}.mlp.experts.{name}_blocks", (experts, rows, columns // 32, 16), "U8"
            yield f"{base}.mlp.experts.{name}_scales", (experts, rows, columns // 32), "U8"
            yield f"{base}.mlp.experts.{name}_bias", (experts, rows)


def _gemma3(config: Config) -> Rows:
    text = {"tie_word_embeddings": True, **config["text_config"]}
    yield from _gemma3_text(text, "language_model.")
    yield from siglip_tower("vision_tower.vision_model", config["vision_config"])
    yield "multi_modal_projector.mm_input_projection_weight", (config["vision_config"]["hidden_size"], text["hidden_size"])
    yield "multi_modal_projector.mm_soft_emb_norm.weight", (config["vision_config"]["hidden_size"],)


def _gemma3_text(text: Config, prefix: str = "") -> Rows:
    yield from _ends(text, f"{prefix}model", f"{prefix}lm_head")
    for base in _layers(text, f"{prefix}model"):
        yield from _norms(base, text, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        yield from _attention(f"{base}.self_attn", text, head_norms=True)
        yield from _gated(f"{base}.mlp", text["hidden_size"], text["intermediate_size"])


def _gemma4(config: Config) -> Rows:
    text, root = config["text_config"], "model.language_model"
    hidden = text["hidden_size"]
    yield from _ends(text, root, "lm_head")
    for kind, base in zip(text["layer_types"], _layers(text, root), strict=True):
        yield from _norms(base, text, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        yield f"{base}.layer_scalar", (1,)
        # Without a window: heads of their own, whose keys are their values too.
        full = kind == "full_attention"
        own = {"head_dim": text["global_head_dim"], "num_key_value_heads": text["num_global_key_value_heads"]} if full else {}
        skip = ("v_proj",) if full and text["attention_k_eq_v"] else ()
        yield from _attention(f"{base}.self_attn", {**text, **own}, head_norms=True, skip=skip)
        yield from _gated(f"{base}.mlp", hidden, text["intermediate_size"])
        if not text["enable_moe_block"]:
            continue
        experts, inner = text["num_experts"], text["moe_intermediate_size"]
        yield from ((f"{base}.{name}.weight", (hidden,)) for name in _GEMMA4_MOE_NORMS)
        yield f"{base}.router.scale", (hidden,)
        yield f"{base}.router.per_expert_scale", (experts,)
        yield f"{base}.router.proj.weight", (experts, hidden)
        yield f"{base}.experts.gate_up_proj", (experts, 2 * inner, hidden)
        yield f"{base}.experts.down_proj", (experts, hidden, inner)
    if config["model_type"] == "gemma4_unified":
        yield from patches("model", config)
    elif "hidden_size" in config["vision_config"]:
        yield from clipped_tower("model.vision_tower", config["vision_config"])
        yield "model.embed_vision.embedding_projection.weight", (hidden, config["vision_config"]["hidden_size"])


_GEMMA4_MOE_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def _nemotron_h(config: Config) -> Rows:
    """Of Nano Omni the language model alone: which tensors its towers have no public source says."""
    text = _language(config)
    prefix = "" if text is config else "language_model."
    hidden = text["hidden_size"]
    yield f"{prefix}backbone.embeddings.weight", (text["vocab_size"], hidden)
    yield f"{prefix}backbone.norm_f.weight", (hidden,)
    yield f"{prefix}lm_head.weight", (text["vocab_size"], hidden)
    for number, kind in enumerate(text["hybrid_override_pattern"]):
        yield from _nemotron_layer(f"{prefix}backbone.layers.{number}", text, kind)
    if not text.get("num_nextn_predict_layers"):
        return
    pattern = text["mtp_hybrid_override_pattern"]
    for number, kind in enumerate(pattern):
        yield from _nemotron_layer(f"mtp.layers.{number}", text, kind)
    yield "mtp.layers.0.eh_proj.weight", (hidden, 2 * hidden)
    yield from ((f"mtp.layers.0.{name}.weight", (hidden,)) for name in ("enorm", "hnorm"))
    yield f"mtp.layers.{len(pattern) - 1}.final_layernorm.weight", (hidden,)


def _nemotron_layer(base: str, text: Config, kind: str) -> Rows:
    hidden, mixer = text["hidden_size"], f"{base}.mixer"
    yield f"{base}.norm.weight", (hidden,)
    if kind == "*":
        yield from _attention(mixer, text)
    elif kind == "M":
        heads = text["mamba_num_heads"]
        width = heads * text["mamba_head_dim"]
        channels = width + 2 * text["n_groups"] * text["ssm_state_size"]
        yield from ((f"{mixer}.{name}", (heads,)) for name in ("A_log", "D", "dt_bias"))
        yield f"{mixer}.conv1d.weight", (channels, 1, text["conv_kernel"])
        yield f"{mixer}.conv1d.bias", (channels,)
        yield f"{mixer}.in_proj.weight", (width + channels + heads, hidden)
        yield f"{mixer}.norm.weight", (width,)
        yield f"{mixer}.out_proj.weight", (hidden, width)
    else:
        # Experts without a gate projection; in Super they work in a space of fewer dimensions.
        experts, inner, shared = text["n_routed_experts"], text["moe_intermediate_size"], text["moe_shared_expert_intermediate_size"]
        latent = text.get("moe_latent_size") or hidden
        yield f"{mixer}.gate.weight", (experts, hidden)
        yield f"{mixer}.gate.e_score_correction_bias", (experts,), "F32"
        if latent != hidden:
            yield f"{mixer}.fc1_latent_proj.weight", (latent, hidden)
            yield f"{mixer}.fc2_latent_proj.weight", (hidden, latent)
        for number in range(experts):
            yield f"{mixer}.experts.{number}.up_proj.weight", (inner, latent)
            yield f"{mixer}.experts.{number}.down_proj.weight", (latent, inner)
        yield f"{mixer}.shared_experts.up_proj.weight", (shared, hidden)
        yield f"{mixer}.shared_experts.down_proj.weight", (hidden, shared)


def _deepseek(config: Config) -> Rows:
    """DeepSeek-V2 and V3, GLM-4.5; a layer ahead has an embedding and a head of its own."""
    hidden, layers, ahead = config["hidden_size"], config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0)
    yield from _ends(config)
    for number in range(layers + ahead):
        base = f"model.layers.{number}"
        yield from _norms(base, config)
        if "kv_lora_rank" in config:
            yield from _latent(f"{base}.self_attn", config)
        else:
            yield from _attention(f"{base}.self_attn", config, biases="qkv" if config["attention_bias"] else "")
        if number < config["first_k_dense_replace"]:
            yield from _gated(f"{base}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _routed(f"{base}.mlp", config, config["n_routed_experts"])
            if config["model_type"] != "deepseek_v2":
                yield f"{base}.mlp.gate.e_score_correction_bias", (config["n_routed_experts"],), "F32"
            yield from _gated(f"{base}.mlp.shared_experts", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])
        if number >= layers:
            yield from ((f"{base}.{name}.weight", (hidden,)) for name in ("enorm", "hnorm", "shared_head.norm"))
            yield from ((f"{base}.{name}.weight", (config["vocab_size"], hidden)) for name in ("embed_tokens", "shared_head.head"))
            yield f"{base}.eh_proj.weight", (hidden, 2 * hidden)


def _latent(module: str, config: Config) -> Rows:
    hidden, heads, queries, latent = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    if queries:
        yield f"{module}.q_a_proj.weight", (queries, hidden)
        yield f"{module}.q_a_layernorm.weight", (queries,)
        yield f"{module}.q_b_proj.weight", (heads * (nope + rope), queries)
    else:
        yield f"{module}.q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{module}.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{module}.kv_a_layernorm.weight", (latent,)
    yield f"{module}.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{module}.o_proj.weight", (hidden, heads * value)


def _granite(config: Config) -> Rows:
    """Granite 4, of which only the layers of attention are known here."""
    hidden, inner, wide, experts = (
        config[key] for key in ("hidden_size", "intermediate_size", "shared_intermediate_size", "num_local_experts")
    )
    yield from _ends(config)
    for base in _layers(config):
        yield from _norms(base, config)
        yield from _attention(f"{base}.self_attn", config)
        yield f"{base}.block_sparse_moe.router.layer.weight", (experts, hidden)
        yield f"{base}.block_sparse_moe.input_linear.weight", (experts, 2 * inner, hidden)
        yield f"{base}.block_sparse_moe.output_linear.weight", (experts, hidden, inner)
        yield f"{base}.shared_mlp.input_linear.weight", (2 * wide, hidden)
        yield f"{base}.shared_mlp.output_linear.weight", (hidden, wide)


def _ends(text: Config, root: str = "model", head: str = "lm_head") -> Rows:
    yield f"{root}.embed_tokens.weight", (text["vocab_size"], text["hidden_size"])
    yield f"{root}.norm.weight", (text["hidden_size"],)
    if not text.get("tie_word_embeddings"):
        yield f"{head}.weight", (text["vocab_size"], text["hidden_size"])


def _layers(text: Config, root: str = "model") -> list[str]:
    return [f"{root}.layers.{number}" for number in range(text["num_hidden_layers"])]


def _is_full(text: Config, number: int) -> bool:
    return (number + 1) % int(text["full_attention_interval"]) == 0


def _norms(base: str, text: Config, *more: str) -> Rows:
    yield from ((f"{base}.{name}.weight", (text["hidden_size"],)) for name in ("input_layernorm", "post_attention_layernorm", *more))


def _attention(
    module: str, text: Config, *, head_norms: bool = False, gated: bool = False, biases: str = "", skip: tuple[str, ...] = ()
) -> Rows:
    """gated: the query projection holds an output gate too. biases: letters of the projections that have one."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    dim = text.get("head_dim") or hidden // heads
    keys = (text["num_key_value_heads"] * dim, hidden)
    shapes = {"q_proj": ((1 + gated) * heads * dim, hidden), "k_proj": keys, "v_proj": keys, "o_proj": (hidden, heads * dim)}
    for name, shape in shapes.items():
        if name not in skip:
            yield f"{module}.{name}.weight", shape
        if name[0] in biases:
            yield f"{module}.{name}.bias", shape[:1]
    if head_norms:
        yield from ((f"{module}.{name}_norm.weight", (dim,)) for name in "qk")


def _gated(module: str, hidden: int, inner: int) -> Rows:
    yield f"{module}.gate_proj.weight", (inner, hidden)
    yield f"{module}.up_proj.weight", (inner, hidden)
    yield f"{module}.down_proj.weight", (hidden, inner)


def _routed(mlp: str, text: Config, experts: int, *, packed: bool = False) -> Rows:
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    yield f"{mlp}.gate.weight", (experts, hidden)
    if packed:
        yield f"{mlp}.experts.gate_up_proj", (experts, 2 * inner, hidden)
        yield f"{mlp}.experts.down_proj", (experts, hidden, inner)
        return
    for number in range(experts):
        yield from _gated(f"{mlp}.experts.{number}", hidden, inner)


def _language(config: Config) -> Config:
    found: Config = config.get("text_config") or config.get("llm_config") or config
    return found


_FAMILIES: Mapping[str, Callable[[Config], Rows]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen3": _dense,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
    "nemotron_h": _nemotron_h,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm4_moe": _deepseek,
    "granitemoehybrid": _granite,
}
