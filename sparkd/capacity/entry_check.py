"""Owns the contradictions between a model's entry and its config.json, the ranks it is split over and the size of its cache, and those
between its files and what vLLM makes of a config.json that says too little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sparkd.capacity.account import NOTHING, Evidence, account, machine, serving_of
from sparkd.capacity.advice import FitRefusal, cache_cures, more_memory, outgrown
from sparkd.capacity.candidates import Candidate, candidate_of
from sparkd.capacity.fit import short_cache
from sparkd.capacity.headers import Headers, drafting_here, headers_here
from sparkd.capacity.kv_cache import Serving, kv_layout, sized
from sparkd.capacity.parallelism import MOST_RANKS, possible_ranks, uneven_heads
from sparkd.capacity.sureness import of_cache
from sparkd.capacity.vllm_figures import GUESS, Exact
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import CONFIG, Checkpoint, Folder
from sparkd.checkpoint.header import AGAIN
from sparkd.checkpoint.index import object_of
from sparkd.checkpoint.quantization import source_quantization
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import SPARK, Hardware
from sparkd.models.architectures import is_checked
from sparkd.models.shape import LAYERS, Shape, shape_of
from sparkd.models.source import folder_of
from sparkd.schema.engine_args import EngineArgs
from sparkd.schema.quantize import AUTO
from sparkd.vllm.translate import draft_method
from workers.quantization.recipe import AS_IT_IS


def misfits(args: EngineArgs, platform: str, evidence: Evidence = NOTHING) -> Iterator[tuple[str, str]]:
    """(key, message) of each contradiction. There is none where its config.json is not on this machine, and a guess contradicts no cache.
    platform: of engine.platform; `auto` counts as a GPU. evidence: replaces the formulas."""
    folder, hardware = folder_of(args.model, args.revision, args.env), _hardware(platform)
    if folder is None:
        return
    try:
        files = Folder(folder)
        if CONFIG not in files.names:
            return
        config = object_of(files.content(CONFIG), files.path(CONFIG), AGAIN)
        shape = shape_of(config)
        checkpoint = Checkpoint(folder, config, (), {}, source_quantization(config, None, {}))
        if LAYERS in shape.gaps:
            yield from _layers(args, hardware, evidence)
        exact = _exact(args, checkpoint, hardware, evidence)
        yield from _ranks(args, shape, exact)
        if is_checked(shape) and args.draft is not None and draft_method(args.draft) == "mtp" and not shape.mtp_layers:
            yield "extra_args", f"{shape.architecture} has no layers here that predict tokens ahead: remove --speculative-config."
        yield from _cache(args, checkpoint, shape, hardware, exact)
        yield from _memory(args, hardware, evidence)
    except (CheckpointError, ConfigError):
        return


def _exact(args: EngineArgs, checkpoint: Checkpoint, hardware: Hardware, evidence: Evidence) -> Exact:
    """vLLM's answer about the entry's split, whatever its format; about one rank where the split is left open."""
    consultation = evidence.consultation(args, checkpoint, hardware)
    consultation.ask([(AS_IT_IS, *args.split)])
    return consultation.exact(AS_IT_IS, Serving(1, tensor_parallel=args.split[0]))


def _layers(args: EngineArgs, hardware: Hardware, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """(key, message) of the faults in the layers for which a load would be refused."""
    try:
        if (candidate := _candidate(args)) is not None:
            account(candidate, hardware, evidence, args.split)
    except CheckpointError as error:
        yield "model", error.message


def _ranks(args: EngineArgs, shape: Shape, exact: Exact) -> Iterator[tuple[str, str]]:
    ranks = args.tensor_parallel
    if ranks is None:
        return
    if reason := exact.refusal if exact.decides else next(uneven_heads(shape, ranks), None):
        yield "tensor_parallel", f"vLLM cannot split it so: {reason}. Possible are {possible_ranks(shape, ranks)}."


def _memory(args: EngineArgs, hardware: Hardware, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """A memory_gib that is too small. Where the entry leaves the number of ranks open, it is judged by the most, which need least each."""
    candidate = _candidate(args) if args.memory_gib is not None else None
    if candidate is None:
        return
    ranks = args.tensor_parallel or MOST_RANKS
    needed = account(candidate, hardware, evidence, (ranks, 1))
    if needed is not None and outgrown(needed, args.memory_gib):
        where = "" if args.tensor_parallel == ranks else f", even with the model split over {ranks} nodes"
        reason = f"{args.memory_gib:g} GiB are too few{where} ({needed.sureness}): {needed.sentence}"
        yield "memory_gib", FitRefusal(reason, (more_memory(needed),)).message


def _candidate(args: EngineArgs) -> Candidate | None:
    headers = headers_here(args)
    return None if headers is None else candidate_of(args, headers)


def _hardware(platform: str) -> Hardware:
    return machine("cpu", SPARK.memory_bytes, SPARK.system_bytes) if platform == "cpu" else SPARK


def _cache(args: EngineArgs, checkpoint: Checkpoint, shape: Shape, hardware: Hardware, exact: Exact) -> Iterator[tuple[str, str]]:
    """A cache whose size holds no request of full length: vLLM ends its start over that, after it has loaded all weights."""
    size = args.cache
    if not isinstance(size, Mapping) or "tokens" in size or args.max_model_len == AUTO:
        return
    serving = serving_of(args, Headers(inventory(checkpoint, shape), drafting_here(args, shape)), hardware)
    sureness = of_cache(shape, exact, serving.unknown)
    if serving.unknown or sureness == GUESS:
        return
    serving = replace(serving, tensor_parallel=args.split[0])
    layout = kv_layout(shape, serving) if exact.layout is None else replace(exact.layout, serving=serving)
    size_bytes = sized(size, layout, serving.max_model_len)
    short = short_cache(size, size_bytes, layout.cost(serving.max_model_len))
    if size_bytes is not None and short is not None:
        cures = tuple(cache_cures(size, size_bytes, layout, serving.max_model_len))
        yield "extra_args" if "blocks" in size else "kv_cache", FitRefusal(f"{short} ({sureness})", cures).message
