"""Shows the snapshot in the metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Gauge

from sparkd import metrics
from sparkd.state.model_state import ModelState
from sparkd.state.nouns import Progress, Reading
from sparkd.state.snapshot import ModelView, NodeView, Snapshot
from sparkd.units import GIB
from workers.guard.policy import LEVELS
from workers.host.memory_limits import MemoryLimits

_models: set[str] = set()
_nodes: set[str] = set()
# By node, on the daemon's clock: when the last reading that came was taken.
_read_at_s: dict[str, float] = {}
_GUARD_ACTIONS = ("kill", "evict", "shed")


def show(snapshot: Snapshot, limits: Callable[[int], MemoryLimits] | None = None) -> None:
    """Set every gauge. Values that the snapshot lacks have no series, nor do models and nodes that are gone.

    limits: the guard's limits on a node with so many bytes of memory.
    """
    for gauge in _GAUGES:
        gauge.clear()
    for view in snapshot.models.values():
        if view.name not in _models:
            _start_at_zero(view.name)
        _show_model(view)
    for name in _models - set(snapshot.models):
        metrics.forget("model", name, but=_OF_REQUESTS)
    _models.clear()
    _models.update(snapshot.models)
    for node in snapshot.nodes:
        _show_node(node, snapshot.at_s)
        if limits is not None and node.reading is not None:
            _show_limits(node.node_id, limits(node.reading.mem_total_bytes))
    for engine in snapshot.engines:
        for gauge, value in ((metrics.ENGINE_HOST_BYTES, engine.host_bytes), (metrics.ENGINE_DEVICE_BYTES, engine.device_bytes)):
            if value is not None:
                gauge.labels(engine.model, engine.node).set(value)
    present = {node.node_id for node in snapshot.nodes}
    for node_id in _nodes - present:
        metrics.forget("node", node_id)
        _read_at_s.pop(node_id, None)
    _nodes.clear()
    _nodes.update(present)


def failed(model: str, reason: str) -> None:
    if reason == "MemoryGuard":
        metrics.GUARD_ACTIONS.labels("kill", model).inc()
    if reason == "EngineFrozen":
        metrics.WATCHDOG_STALLS.labels(model).inc()
    metrics.MODEL_FAILURES.labels(model, reason).inc()


def _start_at_zero(model: str) -> None:
    """Prometheus sees no increase in a series that begins at 1, so the counters that alerts look at begin at 0."""
    for action in _GUARD_ACTIONS:
        metrics.GUARD_ACTIONS.labels(action, model)
    for counter in (metrics.WATCHDOG_STALLS, metrics.SWAPS, metrics.MODEL_RESTARTS):
        counter.labels(model)


def _show_model(view: ModelView) -> None:
    for state in ModelState:
        metrics.MODEL_STATE.labels(view.name, state.value).set(1 if view.state is state else 0)
    metrics.QUEUE_DEPTH.labels(view.name).set(view.queued)
    if view.progress:
        _show_load(view.name, view.progress)
        for gauge, name in _KV:
            if view.progress.kv and view.progress.kv.get(name) is not None:
                gauge.labels(view.name).set(view.progress.kv[name])
    # A scraper must not see a folder's path.
    source = view.source.rstrip("/").rpartition("/")[2] if view.source.startswith(("/", "~", ".")) else view.source
    labels = (view.name, source, _format_of(view.quantize), str(view.max_model_len or ""), str(len(view.ranks)))
    metrics.MODEL_INFO.labels(*labels).set(1)


def _format_of(quantize: Any) -> str:
    """The format of an entry that has one for all layers; `mapping` for a mix."""
    if isinstance(quantize, Mapping):
        return "mapping" if any(value for key, value in quantize.items() if key != "format") else str(quantize["format"])
    return quantize or ""


def _show_load(model: str, progress: Progress) -> None:
    rate = progress.bytes_per_s if progress.phase == "loading" else 0.0
    if progress.units_done is not None:
        metrics.MODEL_LOAD_BYTES_PER_SECOND.labels(model).set(rate or 0.0)
    for gauge, name in _LOAD:
        if (value := getattr(progress, name)) is not None:
            gauge.labels(model).set(value)


def _show_limits(node_id: str, limits: MemoryLimits) -> None:
    for limit in MemoryLimits.__slots__:
        metrics.NODE_MEM_LIMIT_BYTES.labels(node_id, limit).set(getattr(limits, limit))


def _show_node(node: NodeView, now_s: float) -> None:
    metrics.NODE_RESERVED_BYTES.labels(node.node_id).set(node.reserved_gib * GIB)
    reading = node.reading
    if reading is None:
        if (read_at_s := _read_at_s.get(node.node_id)) is not None:
            metrics.NODE_READING_AGE_SECONDS.labels(node.node_id).set(now_s - read_at_s)
        return
    _read_at_s[node.node_id] = now_s - reading.age_s
    metrics.NODE_READING_AGE_SECONDS.labels(node.node_id).set(reading.age_s)
    for gauge, value_in in _OF_A_READING:
        if (value := value_in(reading)) is not None:
            gauge.labels(node.node_id).set(value)


_LOAD: tuple[tuple[Gauge, str], ...] = (
    (metrics.MODEL_LOAD_BYTES, "bytes_done"),
    (metrics.MODEL_LOAD_TOTAL_BYTES, "bytes_total"),
    (metrics.MODEL_LOAD_READ_BYTES, "read_bytes"),
    (metrics.MODEL_LOAD_UNITS, "units_done"),
    (metrics.MODEL_LOAD_TOTAL_UNITS, "units_total"),
    (metrics.QUANTIZED_CACHE_BYTES, "cache_bytes"),
)
_KV: tuple[tuple[Gauge, str], ...] = (
    (metrics.MODEL_KV_CACHE_BYTES, "pool_bytes"),
    (metrics.MODEL_KV_CACHE_TOKENS, "tokens"),
    (metrics.MODEL_KV_CACHE_SEQUENCES, "sequences"),
    (metrics.MODEL_KV_CACHE_BYTES_PER_TOKEN, "bytes_per_token"),
    (metrics.MODEL_KV_CACHE_MARGIN_BYTES, "margin_bytes"),
    (metrics.MODEL_KV_CACHE_SLACK_BYTES, "slack_bytes"),
)
_OF_A_READING: tuple[tuple[Gauge, Callable[[Reading], float | None]], ...] = (
    (metrics.NODE_MEM_TOTAL_BYTES, lambda reading: reading.mem_total_bytes),
    (metrics.NODE_MEM_AVAILABLE_BYTES, lambda reading: reading.mem_available_bytes),
    (metrics.NODE_MEM_FREE_BYTES, lambda reading: reading.mem_free_bytes),
    (metrics.NODE_MEM_CACHED_BYTES, lambda reading: reading.cached_bytes),
    (metrics.NODE_MEM_SWAP_USED_BYTES, lambda reading: reading.swap_total_bytes - reading.swap_free_bytes),
    (metrics.NODE_MEM_CMA_TOTAL_BYTES, lambda reading: reading.cma_total_bytes),
    (metrics.NODE_MEM_CMA_FREE_BYTES, lambda reading: reading.cma_free_bytes),
    (metrics.NODE_PSI_SOME_RATIO, lambda reading: _ratio(reading.psi_some_avg10)),
    (metrics.NODE_PSI_FULL_RATIO, lambda reading: _ratio(reading.psi_full_avg10)),
    (metrics.NODE_MEM_UNACCOUNTED_BYTES, lambda reading: reading.unaccounted_bytes),
    (metrics.NODE_MEM_SLOPE, lambda reading: reading.slope_bytes_per_s),
    (metrics.NODE_MEM_FLOOR_SECONDS, lambda reading: reading.floor_in_s),
    (metrics.NODE_SCANNED_PAGES, lambda reading: reading.scanned_per_s),
    (metrics.NODE_SWAPPED_PAGES, lambda reading: reading.swapped_per_s),
    (metrics.GPU_POWER_WATTS, lambda reading: reading.gpu_power_w),
    (metrics.GPU_BUSY_RATIO, lambda reading: _ratio(reading.gpu_busy_percent)),
    (metrics.GPU_CELSIUS, lambda reading: reading.gpu_celsius),
    (metrics.NODE_GUARDED, lambda reading: reading.guarded),
    (metrics.NODE_MEMORY_LEVEL, lambda reading: LEVELS.index(reading.level)),
)
# Whether these have a series changes with each snapshot. Those of a load stay as the last one left them.
_GAUGES = (
    *(metrics.MODEL_INFO, metrics.NODE_READING_AGE_SECONDS, metrics.ENGINE_HOST_BYTES, metrics.ENGINE_DEVICE_BYTES),
    *(gauge for gauge, _ in (*_KV, *_OF_A_READING)),
)
# The gateway holds these series (sparkd.gateway.exchange): a request may end, and count down, after its model has gone.
_OF_REQUESTS = (
    metrics.REQUESTS,
    metrics.REQUEST_SECONDS,
    metrics.IN_FLIGHT,
    metrics.QUEUE_SECONDS,
    metrics.TIME_TO_FIRST_TOKEN_SECONDS,
)


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100
