"""Everything that an engine's need of memory depends on, for the name of its profile. Never opens a weight file.

Importing this module imports vLLM.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import vllm

from workers.kv.profiles import checkpoint_of

# Of the loader's settings, those that change what is in memory; the rest are paths and limits.
_RECIPE = "quantize"


def identity_of(vllm_config: Any, device: str, rank: int) -> dict[str, Any]:
    """JSON values; equal for two starts whose demand is the same. device: its name and total memory."""
    model, scheduler, parallel = vllm_config.model_config, vllm_config.scheduler_config, vllm_config.parallel_config
    loader = vllm_config.load_config
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "config": vllm_config.compute_hash(),
        "checkpoint": checkpoint_of(str(model.model), str(model.revision)),
        "draft": _draft(vllm_config),
        "load_format": str(loader.load_format),
        "quantize": json.dumps((loader.model_loader_extra_config or {}).get(_RECIPE), sort_keys=True, default=str),
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "eager": model.enforce_eager,
        "world": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, rank],
        "device": device,
    }


def _draft(vllm_config: Any) -> Any:
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    return [str(speculative.method), speculative.num_speculative_tokens, str(speculative.model)]
