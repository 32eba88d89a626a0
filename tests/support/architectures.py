"""Architectures scaled down: config.json and tensors as published checkpoints have them, random weights. Never writes a file.

Names and config keys are those of the models on the hub that each function names; layers, widths and experts are few (Size). Widths are
multiples of 128 where the 4-bit kernels of vLLM want that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.architecture_parts import (
    SMALL,
    ZERO_NORM,
    Size,
    attention_config,
    dense,
    ends,
    gated_mlp,
    head_norms,
    norms,
    packed_experts,
    plain_config,
    qwen_moe_config,
    routed_experts,
    self_attention,
)
from tests.support.architecture_sources import SOURCES, quantized
from tests.support.checkpoints import BYTES, ZEROS, Draw, Tensor, linear, normal

VOCAB, HIDDEN, EXPERTS = SMALL.vocab, SMALL.hidden, SMALL.experts


@dataclass(frozen=True, slots=True)
class Model:
    """What `write_checkpoint` takes."""

    config: Mapping[str, Any]
    entries: tuple[Tensor, ...]


def llama(size: Size = SMALL) -> Model:
    """meta-llama/Llama-3.2: dense, no biases."""
    more: dict[str, Any] = {"intermediate_size": size.wide, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    config = plain_config(size, "LlamaForCausalLM", "llama", 2 * size.times, **attention_config(size), **more)
    return Model(config, tuple(dense(size)))


def qwen3(size: Size = SMALL) -> Model:
    """Qwen/Qwen3-0.6B: dense, norms of query and key, tied embeddings."""
    more: dict[str, Any] = {
        "intermediate_size": size.wide,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "hidden_act": "silu",
    }
    config = plain_config(size, "Qwen3ForCausalLM", "qwen3", 2 * size.times, **attention_config(size), **more, tie_word_embeddings=True)
    return Model(config, tuple(dense(size, qk_norm=True, tied=True)))


def qwen3_moe(size: Size = SMALL, packed: bool = False) -> Model:
    """Qwen/Qwen3-30B-A3B: every layer's MLP is routed experts. `packed`: as fine-tuned copies of it are saved by newer transformers."""
    # Packed, no block may be square: its shape says which way round it stands.
    inner = size.inner + 128 if packed else size.inner
    parts = {**attention_config(size), **qwen_moe_config(size, inner), "intermediate_size": size.wide, "attention_bias": False}
    config = plain_config(size, "Qwen3MoeForCausalLM", "qwen3_moe", 2 * size.times, **parts)
    entries = ends(size)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        entries += [*norms(size, base), *self_attention(size, base), *head_norms(base)]
        entries += packed_experts(size, f"{base}.mlp", inner) if packed else routed_experts(size, f"{base}.mlp")
    return Model(config, tuple(entries))


def qwen3_next(size: Size = SMALL, ahead: bool = False) -> Model:
    """Qwen/Qwen3-Next-80B-A3B: gated delta nets, every fourth layer full attention with an output gate, routed and shared experts.

    `ahead`: with its layer that predicts a token ahead (MTP), which vLLM leaves out where nothing speculates.
    """
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
    parts = {**attention_config(size), **qwen_moe_config(size, size.inner), **mixers, **more}
    config = plain_config(size, "Qwen3NextForCausalLM", "qwen3_next", 4 * size.times, **parts)
    keys, values = key_heads * head, value_heads * head
    entries = ends(size, norm=ZERO_NORM)
    for layer in range(4 * size.times):
        base = f"model.layers.{layer}"
        mixer = f"{base}.linear_attn"
        entries += norms(size, base, draw=ZERO_NORM)
        if layer % 4 == 3:
            entries += [*self_attention(size, base, gated=True), *head_norms(base, draw=ZERO_NORM)]
        else:
            entries += [
                Tensor(f"{mixer}.A_log", (value_heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Tensor(f"{mixer}.dt_bias", (value_heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Tensor(f"{mixer}.conv1d.weight", (2 * keys + values, 1, conv), "BF16", normal(0.3)),
                *linear(f"{mixer}.in_proj_qkvz", 2 * keys + 2 * values, size.hidden, std=0.05),
                *linear(f"{mixer}.in_proj_ba", 2 * value_heads, size.hidden, std=0.05),
                Tensor(f"{mixer}.norm.weight", (head,)),
                *linear(f"{mixer}.out_proj", size.hidden, values, std=0.05),
            ]
        entries += _shared_and_routed(size, base)
    if ahead:
        names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
        entries += [Tensor(f"mtp.{name}.weight", (size.hidden,), "BF16", ZERO_NORM) for name in names]
        entries += linear("mtp.fc", size.hidden, 2 * size.hidden, std=0.05)
        base = "mtp.layers.0"
        entries += [*self_attention(size, base, gated=True), *head_norms(base, draw=ZERO_NORM), *_shared_and_routed(size, base)]
    return Model(config, tuple(entries))


def _shared_and_routed(size: Size, base: str) -> list[Tensor]:
    shared = gated_mlp(size, f"{base}.mlp.shared_expert", size.inner)
    return [*routed_experts(size, f"{base}.mlp"), *shared, *linear(f"{base}.mlp.shared_expert_gate", 1, size.hidden, std=0.05)]


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
    config = plain_config(size, "GptOssForCausalLM", "gpt_oss", 2 * size.times, **attention_config(size), **more)
    entries = ends(size)
    # E2M1 codes drawn evenly have a mean square of 8.6, so the exponent -7 gives a deviation of 0.023 (OCP MX v1.0: bias 127).
    scales = Draw("integers", 119, 121)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        experts = f"{base}.mlp.experts"
        entries += [*norms(size, base), *self_attention(size, base, biased=True)]
        entries += [
            Tensor(f"{base}.self_attn.sinks", (size.heads,), "BF16", normal(1.0)),
            *linear(f"{base}.mlp.router", experts_of, hidden, std=0.05),
            Tensor(f"{base}.mlp.router.bias", (experts_of,), "BF16", normal(0.1)),
            Tensor(f"{experts}.gate_up_proj_bias", (experts_of, 2 * inner), "BF16", normal(0.1)),
            Tensor(f"{experts}.down_proj_bias", (experts_of, hidden), "BF16", normal(0.1)),
        ]
        if source != "mxfp4":
            entries += [
                Tensor(f"{experts}.gate_up_proj", (experts_of, hidden, 2 * inner), "BF16", normal(0.05)),
                Tensor(f"{experts}.down_proj", (experts_of, inner, hidden), "BF16", normal(0.05)),
            ]
            continue
        entries += [
            Tensor(f"{experts}.gate_up_proj_blocks", (experts_of, 2 * inner, hidden // 32, 16), "U8", BYTES),
            Tensor(f"{experts}.gate_up_proj_scales", (experts_of, 2 * inner, hidden // 32), "U8", scales),
            Tensor(f"{experts}.down_proj_blocks", (experts_of, hidden, inner // 32, 16), "U8", BYTES),
            Tensor(f"{experts}.down_proj_scales", (experts_of, hidden, inner // 32), "U8", scales),
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
    parts = {**attention_config(size), **mamba, **moe, **more}
    config = plain_config(size, "NemotronHForCausalLM", "nemotron_h", len(pattern), hybrid_override_pattern=pattern, **parts)
    width = heads * head
    entries = [
        Tensor("backbone.embeddings.weight", (size.vocab, size.hidden), "BF16", normal(0.05)),
        Tensor("backbone.norm_f.weight", (size.hidden,)),
        Tensor("lm_head.weight", (size.vocab, size.hidden), "BF16", normal(0.05)),
    ]
    for layer, kind in enumerate(pattern):
        mixer = f"backbone.layers.{layer}.mixer"
        entries.append(Tensor(f"backbone.layers.{layer}.norm.weight", (size.hidden,)))
        if kind == "M":
            entries += [
                Tensor(f"{mixer}.A_log", (heads,), "BF16", Draw("uniform", 0.0, 2.5)),
                Tensor(f"{mixer}.D", (heads,)),
                Tensor(f"{mixer}.dt_bias", (heads,), "BF16", Draw("uniform", -4.0, -1.0)),
                Tensor(f"{mixer}.conv1d.weight", (width + 2 * groups * state, 1, conv), "BF16", normal(0.3)),
                Tensor(f"{mixer}.conv1d.bias", (width + 2 * groups * state,), "BF16", normal(0.1)),
                *linear(f"{mixer}.in_proj", 2 * width + 2 * groups * state + heads, size.hidden, std=0.05),
                Tensor(f"{mixer}.norm.weight", (width,)),
                *linear(f"{mixer}.out_proj", size.hidden, width),
            ]
        elif kind == "*":
            entries += self_attention(size, "", mixer=mixer)
        else:
            entries += [
                *linear(f"{mixer}.gate", size.experts, size.hidden, std=0.05),
                Tensor(f"{mixer}.gate.e_score_correction_bias", (size.experts,), "F32", ZEROS),
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
    config = plain_config(size, "Gemma3ForCausalLM", "gemma3_text", 2 * size.times, **{**attention_config(size), "head_dim": 256}, **more)
    entries = ends(size, tied=True, norm=ZERO_NORM)
    for layer in range(2 * size.times):
        base = f"model.layers.{layer}"
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        entries += norms(size, base, draw=ZERO_NORM)
        entries += [Tensor(f"{base}.{name}.weight", (size.hidden,), "BF16", ZERO_NORM) for name in names]
        entries += [*self_attention(size, base, head_dim=256), *head_norms(base, head_dim=256, draw=ZERO_NORM)]
        entries += gated_mlp(size, f"{base}.mlp", size.wide)
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
    config = plain_config(size, "DeepseekV3ForCausalLM", "deepseek_v3", 1 + size.times, **attends, **moe, **more)
    entries = ends(size)
    for layer in range(1 + size.times):
        base = f"model.layers.{layer}"
        attention, mlp = f"{base}.self_attn", f"{base}.mlp"
        entries += [
            *norms(size, base),
            *linear(f"{attention}.q_a_proj", queries, size.hidden, std=0.05),
            Tensor(f"{attention}.q_a_layernorm.weight", (queries,)),
            *linear(f"{attention}.q_b_proj", heads * (nope + rope), queries, std=0.05),
            *linear(f"{attention}.kv_a_proj_with_mqa", latent + rope, size.hidden, std=0.05),
            Tensor(f"{attention}.kv_a_layernorm.weight", (latent,)),
            *linear(f"{attention}.kv_b_proj", heads * (nope + value), latent, std=0.05),
            *linear(f"{attention}.o_proj", size.hidden, heads * value, std=0.05),
        ]
        if layer == 0:
            entries += gated_mlp(size, mlp, size.wide)
            continue
        entries += [*routed_experts(size, mlp), Tensor(f"{mlp}.gate.e_score_correction_bias", (size.experts,), "F32", ZEROS)]
        entries += gated_mlp(size, f"{mlp}.shared_experts", inner)
    return Model(config, tuple(entries))


def granitemoehybrid(size: Size = SMALL) -> Model:
    """ibm-granite/granite-4.0-h-tiny: packed experts that are called input_linear and output_linear, and a shared MLP whose halves are one.

    Its layers of attention alone: vLLM's CPU build has no kernel for Mamba-2 (`nemotron_h` has those).
    """
    layers, inner = 2 * size.times, size.inner + 128
    more: dict[str, Any] = {"num_local_experts": size.experts, "num_experts_per_tok": 2, "layer_types": ["attention"] * layers}
    more |= {"intermediate_size": inner, "shared_intermediate_size": size.wide, "position_embedding_type": "nope", "rms_norm_eps": 1e-5}
    more |= {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 6}
    more |= {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "mamba_d_state": 128, "attention_bias": False}
    parts = attention_config(size)
    config = plain_config(size, "GraniteMoeHybridForCausalLM", "granitemoehybrid", layers, **parts, **more)
    config["tie_word_embeddings"] = True
    entries = ends(size, tied=True)
    for layer in range(layers):
        base = f"model.layers.{layer}"
        moe, shared = f"{base}.block_sparse_moe", f"{base}.shared_mlp"
        entries += [
            *norms(size, base),
            *self_attention(size, base),
            *linear(f"{moe}.router.layer", size.experts, size.hidden, std=0.05),
            Tensor(f"{moe}.input_linear.weight", (size.experts, 2 * inner, size.hidden), "BF16", normal(0.05)),
            Tensor(f"{moe}.output_linear.weight", (size.experts, size.hidden, inner), "BF16", normal(0.05)),
            *linear(f"{shared}.input_linear", 2 * size.wide, size.hidden, std=0.05),
            *linear(f"{shared}.output_linear", size.hidden, size.wide, std=0.05),
        ]
    return Model(config, tuple(entries))


def _published(make: Callable[..., Model], source: str) -> Callable[..., Model]:
    """The same model as those who quantize publish it, see architecture_sources.py."""

    def made(size: Size = SMALL) -> Model:
        plain = make(size=size)
        return Model(*quantized(source, plain.config, plain.entries))

    return made


ARCHITECTURES: Mapping[str, Callable[..., Model]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe-packed": lambda size=SMALL: qwen3_moe(size, packed=True),
    "qwen3_next": qwen3_next,
    "qwen3_next-mtp": lambda size=SMALL: qwen3_next(size, ahead=True),
    "gpt_oss": lambda size=SMALL: gpt_oss(size=size),
    "gpt_oss-bf16": lambda size=SMALL: gpt_oss("bf16", size),
    "nemotron_h": nemotron_h,
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
    "granitemoehybrid": granitemoehybrid,
    **{f"{make.__name__}-{source}": _published(make, source) for make in (llama, qwen3_moe) for source in SOURCES},
}
