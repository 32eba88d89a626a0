"""The bytes that a model takes on each node, by part, and the time bounds that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from sparkd.capacity.estimate import (
    MIB,
    cache_doubt,
    context_bytes,
    graph_bytes,
    kv_layout,
    margin_of,
    process_bytes,
    step_bytes,
    weights_doubt,
)
from sparkd.capacity.evidence import EXACT, GUESS, Exact, MeasuredPeaks
from sparkd.capacity.kv_cache import KvCost, KvLayout, Serving, sized
from sparkd.capacity.weights import FormattedModel, Inventory, Weights
from sparkd.checkpoint.shape import Shape
from sparkd.hardware import Hardware
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.quantization.recipe import QuantizationRecipe

# The loader: a ring of 64 MiB and, on a GPU, batches of 32 MiB with what they become.
LOADER_BYTES = 154 * MIB
CACHE_STAGING_BYTES = 260 * MIB
# Quantizing as measured on an H200, bytes of BF16 a second; a Spark was never measured, its share of that bandwidth is taken.
H200_QUANTIZE_BYTES_S, H200_BANDWIDTH = 10e9, 4.8e12


@dataclass(frozen=True, slots=True)
class FitRequest:
    """One question: which formats and splits of a model fit, and how much of a node each takes.

    max_model_len: tokens; None for as many as fit, at least DEFAULT_CONTEXT.
    requests: the number that runs at once at that length.
    nodes: the number of nodes.
    serving: the settings of the engine.
    quantize: a recipe; None for any of sparkd.capacity.formats.FORMATS.
    eager: without CUDA graphs.
    margin_bytes: that stay free; None for the default.
    unlinked: by a number of nodes, the reason why no such number is linked well enough for tensor parallelism.
    ways: the allowed (tensor, pipeline); None for all.
    cache: a configured size (sparkd.capacity.kv_cache.sized); None for one that holds `requests`.
    cache_limit: its most bytes.
    limit: most bytes of the engine, and the setting that limits it.
    beyond: whether a length may exceed the model's own.
    learned: the measurements of an earlier start; None without one.
    exact: vLLM's numbers for a format and a split.
    """

    max_model_len: int | None = None
    requests: int = 1
    nodes: int = 1
    serving: Serving = field(default_factory=lambda: Serving(0))
    quantize: QuantizationRecipe | None = None
    eager: bool = False
    margin_bytes: int | None = None
    unlinked: Mapping[int, str] = field(default_factory=dict)
    ways: tuple[tuple[int, int], ...] | None = None
    cache: Mapping[str, Any] | None = None
    cache_limit: int | None = None
    limit: tuple[int, str] | None = None
    beyond: bool = False
    learned: Callable[[QuantizationRecipe, Serving], MeasuredPeaks | None] = lambda _recipe, _serving: None
    exact: Callable[[QuantizationRecipe, Serving], Exact] = lambda _recipe, _serving: Exact()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The account of one rank and its node.

    total: bytes for `requests` requests of max_model_len tokens. free_bytes: left of them and the margin, negative if it does not fit.
    *_s: seconds; decode_tokens_s: an upper bound for one request. Each is None if the machine's rates are unknown.
    limit_bytes: most bytes of the whole engine; None for all of the node.
    sureness: of weights and cache, one of sparkd.capacity.evidence.
    upper_weight_bytes, upper_cache_bytes: by how much a guess may be too low.
    """

    parts: Mapping[str, int]
    kv: KvCost
    layout: KvLayout
    requests: float
    weights: Weights
    margin_bytes: int
    system_bytes: int
    memory_bytes: int
    load_peak_bytes: int
    first_load_s: float | None
    next_load_s: float | None
    decode_tokens_s: float | None
    limit_bytes: int | None = None
    sureness: str = EXACT
    upper_weight_bytes: int = 0
    upper_cache_bytes: int = 0

    @property
    def upper_bytes(self) -> int:
        return self.upper_weight_bytes + self.upper_cache_bytes

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def free_bytes(self) -> int:
        there = self.memory_bytes - self.system_bytes - self.margin_bytes
        return (there if self.limit_bytes is None else min(there, self.limit_bytes)) - self.total - self.upper_bytes

    @property
    def withheld_bytes(self) -> int:
        """Available bytes that limit_bytes keeps from the engine."""
        return self.memory_bytes - self.system_bytes - self.margin_bytes - self.total - self.upper_bytes - self.free_bytes

    @property
    def fits(self) -> bool:
        return self.free_bytes >= 0 and self.load_free_bytes >= 0

    @property
    def load_free_bytes(self) -> int:
        """Bytes left during the load, after the weights, the loader and the processes."""
        held = self.parts["weights"] + self.parts["processes"] + self.parts["context"]
        return self.memory_bytes - self.system_bytes - held - (self.load_peak_bytes - self.parts["weights"])

    @property
    def fixed(self) -> int:
        """All but the cache."""
        return self.total - self.parts["kv"]

    @property
    def room(self) -> int:
        """For a cache of all that is left."""
        return self.free_bytes + self.parts["kv"]


def footprint(model: FormattedModel, serving: Serving, hardware: Hardware, request: FitRequest) -> Footprint:
    """The account of one node for an engine that serves so."""
    inventory, shape = model.inventory, model.inventory.shape
    ranks, stages = serving.tensor_parallel, serving.pipeline_parallel
    weights = model.weights(ranks, stages)
    exact, learned = request.exact(model.recipe, serving), request.learned(model.recipe, serving)
    layout = exact.layout or kv_layout(shape, serving)
    kv, cache_bytes = layout.cost(serving.max_model_len), sized(request.cache, layout, serving.max_model_len)
    held = weights.bytes
    if exact.weight_bytes is not None:
        weights, held = _weighed(weights, exact.weight_bytes), exact.weight_bytes
    parts = {
        "weights": held,
        "kv": cache_bytes if cache_bytes is not None else ceil(request.requests * kv.per_request) + kv.block_bytes,
        "peak": learned.peak if learned else step_bytes(shape, serving, images="vision" in weights.by_kind),
        "graphs": learned.graphs if learned else graph_bytes(shape, serving, hardware, eager=request.eager),
        "context": context_bytes(hardware, ranks * stages),
        "processes": process_bytes(hardware),
    }
    guesses = exact.guesses(serving.unknown)
    available = hardware.memory_bytes
    margin = margin_of(hardware, request.margin_bytes)
    first_load_s, next_load_s = load_s(inventory, weights, hardware, ranks * stages)
    return Footprint(
        parts=parts,
        kv=kv,
        layout=layout,
        requests=request.requests,
        weights=weights,
        margin_bytes=margin,
        system_bytes=hardware.system_bytes,
        memory_bytes=available,
        load_peak_bytes=parts["weights"] + LOADER_BYTES + (CACHE_STAGING_BYTES if weights.changed else 0),
        first_load_s=first_load_s,
        next_load_s=next_load_s,
        decode_tokens_s=decode_tokens_s(shape, weights, serving, hardware),
        limit_bytes=None if request.limit is None else request.limit[0],
        sureness=GUESS if guesses else EXACT,
        upper_weight_bytes=weights_doubt(held) if WEIGHTS in guesses else 0,
        upper_cache_bytes=cache_doubt(parts["kv"]) if CACHE in guesses and cache_bytes is None else 0,
    )


def _weighed(formula: Weights, weight_bytes: int) -> Weights:
    """The weights with vLLM's total, divided among classes as the formula divides them."""
    if not formula.bytes:
        return formula
    share = weight_bytes / formula.bytes
    by_kind = {kind: int(size * share) for kind, size in formula.by_kind.items()}
    by_kind[max(by_kind, key=lambda kind: by_kind[kind])] += weight_bytes - sum(by_kind.values())
    return replace(formula, by_kind=by_kind, active_bytes=int(formula.active_bytes * share))


def load_s(inventory: Inventory, weights: Weights, hardware: Hardware, ranks: int) -> tuple[float | None, float | None]:
    """(the first start, which quantizes; the next, from the cache). Each rank reads its share; the slower of disk and quantizer counts, and
    how fast a CPU quantizes is not known."""
    if hardware.disk_bytes_s is None:
        return None, None
    stored = inventory.stored_bytes / ranks
    first = stored / hardware.disk_bytes_s
    if not weights.changed:
        return first, first
    again = weights.disk_bytes / ranks / hardware.disk_bytes_s
    if hardware.bandwidth_bytes_s is None or hardware.platform == "cpu":
        return None, again
    return max(first, stored / (H200_QUANTIZE_BYTES_S * hardware.bandwidth_bytes_s / H200_BANDWIDTH)), again


def decode_tokens_s(shape: Shape, weights: Weights, serving: Serving, hardware: Hardware) -> float | None:
    """An upper bound for one request at a short context: every token reads the active weights once; with tensor parallelism two sums over
    the ranks in each layer, of one row of `hidden`, and a pipeline's stages come one after the other. 0 where nothing is read. None where
    the memory's rate is not known, or is not what a token waits for: sparkd's kernels on a CPU decode the weights that sparkd quantizes."""
    bandwidth, link, latency = hardware.bandwidth_bytes_s, hardware.link_bytes_s, hardware.link_latency_s
    if bandwidth is None or (hardware.platform == "cpu" and weights.changed):
        return None
    reading, talking = weights.active_bytes / bandwidth, 0.0
    if serving.tensor_parallel > 1 or serving.pipeline_parallel > 1:
        if link is None or latency is None:
            return None
        row = shape.hidden * shape.dtype_bytes
        talking = 2 * shape.layers * (latency + row / link) if serving.tensor_parallel > 1 else 0.0
        talking += (serving.pipeline_parallel - 1) * latency
    return 1 / (reading + talking) if reading + talking else 0.0
