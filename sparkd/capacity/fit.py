"""Owns the choice: every format at every way over the nodes, which of them fit, and which is best. Never starts anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sparkd.capacity.evidence import EXACT, GUESS
from sparkd.capacity.footprint import FitRequest, Footprint, footprint
from sparkd.capacity.formats import quality_of, recipes
from sparkd.capacity.kv_cache import KvCost, Serving, longest
from sparkd.capacity.weights import Inventory, uneven_groups, uneven_heads
from sparkd.checkpoint.shape import LENGTHS
from sparkd.errors import CheckpointError
from sparkd.hardware import Hardware
from sparkd.units import GIB
from workers.kv.settings import BLOCKS_FLAG
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

CONTEXT_STEP = 1024
# Without a requested length, a format fits from this length on (or from the model's own), and gets as much more as there is room for.
DEFAULT_CONTEXT = 32_768
# The characters of a sentence of vLLM's, which may have all of a configuration in it.
_DOUBT_CHARACTERS = 300
# The sort key of an option; the best has the least.
Rank = tuple[bool, float, int, int]
# memory: of a node, or of the entry's limit; cache: of its given size; length: more tokens than the model has; links: between nodes; vllm:
# its own word; split: of the tensors over ranks; format: of the weights; uncounted: nothing tells what the cache takes.
Cause = Literal["memory", "cache", "length", "links", "vllm", "split", "format", "uncounted"]
_CALLED = {
    "weights": "of weights",
    "kv": "KV cache",
    "peak": "for a batch",
    "graphs": "CUDA graphs",
    "context": "CUDA context",
    "processes": "processes",
}


@dataclass(frozen=True, slots=True)
class Option:
    """One format and split of the model.

    format: its spelling. tensor, pipeline: parallel sizes.
    footprint: None if the split is not legal.
    reason, cause: None if it fits, otherwise one sentence and its kind.
    longest: tokens that each of `requests` requests may have; 0 if it does not fit.
    copy, method: the quantized checkpoint of the model that is served instead, and how it is quantized.
    """

    format: str
    tensor: int
    pipeline: int
    serving: Serving
    footprint: Footprint | None
    reason: str | None
    longest: int = 0
    cause: Cause | None = None
    copy: str | None = None
    method: str | None = None

    @property
    def nodes(self) -> int:
        return self.tensor * self.pipeline

    @property
    def fits(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class FitResult:
    """The options, best first."""

    options: tuple[Option, ...]

    @property
    def best(self) -> Option | None:
        return self.options[0] if self.options and self.options[0].fits else None


def choose(inventory: Inventory, hardware: Hardware, wish: FitRequest) -> FitResult:
    options = [
        _option(inventory, hardware, wish, name, recipe, ways)
        for name, recipe in recipes(inventory, wish.quantize)
        for ways in ways_of(wish)
    ]
    return FitResult(tuple(sorted(options, key=rank)))


def rank(option: Option) -> Rank:
    """Better formats go before fewer nodes, and tensor parallelism before a pipeline, which is slower.

    A copy of the model had data to calibrate with: it ranks behind the stored model, and before a format that is quantized here.
    """
    quality = 0.5 if option.copy is not None else float(quality_of(option.format))
    return not option.fits, quality, option.nodes, option.pipeline


def floor(option: Option, hardware: Hardware, steps: Sequence[float]) -> list[tuple[float, int, int]]:
    """(gpu_memory_utilization, bytes it allows, bytes of them left to the cache; negative where vLLM would fail).

    vLLM counts weights, what the driver holds and the peak of a batch; processes on the host are not in its budget.
    """
    if option.footprint is None:
        return []
    parts = option.footprint.parts
    held = parts["weights"] + parts["context"] + parts["peak"] + parts["graphs"]
    return [(share, int(share * hardware.memory_bytes), int(share * hardware.memory_bytes) - held) for share in steps]


def smallest(option: Option, hardware: Hardware) -> float | None:
    """The least gpu_memory_utilization, in hundredths, that holds one request of full length; None where none does."""
    least = option.footprint.kv.least if option.footprint is not None else 0
    return next((share for share, _, left in floor(option, hardware, [step / 100 for step in range(1, 100)]) if left >= least), None)


def refuse_uncounted(inventory: Inventory, wish: FitRequest) -> None:
    """Raises CheckpointError where neither vLLM nor config.json tells what a cache of the model takes."""
    answers = (
        wish.exact(AS_IT_IS, replace(wish.serving, tensor_parallel=size, pipeline_parallel=stages)) for size, stages in ways_of(wish)
    )
    if not inventory.shape.attentions and not any(exact.decides for exact in answers):
        reason = f"it has no {inventory.shape.gaps[0]}, and no vLLM has computed the size of this model's KV cache"
        cure = "Set memory_gib in its entry; vLLM then sizes the cache"
        raise CheckpointError(reason, file=f"{inventory.checkpoint.folder}/{inventory.checkpoint.config_file}", cure=cure)


def ways_of(wish: FitRequest) -> tuple[tuple[int, int], ...]:
    """(tensor, pipeline): those that come into question, else all over the nodes that are there."""
    return wish.ways or tuple(splits(wish.nodes))


def splits(most: int) -> Iterator[tuple[int, int]]:
    """(tensor, pipeline) over each number of nodes up to `most`: fewest nodes first, and of so many the most tensor parallelism."""
    for nodes in range(1, most + 1):
        yield from ((tensor, nodes // tensor) for tensor in range(nodes, 0, -1) if nodes % tensor == 0)


def _option(
    inventory: Inventory,
    hardware: Hardware,
    wish: FitRequest,
    name: str,
    recipe: QuantizationRecipe,
    ways: tuple[int, int],
) -> Option:
    tensor, pipeline = ways
    context = wish.max_model_len or min(inventory.shape.max_len, DEFAULT_CONTEXT)
    seqs = max(wish.serving.max_num_seqs, wish.requests)
    serving = replace(wish.serving, max_model_len=context, max_num_seqs=seqs, tensor_parallel=tensor, pipeline_parallel=pipeline)
    if context > inventory.shape.max_len and not wish.beyond and LENGTHS[0] not in inventory.shape.gaps:
        too_long = f"{context:,} tokens are more than the {inventory.shape.max_len:,} that the model supports"
        return Option(name, tensor, pipeline, serving, None, too_long, cause="length")
    # As sparkd.cluster.placer: a pipeline sends little, and ranks that share tensors go over all of their nodes by one network.
    if tensor > 1 and tensor * pipeline in wish.unlinked:
        return Option(name, tensor, pipeline, serving, None, wish.unlinked[tensor * pipeline], cause="links")
    try:
        model = inventory.formatted(recipe)
        if reason := uneven_groups(model):
            # Before vLLM's own refusal, which names no format that fits.
            return Option(name, tensor, pipeline, serving, None, reason, cause="format")
        exact = wish.exact(recipe, serving)
        if exact.refusal is not None:
            return Option(name, tensor, pipeline, serving, None, exact.refusal, cause="vllm")
        if not exact.decides and (reason := uneven_heads(inventory.shape, tensor)):
            return Option(name, tensor, pipeline, serving, None, reason, cause="split")
        if exact.layout is None and not inventory.shape.attentions:
            return Option(name, tensor, pipeline, serving, None, "the size of its KV cache is unknown", cause="uncounted")

        def at(tokens: int) -> Footprint:
            return footprint(model, replace(serving, max_model_len=tokens), hardware, wish)

        needed = at(context)
        length = _longest(needed, inventory, wish)
    except CheckpointError as error:
        return Option(name, tensor, pipeline, serving, None, error.clause, cause="format")
    if wish.max_model_len is None and needed.fits and length > context:
        # A profile is of one length: where it is more than was counted with, the context is as long as that leaves.
        more = at(length)
        if not more.fits:
            length = max(context, _longest(more, inventory, wish))
            more = at(length)
        needed, context = (more, length) if more.fits else (needed, context)
        length = context
        serving = replace(serving, max_model_len=length)
    if not needed.fits:
        return Option(name, tensor, pipeline, serving, needed, _short(needed, hardware, length, wish), length, "memory")
    size = needed.parts["kv"] if wish.cache is not None else wish.cache_limit
    if short := short_cache(wish.cache, size, needed.layout.cost(context)):
        return Option(name, tensor, pipeline, serving, needed, short, length, "cache")
    return Option(name, tensor, pipeline, serving, needed, None, length)


def _longest(needed: Footprint, inventory: Inventory, wish: FitRequest) -> int:
    """The model's own length, or so many whole steps; 0 where not even the weights come in."""
    most = max(inventory.shape.max_len, wish.max_model_len or 0)
    size = wish.cache or {"sequences": wish.requests}
    return 0 if needed.load_free_bytes < 0 else longest(size, needed.layout, most, needed.room, limit=wish.cache_limit, step=CONTEXT_STEP)


def short_cache(cache: Mapping[str, Any] | None, size: int | None, cost: KvCost) -> str | None:
    """Why a cache of `size` bytes holds no request; None where it does, or has no size: else vLLM ends its start, with all weights loaded.
    cache: the size as it was asked for, None for that of a CPU's engine."""
    if size is None or cost.least <= size:
        return None
    request = f"one request of {cost.max_model_len:,} tokens needs"
    if cache is not None and "tokens" in cache:
        return f"kv_cache holds {cache['tokens']:,} tokens, and one request has {cost.max_model_len:,}"
    if cache is not None and "blocks" in cache:
        return f"{BLOCKS_FLAG} is {cache['blocks']:,}, and {request} {cost.blocks + 1:,} blocks"
    name = "the cache of a CPU's engine" if cache is None else "kv_cache"
    return f"{name} holds {_size(size)}, and {request} {_size(cost.least)}"


def _short(needed: Footprint, hardware: Hardware, longest: int, wish: FitRequest) -> str:
    there = gib(hardware.memory_bytes)
    if needed.load_free_bytes < 0:
        # The parts that count while the weights come; the cache and the batch are not there yet.
        parts = [f"{gib(needed.parts['weights'])} of weights", f"{gib(needed.load_peak_bytes - needed.parts['weights'])} for the loader"]
        parts += [f"{gib(needed.parts[name])} {_CALLED[name]}" for name in ("context", "processes") if needed.parts[name] >= GIB // 10]
        parts += [f"{gib(needed.system_bytes)} system"] if needed.system_bytes else []
        return f"{' + '.join(parts)} are {gib(-needed.load_free_bytes)} more than the available {there}, before any KV cache"
    parts = [f"{gib(size)} {_CALLED[name]}" for name, size in needed.parts.items() if size >= GIB // 10]
    shorter = f"; {longest:,} tokens of context would fit" if longest else ""
    if wish.limit is not None and needed.total > wish.limit[0]:
        return f"{' + '.join(parts)} are {gib(needed.total - wish.limit[0])} more than {wish.limit[1]}{shorter}"
    parts += [f"{gib(needed.system_bytes)} system", f"{gib(needed.margin_bytes)} margin"]
    return f"{' + '.join(parts)} are {gib(-needed.free_bytes)} more than the available {there}{shorter}"


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _size(size: int) -> str:
    return gib(size) if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def format_notes(best: Option | None) -> Iterator[str]:
    """Names the format that computes prompts faster, beside the one that has its size and is more accurate."""
    if best is not None and best.format == "nvfp4" and best.serving.platform == "cuda":
        yield (
            "For long prompts there is nvfp4-a4: the same memory, computed by FP4 tensor cores where the GPU has them (a GB10 does). It is "
            "less accurate (docs/formats.md)."
        )


def unread(inventory: Inventory, options: Sequence[Option], doubt: str | None) -> Iterator[str]:
    """A note about a guess: what config.json does not tell. doubt: the reason why vLLM gave no answer, None without one."""
    guessed = not is_answered(options) and any(option.footprint is not None and option.footprint.sureness == GUESS for option in options)
    silent = "vLLM gave no answer" if doubt is None else f"vLLM, which was asked, gave no answer: {doubt_in_short(doubt)}"
    if guessed and inventory.shape.gaps:
        missing = ", ".join(inventory.shape.gaps)
        yield f"Its {inventory.checkpoint.config_file} does not tell {missing}, and {silent}."
    elif guessed and doubt is not None:
        yield f"The numbers are a guess: {silent}."


def is_answered(options: Iterable[Option]) -> bool:
    """Whether vLLM has built the model."""
    return any(option.footprint is not None and option.footprint.sureness == EXACT for option in options)


def doubt_in_short(doubt: str) -> str:
    """Without its full stop, in one line."""
    line = " ".join(doubt.split()).rstrip(".")
    return line if len(line) <= _DOUBT_CHARACTERS else f"{line[:_DOUBT_CHARACTERS]}..."
