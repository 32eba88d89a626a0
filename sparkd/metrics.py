"""Every metric of sparkd, declared once, in one registry of its own."""

from __future__ import annotations

import platform
from collections.abc import Collection
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from sparkd import __version__

# Otherwise every series comes with a second one for its time of creation, which no dashboard shows.
disable_created_metrics()

REGISTRY = CollectorRegistry()
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

gauge = partial(Gauge, registry=REGISTRY)
counter = partial(Counter, registry=REGISTRY)
histogram = partial(Histogram, registry=REGISTRY)

_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LOADS = (5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 2400)

# The daemon itself. process_*: its CPU time, memory and descriptors, under the names that Prometheus's own clients give them.
BUILD_INFO = Info("sparkd_build", "The daemon's release, and the Python that it runs on.", registry=REGISTRY)
BUILD_INFO.info({"version": __version__, "python": platform.python_version()})
ProcessCollector(registry=REGISTRY)

# The data plane. `model` is a configured name, "" or "unknown"; `route` is a path of the route table or "none".
REQUESTS = counter("sparkd_requests", "Requests that ended, by HTTP status; 499 where the client left first.", ("model", "route", "code"))
REQUEST_SECONDS = histogram(
    "sparkd_request_seconds",
    "From the request's headers to the last byte of the answer, including the wait for a load.",
    ("model", "route"),
    buckets=_LONG,
)
TIME_TO_FIRST_TOKEN_SECONDS = histogram(
    "sparkd_time_to_first_token_seconds",
    "From the request's headers to the first body chunk of a streamed answer.",
    ("model",),
    buckets=_SHORT,
)
QUEUE_SECONDS = histogram(
    "sparkd_queue_seconds", "Time that a request waited for its engine: for a load, or for a free slot.", ("model",), buckets=_LONG
)
IN_FLIGHT = gauge("sparkd_in_flight", "Requests that an engine is working on.", ("model",))
QUEUE_DEPTH = gauge("sparkd_queue_depth", "Requests that wait for their engine.", ("model",))
CONNECTIONS = gauge("sparkd_connections", "Clients that are connected.")
CONNECTIONS_MAX = gauge("sparkd_connections_max", "Most clients at one time: max_connections, or fewer if file descriptors are short.")
CONNECTIONS_TURNED_AWAY = counter(
    "sparkd_connections_turned_away", "Idle connections closed for new ones (displaced), and new ones refused.", ("how",)
)

# Models.
MODEL_STATE = gauge("sparkd_model_state", "1 for the model's present state, else 0.", ("model", "state"))
MODEL_INFO = gauge(
    "sparkd_model_info",
    "Always 1; labels describe a model. source: its hub id or folder name; nodes: number of nodes of its engine, 0 without one.",
    ("model", "source", "quantize", "max_model_len", "nodes"),
)
MODEL_LOAD_SECONDS = histogram("sparkd_model_load_seconds", "From the start of the ranks to READY.", ("model",), buckets=_LOADS)
MODEL_LOAD_BYTES = gauge(
    "sparkd_model_load_bytes", "Bytes of weights read by the present or last load, as the engine reports them.", ("model",)
)
MODEL_LOAD_TOTAL_BYTES = gauge("sparkd_model_load_total_bytes", "Bytes of weights to read in the present or last load.", ("model",))
MODEL_LOAD_BYTES_PER_SECOND = gauge(
    "sparkd_model_load_bytes_per_second", "Bytes of weights per second in the present load, else 0.", ("model",)
)
MODEL_LOAD_READ_BYTES = gauge("sparkd_model_load_read_bytes", "Bytes read from disk by the present or last load.", ("model",))
MODEL_LOAD_UNITS = gauge("sparkd_model_load_units", "Tensors and experts loaded so far by the present or last load.", ("model",))
MODEL_LOAD_TOTAL_UNITS = gauge("sparkd_model_load_total_units", "Tensors and experts to load in the present or last load.", ("model",))
QUANTIZED_CACHE_BYTES = gauge("sparkd_quantized_cache_bytes", "Bytes of quantized weights cached by the present or last load.", ("model",))
MODEL_KV_CACHE_BYTES = gauge("sparkd_model_kv_cache_bytes", "Size of the model's KV cache, bytes.", ("model",))
MODEL_KV_CACHE_TOKENS = gauge("sparkd_model_kv_cache_tokens", "Capacity of the KV cache, tokens.", ("model",))
MODEL_KV_CACHE_SEQUENCES = gauge("sparkd_model_kv_cache_sequences", "Capacity of the KV cache, requests of full length.", ("model",))
MODEL_KV_CACHE_BYTES_PER_TOKEN = gauge(
    "sparkd_model_kv_cache_bytes_per_token", "KV cache bytes per token in a request of full length.", ("model",)
)
MODEL_KV_CACHE_MARGIN_BYTES = gauge("sparkd_model_kv_cache_margin_bytes", "Safety margin of the KV cache, bytes.", ("model",))
MODEL_KV_CACHE_SLACK_BYTES = gauge(
    "sparkd_model_kv_cache_slack_bytes", "Free bytes when the engine became ready, including the margin.", ("model",)
)
MODEL_FAILURES = counter("sparkd_model_failures", "Times a model went to FAILED.", ("model", "reason"))
MODEL_RESTARTS = counter("sparkd_model_restarts", "Starts that followed a failure.", ("model",))

# Nodes: the last reading of /proc that the supervisor acted on.
NODE_MEM_TOTAL_BYTES = gauge("sparkd_node_mem_total_bytes", "MemTotal.", ("node",))
NODE_MEM_AVAILABLE_BYTES = gauge("sparkd_node_mem_available_bytes", "MemAvailable.", ("node",))
NODE_MEM_FREE_BYTES = gauge("sparkd_node_mem_free_bytes", "MemFree, which is what cudaMemGetInfo reports.", ("node",))
NODE_MEM_CACHED_BYTES = gauge("sparkd_node_mem_cached_bytes", "Cached: the page cache.", ("node",))
NODE_MEM_SWAP_USED_BYTES = gauge("sparkd_node_mem_swap_used_bytes", "SwapTotal - SwapFree.", ("node",))
NODE_MEM_CMA_TOTAL_BYTES = gauge("sparkd_node_mem_cma_total_bytes", "CmaTotal, where the kernel has it.", ("node",))
NODE_MEM_CMA_FREE_BYTES = gauge("sparkd_node_mem_cma_free_bytes", "CmaFree, where the kernel has it.", ("node",))
NODE_PSI_SOME_RATIO = gauge(
    "sparkd_node_psi_memory_some_ratio", "Share of the last 10 s in which some task waited for memory, 0 to 1.", ("node",)
)
NODE_PSI_FULL_RATIO = gauge(
    "sparkd_node_psi_memory_full_ratio", "Share of the last 10 s in which every task waited for memory, 0 to 1.", ("node",)
)
NODE_READING_AGE_SECONDS = gauge(
    "sparkd_node_reading_age_seconds", "Age of the node's last reading; it grows while the node does not answer.", ("node",)
)
NODE_MEM_UNACCOUNTED_BYTES = gauge(
    "sparkd_node_mem_unaccounted_bytes", "Memory that no line of /proc/meminfo accounts for (the driver's).", ("node",)
)
NODE_MEM_SLOPE = gauge("sparkd_node_mem_slope_bytes_per_second", "Change of MemAvailable in the last second.", ("node",))
NODE_MEM_FLOOR_SECONDS = gauge(
    "sparkd_node_mem_floor_seconds", "Time until the guard's floor at that rate; absent while memory does not shrink.", ("node",)
)
NODE_MEM_LIMIT_BYTES = gauge("sparkd_node_mem_limit_bytes", "The guard's limits of MemAvailable: soft, hard, floor.", ("node", "limit"))
NODE_SCANNED_PAGES = gauge("sparkd_node_scanned_pages_per_second", "Pages scanned for a free one.", ("node",))
NODE_SWAPPED_PAGES = gauge("sparkd_node_swapped_pages_per_second", "Pages swapped in and out.", ("node",))
NODE_MEMORY_LEVEL = gauge("sparkd_node_memory_level", "The guard's level: 0 ok, 1 tight, 2 pressed, 3 critical.", ("node",))
NODE_GUARDED = gauge("sparkd_node_guarded", "1 where a memory guard watches, 0 where none does; absent where none is to.", ("node",))
ENGINE_HOST_BYTES = gauge("sparkd_engine_host_bytes", "Anonymous memory of the engine's processes on a node.", ("model", "node"))
ENGINE_METRICS_AGE_SECONDS = gauge(
    "sparkd_engine_metrics_age_seconds",
    "Age of the engine's own series (vllm:*), or time since the first try; left out after 30 s.",
    ("model", "node"),
)
ENGINE_DEVICE_BYTES = gauge("sparkd_engine_device_bytes", "Memory of its processes on the device, as nvidia-smi says.", ("model", "node"))
GUARD_ACTIONS = counter("sparkd_guard_actions", "Actions taken because memory was short: kill, evict, shed.", ("action", "model"))
SWAPS = counter("sparkd_swaps", "Times a model was evicted for another that waited.", ("model",))
GPU_POWER_WATTS = gauge("sparkd_gpu_power_draw_watts", "Power draw of the node's GPU.", ("node",))
GPU_BUSY_RATIO = gauge("sparkd_gpu_utilization_ratio", "Share of time with a resident kernel, including a hung one.", ("node",))
GPU_CELSIUS = gauge("sparkd_gpu_temperature_celsius", "Temperature of the node's GPU.", ("node",))
WATCHDOG_STALLS = counter("sparkd_watchdog_stalls", "Times an engine hung while requests ran and was restarted.", ("model",))
RELEASE_SECONDS = histogram(
    "sparkd_release_seconds", "Time from an engine's end until its memory was free again.", ("node",), buckets=_SHORT
)
RELEASE_LEAKED_BYTES = gauge("sparkd_release_leaked_bytes", "Memory that the last ended engine on the node has not released.", ("node",))
NODE_RESERVED_BYTES = gauge("sparkd_node_reserved_bytes", "Unified memory reserved by resident models.", ("node",))

FABRIC_RATE = gauge("sparkd_fabric_rate_bytes_per_second", "Last measured bus bandwidth between two nodes.", ("a", "b"))
FABRIC_NORMAL_RATE = gauge(
    "sparkd_fabric_normal_rate_bytes_per_second",
    "Least bus bandwidth that is normal for the links of that measurement; absent for virtual links.",
    ("a", "b"),
)

# The supervisor.
INTERNAL_ERRORS = counter("sparkd_internal_errors", "Errors inside sparkd that it survived; its log has the tracebacks.", ("where",))
TICK_SECONDS = histogram(
    "sparkd_tick_seconds", "Duration of one turn of the supervisor's loop.", buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5)
)


def forget(label: str, value: str, but: Collection[Gauge | Counter | Histogram] = ()) -> None:
    """Remove every series, of any metric that is declared above, whose `label` has this value. but: metrics that keep theirs."""
    for metric in globals().values():
        if isinstance(metric, Gauge | Counter | Histogram) and label in metric._labelnames and metric not in but:
            place = metric._labelnames.index(label)
            for labels in [each for each in metric._metrics if each[place] == value]:
                metric.remove(*labels)


def text(extra: bytes = b"") -> bytes:
    """The exposition text of all of them, with `extra` (the engines' own, already labelled) behind it."""
    return generate_latest(REGISTRY) + extra
