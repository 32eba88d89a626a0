"""What vLLM's own functions are asked with where no engine runs: its configuration, and the cache's specification of each kind of layer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from sparkd.capacity.kv_cache import Serving
from sparkd.checkpoint.shape import Attention


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size for each request: a convolution's last inputs and a matrix for every head, of Mamba-2 or a gated delta net."""

    channels: int
    taps: int
    heads: int
    rows: int
    columns: int
    groups: int = 0
    group_size: int = 0
    key_heads: int = 0
    matrix_dtype: str | None = None


DTYPES = {"float32": torch.float32, None: torch.bfloat16}


class Backend:
    """An attention kernel of blocks of 16."""

    @staticmethod
    def customize_spec(spec: Any) -> Any:
        return spec

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [MultipleOf(16)]


class OnePlatform(Platform):
    @classmethod
    def _find_non_ssm_backends(cls, vllm_config: Any) -> list[Any]:
        return [Backend]


def vllm_config(serving: Serving) -> Any:
    """What the functions read of a VllmConfig, the number of batches in flight by its own property."""
    scheduler = SimpleNamespace(
        disable_hybrid_kv_cache_manager=False,
        async_scheduling=serving.batches_in_flight == 2,
        max_num_batched_tokens=serving.max_num_batched_tokens,
    )
    parallel = SimpleNamespace(
        decode_context_parallel_size=1, tensor_parallel_size=serving.tensor_parallel, pipeline_parallel_size=serving.pipeline_parallel
    )
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        mamba_cache_mode="align" if serving.prefix_caching else "none",
        cache_dtype=serving.kv_dtype,
        block_size=0,
        mamba_block_size=None,
        mamba_page_size_padded=None,
    )
    model = SimpleNamespace(
        max_model_len=serving.max_model_len,
        original_max_model_len=None,
        dtype=torch.bfloat16,
        use_mla=False,
        architecture="X",
        supports_kv_cache_grouping=False,
    )
    made = SimpleNamespace(
        scheduler_config=scheduler,
        parallel_config=parallel,
        cache_config=cache,
        model_config=model,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
        use_v2_model_runner=True,
    )
    made.max_concurrent_batches = VllmConfig.max_concurrent_batches.fget(made)  # type: ignore[attr-defined]
    made.max_in_flight_tokens = VllmConfig.max_in_flight_tokens.fget(made)  # type: ignore[attr-defined]
    return made


def state_spec(one: RecurrentState, serving: Serving, block: int = -1, padded: int | None = None) -> Any:
    ranks, kept = serving.tensor_parallel, serving.speculative_tokens
    of = MambaStateShapeCalculator
    checkpoints = 0
    if one.groups:
        # As vllm/model_executor/layers/mamba/mamba_mixer2.py, get_kv_cache_spec, has it.
        checkpoints = 1
        shapes = of.mamba2_state_shape(ranks, one.channels, one.groups, one.heads, one.rows, one.group_size, one.taps + 1, kept)
    else:
        shapes = of.gated_delta_net_state_shape(ranks, one.key_heads, one.heads, one.columns, one.rows, one.taps + 1, kept)
    dtypes = (torch.bfloat16, DTYPES[one.matrix_dtype])
    blocks = {"num_speculative_blocks": kept, "num_prefill_checkpoint_blocks": checkpoints}
    return MambaSpec(block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=padded, **blocks)


def attention_spec(one: Attention, serving: Serving, block: int) -> Any:
    heads = max(1, one.heads // serving.tensor_parallel)
    plain = {"block_size": block, "head_size": one.key_dim, "dtype": torch.float8_e4m3fn if serving.kv_dtype == "fp8" else torch.bfloat16}
    if one.latent:
        return MLAAttentionSpec(num_kv_heads=1, **plain)
    if one.window:
        return SlidingWindowSpec(num_kv_heads=heads, head_size_v=one.value_dim, sliding_window=one.window, **plain)
    return FullAttentionSpec(num_kv_heads=heads, head_size_v=one.value_dim, **plain)


def aligned(config: Any, attention: Attention, state: RecurrentState, serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block and page of a hybrid model, set in the configuration by vLLM's own alignment."""
    spec = state_spec(state, serving)
    model = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _config: spec.shapes, get_mamba_state_dtype_from_config=lambda _config: spec.dtypes
    )
    monkeypatch.setattr(type(ModelRegistry), "resolve_model_cls", lambda *_arguments, **_options: (model, "X"))
    config.model_config.use_mla = attention.latent
    config.model_config.get_num_kv_heads = lambda _parallel: max(1, attention.heads // serving.tensor_parallel)
    config.model_config.get_head_size = lambda: attention.key_dim
    OnePlatform._align_hybrid_block_size(config, Backend)
