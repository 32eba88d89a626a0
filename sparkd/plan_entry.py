"""Owns the plan of a configured model: the choice that the daemon would make of its entry, and the very ranks that it would start. Never
starts one, and never shows what an entry keeps secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from sparkd.admission import Headers, Ways, advice, recipe_of, serving_of
from sparkd.architectures import remark
from sparkd.checkpoint import Checkpoint
from sparkd.config import Config, ModelConfig
from sparkd.container import hidden
from sparkd.drafting import drafting
from sparkd.errors import ConfigError, LoadRefused, RankError
from sparkd.fit import Choice, Option, Wish, choose, gib, quality_of, rank
from sparkd.footprint import Learned
from sparkd.hardware import GIB, Hardware
from sparkd.kv_cost import Serving
from sparkd.kv_sizing import cache_of, margin_bytes, utilization_of
from sparkd.learned import FAMILIES, engine_of, learned_of
from sparkd.model_shape import shape_of
from sparkd.needs import runtime_of, said_to
from sparkd.parser_choice import with_parsers
from sparkd.parsers import OFF
from sparkd.plan_question import Others, Question
from sparkd.planned import MASTER_PORT, OWN, Offer, network, to_json
from sparkd.quantizing import AUTO
from sparkd.rank_fields import rank_fields
from sparkd.recipe_book import split
from sparkd.resolving import resolved, room_of
from sparkd.source import folder_of
from sparkd.source_quantization import SourceQuantization
from sparkd.trust import pinned
from sparkd.uncounted import unsized
from sparkd.vllm_flags import SPECULATIVE, Translation, flag_name, without
from workers.command import build_command, build_environment, parallel_flags
from workers.runtime import API_SERVER, probe
from workers.spec import RankSpec

_SECRET = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
# What a model of the entry takes from the command line instead, and what of the entry gives way to it.
_INSTEAD = {
    "quantize": ("quantization", "load_format"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
}

# And of its extra_args, beside the flag of the key's own name.
_FLAGS_INSTEAD = {
    "quantize": ("quantization", "load-format", "model-loader-extra-config"),
    "kv_cache": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
    "kv_margin_gib": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A configured model. vllm: the release of its runtime on this machine, None where that has none; entrypoint: the module that is its
    engine. origin: whose entry it is, for who asks elsewhere than the daemon that has it."""

    spec: ModelConfig
    config: Config
    vllm: str | None
    entrypoint: str
    origin: str | None = None

    @property
    def env(self) -> dict[str, str]:
        return self.spec.environment(self.config.engine)


def entry_of(spec: ModelConfig, config: Config, origin: str | None = None) -> Entry:
    """It asks the model's runtime what it has, as a start does. Where it is not on this machine, flags are shown as they are written."""
    try:
        found = probe(runtime_of(spec, config))
    except RankError:
        found = None
    entrypoint = spec.entrypoint_of(config.engine)
    if entrypoint == AUTO:
        entrypoint = (found.entrypoint if found is not None else None) or API_SERVER
    return Entry(spec, config, found.vllm if found is not None else None, entrypoint, origin)


def answer(
    entry: Entry,
    question: Question,
    checkpoint: Checkpoint,
    hardware: Hardware,
    read: Callable[[str], Checkpoint],
    unlinked: Mapping[int, str],
    others: Others | None = None,
) -> dict[str, Any]:
    """As sparkd.plan_question.answer; what the question says goes before the entry. Raises ConfigError and CheckpointError."""
    written = entry.spec.tensor_parallel
    entry = replace(entry, spec=_asked(entry.spec, question, checkpoint, read))
    spec, env = entry.spec, entry.env
    headers = Headers.of(spec, checkpoint, read)
    plain = spec.model_copy(update={"quantize": None if spec.quantize == AUTO else spec.quantize})
    serving = serving_of(plain, headers.known, hardware, env, headers)
    if serving is None:
        _refuse_flags(spec, entry)  # what vLLM would not take either is named first
        raise ConfigError(f"{spec.name}: {_uncounted(spec)}, so nothing can be said of its memory beforehand: leave it out for a plan.")
    fixed = spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else None
    nodes = max(question.nodes or 1, fixed or 1)
    asked = replace(_wish(entry, plain, headers, hardware, serving), nodes=nodes, unlinked=unlinked)
    there = dict(others(spec.model, checkpoint)) if others is not None and spec.quantize == AUTO else {}
    options: list[tuple[Option, ModelConfig]] = []
    taken: list[Offer] = []
    for ways in [(fixed, 1)] if fixed is not None else list(_ways(nodes)):
        profiles = str(entry.config.profiles_path())
        one = resolved(spec, hardware, env, _free(hardware), ways, profiles, entry.vllm, headers, beside=nodes == 1 and bool(there))
        found = replace(asked, ways=(ways,), quantize=recipe_of(one, env), max_model_len=_length(one, headers))
        if one.model in there:
            taken = [_taken(replace(entry, spec=one), there[one.model], hardware, found, read)]
            options += [(option, one) for option in choose(headers.known, hardware, replace(found, quantize=None)).options]
            continue
        options += [(option, one) for option in choose(headers.known, hardware, found).options]
        if spec.quantize == AUTO:
            # Why none of the better ones, and what else there would be.
            every = choose(headers.known, hardware, replace(found, quantize=None)).options
            options += [(option, one) for option in every if _is_beside(option, options[-1][0])]
    options.sort(key=lambda each: rank(each[0], headers.known, asked))
    best = options[0] if options and options[0][0].fits else None
    if taken and taken[0].choice.options[0].fits:
        best = taken[0].choice.options[0], one
    notes = [] if best is not None or spec.quantize == AUTO else [_advice(entry, hardware, fixed or 1)]
    notes += [_beside(name, other.quantization) for name, other in there.items() if other.quantization is not None and not taken]
    if written != spec.tensor_parallel:
        notes.append(f"Its entry asks for {written} nodes (tensor_parallel), and {nodes} {'is' if nodes == 1 else 'are'} asked for here.")
    if spec.runs_vllm(entry.config.engine):
        notes.append(remark(checkpoint.config, spec.runtime_of(entry.config.engine)) or "")
    choice = Choice(tuple(option for option, _ in options), tuple(filter(None, notes)))
    how = None if best is None else _how(entry, best[0], best[1], hardware)
    told = to_json(spec.model, headers.known, hardware, asked, choice, taken, how)
    told["entry"] = {"name": spec.name, "origin": entry.origin}
    return told if how is None else {**told, "notes": [*told["notes"], *how["said"]]}


def _taken(entry: Entry, checkpoint: Checkpoint, hardware: Hardware, asked: Wish, read: Callable[[str], Checkpoint]) -> Offer:
    """What `quantize: auto` takes instead of quantizing. entry: with its model for that of the configuration."""
    spec, headers = entry.spec, Headers.of(entry.spec, checkpoint, read)
    serving = serving_of(spec, headers.known, hardware, entry.env, headers) or asked.serving
    own = _wish(entry, spec, headers, hardware, serving)
    return Offer(spec.model, headers.known, choose(headers.known, hardware, replace(own, ways=asked.ways, quantize=asked.quantize)))


def _advice(entry: Entry, hardware: Hardware, ranks: int) -> str:
    """What would fit over as many nodes as the entry asks for, or else on one."""
    spec, env = entry.spec, entry.env
    free = max(0, room_of(spec, hardware, env, _free(hardware)).engine)
    told = advice(spec, hardware, env, free, (ranks, 1))
    if told or ranks == 1:
        return told
    return advice(spec, hardware, env, free, as_asked=True).replace("What would fit", "What would fit one node (tensor_parallel: 1)", 1)


def _asked(spec: ModelConfig, question: Question, checkpoint: Checkpoint, read: Callable[[str], Checkpoint]) -> ModelConfig:
    """The entry with what is asked for in its place."""
    short = question.nodes is not None and isinstance(spec.tensor_parallel, int) and question.nodes < spec.tensor_parallel
    given: dict[str, Any] = {
        "tensor_parallel": AUTO if short else None,
        "max_model_len": question.max_model_len,
        "max_num_seqs": question.max_num_seqs,
        "max_num_batched_tokens": question.max_num_batched_tokens,
        "kv_cache": {"sequences": question.requests} if question.requests is not None else None,
        "kv_cache_dtype": question.kv_cache_dtype,
        "kv_margin_gib": question.margin_gib,
        "quantize": question.quantize,
        "enforce_eager": question.enforce_eager,
    }
    told = {key: value for key, value in given.items() if value is not None}
    if (args := _free_of(spec.extra_args, told)) != list(spec.extra_args):
        told["extra_args"] = args
    for key in [key for key in told if key in _INSTEAD]:
        told = dict.fromkeys(_INSTEAD[key]) | told
    if question.speculative is not None and question.speculative != spec.speculative:
        wish = {key: told.get(key, getattr(spec, key)) for key in ("max_num_seqs", "quantize", "kv_cache_dtype")}
        drafted = drafting(question.speculative, spec.model, shape_of(checkpoint.config), wish, read)
        told |= {"speculative": question.speculative, "extra_args": without(told.get("extra_args", spec.extra_args), SPECULATIVE[2:])}
        if drafted is not None:
            told |= {**drafted.settings, "extra_args": [*told["extra_args"], *drafted.args], "env": {**spec.env, **drafted.env}}
    if not told:
        return spec
    try:
        return ModelConfig.model_validate({**{key: getattr(spec, key) for key in spec.model_fields_set}, **told})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the entry"
        raise ConfigError(f"{spec.name}: {where}: {first['msg'].removeprefix('Value error, ')}.", param="model") from None


def _free_of(args: Sequence[str], told: Iterable[str]) -> list[str]:
    """extra_args without what `told` says instead: vLLM takes the last of a flag, and these stand last."""
    # A switch has no value that would go with it.
    switch = ("enforce-eager", "no-enforce-eager") if "enforce_eager" in told else ()
    kept = [arg for arg in args if flag_name(arg) not in switch]
    for key in told:
        if key != "enforce_eager":
            for flag in (key.replace("_", "-"), *_FLAGS_INSTEAD.get(key, ())):
                kept = without(kept, flag)
    return kept


def _wish(entry: Entry, plain: ModelConfig, headers: Headers, hardware: Hardware, serving: Serving) -> Wish:
    """What every format and way has in common."""
    spec, env = entry.spec, entry.env
    room, share = room_of(spec, hardware, env, _free(hardware)), utilization_of(spec)
    limit = None
    if share is not None:
        limit = (room.engine, f"the {gib(room.engine)} of gpu_memory_utilization {share:g}")
    elif isinstance(spec.memory_gib, int | float):
        limit = (int(spec.memory_gib * GIB), f"the memory_gib of {spec.memory_gib:g} in its entry")
    size = cache_of(spec)
    cache = size if isinstance(size, dict) and "utilization" not in size else None
    margin = 0 if share is not None else margin_bytes(spec, env)
    profiles, held = str(entry.config.profiles_path()), folder_of(spec.model, spec.revision, env)

    def learned(recipe: Any, at: Serving) -> Learned | None:
        length = None if spec.max_model_len is None else at.max_model_len
        made = plain.model_copy(update={"max_model_len": length})
        if spec.quantize == AUTO:
            made = made.model_copy(update={"quantize": recipe.canonical() if recipe.quantizes else None})
        ways = at.tensor_parallel, at.pipeline_parallel
        engine = engine_of(made, env, entry.vllm, hardware.platform)
        return learned_of(profiles, engine, held, ways, hardware.name)

    return Wish(
        max_model_len=None if spec.max_model_len == AUTO else serving.max_model_len,
        requests=int(cache["sequences"]) if cache is not None and "sequences" in cache else 1,
        serving=serving,
        drafting=headers.drafting,
        eager=spec.enforce_eager,
        margin_bytes=margin,
        cache=cache,
        cache_limit=room.cache,
        limit=limit,
        fewest=True,
        # As vLLM allows it (vllm/config/model.py).
        beyond=env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0") == "1",
        learned=learned,
    )


def _beside(name: str, quantization: SourceQuantization) -> str:
    how = f"{name} is on this machine: the same model, quantized already ({quantization.method})"
    return f"{how}. Where the model does not fit as it is stored, and this is the only node, it is served before one is quantized here."


def _is_beside(option: Option, chosen: Option) -> bool:
    """Whether another format is no better choice than that of the daemon's."""
    return option.format != chosen.format and (not option.fits or quality_of(option.format) > quality_of(chosen.format))


def _length(one: ModelConfig, headers: Headers) -> int:
    """Of a resolved entry: where `auto` found nothing that fits, as much as the model has."""
    return one.max_model_len if isinstance(one.max_model_len, int) else headers.known.shape.max_len


def _ways(nodes: int) -> Iterator[Ways]:
    """As the daemon tries them (sparkd.siting): fewest nodes first, and of so many the most tensor parallelism."""
    for size in range(1, nodes + 1):
        yield from ((size // stages, stages) for stages in range(1, size + 1) if size % stages == 0)


def _free(hardware: Hardware) -> int:
    return hardware.memory_bytes - hardware.system_bytes


def _uncounted(spec: ModelConfig) -> str:
    flags = list(unsized(spec.extra_args))
    if flags:
        return f"{', '.join(flags)} in extra_args changes what it takes"
    if spec.quantization is not None or spec.dtype in ("float32", "float"):
        key = "quantization" if spec.quantization is not None else "dtype"
        return f"{key}: {getattr(spec, key)} is vLLM's own way with weights, which is not counted"
    return f"what {f'a cache of kv_cache_dtype: {spec.kv_cache_dtype}' if spec.kv_cache_dtype else 'its draft'} costs is not counted"


def _refuse_flags(spec: ModelConfig, entry: Entry) -> Translation:
    """What its flags are to the runtime's vLLM. Raises ConfigError where that would not be started so."""
    said = said_to(spec, entry.config, entry.vllm)
    if said.refused:
        raise ConfigError(f"{spec.name} cannot be started by the vLLM of its runtime: {said.refused[0]}", param="model")
    return said


def _how(entry: Entry, option: Option, spec: ModelConfig, hardware: Hardware) -> dict[str, Any]:
    """config: what of the entry was `auto`, and what it became. Raises ConfigError where the runtime's vLLM would not be started so."""
    if spec.runs_vllm(entry.config.engine):
        # A start that would be refused says so itself.
        with suppress(LoadRefused):
            spec = pinned(spec, entry.env, entry.config.state_dir)
        spec, _ = with_parsers(spec, entry.env, spec.runtime_of(entry.config.engine))
    said = _refuse_flags(spec, entry)
    decided = {key: getattr(spec, key) for key in ("quantize", "max_model_len") if getattr(entry.spec, key) == AUTO}
    parsers = {key: getattr(spec, key) for key in ("tool_call_parser", "reasoning_parser") if getattr(entry.spec, key) is None}
    decided |= {key: name for key, name in parsers.items() if name not in (None, OFF)}
    if spec.model != entry.spec.model:
        decided = {"model": spec.model} | decided
    if entry.spec.tensor_parallel == AUTO and option.nodes > 1:
        decided["tensor_parallel"] = option.tensor
    fields = rank_fields(entry.config, spec, hardware.platform, entry.entrypoint, said, entry.vllm)
    flags = fields.pop("flags")
    ranks = []
    for number in range(option.nodes):
        rank_spec = RankSpec.from_dict(
            {
                **fields,
                "rank_id": "plan",
                "generation": 0,
                "node_id": "node",
                "rank": number,
                "world": option.nodes,
                "run_dir": "/run/sparkd",
                "log_path": "/dev/null",
                "config_hash": "",
                "flags": [*flags, *parallel_flags(option.tensor, option.pipeline, number, "HEAD", MASTER_PORT, spec.executor)],
                "env": network(hardware, option.nodes, said.env) | dict(said.env),
                "ray": {"address": "HEAD", "group": "sparkd"} if option.nodes > 1 and spec.executor == "ray" else None,
            }
        )
        made = {name: value for name, value in build_environment(rank_spec, {}).items() if name not in OWN}
        shown = {name: value if _is_shown(name, said.env) else hidden(name) for name, value in made.items()}
        ranks.append({"node": number, "command": build_command(rank_spec), "environment": shown})
    return {
        "name": spec.name,
        "configured": True,
        "config": decided,
        "ranks": ranks,
        "container": _container(entry),
        "said": said.notes,
    }


def _is_shown(name: str, own: Mapping[str, str]) -> bool:
    """What sparkd sets itself, and of the entry's own what engines and kernels read."""
    return name not in own or (name.startswith(FAMILIES) and not _SECRET.search(name))


def _container(entry: Entry) -> dict[str, Any] | None:
    """The image that its recipe names, the variant's before the recipe's."""
    if entry.spec.recipe is None:
        return None
    name, variant = split(entry.spec.recipe)
    file, _ = entry.config.book().read(name)
    if file is None:
        return None
    found = file.container(variant)
    return None if found is None else {**found.model_dump(), "recipe": entry.spec.recipe}
