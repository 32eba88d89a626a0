"""Every metric of sparkd, declared once, in one registry of its own. Never computes a value and never serves a request."""

from __future__ import annotations

import platform
from collections.abc import Collection

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

_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LONG = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_LOADS = (5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1200, 2400)

# The daemon itself. process_*: its CPU time, memory and descriptors, under the names that Prometheus's own clients give them.
BUILD_INFO = Info("sparkd_build", "The daemon's release, and the Python that it runs on.", registry=REGISTRY)
BUILD_INFO.info({"version": __version__, "python": platform.python_version()})
ProcessCollector(registry=REGISTRY)

# The data plane. `model` is a configured name, "" or "unknown"; `route` is a path of the route table or "none".
REQUESTS = Counter(
    "sparkd_requests",
    "Requests that ended, by HTTP status; 499 where the client left first.",
    ("model", "route", "code"),
    registry=REGISTRY,
)
REQUEST_SECONDS = Histogram(
    "sparkd_request_seconds",
    "From the request's headers to the last byte of the answer, including the wait for a load.",
    ("model", "route"),
    buckets=_LONG,
    registry=REGISTRY,
)
TIME_TO_FIRST_TOKEN_SECONDS = Histogram(
    "sparkd_time_to_first_token_seconds",
    "From the request's headers to the first body chunk of a streamed answer.",
    ("model",),
    buckets=_SHORT,
    registry=REGISTRY,
)
QUEUE_SECONDS = Histogram(
    "sparkd_queue_seconds",
    "Time that a request waited for its engine: for a load, or for a free slot.",
    ("model",),
    buckets=_LONG,
    registry=REGISTRY,
)
IN_FLIGHT = Gauge("sparkd_in_flight", "Requests that an engine is working on.", ("model",), registry=REGISTRY)
QUEUE_DEPTH = Gauge("sparkd_queue_depth", "Requests that wait for their engine.", ("model",), registry=REGISTRY)
CONNECTIONS = Gauge("sparkd_connections", "Clients that are connected.", registry=REGISTRY)
CONNECTIONS_MAX = Gauge(
    "sparkd_connections_max", "Most clients at one time: max_connections, or fewer if file descriptors are short.", registry=REGISTRY
)
CONNECTIONS_TURNED_AWAY = Counter(
    "sparkd_connections_turned_away", "Idle connections closed for new ones (displaced), and new ones refused.", ("how",), registry=REGISTRY
)

# Models.
MODEL_STATE = Gauge("sparkd_model_state", "1 for the model's present state, else 0.", ("model", "state"), registry=REGISTRY)
MODEL_INFO = Gauge(
    "sparkd_model_info",
    "Always 1; labels describe a model. source: its hub id or folder name; nodes: number of nodes of its engine, 0 without one.",
    ("model", "source", "quantize", "max_model_len", "nodes"),
    registry=REGISTRY,
)
MODEL_LOAD_SECONDS = Histogram(
    "sparkd_model_load_seconds", "From the start of the ranks to READY.", ("model",), buckets=_LOADS, registry=REGISTRY
)
MODEL_LOAD_BYTES = Gauge(
    "sparkd_model_load_bytes",
    "Bytes of weights read by the present or last load, as the engine reports them.",
    ("model",),
    registry=REGISTRY,
)
MODEL_LOAD_TOTAL_BYTES = Gauge(
    "sparkd_model_load_total_bytes", "Bytes of weights to read in the present or last load.", ("model",), registry=REGISTRY
)
MODEL_LOAD_BYTES_PER_SECOND = Gauge(
    "sparkd_model_load_bytes_per_second", "Bytes of weights per second in the present load, else 0.", ("model",), registry=REGISTRY
)
MODEL_LOAD_READ_BYTES = Gauge(
    "sparkd_model_load_read_bytes", "Bytes read from disk by the present or last load.", ("model",), registry=REGISTRY
)
MODEL_LOAD_UNITS = Gauge(
    "sparkd_model_load_units", "Tensors and experts loaded so far by the present or last load.", ("model",), registry=REGISTRY
)
MODEL_LOAD_TOTAL_UNITS = Gauge(
    "sparkd_model_load_total_units", "Tensors and experts to load in the present or last load.", ("model",), registry=REGISTRY
)
QUANTIZED_CACHE_BYTES = Gauge(
    "sparkd_quantized_cache_bytes", "Bytes of quantized weights cached by the present or last load.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_BYTES = Gauge("sparkd_model_kv_cache_bytes", "Size of the model's KV cache, bytes.", ("model",), registry=REGISTRY)
MODEL_KV_CACHE_TOKENS = Gauge("sparkd_model_kv_cache_tokens", "Capacity of the KV cache, tokens.", ("model",), registry=REGISTRY)
MODEL_KV_CACHE_SEQUENCES = Gauge(
    "sparkd_model_kv_cache_sequences", "Capacity of the KV cache, requests of full length.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_BYTES_PER_TOKEN = Gauge(
    "sparkd_model_kv_cache_bytes_per_token", "KV cache bytes per token in a request of full length.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_MARGIN_BYTES = Gauge(
    "sparkd_model_kv_cache_margin_bytes", "Safety margin of the KV cache, bytes.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_SLACK_BYTES = Gauge(
    "sparkd_model_kv_cache_slack_bytes", "Free bytes when the engine became ready, including the margin.", ("model",), registry=REGISTRY
)
MODEL_FAILURES = Counter("sparkd_model_failures", "Times a model went to FAILED.", ("model", "reason"), registry=REGISTRY)
MODEL_RESTARTS = Counter("sparkd_model_restarts", "Starts that followed a failure.", ("model",), registry=REGISTRY)

# Nodes: the last reading of /proc that the supervisor acted on.
NODE_MEM_TOTAL_BYTES = Gauge("sparkd_node_mem_total_bytes", "MemTotal.", ("node",), registry=REGISTRY)
NODE_MEM_AVAILABLE_BYTES = Gauge("sparkd_node_mem_available_bytes", "MemAvailable.", ("node",), registry=REGISTRY)
NODE_MEM_FREE_BYTES = Gauge("sparkd_node_mem_free_bytes", "MemFree, which is what cudaMemGetInfo reports.", ("node",), registry=REGISTRY)
NODE_MEM_CACHED_BYTES = Gauge("sparkd_node_mem_cached_bytes", "Cached: the page cache.", ("node",), registry=REGISTRY)
NODE_MEM_SWAP_USED_BYTES = Gauge("sparkd_node_mem_swap_used_bytes", "SwapTotal - SwapFree.", ("node",), registry=REGISTRY)
NODE_MEM_CMA_TOTAL_BYTES = Gauge("sparkd_node_mem_cma_total_bytes", "CmaTotal, where the kernel has it.", ("node",), registry=REGISTRY)
NODE_MEM_CMA_FREE_BYTES = Gauge("sparkd_node_mem_cma_free_bytes", "CmaFree, where the kernel has it.", ("node",), registry=REGISTRY)
NODE_PSI_SOME_RATIO = Gauge(
    "sparkd_node_psi_memory_some_ratio",
    "Share of the last 10 s in which some task waited for memory, 0 to 1.",
    ("node",),
    registry=REGISTRY,
)
NODE_PSI_FULL_RATIO = Gauge(
    "sparkd_node_psi_memory_full_ratio",
    "Share of the last 10 s in which every task waited for memory, 0 to 1.",
    ("node",),
    registry=REGISTRY,
)
NODE_READING_AGE_SECONDS = Gauge(
    "sparkd_node_reading_age_seconds",
    "Age of the node's last reading; it grows while the node does not answer.",
    ("node",),
    registry=REGISTRY,
)
NODE_MEM_UNACCOUNTED_BYTES = Gauge(
    "sparkd_node_mem_unaccounted_bytes", "Memory that no line of /proc/meminfo accounts for (the driver's).", ("node",), registry=REGISTRY
)
NODE_MEM_SLOPE = Gauge("sparkd_node_mem_slope_bytes_per_second", "Change of MemAvailable in the last second.", ("node",), registry=REGISTRY)
NODE_MEM_FLOOR_SECONDS = Gauge(
    "sparkd_node_mem_floor_seconds",
    "Time until the guard's floor at that rate; absent while memory does not shrink.",
    ("node",),
    registry=REGISTRY,
)
NODE_MEM_LIMIT_BYTES = Gauge(
    "sparkd_node_mem_limit_bytes", "The guard's limits of MemAvailable: soft, hard, floor.", ("node", "limit"), registry=REGISTRY
)
NODE_SCANNED_PAGES = Gauge("sparkd_node_scanned_pages_per_second", "Pages scanned for a free one.", ("node",), registry=REGISTRY)
NODE_SWAPPED_PAGES = Gauge("sparkd_node_swapped_pages_per_second", "Pages swapped in and out.", ("node",), registry=REGISTRY)
NODE_MEMORY_LEVEL = Gauge(
    "sparkd_node_memory_level", "The guard's level: 0 ok, 1 tight, 2 pressed, 3 critical.", ("node",), registry=REGISTRY
)
NODE_GUARDED = Gauge(
    "sparkd_node_guarded",
    "1 where a memory guard watches, 0 where none does; absent where none is to.",
    ("node",),
    registry=REGISTRY,
)
ENGINE_HOST_BYTES = Gauge(
    "sparkd_engine_host_bytes", "Anonymous memory of the engine's processes on a node.", ("model", "node"), registry=REGISTRY
)
ENGINE_METRICS_AGE_SECONDS = Gauge(
    "sparkd_engine_metrics_age_seconds",
    "Age of the engine's own series (vllm:*), or time since the first try; left out after 30 s.",
    ("model", "node"),
    registry=REGISTRY,
)
ENGINE_DEVICE_BYTES = Gauge(
    "sparkd_engine_device_bytes", "Memory of its processes on the device, as nvidia-smi says.", ("model", "node"), registry=REGISTRY
)
GUARD_ACTIONS = Counter(
    "sparkd_guard_actions", "Actions taken because memory was short: kill, evict, shed.", ("action", "model"), registry=REGISTRY
)
SWAPS = Counter("sparkd_swaps", "Times a model was evicted for another that waited.", ("model",), registry=REGISTRY)
GPU_POWER_WATTS = Gauge("sparkd_gpu_power_draw_watts", "Power draw of the node's GPU.", ("node",), registry=REGISTRY)
GPU_BUSY_RATIO = Gauge(
    "sparkd_gpu_utilization_ratio", "Share of time with a resident kernel, including a hung one.", ("node",), registry=REGISTRY
)
GPU_CELSIUS = Gauge("sparkd_gpu_temperature_celsius", "Temperature of the node's GPU.", ("node",), registry=REGISTRY)
WATCHDOG_STALLS = Counter(
    "sparkd_watchdog_stalls", "Times an engine hung while requests ran and was restarted.", ("model",), registry=REGISTRY
)
RELEASE_SECONDS = Histogram(
    "sparkd_release_seconds", "Time from an engine's end until its memory was free again.", ("node",), buckets=_SHORT, registry=REGISTRY
)
RELEASE_LEAKED_BYTES = Gauge(
    "sparkd_release_leaked_bytes", "Memory that the last ended engine on the node has not released.", ("node",), registry=REGISTRY
)
NODE_RESERVED_BYTES = Gauge("sparkd_node_reserved_bytes", "Unified memory reserved by resident models.", ("node",), registry=REGISTRY)

FABRIC_RATE = Gauge("sparkd_fabric_rate_bytes_per_second", "Last measured bus bandwidth between two nodes.", ("a", "b"), registry=REGISTRY)
FABRIC_NORMAL_RATE = Gauge(
    "sparkd_fabric_normal_rate_bytes_per_second",
    "Least bus bandwidth that is normal for the links of that measurement; absent for virtual links.",
    ("a", "b"),
    registry=REGISTRY,
)

# The supervisor.
INTERNAL_ERRORS = Counter(
    "sparkd_internal_errors",
    "Errors inside sparkd that it survived; its log has the tracebacks.",
    ("where",),
    registry=REGISTRY,
)
TICK_SECONDS = Histogram(
    "sparkd_tick_seconds",
    "Duration of one turn of the supervisor's loop.",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5),
    registry=REGISTRY,
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
