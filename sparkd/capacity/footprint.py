"""The bytes that a model takes on each node, by part, and the time bounds that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkd.capacity.estimate import (
    MIB,
    PROCESS_BYTES,
    cache_doubt,
    context_bytes,
    graph_bytes,
    kv_layout,
    process_bytes,
    step_bytes,
    weights_doubt,
)
from sparkd.capacity.evidence import EXACT, GUESS, NO_ANSWER, Exact
from sparkd.capacity.kv_cache import KvCost, KvLayout, Serving, sized
from sparkd.capacity.weights import FormattedModel, Inventory, Weights
from sparkd.checkpoint.shape import Shape
from sparkd.config.engine_args import EngineArgs
from sparkd.hardware import Hardware
from sparkd.units import GIB
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.host.memory_limits import spare
from workers.kv.arithmetic import Demand
from workers.kv.settings import CPU_KV_CACHE_GIB

# The loader: a ring of 64 MiB and, on a GPU, batches of 32 MiB with what they become.
LOADER_BYTES = 154 * MIB
CACHE_STAGING_BYTES = 260 * MIB
# Quantizing as measured on an H200, bytes of BF16 a second; a Spark was never measured, its share of that bandwidth is taken.
H200_QUANTIZE_BYTES_S, H200_BANDWIDTH = 10e9, 4.8e12


def cache_of(args: EngineArgs, platform: str) -> Mapping[str, Any] | None:
    """The size of the engine's cache (sparkd.capacity.kv_cache.sized); None for one that takes what is left. On a CPU it always has one
    (sparkd.config.kv_cache.sizing_of)."""
    given = args.given_cache(platform)
    if given is None and platform == "cpu" and args.cache is None and not args.vllm_sizes:
        return {"bytes": CPU_KV_CACHE_GIB * GIB}
    return given


def limit_of(args: EngineArgs, hardware: Hardware) -> tuple[int, str] | None:
    """Most bytes of the engine by its entry, and the setting that says so; None without a limit.

    gpu_memory_utilization limits all but the processes' memory on the host.
    """
    limits = []
    if args.memory_gib is not None:
        limits.append((int(args.memory_gib * GIB), f"the memory_gib of {args.memory_gib:g} in its entry"))
    if args.share is not None:
        size = int(args.share * hardware.memory_bytes) + (PROCESS_BYTES[hardware.platform] if hardware.unified else 0)
        limits.append((size, f"the {size / GIB:.1f} GiB of {args.share_words}"))
    return min(limits, default=None)


def margin_in(args: EngineArgs, hardware: Hardware) -> int:
    """Bytes of a node that stay free beside the engine: the entry's, or what `kv_cache: auto` leaves there. A share is all vLLM's."""
    if args.share is not None:
        return 0
    if args.margin_bytes is not None:
        return args.margin_bytes
    return spare(hardware.memory_bytes, shared=hardware.unified or hardware.platform != "cuda")


def room_of(args: EngineArgs, hardware: Hardware) -> int:
    """Most bytes of the engine: what others leave of a node but for the margin, within the entry's limit."""
    free, limit = hardware.memory_bytes - hardware.system_bytes - margin_in(args, hardware), limit_of(args, hardware)
    return free if limit is None else min(free, limit[0])


@dataclass(frozen=True, slots=True)
class Footprint:
    """The account of one rank and its node.

    cache: bytes of a cache with a given size; None for one that takes what is left, of which `parts` has one request of full length.
    free_bytes: left of the parts and the margin, negative if it does not fit.
    *_s: seconds; decode_tokens_s: an upper bound for one request. Each is None if the machine's rates are unknown.
    limit_bytes: most bytes of the whole engine; None for all of the node.
    limit_words: the setting that says so.
    sureness: of weights and cache, one of sparkd.capacity.evidence.
    upper_weight_bytes, upper_cache_bytes: by how much a guess may be too low.
    """

    parts: Mapping[str, int]
    kv: KvCost
    layout: KvLayout
    cache: int | None
    weights: Weights
    margin_bytes: int
    system_bytes: int
    memory_bytes: int
    load_peak_bytes: int
    first_load_s: float | None
    next_load_s: float | None
    decode_tokens_s: float | None
    limit_bytes: int | None = None
    limit_words: str = ""
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
        """All but the cache, with what a guess may be too low."""
        return self.total - self.parts["kv"] + self.upper_bytes

    @property
    def least(self) -> int:
        """For one request of full length, or the cache of the given size; without them the model cannot serve."""
        return self.fixed + max(self.kv.least, self.parts["kv"])

    @property
    def surely(self) -> int:
        """The bytes without which it cannot run even where the guess of its cache is too high."""
        return self.fixed - self.upper_bytes if self.sureness == GUESS else self.least

    @property
    def room(self) -> int:
        """For a cache of all that is left."""
        return self.free_bytes + self.parts["kv"]


def footprint(
    model: FormattedModel,
    serving: Serving,
    hardware: Hardware,
    args: EngineArgs,
    exact: Exact = NO_ANSWER,
    measured: Demand | None = None,
) -> Footprint:
    """The account of one node for an engine that serves so.

    args: its cache, its limits and whether it captures graphs.
    exact: vLLM's numbers, which go before the formulas.
    measured: of an earlier start, which goes before both.
    """
    inventory, shape = model.inventory, model.inventory.shape
    ranks, stages = serving.tensor_parallel, serving.pipeline_parallel
    weights = model.weights(ranks, stages)
    layout = exact.layout or kv_layout(shape, serving)
    given = cache_of(args, hardware.platform)
    kv, cache = layout.cost(serving.max_model_len), sized(given, layout, serving.max_model_len)
    held = weights.bytes
    if exact.weight_bytes is not None:
        weights, held = _weighed(weights, exact.weight_bytes), exact.weight_bytes
    parts = {
        "weights": held,
        "kv": kv.least if cache is None else cache,
        "peak": measured.peak if measured else step_bytes(shape, serving, images="vision" in weights.by_kind),
        "graphs": measured.graphs if measured else graph_bytes(shape, serving, hardware, eager=args.spec.enforce_eager),
        "context": context_bytes(hardware, ranks * stages),
        "processes": process_bytes(hardware),
    }
    guesses = exact.guesses(serving.unknown)
    limit_bytes, limit_words = limit_of(args, hardware) or (None, "")
    first_load_s, next_load_s = load_s(inventory, weights, hardware, ranks * stages)
    return Footprint(
        parts=parts,
        kv=kv,
        layout=layout,
        cache=cache,
        weights=weights,
        margin_bytes=margin_in(args, hardware),
        system_bytes=hardware.system_bytes,
        memory_bytes=hardware.memory_bytes,
        load_peak_bytes=parts["weights"] + LOADER_BYTES + (CACHE_STAGING_BYTES if weights.changed else 0),
        first_load_s=first_load_s,
        next_load_s=next_load_s,
        decode_tokens_s=decode_tokens_s(shape, weights, serving, hardware),
        limit_bytes=limit_bytes,
        limit_words=limit_words,
        sureness=GUESS if guesses else EXACT,
        upper_weight_bytes=weights_doubt(held) if WEIGHTS in guesses else 0,
        # The size of a cache in tokens, requests or blocks follows from the guess, too; the doubt is of one request.
        upper_cache_bytes=cache_doubt(kv.least) if CACHE in guesses and "bytes" not in (given or ()) else 0,
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
