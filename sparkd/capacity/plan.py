"""The plan of a model: every format and split over the nodes that fits its entry, best first, and the start of the best.

A model without an entry has one made for it (sparkd.capacity.planned_entry). The choice is the daemon's for such an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from sparkd.capacity.advice import FitRefusal, refusal, share_too_large
from sparkd.capacity.evidence import EXACT, GUESS, Ask, Consultation, Evidence, Ways, nobody
from sparkd.capacity.fit import (
    LINKED,
    Option,
    Source,
    Unlinked,
    candidates_of,
    choose,
    copies_of,
    doubt_in_short,
    fitted,
    preference,
    serving_of,
    single_formats,
    source_of,
    splits,
)
from sparkd.capacity.footprint import cache_of
from sparkd.capacity.formats import AS_STORED, quality_loss_of
from sparkd.capacity.headers import Headers
from sparkd.capacity.launch import start_of
from sparkd.capacity.planned_entry import PlannedEntry, PlanRequest, overlaid
from sparkd.capacity.requirement import reserved_gib
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.config.config import ModelConfig
from sparkd.config.engine_args import EngineArgs, engine_args, settings_uncounted
from sparkd.config.quantize import AUTO, is_open
from sparkd.hardware import Hardware
from sparkd.units import GIB
from sparkd.vllm.unaccounted_args import OTHER, measured
from workers.kv.profiles import profiles_in


def plan(
    request: PlanRequest,
    entry: PlannedEntry,
    checkpoint: Checkpoint,
    hardware: Hardware,
    *,
    read: Callable[[str], Checkpoint] = read_checkpoint,
    unlinked: Unlinked = LINKED,
    ask: Ask = nobody,
) -> dict[str, Any]:
    """The plan of an entry as plain JSON. Blocks.

    request: overrides the entry.
    checkpoint: the headers of the entry's model.
    read: reads the headers of a draft.
    unlinked: see sparkd.capacity.fit.
    ask: vLLM, about the model.

    Raises ConfigError and CheckpointError.
    """
    written = entry.spec.tensor_parallel
    entry = overlaid(entry, request)
    spec, args = entry.spec, engine_args(entry.spec, entry.env)
    headers, nodes = Headers.of(args, checkpoint, read), max(request.nodes or 1, args.tensor_parallel or 1)
    ways = (args.split,) if args.tensor_parallel is not None else tuple(splits(nodes))
    source = source_of(args, headers, hardware, Evidence(profiles_in(str(entry.config.profiles_path)), entry.vllm))
    consultation = source.consultation
    consultation.ask_formats(headers.model, None if is_open(spec.quantize) else args.recipe, ways, ask)
    vllm = _vllm_json(entry, consultation)
    headers = replace(headers, model=consultation.completed(headers.model))
    copies = copies_of(source, hardware) if spec.quantize == AUTO else []
    options = _options(source._replace(headers=headers), copies if nodes == 1 else [], hardware, ways, unlinked)
    most_gib = max(1, _free(hardware) // GIB)
    if share := share_too_large(args, reserved_gib(args, hardware, most_gib), hardware, most_gib, "a node"):
        options = [replace(option, reason=share.reason, cause="memory") if option.fits else option for option in options]
    best = options[0] if options and options[0].fits else None
    notes = [*_format_notes(spec, headers, args, options, copies)]
    if written != spec.tensor_parallel:
        notes.append(f"Its entry sets {written} nodes (tensor_parallel); this plan is for {nodes}.")
    notes += _guess_notes(spec, args, headers, options, consultation.doubt())
    if flags := list(dict.fromkeys(measured(spec.extra_args))):
        notes.append(f"Not counted here, but measured by each start: the memory for {' and '.join(flags)} in extra_args.")
    start = None if best is None else start_of(entry, best, best.args.spec, hardware)
    refused = share or refusal(options, nodes, is_open=is_open(spec.quantize))
    return {
        **to_json(args, headers, nodes, options, hardware, refused, start),
        "entry": {"name": spec.name, "origin": entry.origin} if entry.added is None else None,
        "notes": [*filter(None, notes)],
        "vllm": vllm,
    }


def _options(source: Source, copies: Sequence[Source], node: Hardware, splits: Sequence[Ways], unlinked: Unlinked) -> list[Option]:
    """The options, best first: at each split that which a start takes.

    Where the format is open, the other formats show why no better one was chosen, and the alternatives.
    """
    others = single_formats(source) if is_open(source.args.spec.quantize) else []
    candidates = candidates_of(source, copies)
    options: list[Option] = []
    for ways in splits:
        chosen = choose(candidates, node, ways, unlinked)
        formats = (fitted(candidate, node, ways, unlinked) for candidate in others)
        options += [chosen, *(option for option in formats if _is_beside(option, chosen))]
    return sorted(options, key=preference)


def _is_beside(option: Option, chosen: Option) -> bool:
    """Whether the option has another format that is no better than the chosen one."""
    return option.format != chosen.format and (not option.fits or quality_loss_of(option.format) > quality_loss_of(chosen.format))


def _format_notes(spec: ModelConfig, headers: Headers, args: EngineArgs, options: list[Option], copies: Sequence[Source]) -> Iterator[str]:
    source = headers.model.checkpoint.quantization
    if source is not None and not source.requantizable and is_open(spec.quantize):
        yield f"The checkpoint is quantized already ({source.method}) and is served as it is."
    taken = {option.args.spec.model for option in options if option.is_copy}
    for copy in copies:
        how = f"{copy.args.spec.model} is on this machine: the same model, quantized already ({_method(copy.headers)})"
        if copy.args.spec.model in taken:
            yield f"{how}. sparkd serves it rather than quantize {spec.model} here."
        else:
            yield f"{how}. If the stored model does not fit and this is the only node, sparkd serves that copy rather than quantize here."
    yield from headers.model.unmet(args.recipe)
    if options and options[0].fits and options[0].format == "nvfp4" and options[0].node.platform == "cuda":
        yield (
            "For long prompts there is nvfp4-a4: the same memory, computed by FP4 tensor cores where the GPU has them (a GB10 does). It is "
            "less accurate (docs/formats.md)."
        )


def _method(headers: Headers) -> str | None:
    """How the stored weights are quantized; None where they are not."""
    source = headers.model.checkpoint.quantization
    return None if source is None else source.method


def _free(hardware: Hardware) -> int:
    return hardware.memory_bytes - hardware.system_bytes


def _guess_notes(spec: ModelConfig, args: EngineArgs, headers: Headers, options: Sequence[Option], doubt: str | None) -> Iterator[str]:
    """The notes on numbers that are a guess: the reason, and the way to exact ones.

    doubt: the reason why vLLM gave no answer, None without one.
    """
    sure = {option.footprint.sureness for option in options if option.footprint is not None}
    unknown, shape = serving_of(args.undecided(), headers, options[0].node).unknown if options else frozenset(), headers.model.shape
    if GUESS not in sure:
        return
    reason = None if doubt is None else doubt_in_short(doubt)
    silent = "vLLM gave no answer" if reason is None or unknown else f"vLLM, which was asked, gave no answer: {reason}"
    if unknown:
        what = " and ".join(settings_uncounted(args)) or "what its draft takes"
        cure = "a start measures it" if OTHER in unknown else "a plan asks vLLM without --quick, where its runtime is on this machine"
        cure = cure if reason is None else f"vLLM gave no answer: {reason}"
        yield f"The numbers are a guess, because sparkd has no formula for the effect of {what}; {cure}."
    if EXACT in sure:
        return  # vLLM has built the model
    if shape.gaps:
        yield f"Its {headers.model.checkpoint.config_file} does not tell {', '.join(shape.gaps)}, and {silent}."
    elif reason is not None and not unknown:
        yield f"The numbers are a guess: {silent}."


def _vllm_json(entry: PlannedEntry, consultation: Consultation) -> dict[str, Any]:
    """The vLLM that a plan may rely on.

    version: null where the runtime has no vLLM.
    answered: whether it answered a question.
    unanswered: the number of questions that it was not asked yet, or did not answer; 0 where this node has no such vLLM.
    """
    runtime = entry.runtime
    unanswered = consultation.unanswered if runtime.version is not None and runtime.away is None else 0
    return {"runtime": runtime.place, "version": runtime.version, "answered": consultation.answered, "unanswered": unanswered}


def to_json(
    args: EngineArgs,
    headers: Headers,
    nodes: int,
    options: Sequence[Option],
    hardware: Hardware,
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
    cache = cache_of(args, hardware.platform) or {}
    return {
        "model": args.spec.model,
        "folder": checkpoint.folder,
        "architecture": shape.architecture,
        "layers": shape.layers,
        "max_len": shape.max_len,
        "bytes": inventory.stored_bytes,
        "unloaded": dict(inventory.unloaded),
        "unknown_experts": inventory.unknown_experts() if any(option.format != AS_STORED for option in options) else {},
        "quantization": _method(headers),
        "hardware": asdict(hardware),
        "asked": {
            "nodes": nodes,
            "requests": int(cache.get("sequences", 1)),
            "max_model_len": None if args.spec.max_model_len == AUTO else serving_of(args, headers, hardware).max_model_len,
            "speculative": headers.drafting.method if headers.drafting is not None else None,
        },
        "options": [option_json(option) for option in options],
        "choice": None if best is None else {**option_json(best), **(start or {})},
        "refusal": None if refusal is None else refusal.to_json(),
    }


def option_json(option: Option) -> dict[str, Any]:
    """An option as JSON. footprint: null where vLLM cannot serve the model that way."""
    footprint = option.footprint
    most_gib = max(1, _free(option.node) // GIB)
    return {
        "model": option.args.spec.model,
        "prequantized": _method(option.headers) if option.is_copy else None,
        "format": option.format,
        "nodes": option.nodes,
        "tensor_parallel": option.ways[0],
        "pipeline_parallel": option.ways[1],
        "fits": option.fits,
        "reason": option.reason,
        "max_model_len": option.serving.max_model_len,
        "longest": option.longest,
        "reserved_gib": reserved_gib(option.args, option.node, most_gib, option.known),
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
            "cache": footprint.cache,
            "sureness": footprint.sureness,
            "upper": footprint.upper_bytes,
            "upper_kv": footprint.upper_cache_bytes,
            "kv_bytes_per_token": footprint.kv.per_token,
            "kv_bytes_per_request": footprint.kv.per_request,
            "load_peak": footprint.load_peak_bytes,
            "disk": footprint.weights.disk_bytes if footprint.weights.changed else 0,
            "active_bytes": footprint.weights.active_bytes,
            "by_class": dict(footprint.weights.by_kind),
            "first_load_s": footprint.first_load_s,
            "next_load_s": footprint.next_load_s,
            "decode_tokens_s": footprint.decode_tokens_s,
        },
    }
