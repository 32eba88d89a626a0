"""The account of a configured model: its format and length where they are `auto`, its bytes on a node, and the GiB to reserve."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

from sparkd.capacity.estimate import PROCESS_BYTES, margin_of
from sparkd.capacity.evidence import EXACT, GUESS, NOTHING, Consultation, Evidence, Ways
from sparkd.capacity.fit import CONTEXT_STEP, DEFAULT_CONTEXT
from sparkd.capacity.footprint import FitRequest, Footprint, footprint
from sparkd.capacity.formats import open_recipes
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, KvCost, KvLayout, Serving, largest, sized
from sparkd.capacity.weights import FormattedModel, Inventory, uneven_groups, uneven_heads
from sparkd.checkpoint.prequantized import prequantized
from sparkd.config.engine_args import EngineArgs
from sparkd.config.quantize import AUTO, is_open
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import SPARK, UNKNOWN_RATES, Hardware
from sparkd.units import GIB
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.kv.settings import CPU_KV_CACHE_GIB
from workers.quantization.recipe import AS_IT_IS

VLLM_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py of 0.32; older releases take 0.90


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes on one node that a model needs.

    least: for one request of full length; without them the model cannot serve. fixed: `least` without the cache.
    cache: of the configured KV cache; None if it takes all free memory.
    sentence: the parts of `least`, for a message.
    layout: how the layers share a cache, for requests of max_model_len tokens.
    upper: by how much a guess of `fixed` may be too low; None without a guess.
    sureness: of the numbers, one of sparkd.capacity.evidence.
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
        """Bytes of the whole model; None if the cache takes all free memory."""
        return None if self.cache is None else self.fixed + self.cache


def account(
    candidate: Candidate, hardware: Hardware, evidence: Evidence = NOTHING, ways: Ways = (1, 1), *, guesses: bool = False
) -> Account | None:
    """The account of a candidate; None if it cannot be computed before a start.

    It cannot if a size is unknown, or if the user's flags change it beyond the formulas and vLLM's answer.
    ways: the tensor and pipeline sizes, with each rank on its own node.
    guesses: whether such flags leave a guess instead of None.

    Raises CheckpointError for layers that vLLM makes up and the files contradict (Consultation.completed).
    """
    args, headers = candidate.args, candidate.headers
    try:
        consultation = consulted(candidate, hardware, ways, evidence)
    except (CheckpointError, ConfigError):
        return None
    model = replace(candidate.model, inventory=consultation.completed(candidate.model.inventory))
    plain = serving_of(args, replace(headers, model=model.inventory), hardware)
    serving = replace(plain, tensor_parallel=ways[0], pipeline_parallel=ways[1])
    exact = consultation.exact(model.recipe, serving)
    if exact.refusal is not None:
        return None  # the engine says it, in vLLM's own words
    if not guesses and not serving.unknown <= exact.settled:
        return None
    if exact.layout is None and not model.inventory.shape.attentions:
        return None
    learned = evidence.learned(args, headers, ways, hardware)
    request = FitRequest(eager=args.enforce_eager, margin_bytes=0, learned=lambda _recipe, _serving: learned, exact=consultation.exact)
    needed = footprint(model, serving, hardware, request)
    fixed, layout = needed.fixed + needed.upper_bytes, needed.layout
    cache = sized(args.cache, layout, serving.max_model_len)
    cache_words = args.cache_words if cache is not None and cache > needed.kv.least else None
    least = fixed + max(needed.kv.least, 0 if cache is None else cache)
    sentence = _sentence(needed, serving, least, cache_words or None)
    upper = needed.upper_bytes if needed.sureness == GUESS else None
    return Account(least, fixed, cache, sentence, serving.max_model_len, layout, upper, needed.sureness)


def consulted(candidate: Candidate, hardware: Hardware, ways: Ways, evidence: Evidence) -> Consultation:
    """Asks as it is stored, which settles the cache, and in its format."""
    consultation = evidence.consultation(candidate.args, candidate.model.inventory.checkpoint, hardware)
    consultation.ask([(AS_IT_IS, *ways), (candidate.model.recipe, *ways)])
    return consultation


def needed_gib(args: EngineArgs, hardware: Hardware, offered_gib: float | None = None, known: Account | None = None) -> int:
    """Whole GiB to reserve on a node; Ray's custom resources are whole numbers above one.

    1. memory_gib of the entry.
    2. The account, where the cache has a size; for gpu_memory_utilization that share, in which vLLM stays.

    Without an account, and for a cache of all that is free, all that the node lends.

    hardware: the node.
    offered_gib: that it lends.
    """
    if args.memory_gib is not None:
        return ceil(args.memory_gib)
    node_gib = hardware.memory_bytes / GIB
    share_gib = ceil((args.share or 0.0) * node_gib)
    if known is not None:
        cache = known.cache if args.sized else cache_limit(args, hardware.platform)
        if cache is not None:
            return max(_lent(known, known.fixed + cache, offered_gib), share_gib)
    most = ceil(VLLM_DEFAULT_UTILIZATION * node_gib)
    return share_gib or (most if offered_gib is None else min(most, int(offered_gib)))


def cache_limit(args: EngineArgs, platform: str) -> int | None:
    """Most bytes of a cache without a configured size; None without a limit. On a CPU it is that of sparkd.config.kv_cache.sizing_of."""
    if platform != "cpu" or args.cache is not None or args.vllm_sizes:
        return None
    return args.cpu_space_bytes or CPU_KV_CACHE_GIB * GIB


def _lent(known: Account, size_bytes: float, offered_gib: float | None) -> int:
    """GiB of it; of a guess as much as the node lends."""
    if known.upper is None or offered_gib is None:
        return ceil(size_bytes / GIB)
    return ceil(max(known.surely, min(size_bytes, offered_gib * GIB)) / GIB)


def illegal(candidate: Candidate, hardware: Hardware, ways: Ways, evidence: Evidence = NOTHING) -> str | None:
    """Why vLLM would not split the model over `ways` ranks, without a full stop; None where it would, or nothing is known of it."""
    model, split = candidate.model, Serving(1, tensor_parallel=ways[0], pipeline_parallel=ways[1])
    try:
        exact = consulted(candidate, hardware, ways, evidence).exact(model.recipe, split)
    except (CheckpointError, ConfigError):
        return None  # the engine says it, with the tensor's name
    if exact.decides:
        return exact.refusal
    return uneven_heads(model.inventory.shape, ways[0])


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
    what = f"as its entry sets it ({cache_words})" if cache_words else f"for one request of {serving.max_model_len:,} tokens"
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


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take on each of its nodes. engine: in all; cache: of its cache, None without a limit of its own."""

    engine: int
    cache: int | None = None

    def holds(self, known: Account) -> bool:
        """Whether a request of full length fits, also into the configured cache."""
        caches = [size for size in (self.cache, known.cache) if size is not None]
        return known.least <= self.engine and all(known.kv.least <= size for size in caches)


def room_of(args: EngineArgs, hardware: Hardware, free_bytes: int) -> Room:
    """The memory that the entry's limits leave of free_bytes, the memory of a node that other models leave.

    memory_gib limits the engine; kv_margin_gib stays free in addition to it. gpu_memory_utilization limits all but the processes' memory on
    the host.
    """
    own = free_bytes if args.memory_gib is None else int(args.memory_gib * GIB)
    if args.share is not None:
        beside = PROCESS_BYTES[hardware.platform] if hardware.unified else 0
        return Room(min(free_bytes, own, int(args.share * hardware.memory_bytes) + beside))
    margin = margin_of(hardware, args.margin_bytes)
    return Room(min(free_bytes - margin, own), cache_limit(args, hardware.platform))


def resolved(
    candidates: Sequence[Candidate], hardware: Hardware, free_bytes: int, ways: Ways = (1, 1), evidence: Evidence = NOTHING
) -> Candidate:
    """Decide `quantize: auto` and `max_model_len: auto`.

    The choice is the first candidate in which a request of the configured length fits into free_bytes and the entry's limits.
    Its length is the longest that fits, at most the model's own. If nothing fits, the choice is the smallest, whose refusal gives the
    reason.
    candidates: at least one (`candidates_of`).
    evidence: as in sparkd.capacity.account.account.

    If flags leave an account a guess, the guess decides the format, and vLLM decides a length of `auto` by measuring.
    Raises CheckpointError as sparkd.capacity.account.account.
    """
    plain, asked = candidates[0], candidates[0].args.max_model_len
    if asked != AUTO and len(candidates) == 1:
        return plain
    completed = consulted(plain, hardware, ways, evidence).completed(plain.model.inventory)
    room = room_of(plain.args, hardware, free_bytes)

    def at(one: Candidate, tokens: int) -> Account | None:
        try:
            return account(_of_length(one, tokens), hardware, evidence, ways, guesses=True)
        except CheckpointError:
            return None  # of a neighbour: the entry's own files were judged above

    def fits(one: Candidate, tokens: int) -> bool:
        found = at(one, tokens)
        return found is not None and room.holds(found)

    most = asked if isinstance(asked, int) else completed.shape.max_len
    step = CONTEXT_STEP if asked == AUTO else most
    enough = min(most, DEFAULT_CONTEXT) if asked == AUTO else most
    legal = [one for one in candidates if uneven_groups(one.model) is None and illegal(one, hardware, ways, evidence) is None]
    lengths = [(one, largest(partial(fits, one), most, step)) for one in legal]
    best = next((pair for pair in lengths if pair[1] >= enough), None)
    best = best or max(lengths, key=lambda pair: pair[1], default=(plain, 0))
    if not best[1] and lengths:
        best = min(lengths, key=lambda pair: _least(at(pair[0], min(most, CONTEXT_STEP))))
    one, tokens = best
    chosen = _of_length(one, tokens)
    if asked != AUTO or not tokens or account(chosen, hardware, evidence, ways) is None:
        return one
    return chosen


def _of_length(candidate: Candidate, tokens: int) -> Candidate:
    return replace(candidate, args=replace(candidate.args, max_model_len=tokens))


def _least(known: Account | None) -> float:
    return float("inf") if known is None else known.least


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model in one of the ways that come into question. args: the entry in this format; model: the weights in it."""

    args: EngineArgs
    headers: Headers
    model: FormattedModel


def candidate_of(args: EngineArgs, headers: Headers) -> Candidate | None:
    """The entry in its own format, as stored for `auto`; None where the weights cannot have it: the engine says why, with the tensor's
    name."""
    if args.recipe is None:
        return None
    try:
        return Candidate(args, headers, headers.model.formatted(args.recipe))
    except (CheckpointError, ConfigError):
        return None


def candidates_of(args: EngineArgs, headers: Headers, *, beside: bool = False) -> tuple[Candidate, ...]:
    """The entry's own format alone; for `best` its mixes; for `quantize: auto` as it is stored, then as others have quantized it, who had
    data to calibrate with, then by ourselves (sparkd.capacity.fit.rank), then in mixes that are smaller than any one format.

    beside: with what this machine has of the model quantized already. Raises ConfigError where no mix is as small as the entry asks for.
    """
    ways = [(args, headers)]
    if is_open(args.quantize):
        recipes = open_recipes(headers.model, args.quantize, args.tensor_parallel or 1)
        ways = [(args.quantized(recipe), headers) for recipe in recipes]
    if args.quantize == AUTO and beside:
        ways[1:1] = _neighbours(args, headers)
    return tuple(candidate for way in ways if (candidate := candidate_of(*way)) is not None)


def _neighbours(args: EngineArgs, headers: Headers) -> Iterator[tuple[EngineArgs, Headers]]:
    """Each checkpoint of the same model that this machine has in four or eight bits. Trust in code belongs to the entry's own repository:
    with it there is none."""
    if args.trusts_code:
        return
    for name, _ in prequantized(args.model, headers.model.checkpoint, {**os.environ, **args.env}):
        other = replace(args, model=name, revision=None, quantize=None, recipe=AS_IT_IS)
        if (there := headers_here(other)) is not None:
            yield other, there
