"""The plan of a model: every format and split over the nodes that fits its entry, best first, and the start of the best.

A model without an entry has one made for it (sparkd.capacity.planned_entry). The choice is the daemon's for such an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkd.capacity.account import candidates_of, needed_gib, resolved, room_of, serving_of
from sparkd.capacity.advice import Cure, FitRefusal, advice, refusal, share_too_large
from sparkd.capacity.evidence import GUESS, Answers, Evidence, MeasuredPeaks, nobody
from sparkd.capacity.fit import Option, choose, doubt_in_short, floor, format_notes, gib, rank, refuse_uncounted, smallest, splits, unread
from sparkd.capacity.footprint import FitRequest
from sparkd.capacity.formats import AS_STORED, CONFIGURED, quality_of, recipes
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.launch import start_of
from sparkd.capacity.planned_entry import PlannedEntry, PlanRequest, overlaid
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.checkpoint.quantization import SourceQuantization
from sparkd.config.config import ModelConfig
from sparkd.config.engine_args import EngineArgs, decided, engine_args, recipe_of, settings_uncounted
from sparkd.config.quantize import AUTO, is_open
from sparkd.hardware import Hardware
from sparkd.units import GIB
from sparkd.vllm.unaccounted_args import OTHER, measured
from workers.kv.profiles import profiles_in
from workers.quantization.best_wish import BEST
from workers.quantization.recipe import QuantizationRecipe

if TYPE_CHECKING:
    from sparkd.capacity.evidence import Answers
    from sparkd.vllm.ask.model import InquiryRuntime

# (folder or hub id, headers) -> the same for quantized copies of the model.
Copies = Callable[[str, Checkpoint], Iterable[tuple[str, Checkpoint]]]
# The utilizations of a floor table; the smallest that works is one more.
STEPS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class _Question:
    """Everything that the options of one plan follow from. plain: args with the checkpoint as stored in place of `auto`."""

    args: EngineArgs
    plain: EngineArgs
    headers: Headers
    hardware: Hardware
    evidence: Evidence
    wish: FitRequest
    copies: Mapping[str, Checkpoint]
    read: Callable[[str], Checkpoint]

    @property
    def is_open(self) -> bool:
        return is_open(self.args.quantize)


def plan(
    request: PlanRequest,
    entry: PlannedEntry,
    checkpoint: Checkpoint,
    hardware: Hardware,
    *,
    read: Callable[[str], Checkpoint] = read_checkpoint,
    unlinked: Mapping[int, str] | None = None,
    copies: Copies | None = None,
    answers: Answers | None = None,
) -> dict[str, Any]:
    """The plan of an entry as plain JSON. Blocks.

    request: overrides the entry.
    checkpoint: the headers of the entry's model.
    read: reads the headers of a draft.
    unlinked: see sparkd.capacity.fit.FitRequest.
    copies: called for `quantize: auto`.
    answers: vLLM's, about the model.

    Raises ConfigError and CheckpointError.
    """
    written = entry.spec.tensor_parallel
    entry = overlaid(entry, request, read)
    spec, args = entry.spec, engine_args(entry.spec, entry.env)
    if args.recipe is None:
        recipe_of(spec)  # raises ConfigError, which says why
    headers, plain = Headers.of(args, checkpoint, read), args.undecided()
    nodes = max(request.nodes or 1, args.tensor_parallel or 1)
    ways = (args.split,) if args.tensor_parallel is not None else tuple(splits(nodes))
    answers, draft = answers or Answers(nobody), headers.drafting.draft if headers.drafting is not None else None
    evidence = Evidence(profiles_in(str(entry.config.profiles_path)), entry.vllm, answers.kept, draft)
    wish = replace(_wish(plain, args, headers, hardware, evidence), nodes=nodes, unlinked=unlinked or {}, ways=ways)
    asked = replace(wish, quantize=None if is_open(spec.quantize) else args.recipe)
    consultation = replace(evidence, ask=answers.ask).consultation(args, headers.model.checkpoint, hardware)
    completed = consultation.ask_formats(headers.model, asked.quantize, ways)
    asked = replace(asked, exact=consultation.exact)
    refuse_uncounted(completed, asked)
    headers, wish = replace(headers, model=completed), replace(wish, exact=asked.exact)
    beside = dict(copies(spec.model, checkpoint)) if copies is not None and spec.quantize == AUTO else {}
    ranked = _options(_Question(args, plain, headers, hardware, evidence, wish, beside, read))
    most_gib = max(1, _free(hardware) // GIB)
    if share := share_too_large(args, needed_gib(args, hardware, most_gib), hardware, most_gib, "a node"):
        ranked = [(replace(option, reason=share.reason, cause="memory") if option.fits else option, args) for option, args in ranked]
    options = [option for option, _ in ranked]
    best = ranked[0] if ranked and options[0].fits else None
    notes = [*_format_notes(spec, headers, args, options, beside)]
    if written != spec.tensor_parallel:
        notes.append(f"Its entry sets {written} nodes (tensor_parallel); this plan is for {nodes}.")
    unknown, doubt = serving_of(plain, headers, hardware).unknown, consultation.doubt()
    if unknown and any(option.footprint is not None and option.footprint.sureness == GUESS for option in options):
        notes.append(_guessed(spec, args, unknown, doubt))
    notes += unread(headers.model, options, None if unknown else doubt)
    if flags := list(dict.fromkeys(measured(spec.extra_args))):
        notes.append(f"Not counted here, but measured by each start: the memory for {' and '.join(flags)} in extra_args.")
    start = None if best is None else start_of(entry, best[0], decided(spec, best[1]), hardware)
    refused = share or refusal(options, headers.model, asked)
    if refused is not None and refused.cause == "memory" and not is_open(spec.quantize) and (cure := _cure(args, hardware)) is not None:
        refused = replace(refused, cure=cure)
    return {
        **to_json(spec.model, headers, hardware, asked, options, refused, start),
        "entry": {"name": spec.name, "origin": entry.origin} if entry.added is None else None,
        "notes": [*filter(None, notes)],
    }


def _options(question: _Question) -> list[tuple[Option, EngineArgs]]:
    """Each option with its own entry, best first.

    At each split that is the daemon's choice. Where the format is open, the other formats show why no better one was chosen, and the
    alternatives.
    """
    headers, hardware, wish = question.headers, question.hardware, question.wish
    candidates = candidates_of(question.args, headers, beside=wish.nodes == 1 and bool(question.copies))
    options: list[tuple[Option, EngineArgs]] = []
    for ways in wish.ways or ():
        at = replace(wish, ways=(ways,))
        args = resolved(candidates, hardware, _free(hardware), ways, question.evidence).args if candidates else question.plain
        chosen = _chosen(question, args, at)
        options.append((chosen, args))
        if question.is_open:
            options += ((option, args) for option, args in _formats(question, args, at) if _is_beside(option, chosen))
    return sorted(options, key=lambda each: rank(each[0]))


def _chosen(question: _Question, args: EngineArgs, wish: FitRequest) -> Option:
    """The option of a resolved entry, which may name a quantized copy of the model."""
    headers, hardware = question.headers, question.hardware
    unknown = serving_of(question.plain, headers, hardware).unknown
    length = None if unknown and args.max_model_len == AUTO else _length(args, headers)
    wish = replace(wish, quantize=args.recipe, max_model_len=length)
    if args.model in question.copies:
        copy = Headers.of(args, question.copies[args.model], question.read)
        # The sizes of this checkpoint are computed here: vLLM was asked about the other one only.
        own = replace(_wish(args, args, copy, hardware, question.evidence), ways=wish.ways, quantize=wish.quantize)
        quantization = copy.model.checkpoint.quantization
        option = choose(copy.model, hardware, own).options[0]
        return replace(option, copy=args.model, method=None if quantization is None else quantization.method)
    option = choose(headers.model, hardware, wish).options[0]
    return replace(option, format=BEST) if question.is_open and option.format == CONFIGURED else option


def _formats(question: _Question, args: EngineArgs, wish: FitRequest) -> Iterator[tuple[Option, EngineArgs]]:
    """Every single format of the model that was asked for, each with its entry and, without a configured length, its own longest."""
    for _, recipe in recipes(question.headers.model, None):
        option = choose(question.headers.model, question.hardware, replace(wish, quantize=recipe)).options[0]
        own = replace(args, model=question.args.model, revision=question.args.revision).quantized(recipe)
        length = option.serving.max_model_len if question.args.max_model_len == AUTO else question.args.max_model_len
        yield option, replace(own, max_model_len=length)


def _is_beside(option: Option, chosen: Option) -> bool:
    """Whether the option has another format that is no better than the chosen one."""
    return option.format != chosen.format and (not option.fits or quality_of(option.format) > quality_of(chosen.format))


def _wish(plain: EngineArgs, args: EngineArgs, headers: Headers, hardware: Hardware, evidence: Evidence) -> FitRequest:
    """The numbers that all formats and splits share. plain: args with the checkpoint as stored in place of `auto`."""
    serving = serving_of(plain, headers, hardware)
    room, limit = room_of(args, hardware, _free(hardware)), None
    if args.share is not None:
        limit = (room.engine, f"the {gib(room.engine)} of gpu_memory_utilization {args.share:g}")
    elif args.memory_gib is not None:
        limit = (int(args.memory_gib * GIB), f"the memory_gib of {args.memory_gib:g} in its entry")
    cache = args.given_cache(hardware.platform)

    def learned(recipe: QuantizationRecipe, at: Serving) -> MeasuredPeaks | None:
        timed = plain if args.max_model_len is None else replace(plain, max_model_len=at.max_model_len)
        formatted = timed.quantized(recipe) if is_open(args.quantize) else timed
        return evidence.learned(formatted, headers, (at.tensor_parallel, at.pipeline_parallel), hardware)

    return FitRequest(
        max_model_len=None if args.max_model_len == AUTO else serving.max_model_len,
        requests=int(cache["sequences"]) if cache is not None and "sequences" in cache else 1,
        serving=serving,
        eager=args.enforce_eager,
        margin_bytes=0 if args.share is not None else args.margin_bytes,
        cache=cache,
        cache_limit=room.cache,
        limit=limit,
        # As vLLM allows it (vllm/config/model.py).
        beyond=args.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "1" or args.other_config,
        learned=learned,
    )


def _format_notes(
    spec: ModelConfig, headers: Headers, args: EngineArgs, options: list[Option], beside: Mapping[str, Checkpoint]
) -> Iterator[str]:
    source = headers.model.checkpoint.quantization
    if source is not None and not source.requantizable and is_open(spec.quantize):
        yield f"The checkpoint is quantized already ({source.method}) and is served as it is."
    taken = {option.copy for option in options}
    for name, other in beside.items():
        if other.quantization is not None:
            yield _copy_note(name, other.quantization, f"rather than quantize {spec.model} here" if name in taken else None)
    yield from headers.model.unmet(args.recipe) if args.recipe is not None else ()
    yield from format_notes(options[0] if options and options[0].fits else None)


def _copy_note(name: str, quantization: SourceQuantization, taken: str | None) -> str:
    how = f"{name} is on this machine: the same model, quantized already ({quantization.method})"
    if taken is not None:
        return f"{how}. sparkd serves it {taken}."
    return f"{how}. If the stored model does not fit and this is the only node, sparkd serves that copy rather than quantize one here."


def _cure(args: EngineArgs, hardware: Hardware) -> Cure | None:
    """The choices that would fit over as many nodes as the entry asks for, or else on one."""
    free, here = max(0, room_of(args, hardware, _free(hardware)).engine), headers_here(args)
    cure = advice(args, here, hardware, free, args.split)
    if cure is None and args.split != (1, 1):
        cure = advice(args, here, hardware, free, instead_of=math.prod(args.split))
    return cure


def _length(args: EngineArgs, headers: Headers) -> int:
    """The length of a resolved entry, or the model's own where `auto` found no length that fits."""
    return args.max_model_len if isinstance(args.max_model_len, int) else headers.model.shape.max_len


def _free(hardware: Hardware) -> int:
    return hardware.memory_bytes - hardware.system_bytes


def _guessed(spec: ModelConfig, args: EngineArgs, unknown: frozenset[str], doubt: str | None) -> str:
    """A sentence that names the settings that make the numbers a guess, and the way to exact ones. doubt: why vLLM gave no answer."""
    what = " and ".join(settings_uncounted(spec, args)) or "what its draft takes"
    cure = "a plan asks vLLM without --quick, where its runtime is on this machine"
    if doubt is not None:
        cure = f"vLLM gave no answer: {doubt_in_short(doubt)}"
    elif OTHER in unknown:
        cure = "a start measures it"
    return f"The numbers are a guess, because sparkd has no formula for the effect of {what}; {cure}."


def vllm_json(runtime: InquiryRuntime, answers: Answers) -> dict[str, Any]:
    """The vLLM that a plan may rely on.

    version: null where the runtime has no vLLM.
    answered: whether it answered a question.
    unanswered: the number of questions that it was not asked yet, or did not answer; 0 where this node has no such vLLM.
    """
    version = runtime.version
    unanswered = answers.unanswered if version is not None and runtime.away is None else 0
    return {"runtime": runtime.place, "version": version, "answered": answers.answered, "unanswered": unanswered}


def to_json(
    model: str,
    headers: Headers,
    hardware: Hardware,
    request: FitRequest,
    options: Sequence[Option],
    refusal: FitRefusal | None,
    start: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The plan as plain JSON: bytes as integers, seconds and tokens/s as floats, null for unknown values.

    options: best first, which is the choice where it fits; each names its model.
    start: of the choice, as sparkd.capacity.launch has it.
    """
    inventory = headers.model
    checkpoint, shape = inventory.checkpoint, inventory.shape
    best = options[0] if options and options[0].fits else None
    return {
        "model": model,
        "folder": checkpoint.folder,
        "architecture": shape.architecture,
        "layers": shape.layers,
        "max_len": shape.max_len,
        "bytes": inventory.stored_bytes,
        "unloaded": dict(inventory.unloaded),
        "unknown_experts": inventory.unknown_experts() if any(option.format != AS_STORED for option in options) else {},
        "quantization": checkpoint.quantization.method if checkpoint.quantization else None,
        "hardware": asdict(hardware),
        "asked": {
            "nodes": request.nodes,
            "requests": request.requests,
            "max_model_len": request.max_model_len,
            "eager": request.eager,
            "speculative": headers.drafting.method if headers.drafting is not None else None,
        },
        "options": [option_json(option, model) for option in options],
        "choice": None if best is None else {**option_json(best, model), **(start or {})},
        "refusal": None if refusal is None else refusal.to_json(),
        "floor": [] if best is None else _floor(best, hardware),
    }


def option_json(option: Option, model: str) -> dict[str, Any]:
    """An option as JSON. model: that is asked for. footprint: null where vLLM cannot split the model that way."""
    footprint = option.footprint
    return {
        "model": option.copy or model,
        "prequantized": option.method,
        "format": option.format,
        "nodes": option.nodes,
        "tensor_parallel": option.tensor,
        "pipeline_parallel": option.pipeline,
        "fits": option.fits,
        "reason": option.reason,
        "max_model_len": option.serving.max_model_len,
        "longest": option.longest,
        "footprint": None
        if footprint is None
        else {
            **footprint.parts,
            "system": footprint.system_bytes,
            "margin": footprint.margin_bytes,
            "free": footprint.free_bytes,
            "withheld": footprint.withheld_bytes,
            "memory": footprint.memory_bytes,
            "total": footprint.total,
            "sureness": footprint.sureness,
            "upper": footprint.upper_bytes,
            "upper_kv": footprint.upper_cache_bytes,
            "requests": footprint.requests,
            "kv_bytes_per_token": footprint.kv.per_token,
            "kv_bytes_per_request": footprint.kv.per_request,
            "load_peak": footprint.load_peak_bytes,
            "disk": footprint.weights.disk_bytes if footprint.weights.changed else 0,
            "by_class": dict(footprint.weights.by_kind),
            "first_load_s": footprint.first_load_s,
            "next_load_s": footprint.next_load_s,
            "decode_tokens_s": footprint.decode_tokens_s,
            "active_bytes": footprint.weights.active_bytes,
            "notes": list(footprint.weights.notes),
        },
    }


def _floor(option: Option, hardware: Hardware) -> list[dict[str, Any]]:
    least = smallest(option, hardware)
    steps = sorted({*STEPS, *([] if least is None else [least])})
    need = option.footprint.kv.least if option.footprint is not None else 0
    return [
        {"utilization": share, "allowed": allowed, "kv": left, "works": left >= need, "smallest": share == least}
        for share, allowed, left in floor(option, hardware, steps)
    ]
