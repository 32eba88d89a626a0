"""Owns the account of a configured model: the bytes that it needs at least, and those that it will take. Decides nothing that is `auto`
(sparkd.capacity.auto_resolve).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sparkd.capacity.consultation import Ask, Consultation, nobody
from sparkd.capacity.footprint import Footprint, MeasuredPeaks, Terms, footprint
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, KvCost, KvLayout, Serving, kv_layout, sized
from sparkd.capacity.parallelism import refusal, unfit
from sparkd.capacity.profiles import engine_of, learned_of
from sparkd.capacity.vllm_figures import EXACT, GUESS, Exact
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import GIB, SPARK, UNKNOWN_RATES, Hardware
from sparkd.schema.engine_args import EngineArgs
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

# Tensor-parallel and pipeline-parallel size.
Ways = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes on one node. least: without which the model cannot serve one request of full length; fixed: all of it but the cache.

    cache: of the cache that was asked for, None for all that is left. sentence: the parts of `least`, for a message. layout: how its
    layers share a cache, for requests of max_model_len tokens. upper: of `fixed`, that a guess may lie too low; None where it is none.
    sureness: of its numbers, one of sparkd.capacity.vllm_figures.
    """

    least: int
    fixed: int
    cache: int | None
    sentence: str
    max_model_len: int
    layout: KvLayout = field(compare=False)
    upper: int | None = None
    sureness: str = EXACT

    @property
    def kv(self) -> KvCost:
        return self.layout.cost(self.max_model_len)

    @property
    def surely(self) -> int:
        """The bytes without which it cannot run even where the guess of its cache is too high."""
        return self.least if self.upper is None else self.fixed - self.upper

    @property
    def total(self) -> int | None:
        """Bytes of the whole model, None where it takes what is left."""
        return None if self.cache is None else self.fixed + self.cache


@dataclass(frozen=True, slots=True)
class Evidence:
    """What goes before a formula. profiles: the folder of what earlier starts measured, with the engine's release `vllm`; ask: what vLLM
    said about a model. draft: the headers of its draft, where that need not be on this machine."""

    profiles: str | None = None
    vllm: str | None = None
    ask: Ask = nobody
    draft: Checkpoint | None = None

    def consultation(self, args: EngineArgs, checkpoint: Checkpoint, hardware: Hardware) -> Consultation:
        return Consultation(self.ask, checkpoint, args.flags, args.env, hardware, self.draft)

    def learned(self, args: EngineArgs, folder: str, ways: Ways, hardware: Hardware) -> MeasuredPeaks | None:
        """The measurements of an earlier start of this engine. folder: of its weights."""
        if self.profiles is None or not folder.startswith("/"):
            return None
        engine = engine_of(args.flags, args.quantize, args.env, self.vllm, hardware.platform)
        return learned_of(self.profiles, engine, folder, ways, hardware.name)


NOTHING = Evidence()


def account(
    args: EngineArgs,
    headers: Headers,
    hardware: Hardware,
    evidence: Evidence = NOTHING,
    ways: Ways = (1, 1),
    *,
    guesses: bool = False,
) -> Account | None:
    """None where nothing can be said beforehand: sizes that nothing tells, flags of the operator's own that change the account in a way
    that neither formulas nor vLLM's answer have. ways: over how many ranks, each on a node of its own. guesses: whether such flags leave a
    guess instead.

    Raises CheckpointError for layers that vLLM makes up and the files contradict (Consultation.completed)."""
    recipe = args.recipe
    if recipe is None:
        return None  # the engine says it
    try:
        consultation = consulted(args, headers.model, recipe, hardware, ways, evidence)
    except (CheckpointError, ConfigError):
        return None
    model = consultation.completed(headers.model)
    try:
        plain = serving_of(args, replace(headers, model=model), hardware)
        serving = replace(plain, tensor_parallel=ways[0], pipeline_parallel=ways[1])
        exact = consultation.exact(recipe, serving)
        if exact is not None and exact.refusal is not None:
            return None  # the engine says it, in vLLM's own words
        if not guesses and not (exact or Exact()).settles(serving.unknown):
            return None
        if (exact is None or exact.layout is None) and not model.shape.mixers:
            return None
        learned = evidence.learned(args, headers.model.checkpoint.folder, ways, hardware)
        terms = Terms(eager=args.enforce_eager, margin_bytes=0, learned=learned, exact=exact)
        needed = footprint(model, recipe, serving, hardware, terms)
    except (CheckpointError, ConfigError):
        return None  # the engine says it, with the tensor's name
    fixed = needed.fixed + needed.upper_bytes
    layout = exact.layout if exact is not None and exact.layout is not None else kv_layout(model.shape, serving)
    cache = sized(args.cache, layout, serving.max_model_len)
    cache_words = args.cache_words if cache is not None and cache > needed.kv.least else None
    least = fixed + max(needed.kv.least, 0 if cache is None else cache)
    sentence = _sentence(needed, serving, least, cache_words or None)
    upper = needed.upper_bytes if needed.sureness == GUESS else None
    return Account(least, fixed, cache, sentence, serving.max_model_len, layout, upper, needed.sureness)


def consulted(
    args: EngineArgs, model: Inventory, recipe: QuantizationRecipe, hardware: Hardware, ways: Ways, evidence: Evidence
) -> Consultation:
    consultation = evidence.consultation(args, model.checkpoint, hardware)
    consultation.ask([(AS_IT_IS, *ways), (recipe, *ways)])
    return consultation


def illegal(args: EngineArgs, headers: Headers, hardware: Hardware, ways: Ways, evidence: Evidence = NOTHING) -> str | None:
    """Why vLLM would not split the model over `ways` ranks, without a full stop; None where it would, or nothing is known of it."""
    model, recipe = headers.model, args.recipe
    if recipe is None:
        return None
    try:
        split = Serving(1, tensor_parallel=ways[0], pipeline_parallel=ways[1])
        exact = consulted(args, model, recipe, hardware, ways, evidence).exact(recipe, split)
        if exact is not None and exact.decides:
            return exact.refusal or unfit(model, recipe, ways[0], hardware.platform)
        return None if is_other(args, model) else refusal(model, recipe, *ways, hardware.platform)
    except (CheckpointError, ConfigError):
        return None  # the engine says it, with the tensor's name


def machine(platform: str, mem_total_bytes: int, reserve_bytes: int) -> Hardware:
    """This node, for planning: on a GPU a Spark's bandwidths where nothing else is known."""
    node = replace(SPARK, name="node", memory_bytes=mem_total_bytes, system_bytes=reserve_bytes, platform=platform)
    return replace(node, **UNKNOWN_RATES) if platform == "cpu" else node


def is_other(args: EngineArgs, model: Inventory) -> bool:
    """Whether vLLM makes other weights of the stored ones than are counted: by its own quantizing, in a wider type, by another
    configuration."""
    return WEIGHTS in args.changes or (args.own_quantization and model.checkpoint.quantization is None)


def serving_of(args: EngineArgs, headers: Headers, hardware: Hardware) -> Serving:
    """`unknown` of it says what the entry changes in a way that the formulas do not have."""
    model, drafted, kv_dtype = headers.model, headers.drafting, args.kv_cache_dtype
    uncounted = is_other(args, model) or (drafted is None and args.drafts)
    length = args.max_model_len if isinstance(args.max_model_len, int) else model.shape.max_len
    batch = BATCH_TOKENS[hardware.platform]
    if not args.chunked_prefill:
        batch = max(length, batch)  # a prompt in one piece (vllm/engine/arg_utils.py, where not enable_chunked_prefill)
    source = model.checkpoint.quantization
    if kv_dtype == "auto" and source is not None and hardware.platform == "cuda" and (args.quantize is None or not source.requantizable):
        kv_dtype = source.kv_dtype
    plain = Serving(
        max_model_len=length,
        max_num_seqs=args.max_num_seqs or SEQUENCES[hardware.platform],
        max_num_batched_tokens=args.max_num_batched_tokens or batch,
        prefix_caching=args.prefix_caching,
        kv_dtype=kv_dtype,
        platform=hardware.platform,
        block_tokens=args.block_tokens,
        unknown=args.changes | ({WEIGHTS, CACHE} if uncounted else frozenset()),
    )
    return plain if drafted is None else drafted.serving(plain)


def _sentence(needed: Footprint, serving: Serving, least: int, cache_words: str | None) -> str:
    """cache_words: a cache of a given size that is more than one request takes, as its entry has it."""
    rest = sum(needed.parts[name] for name in ("peak", "graphs", "context"))
    parts = (needed.parts["weights"], least - needed.fixed, rest, needed.parts["processes"])
    total, (weights, cache, batch, processes) = _adding_up(parts)
    what = f"as asked for ({cache_words})" if cache_words else f"for one request of {serving.max_model_len:,} tokens"
    held = " and what CUDA holds" if serving.platform == "cuda" else ""
    return (
        f"it needs at least {total}: weights {weights}, KV cache {cache} {what}, {batch} for the largest batch{held}, processes {processes}"
    )


def _adding_up(sizes: Sequence[int]) -> tuple[str, list[str]]:
    """The sum and its parts, in tenths of a GiB that add up: what rounding leaves over goes to those that it took most from."""
    total, tenths = round(sum(sizes) * 10 / GIB), [size * 10 // GIB for size in sizes]
    for number in sorted(range(len(sizes)), key=lambda at: -(sizes[at] * 10 % GIB))[: total - sum(tenths)]:
        tenths[number] += 1
    return f"{total / 10:.1f} GiB", [f"{part / 10:.1f} GiB" for part in tenths]
