"""Whether a model fits, and how: one rule judges each format, split and length. A start takes the option that a plan shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from sparkd.capacity.evidence import NOTHING, Consultation, Evidence, Ways
from sparkd.capacity.footprint import Footprint, footprint
from sparkd.capacity.formats import AS_STORED, CONFIGURED, open_recipes, quality_loss_of, recipes
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, Serving, largest
from sparkd.capacity.weights import Inventory, uneven_groups, uneven_heads
from sparkd.checkpoint.prequantized import prequantized
from sparkd.checkpoint.shape import LENGTHS
from sparkd.config.engine_args import EngineArgs
from sparkd.config.quantize import AUTO, is_open
from sparkd.errors import CheckpointError
from sparkd.hardware import Hardware
from sparkd.units import GIB, gib
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.kv.settings import BLOCKS_FLAG
from workers.quantization.best_wish import BEST
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

CONTEXT_STEP = 1024
# For `max_model_len: auto` a format fits from this length on (or from the model's own), and gets as much more as there is room for.
DEFAULT_CONTEXT = 32_768
# The characters of a sentence of vLLM's, which may have all of a configuration in it.
_DOUBT_CHARACTERS = 300
# The sort key of options; the best has the least.
Preference = tuple[bool, float, int, int]
# memory: of a node, or of the entry's limit; cache: of its given size; length: more tokens than the model has; links: between nodes; vllm:
# its own word; split: of the tensors over ranks; format: of the weights; uncounted: nothing tells what the cache takes.
Cause = Literal["memory", "cache", "length", "links", "vllm", "split", "format", "uncounted"]
# By a number of nodes, the reason why no such number is linked well enough for tensor parallelism.
Unlinked = Mapping[int, str]
LINKED: Unlinked = MappingProxyType({})


class Source(NamedTuple):
    """A checkpoint from which an entry may be served: its own, or a copy of that which others have quantized.

    args: the entry with this checkpoint.
    headers: of its files.
    """

    args: EngineArgs
    headers: Headers
    evidence: Evidence
    consultation: Consultation


class Candidate(NamedTuple):
    """A source in one of the formats that come into question.

    args: the entry in this format.
    recipe: of its weights.
    format: the recipe's name in a plan.
    is_copy: whether it is another checkpoint than the entry names.
    """

    source: Source
    args: EngineArgs
    recipe: QuantizationRecipe
    format: str
    is_copy: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """One format, split and length of a model on nodes of one kind.

    args: the entry in this format and length; the length stays `auto` where vLLM finds it by measuring.
    headers: with vLLM's sizes of the model.
    node: each of its nodes; system_bytes is what others hold there.
    footprint: None if vLLM or the loader would refuse it.
    reason, cause: None if it fits, otherwise one sentence and its kind.
    longest: tokens that a request may have; 0 if it does not fit. If it is too long, those that the model supports.
    is_counted: whether the numbers cover every flag of the entry; otherwise the start measures.
    """

    args: EngineArgs
    headers: Headers
    format: str
    is_copy: bool
    node: Hardware
    ways: Ways
    serving: Serving
    footprint: Footprint | None = None
    reason: str | None = None
    cause: Cause | None = None
    longest: int = 0
    is_counted: bool = False

    @property
    def nodes(self) -> int:
        return self.ways[0] * self.ways[1]

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def known(self) -> Footprint | None:
        """The bytes of a model; None if only a start can tell them."""
        return self.footprint if self.is_counted else None


def preference(option: Option) -> Preference:
    """Better formats go before fewer nodes, and tensor parallelism before a pipeline, which is slower.

    A copy of the model had data to calibrate with: it ranks behind the stored model, and before a format that is quantized here.
    """
    loss = 0.5 if option.is_copy else float(quality_loss_of(option.format))
    return not option.fits, loss, option.nodes, option.ways[1]


def splits(most: int) -> Iterator[Ways]:
    """(tensor, pipeline) over each number of nodes up to `most`: fewest nodes first, and of so many the most tensor parallelism."""
    for nodes in range(1, most + 1):
        yield from ((tensor, nodes // tensor) for tensor in range(nodes, 0, -1) if nodes % tensor == 0)


def source_of(args: EngineArgs, headers: Headers, node: Hardware, evidence: Evidence = NOTHING) -> Source:
    """node: as the one on which it is to run."""
    return Source(args, headers, evidence, evidence.consultation(args, headers, node))


def copies_of(own: Source, node: Hardware) -> list[Source]:
    """Each checkpoint of the same model that this machine has in four or eight bits. Trust in code belongs to the entry's own repository:
    with it there is none."""
    args = own.args
    if args.spec.trust_remote_code:
        return []
    copies = prequantized(args.spec.model, own.headers.model.checkpoint, {**os.environ, **args.env})
    others = (args.with_keys(model=name, revision=None, quantize=None) for name, _ in copies)
    return [source_of(other, there, node, own.evidence) for other in others if (there := headers_here(other)) is not None]


def candidates_of(own: Source, copies: Sequence[Source] = ()) -> list[Candidate]:
    """The entry's own format alone; for `best` its mixes; for `quantize: auto` as it is stored, then as others have quantized it, who had
    data to calibrate with, then by ourselves (see `preference`), then in mixes that are smaller than any one format.

    copies: of the model, for `quantize: auto`. Raises ConfigError where no mix is as small as the entry asks for.
    """
    args = own.args
    if not is_open(args.spec.quantize):
        return _formatted(own, [args.recipe])
    choices = tuple(open_recipes(own.headers.model, args.wish, args.tensor_parallel or 1))
    # A model whose weights can have no mix is served as it is stored.
    candidates = _formatted(own, choices or (AS_IT_IS,))
    if args.spec.quantize == AUTO:
        candidates[1:1] = [candidate._replace(is_copy=True) for copy in copies for candidate in _formatted(copy, [AS_IT_IS])]
    return candidates


def single_formats(own: Source) -> list[Candidate]:
    """The model in each of sparkd.capacity.formats.FORMATS and as it is stored, best first."""
    return _formatted(own, [recipe for _, recipe in recipes(own.headers.model, None)])


def _formatted(source: Source, choices: Iterable[QuantizationRecipe]) -> list[Candidate]:
    args, is_mixed = source.args, is_open(source.args.spec.quantize)

    def called(recipe: QuantizationRecipe) -> str:
        if not recipe.quantizes:
            return AS_STORED
        return recipe.default.spelling if not recipe.rules else BEST if is_mixed else CONFIGURED

    return [
        Candidate(source, args if recipe == args.recipe and not is_mixed else args.quantized(recipe), recipe, called(recipe))
        for recipe in choices
    ]


def choose(candidates: Sequence[Candidate], node: Hardware, ways: Ways = (1, 1), unlinked: Unlinked = LINKED) -> Option:
    """The choice of the candidates, at least one, over `ways` nodes like this one: the first that fits.

    If none does, it is the longest of those with a length of `auto`, else the smallest, whose refusal gives the reason.
    """
    options: list[Option] = []
    for candidate in candidates:
        options.append(fitted(candidate, node, ways, unlinked))
        if options[-1].fits:
            return options[-1]
    number, roomiest = max(enumerate(options), key=lambda each: each[1].longest)
    if roomiest.longest and candidates[number].args.spec.max_model_len == AUTO:
        return fitted(candidates[number], node, ways, unlinked, at_least=roomiest.longest)
    return min(options, key=_least)


def _least(option: Option) -> float:
    return float("inf") if option.footprint is None else option.footprint.least


def checked(candidate: Candidate, node: Hardware, ways: Ways = (1, 1), unlinked: Unlinked = LINKED) -> Option:
    """The option without its footprint: with the reason for which vLLM or the loader would refuse it, if there is one."""
    (_, stored, _, consultation), args, recipe = candidate.source, candidate.args, candidate.recipe
    consultation.ask([(AS_IT_IS, *ways), (recipe, *ways)])
    headers = replace(stored, model=consultation.completed(stored.model))
    serving = serving_of(args, headers, node, ways)
    option = Option(args, headers, candidate.format, candidate.is_copy, node, ways, serving)
    # vLLM takes a longrope's shorter length by itself, and its longer one where the entry asks for it.
    longest = max(stored.model.shape.max_len, headers.model.shape.max_len)
    if isinstance(args.spec.max_model_len, int) and args.spec.max_model_len > longest and not _is_beyond(args, headers.model):
        reason = f"{args.spec.max_model_len:,} tokens are more than the {longest:,} that the model supports"
        return replace(option, reason=reason, cause="length", longest=longest)
    # As sparkd.cluster.placer: a pipeline sends little, and ranks that share tensors go over all of their nodes by one network.
    if ways[0] > 1 and option.nodes in unlinked:
        return replace(option, reason=unlinked[option.nodes], cause="links")
    try:
        formatted = stored.model.formatted(recipe)
        uneven = uneven_groups(formatted)
    except CheckpointError as error:
        return replace(option, reason=error.clause, cause="format")
    if uneven is not None:
        # Before vLLM's own refusal, which names no format that fits.
        return replace(option, reason=uneven, cause="format")
    exact, shape = consultation.exact(recipe, serving), headers.model.shape
    if exact.refusal is not None:
        return replace(option, reason=exact.refusal, cause="vllm")
    if not exact.decides and (heads := uneven_heads(shape, ways[0])):
        return replace(option, reason=heads, cause="split")
    if exact.layout is None and not shape.attentions:
        gap = f"its {headers.model.checkpoint.config_file} has no {shape.gaps[0]}" if shape.gaps else "its configuration has no layers"
        return replace(option, reason=f"{gap}, and no vLLM has computed the size of its KV cache", cause="uncounted")
    return replace(option, is_counted=serving.unknown <= exact.settled)


def fitted(
    candidate: Candidate, node: Hardware, ways: Ways = (1, 1), unlinked: Unlinked = LINKED, *, at_least: int = DEFAULT_CONTEXT
) -> Option:
    """The candidate over `ways` nodes like this one: its bytes, and whether it fits.

    at_least: tokens from which on a length of `auto` fits.
    """
    option = checked(candidate, node, ways, unlinked)
    if option.reason is not None:
        return option
    (_, stored, evidence, consultation), args, recipe = candidate.source, candidate.args, candidate.recipe
    headers, model = option.headers, replace(stored.model.formatted(recipe), inventory=option.headers.model)
    is_auto, most = args.spec.max_model_len == AUTO, option.serving.max_model_len

    def at(tokens: int) -> Footprint:
        own = args if tokens == most and not is_auto else args.with_keys(max_model_len=tokens)
        serving = serving_of(own, headers, node, ways)
        exact = consultation.exact(recipe, serving)
        measured = evidence.learned(own, headers, ways, node)
        return footprint(model, serving, node, own, exact, measured)

    def fits(tokens: int) -> bool:
        needed = at(tokens)
        return needed.fits and short_cache(args, needed) is None

    longest, enough = largest(fits, most, CONTEXT_STEP), min(most, at_least) if is_auto else most
    tokens = max(longest, enough)
    needed = at(tokens)
    own = args.with_keys(max_model_len=tokens) if is_auto and option.is_counted and longest >= enough else args
    option = replace(option, args=own, serving=replace(option.serving, max_model_len=tokens), footprint=needed, longest=longest)
    if longest >= enough:
        return option
    if short := short_cache(args, needed):
        return replace(option, reason=short, cause="cache")
    return replace(option, reason=_short(args, needed, node, longest), cause="memory")


def serving_of(args: EngineArgs, headers: Headers, hardware: Hardware, ways: Ways = (1, 1)) -> Serving:
    """`unknown` of it says what the entry changes in a way that the formulas do not have."""
    spec, model, drafted = args.spec, headers.model, headers.drafting
    kv_dtype = spec.kv_cache_dtype or "auto"
    # By its own quantizing, in a wider type or by another configuration vLLM makes other weights of the stored ones than are counted.
    is_other = WEIGHTS in args.changes or (spec.quantization is not None and model.checkpoint.quantization is None)
    uncounted = is_other or (drafted is None and args.drafts)
    length = spec.max_model_len if isinstance(spec.max_model_len, int) else model.shape.max_len
    batch = BATCH_TOKENS[hardware.platform]
    if not args.chunked_prefill:
        batch = max(length, batch)  # a prompt in one piece (vllm/engine/arg_utils.py, where not enable_chunked_prefill)
    source = model.checkpoint.quantization
    if kv_dtype == "auto" and source is not None and hardware.platform == "cuda" and (spec.quantize is None or not source.requantizable):
        kv_dtype = source.kv_dtype
    plain = Serving(
        max_model_len=length,
        max_num_seqs=spec.max_num_seqs or SEQUENCES[hardware.platform],
        max_num_batched_tokens=spec.max_num_batched_tokens or batch,
        tensor_parallel=ways[0],
        pipeline_parallel=ways[1],
        prefix_caching=args.prefix_caching,
        kv_dtype=kv_dtype,
        platform=hardware.platform,
        block_tokens=args.block_tokens,
        unknown=args.changes | ({WEIGHTS, CACHE} if uncounted else frozenset()),
    )
    return plain if drafted is None else drafted.serving(plain)


def _is_beyond(args: EngineArgs, model: Inventory) -> bool:
    """Whether vLLM may serve requests that are longer than config.json says (vllm/config/model.py, _get_and_verify_max_len)."""
    allowed = args.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")
    return allowed or args.other_config or LENGTHS[0] in model.shape.gaps or "model_max_length" in model.checkpoint.config


def short_cache(args: EngineArgs, needed: Footprint) -> str | None:
    """Why the cache, which has a given size, holds no request; None where it does: else vLLM ends its start, with all weights loaded."""
    cost, size = needed.kv, needed.cache
    if size is None or cost.least <= size:
        return None
    cache = args.cache if isinstance(args.cache, Mapping) else {}
    request = f"one request of {cost.max_model_len:,} tokens needs"
    if "tokens" in cache:
        return f"kv_cache holds {cache['tokens']:,} tokens, and one request has {cost.max_model_len:,}"
    if "blocks" in cache:
        return f"{BLOCKS_FLAG} is {cache['blocks']:,}, and {request} {cost.blocks + 1:,} blocks"
    name = "kv_cache" if cache else "the cache of a CPU's engine"
    return f"{name} holds {_size(size)}, and {request} {_size(cost.least)}"


def _short(args: EngineArgs, needed: Footprint, node: Hardware, longest: int) -> str:
    """Why its bytes are too many for a node, or for the limit of its entry."""
    kept = f"{gib(needed.system_bytes)} system and {gib(needed.margin_bytes)} margin"
    there = f"a node has {gib(node.memory_bytes)}, less {kept}"
    if needed.limit_bytes is not None and needed.total > needed.limit_bytes:
        there = f"that is more than {needed.limit_words}"
    elif needed.free_bytes >= 0:
        there = f"while the weights come, the loader needs {gib(-needed.load_free_bytes)} more than a node has"
    return f"{it_needs(args, needed)}; {there}" + (f"; {longest:,} tokens of context would fit" if longest else "")


def it_needs(args: EngineArgs, known: Footprint) -> str:
    """The parts of its least, for a message."""
    is_larger = known.cache is not None and known.cache > known.kv.least
    what = f"for one request of {known.kv.max_model_len:,} tokens"
    if is_larger and args.cache_words:
        what = f"as its entry sets it ({args.cache_words})"
    rest = sum(known.parts[name] for name in ("peak", "graphs", "context"))
    weights, cache, processes = gib(known.parts["weights"]), gib(known.least - known.fixed), gib(known.parts["processes"])
    held = " and what CUDA holds" if known.parts["context"] else ""
    guess = "" if gib(known.upper_bytes) == gib(0) else f", reserve for an uncertain estimate {gib(known.upper_bytes)}"
    largest = f"{gib(rest)} for the largest batch{held}"
    return f"it needs at least {gib(known.least)}: weights {weights}, KV cache {cache} {what}, {largest}, processes {processes}{guess}"


def _size(size: int) -> str:
    return gib(size) if size >= GIB else f"{size / (1 << 20):.0f} MiB"


def doubt_in_short(doubt: str) -> str:
    """Without its full stop, in one line."""
    line = " ".join(doubt.split()).rstrip(".")
    return line if len(line) <= _DOUBT_CHARACTERS else f"{line[:_DOUBT_CHARACTERS]}..."
