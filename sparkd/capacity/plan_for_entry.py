"""Owns the plan of a configured model: the daemon's choices for its entry, and the ranks that it would start.

Never starts one, and never shows a secret of an entry.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from sparkd.capacity.account import Evidence, needed_gib, serving_of
from sparkd.capacity.advice import advice, advised, share_too_large
from sparkd.capacity.auto_resolve import resolved, room_of
from sparkd.capacity.calibration import kept_in
from sparkd.capacity.candidates import candidates_of
from sparkd.capacity.consultation import Answers, Ask, nobody
from sparkd.capacity.container import hidden
from sparkd.capacity.fit import (
    CONFIGURED,
    FitRequest,
    FitResult,
    Option,
    choose,
    doubt_in_short,
    format_notes,
    gib,
    is_answered,
    quality_of,
    rank,
    refuse_uncounted,
    splits,
    unread,
)
from sparkd.capacity.footprint import MeasuredPeaks
from sparkd.capacity.headers import Headers, headers_here
from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.launch_spec import rank_fields
from sparkd.capacity.plan_report import MASTER_PORT, OWN, Offer, network, rank_at, to_json
from sparkd.capacity.plan_request import Others, PlanRequest
from sparkd.capacity.profiles import FAMILIES
from sparkd.capacity.requirement import runtime_of, said_to
from sparkd.capacity.speculative import drafting
from sparkd.capacity.vllm_figures import GUESS
from sparkd.checkpoint import CONFIG, Checkpoint
from sparkd.checkpoint.quantization import SourceQuantization
from sparkd.config.config import Config, ModelConfig
from sparkd.entry.hub_check import is_absent, look
from sparkd.entry.node_runtime import NodeRuntime
from sparkd.entry.parser_choice import with_parsers
from sparkd.entry.trusted_commits import at_trusted_commit, pinned
from sparkd.errors import CommitUnknown, ConfigError, HubUnreachable, LoadRefused, ModelUnusable, RankError, clause
from sparkd.hardware import GIB, Hardware
from sparkd.models.architectures import remark
from sparkd.models.shape import shape_of
from sparkd.schema.engine_args import EngineArgs, at_any_length, decided, engine_args, recipe_of, settings_uncounted
from sparkd.schema.quantize import AUTO, is_open
from sparkd.vllm.parsers import OFF
from sparkd.vllm.translate import SPECULATIVE, Translation, flag_name, without
from sparkd.vllm.unaccounted_args import OTHER, measured
from workers.host.runtime import API_SERVER, probe
from workers.kv.profiles import profiles_in
from workers.quantization.best_wish import BEST
from workers.quantization.recipe import QuantizationRecipe
from workers.rank.command import build_command, build_environment, parallel_flags

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
# By option of the command line: the keys of the entry that it replaces.
_INSTEAD = {
    "quantize": ("quantization", "load_format"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
}

# By key: the flags of extra_args that it replaces, besides the flag with the key's own name.
_FLAGS_INSTEAD = {
    "quantize": ("quantization", "load-format", "model-loader-extra-config"),
    "kv_cache": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
    "kv_margin_gib": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
}


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """A configured model. vllm: the vLLM release of its runtime, None without vLLM; entrypoint: the engine's module. origin: the file or
    daemon that has the entry."""

    spec: ModelConfig
    config: Config
    vllm: str | None
    entrypoint: str
    origin: str | None = None

    @property
    def env(self) -> dict[str, str]:
        return self.spec.environment(self.config.engine)


def entry_of(spec: ModelConfig, config: Config, origin: str | None = None, there: NodeRuntime | None = None) -> PlannedEntry:
    """The entry with the facts of its runtime, asked as at a start. there: another node's runtime, where this node lacks it. Without any
    runtime the flags stay as written. The model's files are those of the commit that a start would use."""
    spec = at_trusted_commit(spec, config)
    facts: Mapping[str, Any] = {"entrypoint": None, "vllm": None}
    with suppress(RankError):
        facts = there.facts if there is not None else probe(runtime_of(spec, config)).to_dict()
    entrypoint = spec.entrypoint_of(config.engine)
    if entrypoint == AUTO:
        entrypoint = facts["entrypoint"] or API_SERVER
    return PlannedEntry(spec, config, facts["vllm"], entrypoint, origin)


def answer(
    entry: PlannedEntry,
    question: PlanRequest,
    checkpoint: Checkpoint,
    hardware: Hardware,
    read: Callable[[str], Checkpoint],
    unlinked: Mapping[int, str],
    others: Others | None = None,
    ask: Ask = nobody,
) -> dict[str, Any]:
    """The plan of an entry, in the JSON of sparkd.capacity.plan_for_checkpoint.answer; the question overrides the entry. Raises ConfigError
    and CheckpointError."""
    written = entry.spec.tensor_parallel
    entry = replace(entry, spec=_overlaid(at_any_length(entry.spec), question, checkpoint, read))
    spec, args = entry.spec, engine_args(entry.spec, entry.env)
    if args.recipe is None:
        recipe_of(spec)  # raises ConfigError, which says why
    headers = Headers.of(args, checkpoint, read)
    plain = args.undecided()
    serving = serving_of(plain, headers, hardware)
    nodes = max(question.nodes or 1, args.tensor_parallel or 1)
    there = dict(others(spec.model, checkpoint)) if others is not None and spec.quantize == AUTO else {}
    options: list[tuple[Option, EngineArgs]] = []
    taken: list[Offer] = []
    tried = [args.split] if args.tensor_parallel is not None else list(splits(nodes))
    answers = Answers(ask)
    draft = headers.drafting.draft if headers.drafting is not None else None
    evidence = Evidence(profiles_in(str(entry.config.profiles_path)), entry.vllm, answers.kept, draft)
    kept = kept_in(str(entry.config.quantized_path) if spec.quantized_cache else None, checkpoint)
    wish = replace(_wish(plain, args, headers, hardware, serving, evidence), nodes=nodes, unlinked=unlinked, calibrated=kept)
    informed = replace(wish, ways=tuple(tried), quantize=None if is_open(spec.quantize) else args.recipe)
    consultation = replace(evidence, ask=answers.ask).consultation(args, headers.model.checkpoint, hardware)
    completed, informed = consultation.informed(headers.model, informed)
    refuse_uncounted(completed, informed)
    headers, wish = replace(headers, model=completed), replace(wish, exact=informed.exact)
    candidates = candidates_of(args, headers, beside=nodes == 1 and bool(there))
    for ways in tried:
        candidate = resolved(candidates, hardware, _free(hardware), ways, evidence).args if candidates else plain
        length = None if serving.unknown and candidate.max_model_len == AUTO else _length(candidate, headers)
        own_wish = replace(wish, ways=(ways,), quantize=candidate.recipe, max_model_len=length)
        if candidate.model in there:
            taken = [_taken(candidate, there[candidate.model], hardware, own_wish, evidence, read)]
            options += [(option, candidate) for option in choose(headers.model, hardware, replace(own_wish, quantize=None)).options]
            continue
        own_options = choose(headers.model, hardware, own_wish).options
        named = [
            replace(option, format=BEST) if is_open(spec.quantize) and option.format == CONFIGURED else option for option in own_options
        ]
        options += [(option, candidate) for option in named]
        if is_open(spec.quantize):
            # The other formats show why no better one was chosen, and the alternatives.
            every = choose(headers.model, hardware, replace(own_wish, quantize=None)).options
            options += [(option, candidate) for option in every if _is_beside(option, options[-1][0])]
    most_gib = max(1, _free(hardware) // GIB)
    if short := share_too_large(args, needed_gib(args, hardware, most_gib), hardware, most_gib, "a node"):
        taken = []
        options = [(replace(option, reason=short.reason, cause="memory"), one) if option.fits else (option, one) for option, one in options]
    options.sort(key=lambda each: rank(each[0], headers.model, wish))
    best = options[0] if options and options[0][0].fits else None
    if taken and taken[0].choice.options[0].fits:
        best = taken[0].choice.options[0], candidate
    # The refusal of a format names those that fit.
    advises = best is None and not is_open(spec.quantize) and not all(option.cause == "format" for option, _ in options)
    notes = [_advice(args, hardware)] if advises else []
    notes += [_beside(name, other.quantization) for name, other in there.items() if other.quantization is not None and not taken]
    notes += headers.model.unmet(args.recipe) if args.recipe is not None else ()
    notes += format_notes(None if best is None else best[0])
    if written != spec.tensor_parallel:
        notes.append(f"Its entry sets {written} nodes (tensor_parallel); this plan is for {nodes}.")
    answered = is_answered([option for option, _ in options])
    if spec.runs_vllm(entry.config.engine) and checkpoint.config_file == CONFIG and not answered:
        notes.append(remark(checkpoint.config, spec.runtime_of(entry.config.engine)) or "")
    guessed = any(option.footprint is not None and option.footprint.sureness == GUESS for option, _ in options)
    if serving.unknown and guessed:
        notes.append(_guessed(spec, args, serving, consultation.doubt()))
    notes += unread(headers.model, [option for option, _ in options], None if serving.unknown else consultation.doubt())
    if flags := list(dict.fromkeys(measured(spec.extra_args))):
        notes.append(f"Not counted here, but measured by each start: the memory for {' and '.join(flags)} in extra_args.")
    choice = FitResult(tuple(option for option, _ in options), tuple(filter(None, notes)))
    how = None if best is None else _how(entry, best[0], decided(spec, best[1]), hardware)
    asked = replace(wish, quantize=informed.quantize)
    plan = to_json(spec.model, headers.model, hardware, asked, choice, taken, how)
    if short is not None:
        plan["refusal"] = short.to_json()
    plan["entry"] = {"name": spec.name, "origin": entry.origin}
    return plan if how is None else {**plan, "notes": [*plan["notes"], *how["notes"]]}


def _taken(
    args: EngineArgs, checkpoint: Checkpoint, hardware: Hardware, wish: FitRequest, evidence: Evidence, read: Callable[[str], Checkpoint]
) -> Offer:
    """The checkpoint that `quantize: auto` takes instead of quantizing: the model of args."""
    headers = Headers.of(args, checkpoint, read)
    # The sizes of this checkpoint are computed here: vLLM was asked about the other one only.
    own = _wish(args, args, headers, hardware, serving_of(args, headers, hardware), evidence)
    return Offer(args.model, headers.model, choose(headers.model, hardware, replace(own, ways=wish.ways, quantize=wish.quantize)))


def _advice(args: EngineArgs, hardware: Hardware) -> str:
    """The choices that would fit over as many nodes as the entry asks for, or else on one."""
    free, here = max(0, room_of(args, hardware, _free(hardware)).engine), headers_here(args)
    smaller = advised(advice(args, here, hardware, free, args.split))
    if smaller or args.split == (1, 1):
        return smaller
    return advised(advice(args, here, hardware, free, instead_of=math.prod(args.split)))


def _overlaid(spec: ModelConfig, question: PlanRequest, checkpoint: Checkpoint, read: Callable[[str], Checkpoint]) -> ModelConfig:
    """The entry with the question's options in place of its own."""
    short = question.nodes is not None and isinstance(spec.tensor_parallel, int) and question.nodes < spec.tensor_parallel
    requested: dict[str, Any] = {
        "tensor_parallel": AUTO if short else None,
        "max_model_len": question.max_model_len,
        # The number of concurrent requests: the batch, the sampler's rows and the graphs depend on it.
        "max_num_seqs": question.max_num_seqs or question.requests,
        "max_num_batched_tokens": question.max_num_batched_tokens,
        "kv_cache": {"sequences": question.requests} if question.requests is not None else None,
        "kv_cache_dtype": question.kv_cache_dtype,
        "kv_margin_gib": question.margin_gib,
        "quantize": question.quantize,
        "enforce_eager": question.enforce_eager,
    }
    overlay = {key: value for key, value in requested.items() if value is not None}
    if (args := _free_of(spec.extra_args, overlay)) != list(spec.extra_args):
        overlay["extra_args"] = args
    for key in [key for key in overlay if key in _INSTEAD]:
        overlay = dict.fromkeys(_INSTEAD[key]) | overlay
    if question.speculative is not None:
        wish = {key: overlay.get(key, getattr(spec, key)) for key in ("max_num_seqs", "quantize", "kv_cache_dtype")}
        drafted = drafting(question.speculative, spec.model, shape_of(checkpoint.config), wish, read)
        overlay |= {"extra_args": without(overlay.get("extra_args", spec.extra_args), SPECULATIVE[2:])}
        if drafted is not None:
            overlay |= {**drafted.settings, "extra_args": [*overlay["extra_args"], *drafted.args], "env": {**spec.env, **drafted.env}}
    if not overlay:
        return spec
    try:
        return ModelConfig.model_validate({**{key: getattr(spec, key) for key in spec.model_fields_set}, **overlay})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("item")
        reason = clause(first["msg"].removeprefix("Value error, "))
        raise ConfigError(f"{spec.name}: {where or 'the entry'}: {reason}.", param=where) from None


def _free_of(args: Sequence[str], keys: Iterable[str]) -> list[str]:
    """extra_args without the flags that these keys replace: extra_args come last, and vLLM takes the last flag."""
    # A switch has no value to remove with it.
    switch = ("enforce-eager", "no-enforce-eager") if "enforce_eager" in keys else ()
    left = [arg for arg in args if flag_name(arg) not in switch]
    for key in keys:
        if key != "enforce_eager":
            for flag in (key.replace("_", "-"), *_FLAGS_INSTEAD.get(key, ())):
                left = without(left, flag)
    return left


def _wish(plain: EngineArgs, args: EngineArgs, headers: Headers, hardware: Hardware, serving: Serving, evidence: Evidence) -> FitRequest:
    """The numbers that all formats and splits share. plain: args with the checkpoint as stored in place of `auto`."""
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
        drafting=headers.drafting,
        eager=args.enforce_eager,
        margin_bytes=0 if args.share is not None else args.margin_bytes,
        cache=cache,
        cache_limit=room.cache,
        limit=limit,
        fewest=True,
        # As vLLM allows it (vllm/config/model.py).
        beyond=args.env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "1" or args.other_config,
        learned=learned,
    )


def _beside(name: str, quantization: SourceQuantization) -> str:
    how = f"{name} is on this machine: the same model, quantized already ({quantization.method})"
    return f"{how}. If the stored model does not fit and this is the only node, sparkd serves that copy rather than quantize one here."


def _is_beside(option: Option, chosen: Option) -> bool:
    """Whether the option has another format that is no better than the chosen one."""
    return option.format != chosen.format and (not option.fits or quality_of(option.format) > quality_of(chosen.format))


def _length(args: EngineArgs, headers: Headers) -> int:
    """The length of a resolved entry, or the model's own where `auto` found no length that fits."""
    return args.max_model_len if isinstance(args.max_model_len, int) else headers.model.shape.max_len


def _free(hardware: Hardware) -> int:
    return hardware.memory_bytes - hardware.system_bytes


def _guessed(spec: ModelConfig, args: EngineArgs, serving: Serving, doubt: str | None) -> str:
    """A sentence that names the settings that make the numbers a guess, and the way to exact ones. doubt: why vLLM gave no answer."""
    what = " and ".join(settings_uncounted(spec, args)) or "what its draft takes"
    cure = "a plan that no daemon makes asks vLLM without --quick, where its runtime is on this machine"
    if doubt is not None:
        cure = f"vLLM gave no answer: {doubt_in_short(doubt)}"
    elif OTHER in serving.unknown:
        cure = "a start measures it"
    return f"The numbers are a guess, because sparkd has no formula for the effect of {what}; {cure}."


def _refuse_flags(spec: ModelConfig, entry: PlannedEntry) -> Translation:
    """The entry's flags, translated for the runtime's vLLM. Raises ConfigError where that vLLM would refuse them."""
    translation = said_to(spec, entry.config, entry.vllm)
    if translation.refused:
        raise ConfigError(f"{spec.name} cannot be started by the vLLM of its runtime: {translation.refused[0]}", param="model")
    return translation


def _how(entry: PlannedEntry, option: Option, spec: ModelConfig, hardware: Hardware) -> dict[str, Any]:
    """The start of the option, in JSON. config: the keys that were `auto`, with their values. Raises ConfigError where the runtime's vLLM
    would refuse the flags."""
    spec, notes = _pinned(spec, entry)
    if spec.runs_vllm(entry.config.engine):
        spec, _ = with_parsers(spec, entry.env, spec.runtime_of(entry.config.engine))
    translation = _refuse_flags(spec, entry)
    decided = {key: getattr(spec, key) for key in ("quantize", "max_model_len") if is_open(getattr(entry.spec, key))}
    parsers = {key: getattr(spec, key) for key in ("tool_call_parser", "reasoning_parser") if getattr(entry.spec, key) is None}
    decided |= {key: name for key, name in parsers.items() if name not in (None, OFF)}
    if spec.model != entry.spec.model:
        decided = {"model": spec.model} | decided
    if entry.spec.tensor_parallel == AUTO and option.nodes > 1:
        decided["tensor_parallel"] = option.tensor
    fields = rank_fields(entry.config, spec, hardware.platform, entry.entrypoint, translation, entry.vllm)
    flags = fields.pop("flags")
    ranks = []
    for number in range(option.nodes):
        at = {
            "flags": [*flags, *parallel_flags(option.tensor, option.pipeline, number, "HEAD", MASTER_PORT, spec.executor)],
            "env": fields["env"] | network(hardware, option.nodes, translation.env) | dict(translation.env),
            "ray": {"address": "HEAD", "group": "sparkd"} if option.nodes > 1 and spec.executor == "ray" else None,
        }
        rank_spec = rank_at(number, option.nodes, {**fields, **at})
        variables = {name: value for name, value in build_environment(rank_spec, {}).items() if name not in OWN}
        shown = {name: value if _is_shown(name, translation.env) else hidden(name) for name, value in variables.items()}
        ranks.append({"node": number, "command": build_command(rank_spec), "environment": shown})
    return {
        "name": spec.name,
        "configured": True,
        "config": decided,
        "ranks": ranks,
        "container": _container(entry),
        "notes": [*notes, *translation.notes],
    }


def _pinned(spec: ModelConfig, entry: PlannedEntry) -> tuple[ModelConfig, list[str]]:
    """(the entry at the commits whose code it may run, notes where these are unknown on this machine). Raises ConfigError where a start
    would refuse the code."""
    try:
        if spec.trusts_code() and is_absent(spec, entry.env):
            look(spec, entry.env)
        return pinned(spec, entry.config), []
    except (CommitUnknown, HubUnreachable, ModelUnusable) as error:
        return spec, [error.message]
    except LoadRefused as error:
        raise ConfigError(error.message, param="model") from None


def _is_shown(name: str, own: Mapping[str, str]) -> bool:
    """Whether a variable is shown: sparkd sets it, or it is one of the entry's that engines and kernels read, and no secret."""
    return name not in own or (name.startswith(FAMILIES) and not _SECRET.search(name))


def _container(entry: PlannedEntry) -> dict[str, Any] | None:
    """The container image of the entry's recipe."""
    if entry.spec.recipe is None:
        return None
    book = entry.config.book()
    file, _ = book.read(entry.spec.recipe)
    container = file.recipe.container if file is not None else None
    return None if container is None else {**container.model_dump(), "recipe": entry.spec.recipe}
