"""Architectures scaled down: config.json and tensors as published checkpoints have them, random weights. Never writes a file.

Names and config keys are those of the models on the hub that each function names; layers, widths and experts are few. Widths are
multiples of 128 where the 4-bit kernels of vLLM want that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.checkpoints import BYTES, ZEROS, Draw, Entry, linear, normal, special_tokens

VOCAB = 512
HIDDEN = 256
EXPERTS = 8
_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 64
# A norm that multiplies by one plus its weight is stored around zero.
_ZERO_NORM = normal(0.05)


@dataclass(frozen=True, slots=True)
class Model:
    """What `write_checkpoint` takes."""

    config: Mapping[str, Any]
    entries: tuple[Entry, ...]


def llama() -> Model:
    """meta-llama/Llama-3.2: dense, no biases."""
    config = _config("LlamaForCausalLM", "llama", 2, **_attention(), intermediate_size=512, rms_norm_eps=1e-5, rope_theta=500000.0)
    return Model(config, tuple(_dense(2, intermediate=512)))


def qwen3() -> Model:
    """Qwen/Qwen3-0.6B: dense, norms of query and key, tied embeddings."""
    more: dict[str, Any] = {
        "intermediate_size": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    config = _config("Qwen3ForCausalLM", "qwen3", 2, **_attention(), **more, tie_word_embeddings=True)
    return Model(config, tuple(_dense(2, intermediate=512, qk_norm=True, tied=True)))


def qwen3_moe(source: str = "bf16", packed: bool = False) -> Model:
    """Qwen/Qwen3-30B-A3B: every layer's MLP is routed experts. `packed`: as fine-tuned copies of it are saved by newer transformers."""
    # Packed, no block may be square: its shape says which way round it stands.
    inner = 384 if packed else 256
    config = _config("Qwen3MoeForCausalLM", "qwen3_moe", 2, **_attention(), **_qwen_moe(inner), intermediate_size=512, attention_bias=False)
    if source != "bf16":
        from tests.checkpoints import fp8_config

        config["quantization_config"] = fp8_config(source)
    entries = _ends()
    for layer in range(2):
        base = f"model.layers.{layer}"
        entries += [*_norms(base), *_self_attention(base, source=source), *_head_norms(base)]
        entries += _packed_experts(f"{base}.mlp", inner) if packed else _experts(f"{base}.mlp", source=source)
    return Model(config, tuple(entries))


def qwen3_next() -> Model:
    """Qwen/Qwen3-Next-80B-A3B: gated delta nets, every fourth layer full attention with an output gate, routed and shared experts."""
    key_heads, value_heads, head, conv = 2, 4, 128, 4
    mixers: dict[str, Any] = {
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "linear_conv_kernel_dim": conv,
    }
    mixers |= {"linear_key_head_dim": head, "linear_num_key_heads": key_heads}
    mixers |= {"linear_value_head_dim": head, "linear_num_value_heads": value_heads}
    more: dict[str, Any] = {"shared_expert_intermediate_size": 256, "intermediate_size": 512}
    config = _config("Qwen3NextForCausalLM", "qwen3_next", 4, **_attention(), **_qwen_moe(), **mixers, **more)
    keys, values = key_heads * head, value_heads * head
    entries = _ends(norm=_ZERO_NORM)
    for layer in range(4):
        base = f"model.layers.{layer}"
        mixer = f"{base}.linear_attn"
        entries += _norms(base, draw=_ZERO_NORM)
        if layer % 4 == 3:
            entries += [*_self_attention(base, gated=True), *_head_norms(base, draw=_ZERO_NORM)]
        else:
            entries += [
                Entry(f"{mixer}.A_log", (value_heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Entry(f"{mixer}.dt_bias", (value_heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Entry(f"{mixer}.conv1d.weight", (2 * keys + values, 1, conv), "BF16", normal(0.3)),
                *linear(f"{mixer}.in_proj_qkvz", 2 * keys + 2 * values, HIDDEN, std=0.05),
                *linear(f"{mixer}.in_proj_ba", 2 * value_heads, HIDDEN, std=0.05),
                Entry(f"{mixer}.norm.weight", (head,)),
                *linear(f"{mixer}.out_proj", HIDDEN, values, std=0.05),
            ]
        entries += _experts(f"{base}.mlp")
        entries += _gated_mlp(f"{base}.mlp.shared_expert", 256)
        entries += linear(f"{base}.mlp.shared_expert_gate", 1, HIDDEN, std=0.05)
    return Model(config, tuple(entries))


def gpt_oss(source: str = "mxfp4") -> Model:
    """openai/gpt-oss-20b: experts in MXFP4 with biases, attention sinks, sliding windows in every other layer.

    `source` bf16: as unsloth/gpt-oss-20b-BF16 and fine-tuned copies are saved, experts transposed with gate and up interleaved.
    """
    inner = 256
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    more: dict[str, Any] = {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "intermediate_size": inner,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    }
    more |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0}
    more |= {"rope_scaling": {**yarn, "original_max_position_embeddings": 4096}, "max_position_embeddings": 131072}
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    if source == "mxfp4":
        more["quantization_config"] = quantization
    config = _config("GptOssForCausalLM", "gpt_oss", 2, **_attention(), **more)
    entries = _ends()
    # E2M1 codes drawn evenly have a mean square of 8.6, so the exponent -7 gives a deviation of 0.023 (OCP MX v1.0: bias 127).
    scales = Draw("integers", 119, 121)
    for layer in range(2):
        base = f"model.layers.{layer}"
        experts = f"{base}.mlp.experts"
        entries += [*_norms(base), *_self_attention(base, biased=True)]
        entries += [
            Entry(f"{base}.self_attn.sinks", (_HEADS,), "BF16", normal(1.0)),
            *linear(f"{base}.mlp.router", EXPERTS, HIDDEN, std=0.05),
            Entry(f"{base}.mlp.router.bias", (EXPERTS,), "BF16", normal(0.1)),
            Entry(f"{experts}.gate_up_proj_bias", (EXPERTS, 2 * inner), "BF16", normal(0.1)),
            Entry(f"{experts}.down_proj_bias", (EXPERTS, HIDDEN), "BF16", normal(0.1)),
        ]
        if source != "mxfp4":
            entries += [
                Entry(f"{experts}.gate_up_proj", (EXPERTS, HIDDEN, 2 * inner), "BF16", normal(0.05)),
                Entry(f"{experts}.down_proj", (EXPERTS, inner, HIDDEN), "BF16", normal(0.05)),
            ]
            continue
        entries += [
            Entry(f"{experts}.gate_up_proj_blocks", (EXPERTS, 2 * inner, HIDDEN // 32, 16), "U8", BYTES),
            Entry(f"{experts}.gate_up_proj_scales", (EXPERTS, 2 * inner, HIDDEN // 32), "U8", scales),
            Entry(f"{experts}.down_proj_blocks", (EXPERTS, HIDDEN, inner // 32, 16), "U8", BYTES),
            Entry(f"{experts}.down_proj_scales", (EXPERTS, HIDDEN, inner // 32), "U8", scales),
        ]
    return Model(config, tuple(entries))


def nemotron_h() -> Model:
    """nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: Mamba-2 layers, attention, routed experts without a gate projection."""
    heads, head, groups, state, conv, inner = 64, 64, 8, 128, 4, 256
    pattern = "MEM*E"
    mamba: dict[str, Any] = {
        "mamba_num_heads": heads,
        "mamba_head_dim": head,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": conv,
    }
    mamba |= {"chunk_size": 128, "expand": 2, "mamba_hidden_act": "silu", "use_conv_bias": True, "time_step_limit": [0.0, 1e9]}
    moe: dict[str, Any] = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    moe |= {"moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": inner, "routed_scaling_factor": 2.5}
    more: dict[str, Any] = {"intermediate_size": inner, "mlp_hidden_act": "relu2", "norm_topk_prob": True, "layer_norm_epsilon": 1e-5}
    more |= dict.fromkeys(("mamba_proj_bias", "use_bias", "mlp_bias", "attention_bias", "residual_in_fp32"), False)
    parts = {**_attention(), **mamba, **moe, **more}
    config = _config("NemotronHForCausalLM", "nemotron_h", len(pattern), hybrid_override_pattern=pattern, **parts)
    width = heads * head
    entries = [
        Entry("backbone.embeddings.weight", (VOCAB, HIDDEN), "BF16", normal(0.05)),
        Entry("backbone.norm_f.weight", (HIDDEN,)),
        Entry("lm_head.weight", (VOCAB, HIDDEN), "BF16", normal(0.05)),
    ]
    for layer, kind in enumerate(pattern):
        mixer = f"backbone.layers.{layer}.mixer"
        entries.append(Entry(f"backbone.layers.{layer}.norm.weight", (HIDDEN,)))
        if kind == "M":
            entries += [
                Entry(f"{mixer}.A_log", (heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Entry(f"{mixer}.D", (heads,)),
                Entry(f"{mixer}.dt_bias", (heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Entry(f"{mixer}.conv1d.weight", (width + 2 * groups * state, 1, conv), "BF16", normal(0.3)),
                Entry(f"{mixer}.conv1d.bias", (width + 2 * groups * state,), "BF16", normal(0.1)),
                *linear(f"{mixer}.in_proj", 2 * width + 2 * groups * state + heads, HIDDEN, std=0.05),
                Entry(f"{mixer}.norm.weight", (width,)),
                *linear(f"{mixer}.out_proj", HIDDEN, width),
            ]
        elif kind == "*":
            entries += _self_attention("", mixer=mixer)
        else:
            entries += [
                *linear(f"{mixer}.gate", EXPERTS, HIDDEN, std=0.05),
                Entry(f"{mixer}.gate.e_score_correction_bias", (EXPERTS,), "F32", ZEROS),
            ]
            for module in (*(f"{mixer}.experts.{expert}" for expert in range(EXPERTS)), f"{mixer}.shared_experts"):
                entries += [*linear(f"{module}.up_proj", inner, HIDDEN, std=0.05), *linear(f"{module}.down_proj", HIDDEN, inner, std=0.05)]
    return Model(config, tuple(entries))


def gemma3() -> Model:
    """google/gemma-3-1b-it: tied embeddings, four norms a layer, a sliding window in most layers, heads of 256."""
    more: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    config = _config("Gemma3ForCausalLM", "gemma3_text", 2, **{**_attention(), "head_dim": 256}, **more)
    entries = _ends(tied=True, norm=_ZERO_NORM)
    for layer in range(2):
        base = f"model.layers.{layer}"
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        entries += _norms(base, draw=_ZERO_NORM)
        entries += [Entry(f"{base}.{name}.weight", (HIDDEN,), "BF16", _ZERO_NORM) for name in names]
        entries += [*_self_attention(base, head_dim=256), *_head_norms(base, head_dim=256, draw=_ZERO_NORM)]
        entries += _gated_mlp(f"{base}.mlp", 512)
    return Model(config, tuple(entries))


def deepseek_v3() -> Model:
    """deepseek-ai/DeepSeek-V3: multi-head latent attention, one dense layer, then routed experts in groups and a shared one."""
    heads, queries, latent, nope, rope, value, inner = 4, 256, 512, 128, 64, 128, 256
    attends: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": queries, "kv_lora_rank": latent}
    attends |= {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "attention_bias": False, "rope_theta": 10000.0}
    moe: dict[str, Any] = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    moe |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    moe |= {"moe_intermediate_size": inner, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    more: dict[str, Any] = {"intermediate_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config = _config("DeepseekV3ForCausalLM", "deepseek_v3", 2, **attends, **moe, **more)
    entries = _ends()
    for layer in range(2):
        base = f"model.layers.{layer}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        entries += [
            *_norms(base),
            *linear(f"{attention}.q_a_proj", queries, HIDDEN, std=0.05),
            Entry(f"{attention}.q_a_layernorm.weight", (queries,)),
            *linear(f"{attention}.q_b_proj", heads * (nope + rope), queries, std=0.05),
            *linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, HIDDEN, std=0.05),
            Entry(f"{attention}.kv_a_layernorm.weight", (latent,)),
            *linear(f"{attention}.kv_b_proj", heads * (nope + value), latent, std=0.05),
            *linear(f"{attention}.o_proj", HIDDEN, heads * value, std=0.05),
        ]
        if layer == 0:
            entries += _gated_mlp(mlp, 512)
            continue
        entries += [*_experts(mlp), Entry(f"{mlp}.gate.e_score_correction_bias", (EXPERTS,), "F32", ZEROS)]
        entries += _gated_mlp(f"{mlp}.shared_experts", inner)
    return Model(config, tuple(entries))


ARCHITECTURES: Mapping[str, Callable[[], Model]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe-packed": lambda: qwen3_moe(packed=True),
    "qwen3_moe-fp8_block": lambda: qwen3_moe(source="fp8_block"),
    "qwen3_moe-fp8_channel": lambda: qwen3_moe(source="fp8_channel"),
    "qwen3_next": qwen3_next,
    "gpt_oss": gpt_oss,
    "gpt_oss-bf16": lambda: gpt_oss("bf16"),
    "nemotron_h": nemotron_h,
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
}


def _config(architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    plain = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "torch_dtype": "bfloat16",
    }
    return {**plain, **special_tokens(), **more}


def _attention() -> dict[str, Any]:
    return {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM}


def _qwen_moe(inner: int = 256) -> dict[str, Any]:
    return {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def _ends(*, tied: bool = False, norm: Draw | None = None) -> list[Entry]:
    embedding = Entry("model.embed_tokens.weight", (VOCAB, HIDDEN), "BF16", normal(0.05))
    last = Entry("model.norm.weight", (HIDDEN,), "BF16", norm or Draw("constant", 1.0))
    return [embedding, last] if tied else [embedding, last, Entry("lm_head.weight", (VOCAB, HIDDEN), "BF16", normal(0.05))]


def _norms(base: str, *, draw: Draw | None = None) -> list[Entry]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [Entry(f"{base}.{name}.weight", (HIDDEN,), "BF16", draw or Draw("constant", 1.0)) for name in names]


def _head_norms(base: str, *, head_dim: int = _HEAD_DIM, draw: Draw | None = None) -> list[Entry]:
    return [Entry(f"{base}.self_attn.{name}_norm.weight", (head_dim,), "BF16", draw or Draw("constant", 1.0)) for name in "qk"]


def _self_attention(
    base: str, *, mixer: str = "", head_dim: int = _HEAD_DIM, gated: bool = False, biased: bool = False, source: str = "bf16"
) -> list[Entry]:
    """gated: the query projection holds an output gate too."""
    module = mixer or f"{base}.self_attn"
    queries, keys = _HEADS * head_dim, _KV_HEADS * head_dim
    shapes = {
        "q_proj": ((2 if gated else 1) * queries, HIDDEN),
        "k_proj": (keys, HIDDEN),
        "v_proj": (keys, HIDDEN),
        "o_proj": (HIDDEN, queries),
    }
    found = [entry for name, shape in shapes.items() for entry in linear(f"{module}.{name}", *shape, source, std=0.05)]
    biases = [Entry(f"{module}.{name}.bias", (shape[0],), "BF16", normal(0.1)) for name, shape in shapes.items()]
    return found + biases if biased else found


def _gated_mlp(module: str, inner: int, source: str = "bf16") -> list[Entry]:
    shapes = (("gate_proj", inner, HIDDEN), ("up_proj", inner, HIDDEN), ("down_proj", HIDDEN, inner))
    return [entry for name, n, k in shapes for entry in linear(f"{module}.{name}", n, k, source, std=0.05)]


def _experts(mlp: str, source: str = "bf16") -> list[Entry]:
    gate = linear(f"{mlp}.gate", EXPERTS, HIDDEN, std=0.05)
    return gate + [entry for expert in range(EXPERTS) for entry in _gated_mlp(f"{mlp}.experts.{expert}", 256, source)]


def _packed_experts(mlp: str, inner: int) -> list[Entry]:
    return [
        *linear(f"{mlp}.gate", EXPERTS, HIDDEN, std=0.05),
        Entry(f"{mlp}.experts.gate_up_proj", (EXPERTS, 2 * inner, HIDDEN), "BF16", normal(0.05)),
        Entry(f"{mlp}.experts.down_proj", (EXPERTS, HIDDEN, inner), "BF16", normal(0.05)),
    ]


def _dense(layers: int, *, intermediate: int, qk_norm: bool = False, tied: bool = False) -> list[Entry]:
    entries = _ends(tied=tied)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        entries += [
            *_norms(base),
            *_self_attention(base),
            *(_head_norms(base) if qk_norm else []),
            *_gated_mlp(f"{base}.mlp", intermediate),
        ]
    return entries
