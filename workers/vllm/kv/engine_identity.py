"""Everything that an engine's need of memory depends on, for the name of its profile. Never opens a weight file.

Importing this module imports vLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from workers.host.hub_cache import snapshot_of
from workers.kv.profiles import checkpoint_of, key_of
from workers.vllm.symbols import release, symbol

# The loader's setting that changes the weights in memory; the rest are paths and limits.
_RECIPE = "quantize"
# The variables of other libraries that size buffers, pools and workspaces: torch's allocator (torch/docs, "CUDA environment variables"),
# cuBLAS's and NCCL's own (their documentation, "Environment variables"), the C allocators', threads that each have scratch memory.
VARIABLES = (
    *(
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "CUDA_MODULE_LOADING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    *("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_CACHE_AUTOTUNING"),
    *("NCCL_BUFFSIZE", "NCCL_LL_BUFFSIZE", "NCCL_LL128_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_ALGO", "NCCL_PROTO", "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE"),
    *("OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_CONF", "LD_PRELOAD"),
    # vLLM's variables that change its memory but not its compiled graphs (vllm/envs.py, compile_factors).
    *("VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS", "VLLM_MAX_IMAGE_PIXELS"),
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD"),
)
# The fields of vLLM's configuration that change its memory but not its compiled graphs: (part, field). A field that a release lacks is
# None.
FIELDS = (
    *(("model_config", name) for name in ("max_logprobs", "logprobs_mode", "logits_processors", "disable_cascade_attn", "runner_type")),
    *(("cache_config", name) for name in ("enable_prefix_caching", "mamba_cache_mode", "block_size")),
    *(("model_config", name) for name in ("use_fp64_gumbel", "return_sampling_mask", "pooler_config")),
    ("cache_config", "kv_sharing_fast_prefill"),
    *(("scheduler_config", name) for name in ("async_scheduling", "enable_chunked_prefill", "max_num_encoder_input_tokens")),
    *(("scheduler_config", name) for name in ("max_num_active_seqs", "disable_chunked_mm_input")),
    *(("kernel_config", name) for name in ("enable_flashinfer_autotune", "enable_jit_warmup", "enable_cutedsl_warmup")),
    ("lora_config", "max_cpu_loras"),
    # vLLM's hash covers only the draft's model; probabilities of drafts are as large as logits.
    *(("speculative_config", name) for name in ("draft_sample_method", "rejection_sample_method", "parallel_drafting")),
    *(("speculative_config", name) for name in ("draft_tensor_parallel_size", "max_model_len", "disable_padded_drafter_batch")),
    ("speculative_config", "num_speculative_tokens_per_batch_size"),
    *(("parallel_config", name) for name in ("disable_custom_all_reduce", "distributed_executor_backend")),
)
# The items that a request may bring besides text; the encoder is profiled with as many and as large items as these allow
# (vllm/config/multimodal.py).
MULTIMODAL = (
    *("limit_per_prompt", "mm_processor_kwargs", "media_io_kwargs", "skip_mm_profiling", "enable_mm_embeds", "language_model_only"),
    *("mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "video_pruning_rate"),
    *("mm_processor_cache_type", "mm_tensor_ipc", "mm_ipc_gpu_memory_gb"),
)


def identity_of(vllm_config: Any, device: str, rank: int) -> dict[str, Any]:
    """The engine's identity in JSON values, equal for two starts with the same demand. device: the device's name and total memory."""
    model, scheduler, parallel = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.parallel_config
    loader = vllm_config.load_config
    return {
        "vllm": release(),
        "torch": torch.__version__,
        "config": vllm_config.compute_hash(),
        "checkpoint": _checkpoint(model, loader),
        "draft": _draft(vllm_config),
        "load_format": str(loader.load_format),
        "quantize": json.dumps((loader.model_loader_extra_config or {}).get(_RECIPE), sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "eager": model.enforce_eager,
        "flags": {name: _plain(getattr(getattr(vllm_config, part, None), name, None)) for part, name in FIELDS},
        "multimodal": multimodal_of(getattr(model, "multimodal_config", None)),
        "environment": environment_of(os.environ),
        "world": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, rank],
        "device": device,
    }


def multimodal_of(config: Any) -> dict[str, Any] | None:
    """The limits on items besides text; None for a text-only model."""
    return None if config is None else {name: _plain(getattr(config, name, None)) for name in MULTIMODAL}


def environment_of(environ: Mapping[str, str]) -> str:
    """A digest of the variables that change memory, because a profile's file must not hold their values."""
    named = {name: environ[name] for name in VARIABLES if name in environ}
    return key_of({"named": named, "vllm": symbol("envs").compile_factors()})


def folders_of(vllm_config: Any) -> list[str]:
    """The folders of the model's and the draft's weights on this machine."""
    speculative = vllm_config.speculative_config
    models = [vllm_config.model_config, None if speculative is None else getattr(speculative, "draft_model_config", None)]
    folders = [_folder(config, vllm_config.load_config) for config in models if config is not None]
    return list(dict.fromkeys(folder for folder in folders if os.path.isdir(folder)))


def _folder(model: Any, loader: Any) -> str:
    """The model's folder: for a hub id its snapshot in the local cache, because `main` may move. The name itself where there is none."""
    name = str(model.model)
    if os.path.isdir(name):
        return name
    place = {"HF_HUB_CACHE": str(loader.download_dir)} if getattr(loader, "download_dir", None) else os.environ
    return str(snapshot_of(name, model.revision, place) or name)


def _checkpoint(model: Any, loader: Any) -> str:
    return checkpoint_of(_folder(model, loader), str(model.revision))


def _draft(vllm_config: Any) -> Any:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    draft = getattr(speculative, "draft_model_config", None)
    held = None if draft is None else _checkpoint(draft, vllm_config.load_config)
    return [str(speculative.method), speculative.num_speculative_tokens, str(speculative.model), held]


def _plain(value: Any) -> Any:
    """A value for JSON: numbers and strings unchanged, everything else as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in sorted(value.items(), key=str)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
