"""Architectures scaled down: config.json and tensors as published checkpoints have them, random weights. Never writes a file.

Names and config keys are those of the models on the hub that each function names; layers, widths and experts are few (Size). Widths are
multiples of 128 where the 4-bit kernels of vLLM want that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.checkpoints import BYTES, ZEROS, Draw, Entry, linear, normal, special_tokens

_HEAD_DIM = 64
# A norm that multiplies by one plus its weight is stored around zero.
_ZERO_NORM = normal(0.05)


@dataclass(frozen=True, slots=True)
class Size:
    """wide: inner width of a dense MLP; inner: of an expert; times: how often the layers are repeated."""

    hidden: int = 256
    vocab: int = 512
    experts: int = 8
    heads: int = 4
    kv_heads: int = 2
    wide: int = 512
    inner: int = 256
    times: int = 1


SMALL = Size()
VOCAB, HIDDEN, EXPERTS = SMALL.vocab, SMALL.hidden, SMALL.experts


@dataclass(frozen=True, slots=True)
class Model:
    """What `write_checkpoint` takes."""

    config: Mapping[str, Any]
    entries: tuple[Entry, ...]


def llama(size: Size = SMALL) -> Model:
    """meta-llama/Llama-3.2: dense, no biases."""
    more: dict[str, Any] = {"intermediate_size": size.wide, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    config = _config(size, "LlamaForCausalLM", "llama", 2 * size.times, **_attention(size), **more)
    return Model(config, tuple(_dense(size)))


def qwen3(size: Size = SMALL) -> Model:
    """Qwen/Qwen3-0.6B: dense, norms of query and key, tied embeddings."""
    more: dict[str, Any] = {
        "intermediate_size": size.wide,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    config = _config(size, "Qwen3ForCausalLM", "qwen3", 2 * size.times, **_attention(size), **more, tie_word_embeddings=True)
    return Model(config, tuple(_dense(size, qk_norm=True, tied=True)))


def qwen3_moe(source: str = "bf16", packed: bool = False, size: Size = SMALL) -> Model:
    """Qwen/Qwen3-30B-A3B: every layer's MLP is routed experts. `packed`: as fine-tuned copies of it are saved by newer transformers."""
    # Packed, no block may be square: its shape says which way round it stands.
    inner = size.inner + 128 if packed else size.inner
    parts = {**_attention(size), **_qwen_moe(size, inner), "intermediate_size": size.wide, "attention_bias": False}
    config = _config(size, "Qwen3MoeForCausalLM", "qwen3_moe", 2 * size.times, **parts)
    if source != "bf16":
        from tests.checkpoints import fp8_config

        config["quantization_config"] = fp8_config(source)
    entries = _ends(size)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        entries += [*_norms(size, base), *_self_attention(size, base, source=source), *_head_norms(base)]
        entries += _packed_experts(size, f"{base}.mlp", inner) if packed else _experts(size, f"{base}.mlp", source=source)
    return Model(config, tuple(entries))


def qwen3_next(size: Size = SMALL) -> Model:
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
    more: dict[str, Any] = {"shared_expert_intermediate_size": size.inner, "intermediate_size": size.wide}
    parts = {**_attention(size), **_qwen_moe(size, size.inner), **mixers, **more}
    config = _config(size, "Qwen3NextForCausalLM", "qwen3_next", 4 * size.times, **parts)
    keys, values = key_heads * head, value_heads * head
    entries = _ends(size, norm=_ZERO_NORM)
    for layer in range(4 * size.times):
        base = f"model.layers.{layer}"
        mixer = f"{base}.linear_attn"
        entries += _norms(size, base, draw=_ZERO_NORM)
        if layer % 4 == 3:
            entries += [*_self_attention(size, base, gated=True), *_head_norms(base, draw=_ZERO_NORM)]
        else:
            entries += [
                Entry(f"{mixer}.A_log", (value_heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Entry(f"{mixer}.dt_bias", (value_heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Entry(f"{mixer}.conv1d.weight", (2 * keys + values, 1, conv), "BF16", normal(0.3)),
                *linear(f"{mixer}.in_proj_qkvz", 2 * keys + 2 * values, size.hidden, std=0.05),
                *linear(f"{mixer}.in_proj_ba", 2 * value_heads, size.hidden, std=0.05),
                Entry(f"{mixer}.norm.weight", (head,)),
                *linear(f"{mixer}.out_proj", size.hidden, values, std=0.05),
            ]
        entries += _experts(size, f"{base}.mlp")
        entries += _gated_mlp(size, f"{base}.mlp.shared_expert", size.inner)
        entries += linear(f"{base}.mlp.shared_expert_gate", 1, size.hidden, std=0.05)
    return Model(config, tuple(entries))


def gpt_oss(source: str = "mxfp4", size: Size = SMALL) -> Model:
    """openai/gpt-oss-20b: experts in MXFP4 with biases, attention sinks, sliding windows in every other layer.

    `source` bf16: as unsloth/gpt-oss-20b-BF16 and fine-tuned copies are saved, experts transposed with gate and up interleaved.
    """
    inner, hidden, experts_of = size.inner, size.hidden, size.experts
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    more: dict[str, Any] = {
        "num_local_experts": experts_of,
        "num_experts_per_tok": 2,
        "intermediate_size": inner,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
    }
    more |= {"layer_types": ["sliding_attention", "full_attention"] * size.times, "sliding_window": 128}
    more |= {"attention_bias": True, "rope_theta": 150000.0}
    more |= {"rope_scaling": {**yarn, "original_max_position_embeddings": 4096}, "max_position_embeddings": 131072}
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    if source == "mxfp4":
        more["quantization_config"] = quantization
    config = _config(size, "GptOssForCausalLM", "gpt_oss", 2 * size.times, **_attention(size), **more)
    entries = _ends(size)
    # E2M1 codes drawn evenly have a mean square of 8.6, so the exponent -7 gives a deviation of 0.023 (OCP MX v1.0: bias 127).
    scales = Draw("integers", 119, 121)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        experts = f"{base}.mlp.experts"
        entries += [*_norms(size, base), *_self_attention(size, base, biased=True)]
        entries += [
            Entry(f"{base}.self_attn.sinks", (size.heads,), "BF16", normal(1.0)),
            *linear(f"{base}.mlp.router", experts_of, hidden, std=0.05),
            Entry(f"{base}.mlp.router.bias", (experts_of,), "BF16", normal(0.1)),
            Entry(f"{experts}.gate_up_proj_bias", (experts_of, 2 * inner), "BF16", normal(0.1)),
            Entry(f"{experts}.down_proj_bias", (experts_of, hidden), "BF16", normal(0.1)),
        ]
        if source != "mxfp4":
            entries += [
                Entry(f"{experts}.gate_up_proj", (experts_of, hidden, 2 * inner), "BF16", normal(0.05)),
                Entry(f"{experts}.down_proj", (experts_of, inner, hidden), "BF16", normal(0.05)),
            ]
            continue
        entries += [
            Entry(f"{experts}.gate_up_proj_blocks", (experts_of, 2 * inner, hidden // 32, 16), "U8", BYTES),
            Entry(f"{experts}.gate_up_proj_scales", (experts_of, 2 * inner, hidden // 32), "U8", scales),
            Entry(f"{experts}.down_proj_blocks", (experts_of, hidden, inner // 32, 16), "U8", BYTES),
            Entry(f"{experts}.down_proj_scales", (experts_of, hidden, inner // 32), "U8", scales),
        ]
    return Model(config, tuple(entries))


def nemotron_h(size: Size = SMALL) -> Model:
    """nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: Mamba-2 layers, attention, routed experts without a gate projection."""
    heads, head, groups, state, conv, inner = 64, 64, 8, 128, 4, size.inner
    pattern = "MEM*E" * size.times
    mamba: dict[str, Any] = {
        "mamba_num_heads": heads,
        "mamba_head_dim": head,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": conv,
    }
    mamba |= {"chunk_size": 128, "expand": 2, "mamba_hidden_act": "silu", "use_conv_bias": True, "time_step_limit": [0.0, 1e9]}
    moe: dict[str, Any] = {"n_routed_experts": size.experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    moe |= {"moe_intermediate_size": inner, "moe_shared_expert_intermediate_size": inner, "routed_scaling_factor": 2.5}
    more: dict[str, Any] = {"intermediate_size": inner, "mlp_hidden_act": "relu2", "norm_topk_prob": True, "layer_norm_epsilon": 1e-5}
    more |= dict.fromkeys(("mamba_proj_bias", "use_bias", "mlp_bias", "attention_bias", "residual_in_fp32"), False)
    parts = {**_attention(size), **mamba, **moe, **more}
    config = _config(size, "NemotronHForCausalLM", "nemotron_h", len(pattern), hybrid_override_pattern=pattern, **parts)
    width = heads * head
    entries = [
        Entry("backbone.embeddings.weight", (size.vocab, size.hidden), "BF16", normal(0.05)),
        Entry("backbone.norm_f.weight", (size.hidden,)),
        Entry("lm_head.weight", (size.vocab, size.hidden), "BF16", normal(0.05)),
    ]
    for layer, kind in enumerate(pattern):
        mixer = f"backbone.layers.{layer}.mixer"
        entries.append(Entry(f"backbone.layers.{layer}.norm.weight", (size.hidden,)))
        if kind == "M":
            entries += [
                Entry(f"{mixer}.A_log", (heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Entry(f"{mixer}.D", (heads,)),
                Entry(f"{mixer}.dt_bias", (heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Entry(f"{mixer}.conv1d.weight", (width + 2 * groups * state, 1, conv), "BF16", normal(0.3)),
                Entry(f"{mixer}.conv1d.bias", (width + 2 * groups * state,), "BF16", normal(0.1)),
                *linear(f"{mixer}.in_proj", 2 * width + 2 * groups * state + heads, size.hidden, std=0.05),
                Entry(f"{mixer}.norm.weight", (width,)),
                *linear(f"{mixer}.out_proj", size.hidden, width),
            ]
        elif kind == "*":
            entries += _self_attention(size, "", mixer=mixer)
        else:
            entries += [
                *linear(f"{mixer}.gate", size.experts, size.hidden, std=0.05),
                Entry(f"{mixer}.gate.e_score_correction_bias", (size.experts,), "F32", ZEROS),
            ]
            for module in (*(f"{mixer}.experts.{expert}" for expert in range(size.experts)), f"{mixer}.shared_experts"):
                entries += [
                    *linear(f"{module}.up_proj", inner, size.hidden, std=0.05),
                    *linear(f"{module}.down_proj", size.hidden, inner, std=0.05),
                ]
    return Model(config, tuple(entries))


def gemma3(size: Size = SMALL) -> Model:
    """google/gemma-3-1b-it: tied embeddings, four norms a layer, a sliding window in most layers, heads of 256."""
    more: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": size.wide,
        "layer_types": ["sliding_attention", "full_attention"] * size.times,
        "sliding_window": 128,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    config = _config(size, "Gemma3ForCausalLM", "gemma3_text", 2 * size.times, **{**_attention(size), "head_dim": 256}, **more)
    entries = _ends(size, tied=True, norm=_ZERO_NORM)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        entries += _norms(size, base, draw=_ZERO_NORM)
        entries += [Entry(f"{base}.{name}.weight", (size.hidden,), "BF16", _ZERO_NORM) for name in names]
        entries += [*_self_attention(size, base, head_dim=256), *_head_norms(base, head_dim=256, draw=_ZERO_NORM)]
        entries += _gated_mlp(size, f"{base}.mlp", size.wide)
    return Model(config, tuple(entries))


def deepseek_v3(size: Size = SMALL) -> Model:
    """deepseek-ai/DeepSeek-V3: multi-head latent attention, one dense layer, then routed experts in groups and a shared one."""
    heads, queries, latent, nope, rope, value, inner = size.heads, 256, 512, 128, 64, 128, size.inner
    attends: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": queries, "kv_lora_rank": latent}
    attends |= {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "attention_bias": False, "rope_theta": 10000.0}
    moe: dict[str, Any] = {"n_routed_experts": size.experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    moe |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    moe |= {"moe_intermediate_size": inner, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    more: dict[str, Any] = {"intermediate_size": size.wide, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    config = _config(size, "DeepseekV3ForCausalLM", "deepseek_v3", 1 + size.times, **attends, **moe, **more)
    entries = _ends(size)
    for layer in range(1 + size.times):
        base = f"model.layers.{layer}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        entries += [
            *_norms(size, base),
            *linear(f"{attention}.q_a_proj", queries, size.hidden, std=0.05),
            Entry(f"{attention}.q_a_layernorm.weight", (queries,)),
            *linear(f"{attention}.q_b_proj", heads * (nope + rope), queries, std=0.05),
            *linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, size.hidden, std=0.05),
            Entry(f"{attention}.kv_a_layernorm.weight", (latent,)),
            *linear(f"{attention}.kv_b_proj", heads * (nope + value), latent, std=0.05),
            *linear(f"{attention}.o_proj", size.hidden, heads * value, std=0.05),
        ]
        if layer == 0:
            entries += _gated_mlp(size, mlp, size.wide)
            continue
        entries += [*_experts(size, mlp), Entry(f"{mlp}.gate.e_score_correction_bias", (size.experts,), "F32", ZEROS)]
        entries += _gated_mlp(size, f"{mlp}.shared_experts", inner)
    return Model(config, tuple(entries))


ARCHITECTURES: Mapping[str, Callable[..., Model]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": lambda size=SMALL: qwen3_moe(size=size),
    "qwen3_moe-packed": lambda size=SMALL: qwen3_moe(packed=True, size=size),
    "qwen3_moe-fp8_block": lambda size=SMALL: qwen3_moe("fp8_block", size=size),
    "qwen3_moe-fp8_channel": lambda size=SMALL: qwen3_moe("fp8_channel", size=size),
    "qwen3_next": qwen3_next,
    "gpt_oss": lambda size=SMALL: gpt_oss(size=size),
    "gpt_oss-bf16": lambda size=SMALL: gpt_oss("bf16", size),
    "nemotron_h": nemotron_h,
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
}


def _config(size: Size, architecture: str, model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    plain = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": size.hidden,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": size.vocab,
        "torch_dtype": "bfloat16",
    }
    return {**plain, **special_tokens(), **more}


def _attention(size: Size) -> dict[str, Any]:
    return {"num_attention_heads": size.heads, "num_key_value_heads": size.kv_heads, "head_dim": _HEAD_DIM}


def _qwen_moe(size: Size, inner: int) -> dict[str, Any]:
    return {
        "num_experts": size.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    }


def _ends(size: Size, *, tied: bool = False, norm: Draw | None = None) -> list[Entry]:
    embedding = Entry("model.embed_tokens.weight", (size.vocab, size.hidden), "BF16", normal(0.05))
    last = Entry("model.norm.weight", (size.hidden,), "BF16", norm or Draw("constant", 1.0))
    return [embedding, last] if tied else [embedding, last, Entry("lm_head.weight", (size.vocab, size.hidden), "BF16", normal(0.05))]


def _norms(size: Size, base: str, *, draw: Draw | None = None) -> list[Entry]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [Entry(f"{base}.{name}.weight", (size.hidden,), "BF16", draw or Draw("constant", 1.0)) for name in names]


def _head_norms(base: str, *, head_dim: int = _HEAD_DIM, draw: Draw | None = None) -> list[Entry]:
    return [Entry(f"{base}.self_attn.{name}_norm.weight", (head_dim,), "BF16", draw or Draw("constant", 1.0)) for name in "qk"]


def _self_attention(
    size: Size, base: str, *, mixer: str = "", head_dim: int = _HEAD_DIM, gated: bool = False, biased: bool = False, source: str = "bf16"
) -> list[Entry]:
    """gated: the query projection holds an output gate too."""
    module = mixer or f"{base}.self_attn"
    queries, keys = size.heads * head_dim, size.kv_heads * head_dim
    shapes = {
        "q_proj": ((2 if gated else 1) * queries, size.hidden),
        "k_proj": (keys, size.hidden),
        "v_proj": (keys, size.hidden),
        "o_proj": (size.hidden, queries),
    }
    found = [entry for name, shape in shapes.items() for entry in linear(f"{module}.{name}", *shape, source, std=0.05)]
    biases = [Entry(f"{module}.{name}.bias", (shape[0],), "BF16", normal(0.1)) for name, shape in shapes.items()]
    return found + biases if biased else found


def _gated_mlp(size: Size, module: str, inner: int, source: str = "bf16") -> list[Entry]:
    shapes = (("gate_proj", inner, size.hidden), ("up_proj", inner, size.hidden), ("down_proj", size.hidden, inner))
    return [entry for name, n, k in shapes for entry in linear(f"{module}.{name}", n, k, source, std=0.05)]


def _experts(size: Size, mlp: str, source: str = "bf16") -> list[Entry]:
    gate = linear(f"{mlp}.gate", size.experts, size.hidden, std=0.05)
    return gate + [entry for expert in range(size.experts) for entry in _gated_mlp(size, f"{mlp}.experts.{expert}", size.inner, source)]


def _packed_experts(size: Size, mlp: str, inner: int) -> list[Entry]:
    return [
        *linear(f"{mlp}.gate", size.experts, size.hidden, std=0.05),
        Entry(f"{mlp}.experts.gate_up_proj", (size.experts, 2 * inner, size.hidden), "BF16", normal(0.05)),
        Entry(f"{mlp}.experts.down_proj", (size.experts, size.hidden, inner), "BF16", normal(0.05)),
    ]


def _dense(size: Size, *, qk_norm: bool = False, tied: bool = False) -> list[Entry]:
    entries = _ends(size, tied=tied)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        entries += [
            *_norms(size, base),
            *_self_attention(size, base),
            *(_head_norms(base) if qk_norm else []),
            *_gated_mlp(size, f"{base}.mlp", size.wide),
        ]
    return entries
