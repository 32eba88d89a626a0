"""Owns the account of a configured model: the bytes that it needs at least, those that it will take, and the GiB to reserve for it. Decides
nothing that is `auto` (sparkd.capacity.auto_resolve).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from sparkd.capacity.candidates import Candidate
from sparkd.capacity.consultation import Ask, Consultation, nobody
from sparkd.capacity.footprint import Footprint, MeasuredPeaks, Terms, footprint
from sparkd.capacity.headers import Headers
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, KvCost, KvLayout, Serving, sized
from sparkd.capacity.parallelism import uneven_heads
from sparkd.capacity.profiles import engine_of, peaks_of
from sparkd.capacity.vllm_figures import EXACT, GUESS
from sparkd.capacity.weights import Inventory
from sparkd.checkpoint import Checkpoint
from sparkd.config.engine_args import EngineArgs
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import GIB, SPARK, UNKNOWN_RATES, Hardware
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.kv.profiles import KeptProfile
from workers.kv.settings import CPU_KV_CACHE_GIB
from workers.quantization.recipe import AS_IT_IS

VLLM_DEFAULT_UTILIZATION = 0.92  # vllm/config/cache.py of 0.32; older releases take 0.90
# Tensor-parallel and pipeline-parallel size.
Ways = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes on one node that a model needs.

    least: for one request of full length; without them the model cannot serve. fixed: `least` without the cache.
    cache: of the configured KV cache; None if it takes all free memory.
    sentence: the parts of `least`, for a message.
    layout: how the layers share a cache, for requests of max_model_len tokens.
    upper: by how much a guess of `fixed` may be too low; None without a guess.
    sureness: of the numbers, one of sparkd.capacity.vllm_figures.
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


@dataclass(frozen=True, slots=True)
class Evidence:
    """Numbers that override a formula.

    profiles: measurements of earlier starts on this machine, by the engine's release `vllm`.
    ask: vLLM's answers about a model.
    draft: the headers of its draft, which need not be on this machine.
    """

    profiles: tuple[KeptProfile, ...] = ()
    vllm: str | None = None
    ask: Ask = nobody
    draft: Checkpoint | None = None

    def consultation(self, args: EngineArgs, checkpoint: Checkpoint, hardware: Hardware) -> Consultation:
        return Consultation(self.ask, checkpoint, args.flags, args.env, hardware, self.draft)

    def learned(self, args: EngineArgs, headers: Headers, ways: Ways, hardware: Hardware) -> MeasuredPeaks | None:
        """The measurements of an earlier start of this engine."""
        if not self.profiles:
            return None
        engine = engine_of(args.flags, args.quantize, args.env, self.vllm, hardware.platform)
        return peaks_of(self.profiles, engine, headers.identity, ways, hardware.name)


NOTHING = Evidence()


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
    needed = footprint(model, serving, hardware, Terms(eager=args.enforce_eager, margin_bytes=0, learned=learned, exact=exact))
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
