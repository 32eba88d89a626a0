"""Architectures scaled down: config.json and tensors as published checkpoints have them, random weights.

Config keys are those of the models on the hub that each function names; layers, widths and experts are few. Widths are multiples of 128
where the 4-bit kernels of vLLM want that. Which tensors a configuration has, published_tensors.py says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.checkpoints import BYTES, GIB, MIB, ONES, ZEROS, Draw, Tensor, dense, normal, special_tokens, write_checkpoint
from tests.support.published_stored import stored
from tests.support.published_tensors import tensors_of

HIDDEN, EXPERTS = 256, 8
WIDE, INNER = 512, 256
# A norm that multiplies by one plus its weight is stored around zero.
ZERO_NORM = normal(0.05)
# name of the tensor -> its values, the first that is found
DRAWS: Mapping[str, Draw] = {
    r"e_score_correction_bias$": ZEROS,
    r"A_log$": Draw("uniform", 0.0, 2.5),
    r"dt_bias$": Draw("uniform", -4.0, -1.0),
    r"conv1d\.weight$": normal(0.3),
    r"sinks$": normal(1.0),
    r"_blocks$": BYTES,
    # E2M1 codes drawn evenly have a mean square of 8.6, so the exponent -7 gives a deviation of 0.023 (OCP MX v1.0: bias 127).
    r"_scales$": Draw("integers", 119, 121),
    r"bias$": normal(0.1),
    r"norm(_\w+)?\.weight$|\.D$": ONES,
    r"": normal(0.05),
}


@dataclass(frozen=True, slots=True)
class Model:
    """What `write_checkpoint` takes."""

    config: Mapping[str, Any]
    entries: tuple[Tensor, ...]


def _model(architecture: str, config: Mapping[str, Any], norms: Draw = ONES) -> Model:
    """config: keys beside those of every architecture, None for one that it lacks. norms: values of all but a gated one."""
    small = {"hidden_size": HIDDEN, "vocab_size": 512, "num_hidden_layers": 2, "intermediate_size": WIDE, "head_dim": 64}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, **special_tokens()}
    whole = dense(**{**small, "architectures": [architecture], **config})

    def drawn(name: str) -> Draw:
        found = next(draw for pattern, draw in DRAWS.items() if re.search(pattern, name))
        return norms if found == ONES and not name.endswith("linear_attn.norm.weight") else found

    return Model(whole, tuple(tensor._replace(draw=drawn(tensor.name)) for tensor in tensors_of(whole)))


def llama(**changes: Any) -> Model:
    """meta-llama/Llama-3.2: dense, no biases."""
    return _model("LlamaForCausalLM", {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, **changes})


def qwen3(**changes: Any) -> Model:
    """Qwen/Qwen3-0.6B: dense, norms of query and key, tied embeddings."""
    own: dict[str, Any] = {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": True}
    return _model("Qwen3ForCausalLM", {**own, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, **changes})


QWEN_MOE: Mapping[str, Any] = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
}


def qwen3_moe(**changes: Any) -> Model:
    """Qwen/Qwen3-30B-A3B: every layer's MLP is routed experts."""
    return _model("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", **QWEN_MOE, **changes})


# Of `write_qwen3_moe`. The CPU table's 1.85 GB, and the 9.29 GiB that the GPU figures are about.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "smallest": {"num_hidden_layers": 1, "num_experts": 4},
    "cpu": {
        "num_hidden_layers": 6,
        "hidden_size": 1024,
        "num_experts": 64,
        "moe_intermediate_size": 768,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "h200": {
        "num_hidden_layers": 8,
        "hidden_size": 2048,
        "num_experts": 128,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 1024,
        "shard_bytes": 2 * GIB,
    },
}


def write_qwen3_moe(
    folder: Path,
    *,
    source: Mapping[str, Any] | None = None,
    shard_bytes: int = 200 * MIB,
    shuffled: bool = False,
    device: str = "cpu",
    **changes: Any,
) -> Path:
    """A checkpoint of four layers, of which up to eight experts answer. source: its `quantization_config`, None for BF16; changes: to the
    rest of its configuration. Projections have a deviation of 0.03."""
    sizes = {"num_hidden_layers": 4, "num_experts": EXPERTS, **changes}
    made = qwen3_moe(num_experts_per_tok=min(8, sizes["num_experts"]), **sizes)
    made = replace(made, entries=tuple(_calmer(entry) for entry in made.entries)) if source is None else quantized(made, source)
    return write_checkpoint(folder, made.config, made.entries, shard_bytes=shard_bytes, shuffled=shuffled, device=device)


def _calmer(entry: Tensor) -> Tensor:
    return entry._replace(draw=normal(0.03)) if entry.name.endswith("_proj.weight") else entry


def packed_qwen3_moe() -> Model:
    """As fine-tuned copies of it are saved by newer transformers. No block is square: its shape says which way round it stands."""
    inner = INNER + 128
    plain = qwen3_moe(moe_intermediate_size=inner)
    packed = [
        Tensor(f"model.layers.{layer}.mlp.experts.{name}", (EXPERTS, *shape), "BF16", normal(0.05))
        for layer in range(2)
        for name, shape in (("gate_up_proj", (2 * inner, HIDDEN)), ("down_proj", (HIDDEN, inner)))
    ]
    return replace(plain, entries=(*(entry for entry in plain.entries if ".experts." not in entry.name), *packed))


def qwen3_next(ahead: bool = False, **changes: Any) -> Model:
    """Qwen/Qwen3-Next-80B-A3B: gated delta nets, every fourth layer full attention with an output gate, routed and shared experts.

    `ahead`: with its layer that predicts a token ahead (MTP), which vLLM leaves out where nothing speculates.
    """
    own: dict[str, Any] = {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4, "partial_rotary_factor": 0.25}
    own |= {"shared_expert_intermediate_size": INNER, "linear_conv_kernel_dim": 4}
    own |= {"linear_key_head_dim": 128, "linear_num_key_heads": 2, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
    made = _model("Qwen3NextForCausalLM", {**QWEN_MOE, **own, **changes}, norms=ZERO_NORM)
    return made if ahead else replace(made, entries=tuple(entry for entry in made.entries if not entry.name.startswith("mtp.")))


def gpt_oss(source: str = "mxfp4") -> Model:
    """openai/gpt-oss-20b: experts in MXFP4 with biases, attention sinks, sliding windows in every other layer.

    `source` bf16: as unsloth/gpt-oss-20b-BF16 and fine-tuned copies are saved, experts transposed with gate and up interleaved.
    """
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    own: dict[str, Any] = {"model_type": "gpt_oss", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER}
    own |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "attention_bias": True}
    own |= {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}
    own |= {"rope_scaling": {**yarn, "original_max_position_embeddings": 4096}, "max_position_embeddings": 131072}
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    if source == "mxfp4":
        return _model("GptOssForCausalLM", {**own, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": left}})
    made = _model("GptOssForCausalLM", own)
    entries = [entry for entry in made.entries if not entry.name.endswith("_scales")]
    return replace(made, entries=tuple(_transposed(entry) if entry.name.endswith("_blocks") else entry for entry in entries))


def _transposed(blocks: Tensor) -> Tensor:
    experts, rows, groups, _ = blocks.shape
    return Tensor(blocks.name.removesuffix("_blocks"), (experts, 32 * groups, rows), "BF16", normal(0.05))


def nemotron_h(**changes: Any) -> Model:
    """nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: Mamba-2 layers, attention, routed experts without a gate projection."""
    own: dict[str, Any] = {"model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "MEM*E"}
    own |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128}
    own |= {"expand": 2, "mamba_hidden_act": "silu", "use_conv_bias": True, "time_step_limit": [0.0, 1e9]}
    own |= {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    own |= {"moe_intermediate_size": INNER, "moe_shared_expert_intermediate_size": INNER, "routed_scaling_factor": 2.5}
    own |= {"intermediate_size": INNER, "mlp_hidden_act": "relu2", "norm_topk_prob": True, "layer_norm_epsilon": 1e-5}
    own |= dict.fromkeys(("mamba_proj_bias", "use_bias", "mlp_bias", "attention_bias", "residual_in_fp32"), False)
    return _model("NemotronHForCausalLM", {**own, **changes})


def gemma3(**changes: Any) -> Model:
    """google/gemma-3-1b-it: tied embeddings, four norms a layer, a sliding window in most layers, heads of 256."""
    own: dict[str, Any] = {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 256}
    own |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128, "query_pre_attn_scalar": 256}
    own |= {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rms_norm_eps": 1e-6}
    return _model("Gemma3ForCausalLM", {**own, "attention_bias": False, "tie_word_embeddings": True, **changes}, norms=ZERO_NORM)


def deepseek_v3(**changes: Any) -> Model:
    """deepseek-ai/DeepSeek-V3: multi-head latent attention, one dense layer, then routed experts in groups and a shared one."""
    own: dict[str, Any] = {"model_type": "deepseek_v3", "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 256, "kv_lora_rank": 512}
    own |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False, "rope_theta": 10000.0}
    own |= {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    own |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    own |= {"moe_intermediate_size": INNER, "first_k_dense_replace": 1, "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    return _model("DeepseekV3ForCausalLM", {**own, **changes})


def granitemoehybrid() -> Model:
    """ibm-granite/granite-4.0-h-tiny: packed experts that are called input_linear and output_linear, and a shared MLP whose halves are one.

    Its layers of attention alone: vLLM's CPU build has no kernel for Mamba-2 (`nemotron_h` has those).
    """
    own: dict[str, Any] = {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2, "position_embedding_type": "nope"}
    own |= {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "intermediate_size": INNER + 128, "shared_intermediate_size": WIDE}
    own |= {"embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "logits_scaling": 6}
    own |= {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_expand": 2, "mamba_d_state": 128, "attention_bias": False}
    return _model("GraniteMoeHybridForCausalLM", {**own, "rms_norm_eps": 1e-5, "tie_word_embeddings": True})


# As Qwen/Qwen3-8B-AWQ, Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4, nvidia/Llama-3.1-8B-Instruct-NVFP4 and RedHatAI/Llama-3.1-8B-Instruct-NVFP4 say
# that they are quantized.
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "static_groups": False, "lm_head": False}
_FLOAT4 = {"num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_FLOAT4, "dynamic": False}, "input_activations": dict(_FLOAT4)}},
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
_TENSOR_GROUP = {**_FLOAT4, "strategy": "tensor_group", "symmetric": True}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_TENSOR_GROUP, "dynamic": False},
            "input_activations": {**_TENSOR_GROUP, "dynamic": "local"},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "kv_cache_scheme": None,
}
SOURCES: Mapping[str, Mapping[str, Any]] = {"awq": _AWQ, "gptq": _GPTQ, "modelopt_nvfp4": _MODELOPT, "ct_nvfp4": _COMPRESSED}


def quantized(model: Model, described: Mapping[str, Any]) -> Model:
    """The same model as those who quantize publish it. described: its `quantization_config`."""
    half = described["quant_method"] in ("awq", "gptq")
    entries = tuple(stored(model.entries, described))
    if half:
        entries = tuple(entry._replace(dtype="F16") if entry.dtype == "BF16" else entry for entry in entries)
    more = {"quantization_config": described, "torch_dtype": "float16" if half else "bfloat16"}
    return Model({**model.config, **more}, entries)


def _published(make: Callable[[], Model], source: str) -> Callable[[], Model]:
    return lambda: quantized(make(), SOURCES[source])


ARCHITECTURES: Mapping[str, Callable[..., Model]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_moe-packed": packed_qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_next-mtp": lambda: qwen3_next(ahead=True),
    "gpt_oss": gpt_oss,
    "gpt_oss-bf16": lambda: gpt_oss("bf16"),
    "nemotron_h": nemotron_h,
    "gemma3": gemma3,
    "deepseek_v3": deepseek_v3,
    "granitemoehybrid": granitemoehybrid,
    **{f"{make.__name__}-{source}": _published(make, source) for make in (llama, qwen3_moe) for source in SOURCES},
}
