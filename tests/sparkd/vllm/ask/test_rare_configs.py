"""That a plan of a model without a formula is vLLM's own where vLLM is asked, and otherwise says that it guesses.

Real vLLM answers, on the meta device, as for a Spark: of one model that it serves, one that needs code of its own, one that it refuses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkd.capacity.evidence import exact_of
from sparkd.capacity.kv_cache import Serving
from sparkd.hardware import SPARK as SPARK_MACHINE
from sparkd.vllm.ask.answers import SPARK, ModelAnswer, ModelQuestion
from tests.conftest import VllmAnswers
from tests.support.checkpoints import checkpoint_of
from tests.support.plans import planned as plan

PLAIN = {
    "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32_000, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    # Latent in its configuration, keys and values of all heads in vLLM.
    "served": {
        **PLAIN, "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_key_value_heads": 16, "scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 256, "head_dim": 192,
    },
    # Its class asks tables of compiled packages for the kernel that it needs.
    "DeepSeek V4": {
        **PLAIN, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "q_lora_rank": 256, "qk_rope_head_dim": 64, "o_lora_rank": 256, "o_groups": 8,
        "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0,
        "num_hash_layers": 1, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 40_000.0, "sliding_window": 128, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20,
        "rope_theta": 10_000.0, "expert_dtype": "fp4", "num_nextn_predict_layers": 1,
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65_536, "beta_fast": 32, "beta_slow": 1},
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0",
        },
    },
    # No question runs its code.
    "its own code": {
        **PLAIN, "architectures": ["DeciLMForCausalLM"], "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_own.Config", "AutoModelForCausalLM": "modeling_own.Model"},
    },
    # An architecture that is known, with layers that differ.
    "refused": {
        **PLAIN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "per_layer_config": {"1": {"num_key_value_heads": 2}},
    },
}  # fmt: skip
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def questions(_folder: Path) -> dict[str, ModelQuestion]:
    return {name: ModelQuestion(files={"config.json": json.dumps(config).encode()}, platform=SPARK) for name, config in CONFIGS.items()}


@pytest.fixture(scope="module")
def answers(vllm_answers: VllmAnswers) -> Mapping[str, ModelAnswer | None]:
    return vllm_answers.answers[__name__]


def planned(answer: ModelAnswer, *, asked: bool) -> dict[str, Any]:
    """The first option of a plan where every model fits, of a checkpoint with vLLM's own parameters. asked: whether it gets the answer."""
    rows = [(one.name, one.shape, DTYPES[one.dtype]) for one in answer.stages[0].parameters if one.purpose == "model"]
    checkpoint = checkpoint_of(rows, CONFIGS["served"])
    facts = answer.facts
    roomy = replace(SPARK_MACHINE, memory_bytes=1 << 50)
    limits = {name: facts[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    ask = lambda asks: [answer if asked else None for _ in asks]  # noqa: E731
    found = plan("nobody/model", roomy, checkpoint, ask, quantize="bf16", **limits)
    option: dict[str, Any] = found["options"][0]
    return option


def test_a_plan_is_vllms_own_or_says_that_it_guesses(answers: Mapping[str, ModelAnswer | None]) -> None:
    answer = answers["served"]
    assert answer is not None and answer.refusal is None, answer
    (stage,) = answer.stages
    tokens, size = stage.requests[-1]
    weights = stage.parameter_bytes + stage.buffer_bytes

    exact, guess = planned(answer, asked=True), planned(answer, asked=False)
    found = exact["footprint"]
    assert (exact["max_model_len"], found["kv_bytes_per_request"], found["weights"]) == (tokens, size, weights)
    assert (found["sureness"], guess["footprint"]["sureness"]) == ("exact", "guess")


def test_a_class_that_looks_its_kernels_up_is_counted(answers: Mapping[str, ModelAnswer | None]) -> None:
    answer = answers["DeepSeek V4"]
    assert answer is not None and answer.refusal is None, answer
    (stage,) = answer.stages
    assert min(size for _, size in stage.requests) > 0


@pytest.mark.parametrize(("name", "certain"), [("its own code", False), ("refused", True)])
def test_only_what_vllm_refuses_for_certain_is_refused(answers: Mapping[str, ModelAnswer | None], name: str, certain: bool) -> None:
    answer = answers[name]
    assert answer is not None and answer.refusal is not None and answer.refusal.certain is certain, answer
    exact = exact_of(answer, Serving(1), same_format=True)
    assert (exact is not None and exact.refusal is not None) is certain
