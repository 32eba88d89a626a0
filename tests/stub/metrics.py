"""Owns the page of metrics of a stub engine: every family that vLLM has, so that boards and alerts can be tried without a model."""

from __future__ import annotations

from collections.abc import Mapping

_COUNTERS = (
    "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits", "mm_cache_queries",
    "mm_cache_hits", "num_preemptions", "prompt_tokens", "prompt_tokens_cached", "generation_tokens", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu",
    "estimated_write_bytes_per_gpu",
)  # fmt: skip
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_HISTOGRAMS = (
    "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_num_preemptions", "request_prefill_kv_computed_tokens",
)  # fmt: skip
# Families with a label more: its name, and the values that vLLM writes from the start.
_LABELLED = (
    ("spec_decode_num_accepted_tokens_per_pos_total", "position", ("0", "1")),
    ("num_requests_waiting_by_reason", "reason", ("capacity", "deferred")),
    ("engine_sleep_state", "sleep_state", ("awake", "weights_offloaded", "discard_all")),
    ("prompt_tokens_by_source_total", "source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
    ("prompt_tokens_cached_by_source_total", "source", ("device", "host", "p2p", "disk", "external_unspecified")),
    ("request_success_total", "finished_reason", ("stop", "length", "abort", "error", "repetition")),
)
_CACHE_CONFIG = {"block_size": "16", "cache_dtype": "auto", "enable_prefix_caching": "True", "num_gpu_blocks": "64"}


def page(model: str, values: Mapping[str, float]) -> bytes:
    """Prometheus' text format 0.0.4. values: by full name, of the samples that have the labels of every family; the others are 0."""
    own = f'engine="0",model_name="{model}"'
    lines: list[str] = []
    for name, kind in (*((f"vllm:{name}_total", "counter") for name in _COUNTERS), *((f"vllm:{name}", "gauge") for name in _GAUGES)):
        lines += [*_head(name, kind), f"{name}{{{own}}} {float(values.get(name, 0))}"]
    for short, label, choices in _LABELLED:
        name = f"vllm:{short}"
        lines += _head(name, "counter" if short.endswith("_total") else "gauge")
        lines += [f'{name}{{{own},{label}="{choice}"}} {float(choice == "awake")}' for choice in choices]
    for short in _HISTOGRAMS:
        name = f"vllm:{short}"
        bucket = f'{name}_bucket{{{own},le="+Inf"}} 0.0'
        lines += [*_head(name, "histogram"), bucket, f"{name}_count{{{own}}} 0.0", f"{name}_sum{{{own}}} 0.0"]
    cache = ",".join(f'{label}="{value}"' for label, value in _CACHE_CONFIG.items())
    lines += [*_head("vllm:cache_config_info", "gauge"), f'vllm:cache_config_info{{engine="0",{cache}}} 1.0']
    for name in sorted(name for name in values if name.startswith("stub:")):
        lines += [*_head(name, "counter"), f"{name}{{{own}}} {float(values[name])}"]
    return ("\n".join(lines) + "\n").encode()


def _head(name: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} As vLLM counts it.", f"# TYPE {name} {kind}"
