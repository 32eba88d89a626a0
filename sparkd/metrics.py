"""Every metric of sparkd, declared once, in one registry of its own. Never computes a value and never serves a request."""

from __future__ import annotations

import platform

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

# Else every series comes with a second one that holds its time of birth, which nobody draws.
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
    "From the request's headers to the last byte of the answer, waiting for a model to load included.",
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
    "How long a request waited for its engine: for a load, or for a free place.",
    ("model",),
    buckets=_LONG,
    registry=REGISTRY,
)
IN_FLIGHT = Gauge("sparkd_in_flight", "Requests that an engine is working on.", ("model",), registry=REGISTRY)
QUEUE_DEPTH = Gauge("sparkd_queue_depth", "Requests that wait for their engine.", ("model",), registry=REGISTRY)
CONNECTIONS = Gauge("sparkd_connections", "Clients that are connected.", registry=REGISTRY)
CONNECTIONS_MAX = Gauge(
    "sparkd_connections_max", "Clients that may be connected at one time: max_connections, or fewer by open files.", registry=REGISTRY
)
CONNECTIONS_TURNED_AWAY = Counter(
    "sparkd_connections_turned_away", "Idle connections closed for new ones (displaced), and new ones refused.", ("how",), registry=REGISTRY
)
ACCEPT_RESTS = Counter("sparkd_accept_rests", "Times no client was accepted for a while because open files ran short.", registry=REGISTRY)

# Models.
MODEL_STATE = Gauge("sparkd_model_state", "1 for the state that the model is in, else 0.", ("model", "state"), registry=REGISTRY)
MODEL_INFO = Gauge(
    "sparkd_model_info",
    "1: what a model is. source: its hub id, or the name of its folder; nodes: how many its engine runs on, 0 while it has none.",
    ("model", "source", "quantize", "max_model_len", "nodes"),
    registry=REGISTRY,
)
MODEL_LOAD_SECONDS = Histogram(
    "sparkd_model_load_seconds", "From the start of the ranks to READY.", ("model",), buckets=_LOADS, registry=REGISTRY
)
MODEL_LOAD_BYTES = Gauge(
    "sparkd_model_load_bytes",
    "Bytes of weights read by the present or the last load, as far as the engine says.",
    ("model",),
    registry=REGISTRY,
)
MODEL_LOAD_TOTAL_BYTES = Gauge(
    "sparkd_model_load_total_bytes", "Bytes of weights that the present or the last load has to read.", ("model",), registry=REGISTRY
)
MODEL_LOAD_BYTES_PER_SECOND = Gauge(
    "sparkd_model_load_bytes_per_second", "Bytes of weights per second in the present load, else 0.", ("model",), registry=REGISTRY
)
MODEL_LOAD_READ_BYTES = Gauge(
    "sparkd_model_load_read_bytes", "Bytes that the present or the last load took from the disk.", ("model",), registry=REGISTRY
)
MODEL_LOAD_UNITS = Gauge(
    "sparkd_model_load_units", "Tensors and experts that the present or the last load has handed over.", ("model",), registry=REGISTRY
)
MODEL_LOAD_TOTAL_UNITS = Gauge(
    "sparkd_model_load_total_units", "Tensors and experts that the present or the last load hands over.", ("model",), registry=REGISTRY
)
QUANTIZED_CACHE_BYTES = Gauge(
    "sparkd_quantized_cache_bytes", "Bytes of quantized weights that the present or the last load has kept.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_BYTES = Gauge(
    "sparkd_model_kv_cache_bytes", "Bytes of the model's KV cache, as its worker has sized it.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_TOKENS = Gauge("sparkd_model_kv_cache_tokens", "Tokens that the KV cache holds.", ("model",), registry=REGISTRY)
MODEL_KV_CACHE_SEQUENCES = Gauge(
    "sparkd_model_kv_cache_sequences", "Requests of full length that the KV cache holds at one time.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_BYTES_PER_TOKEN = Gauge(
    "sparkd_model_kv_cache_bytes_per_token", "Bytes that a token of a request of full length takes.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_MARGIN_BYTES = Gauge(
    "sparkd_model_kv_cache_margin_bytes", "Bytes that were to stay free beside the KV cache.", ("model",), registry=REGISTRY
)
MODEL_KV_CACHE_SLACK_BYTES = Gauge(
    "sparkd_model_kv_cache_slack_bytes", "Bytes that were free when the engine was ready, margin included.", ("model",), registry=REGISTRY
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
NODE_READING_AGE_SECONDS = Gauge("sparkd_node_reading_age_seconds", "Age of the node's last reading.", ("node",), registry=REGISTRY)
NODE_MEM_UNACCOUNTED_BYTES = Gauge(
    "sparkd_node_mem_unaccounted_bytes", "What no line of /proc/meminfo accounts for: the driver's.", ("node",), registry=REGISTRY
)
NODE_MEM_SLOPE = Gauge("sparkd_node_mem_slope_bytes_per_second", "Change of MemAvailable in the last second.", ("node",), registry=REGISTRY)
NODE_MEM_FLOOR_SECONDS = Gauge(
    "sparkd_node_mem_floor_seconds", "Until the guard's floor at that pace; absent while memory does not go.", ("node",), registry=REGISTRY
)
NODE_SCANNED_PAGES = Gauge(
    "sparkd_node_scanned_pages_per_second", "Pages that processes had to look through for a free one.", ("node",), registry=REGISTRY
)
NODE_SWAPPED_PAGES = Gauge("sparkd_node_swapped_pages_per_second", "Pages swapped in and out.", ("node",), registry=REGISTRY)
NODE_MEMORY_LEVEL = Gauge(
    "sparkd_node_memory_level", "The guard's level: 0 ok, 1 tight, 2 pressed, 3 critical.", ("node",), registry=REGISTRY
)
ENGINE_HOST_BYTES = Gauge(
    "sparkd_engine_host_bytes", "Anonymous memory of the engine's processes on a node.", ("model", "node"), registry=REGISTRY
)
ENGINE_METRICS_LEFT_OUT = Counter(
    "sparkd_engine_metrics_left_out",
    "Pages of an engine's metrics that would have spoilt the whole scrape, by what is wrong with them.",
    ("model", "fault"),
    registry=REGISTRY,
)
ENGINE_METRICS_AGE_SECONDS = Gauge(
    "sparkd_engine_metrics_age_seconds",
    "Since the engine's own series (vllm:*) were fetched last, or since it was first asked; they are left out after 30 s.",
    ("model", "node"),
    registry=REGISTRY,
)
ENGINE_DEVICE_BYTES = Gauge(
    "sparkd_engine_device_bytes", "Memory of its processes on the device, as nvidia-smi says.", ("model", "node"), registry=REGISTRY
)
GUARD_ACTIONS = Counter(
    "sparkd_guard_actions", "What was done because memory was short: kill, evict, shed.", ("action", "model"), registry=REGISTRY
)
SWAPS = Counter("sparkd_swaps", "How often a model was unloaded for the sake of another that waited.", ("model",), registry=REGISTRY)
GPU_POWER_WATTS = Gauge("sparkd_gpu_power_draw_watts", "What the node's GPU draws.", ("node",), registry=REGISTRY)
GPU_BUSY_RATIO = Gauge(
    "sparkd_gpu_utilization_ratio", "Share of time in which a kernel was resident, also one that hangs.", ("node",), registry=REGISTRY
)
GPU_CELSIUS = Gauge("sparkd_gpu_temperature_celsius", "Temperature of the node's GPU.", ("node",), registry=REGISTRY)
WATCHDOG_STALLS = Counter(
    "sparkd_watchdog_stalls", "Times an engine stood still while requests ran, and was started again.", ("model",), registry=REGISTRY
)
RELEASE_SECONDS = Histogram(
    "sparkd_release_seconds", "From an engine's end until its memory was back.", ("node",), buckets=_SHORT, registry=REGISTRY
)
RELEASE_LEAKED_BYTES = Gauge(
    "sparkd_release_leaked_bytes", "What the last engine that ended on the node has not given back.", ("node",), registry=REGISTRY
)
NODE_RESERVED_BYTES = Gauge(
    "sparkd_node_reserved_bytes", "Unified memory that resident models have reserved.", ("node",), registry=REGISTRY
)

FABRIC_RATE = Gauge(
    "sparkd_fabric_rate_bytes_per_second", "Bus bandwidth between two nodes, as it was measured last.", ("a", "b"), registry=REGISTRY
)

# The supervisor.
INTERNAL_ERRORS = Counter(
    "sparkd_internal_errors",
    "Errors that sparkd itself made, and went on; its log has each one's traceback.",
    ("where",),
    registry=REGISTRY,
)
TICK_SECONDS = Histogram(
    "sparkd_tick_seconds", "One turn of the supervisor's loop.", buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5), registry=REGISTRY
)


def text(extra: bytes = b"") -> bytes:
    """The exposition text of all of them, with `extra` (the engines' own, already labelled) behind it."""
    return generate_latest(REGISTRY) + extra
