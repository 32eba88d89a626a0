"""The table of everything that sparkd uses of vLLM, with the modules that have had it. Never imports vLLM itself: a look-up does.

sparkd.vllm.missing_symbols tells what a vLLM lacks.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sparkd.errors import MissingSymbol

SUPPORTED = ("0.32", "0.33")

# The consequence of one that is missing. OTHERWISE: the release before has another way, which is as good.
OTHERWISE = ""
LOAD = "a load with `quantize` is refused; other models are served as before"
CACHE = "vLLM sizes its KV cache itself"
PLAN = "a plan is an estimate"
FLAGS = "flags are judged when the engine starts"
MEDIA = "the URL of a medium that cannot be fetched may be in the engine's log"
RANKS = "an engine on several nodes is refused"

_CT = "vllm.model_executor.layers.quantization.compressed_tensors"
_MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils_fp4"
_PLANNING = ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils")
_CLI = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name of vLLM's.

    homes: the modules that may have it, the newest release's first.
    attribute: dotted, where it is not the symbol's own name; "" for the module itself.
    without: what happens in a release that lacks it.
    """

    homes: tuple[str, ...]
    without: str
    attribute: str | None = None


def _of(without: str, rows: dict[str, str | tuple[str, ...]]) -> dict[str, Symbol]:
    """rows: the names and their homes."""
    return {name: Symbol((homes,) if isinstance(homes, str) else homes, without) for name, homes in rows.items()}


TABLE: dict[str, Symbol] = {
    **_of(
        LOAD,
        {
            "BaseModelLoader": "vllm.model_executor.model_loader.base_loader",
            "BasevLLMParameter": "vllm.model_executor.parameter",
            "BlockQuantScaleParameter": "vllm.model_executor.parameter",
            "ChannelQuantScaleParameter": "vllm.model_executor.parameter",
            "CompressedTensorsConfig": f"{_CT}.compressed_tensors",
            "CompressedTensorsLinearMethod": f"{_CT}.compressed_tensors",
            "DefaultModelLoader": "vllm.model_executor.model_loader.default_loader",
            "EngineArgs": "vllm.engine.arg_utils",
            "FusedMoEMethodBase": "vllm.model_executor.layers.fused_moe",
            "LinearBase": "vllm.model_executor.layers.linear",
            "ModelWeightParameter": "vllm.model_executor.parameter",
            "ParallelLMHead": "vllm.model_executor.layers.vocab_parallel_embedding",
            "PerTensorScaleParameter": "vllm.model_executor.parameter",
            "RoutedExperts": "vllm.model_executor.layers.fused_moe",
            "VLLM_CACHE_ROOT": "vllm.envs",
            "current_platform": "vllm.platforms",
            "get_current_vllm_config": "vllm.config",
            "moe_align_block_size": "vllm.model_executor.layers.fused_moe.moe_align_block_size",
            "register_model_loader": "vllm.model_executor.model_loader",
            "register_quantization_config": "vllm.model_executor.layers.quantization",
        },
    ),
    "envs": Symbol(("vllm.envs",), LOAD, ""),
    "gpt_oss_streamed": Symbol(("vllm.model_executor.models.gpt_oss",), LOAD, "_GPT_OSS_STREAMED_EXPERT_SUFFIX_TO_SHARD"),
    **_of(
        "a layer's experts are repacked with a second copy",
        {
            "_repack_marlin_experts": _MARLIN,
            "gptq_marlin_moe_repack": "vllm._custom_ops",
            "prepare_nvfp4_moe_layer_for_marlin": _MARLIN,
        },
    ),
    **_of(
        CACHE,
        {
            "CPUWorker": "vllm.v1.worker.cpu_worker",
            "CUDAGraphMode": "vllm.config",
            "MultiModalBudget": "vllm.multimodal.encoder_budget",
            "Worker": "vllm.v1.worker.gpu_worker",
            "_teardown_profiling_state": "vllm.v1.worker.gpu.cudagraph_utils",
            "get_kv_cache_config_from_groups": _PLANNING,
            "get_kv_cache_groups": _PLANNING,
            "get_max_concurrency_for_kv_cache_config": _PLANNING,
            "get_world_group": "vllm.distributed.parallel_state",
            "kernel_warmup": "vllm.model_executor.warmup.kernel_warmup",
            "reserve_mm_ipc_gpu_memory": "vllm.multimodal.gpu_ipc_memory",
            "set_current_vllm_config": "vllm.config",
            "warmup_kernels": "vllm.v1.worker.gpu.warmup",
        },
    ),
    **_of(
        OTHERWISE,
        {
            "_pool_bytes_per_block_from_builder": "vllm.v1.core.kv_cache_planning",
            "get_kv_cache_config_builder": "vllm.v1.core.kv_cache_config_builder",
            "get_kv_cache_groups_from_builder": "vllm.v1.core.kv_cache_planning",
        },
    ),
    **_of(
        "the log-probabilities of a prompt take memory that was not measured",
        {"compute_prompt_logprobs_with_chunking": "vllm.v1.worker.gpu.sample.prompt_logprob"},
    ),
    **_of(
        PLAN,
        {
            "AttentionLayerBase": "vllm.model_executor.layers.attention_layer_base",
            "AttentionSpec": "vllm.v1.kv_cache_interface",
            "FlexibleArgumentParser": "vllm.utils.argparse_utils",
            "MambaSpec": "vllm.v1.kv_cache_interface",
            "SpecDecodeBaseProposer": "vllm.v1.spec_decode.llm_base_proposer",
            "UsageContext": "vllm.usage.usage_lib",
            "_max_memory_usage_bytes_from_groups": _PLANNING,
            "_pool_bytes_per_block": _PLANNING,
            "_project_kv_cache_groups_to_worker": _PLANNING,
            "customize_attention_spec": "vllm.v1.worker.utils",
            "dflash_has_any_non_causal": "vllm.model_executor.models.qwen3_dflash",
            "get_current_attn_backends": "vllm.v1.worker.worker_base",
            "get_layers_from_vllm_config": "vllm.config",
            "get_pp_group": "vllm.distributed.parallel_state",
            "get_supported_kv_cache_layouts": "vllm.v1.attention.backends.utils",
            "initialize_model": "vllm.model_executor.model_loader.utils",
            "load_general_plugins": "vllm.plugins",
            "process_eagle_weight": "vllm.model_executor.models.utils",
            "resolve_kv_cache_layout": "vllm.v1.attention.backends.utils",
            "supports_multimodal": "vllm.model_executor.models.interfaces",
        },
    ),
    "parallel_state": Symbol(("vllm.distributed.parallel_state",), PLAN, ""),
    "registry": Symbol(("vllm.model_executor.models.registry",), PLAN, ""),
    **_of(
        FLAGS,
        {"ReasoningParserManager": "vllm.reasoning", "ToolParserManager": "vllm.tool_parsers", "make_arg_parser": _CLI},
    ),
    **_of(
        MEDIA,
        {"MEDIA_CONNECTOR_REGISTRY": "vllm.multimodal.media.connector", "MediaConnector": "vllm.multimodal.media.connector"},
    ),
    **_of(
        RANKS,
        {
            "RAY_NON_CARRY_OVER_ENV_VARS": "vllm.ray.ray_env",
            "ServeSubcommand": "vllm.entrypoints.cli.serve",
            "cli_env_setup": ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"),
        },
    ),
    "CpuPlatform": Symbol(("vllm.platforms.cpu",), RANKS),
}


def symbol(name: str) -> Any:
    """The function, class, value or module of the table. Raises MissingSymbol."""
    row = TABLE[name]
    attribute = name if row.attribute is None else row.attribute
    reason: Exception | None = None
    for home in row.homes:
        try:
            module = importlib.import_module(home)
            return attrgetter(attribute)(module) if attribute else module
        except (ImportError, AttributeError) as error:
            reason = reason or error
    raise _missing(f"{row.homes[0]}.{attribute}".rstrip(".")) from reason


def method(holder: Any, name: str) -> Any:
    """A method of one of vLLM's objects. Raises MissingSymbol."""
    bound = getattr(holder, name, None)
    if bound is None:
        raise _missing(f"{type(holder).__name__}.{name}")
    return bound


def _missing(name: str) -> MissingSymbol:
    return MissingSymbol(lacking(f"it has no {name}"), symbol=name)


def has(name: str) -> bool:
    """Whether this vLLM has it, for a symbol without which another way is as good."""
    try:
        symbol(name)
    except MissingSymbol:
        return False
    return True


def lacking(what: str) -> str:
    """The sentence for a release that cannot be worked with; what: the symbol, or Python's own words for it."""
    release = getattr(sys.modules.get("vllm"), "__version__", "of an unknown release")
    return (
        f"The sparkd plugin does not work with this vLLM ({release}): {what}. It works with {' and '.join(SUPPORTED)}; "
        "serve without `quantize`, or install one of those."
    )


def release() -> str:
    """The installed vLLM's."""
    return str(importlib.import_module("vllm").__version__)
