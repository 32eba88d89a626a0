"""Owns the contradictions between a model's entry and its config.json, the ranks it is split over and the size of its cache, and those
between its files and what vLLM makes of a config.json that says too little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sparkd.capacity.account import NOTHING, Evidence, Headers, account, drafting_here, machine, serving_of
from sparkd.capacity.consultation import UNCHANGED
from sparkd.capacity.fit import short_cache
from sparkd.capacity.kv_cache import Serving, kv_layout, longest, sized
from sparkd.capacity.parallelism import uneven_heads
from sparkd.capacity.requirement import exceeds
from sparkd.capacity.sureness import of_cache
from sparkd.capacity.vllm_figures import GUESS, Exact
from sparkd.capacity.weights import inventory
from sparkd.checkpoint import CONFIG, Checkpoint, Folder
from sparkd.checkpoint.header import AGAIN
from sparkd.checkpoint.index import object_of
from sparkd.checkpoint.quantization import source_quantization
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import GIB, SPARK, Hardware
from sparkd.models.architectures import is_checked
from sparkd.models.shape import LAYERS, Shape, shape_of
from sparkd.models.source import folder_of
from sparkd.schema.kv_cache import cache_of
from sparkd.schema.model import ModelConfig
from sparkd.schema.quantize import AUTO
from sparkd.vllm.unaccounted_args import at_any_length

_MOST_RANKS = 8


def misfits(spec: ModelConfig, env: Mapping[str, str], platform: str, evidence: Evidence = NOTHING) -> Iterator[tuple[str, str]]:
    """(key, message) of each contradiction. There is none where its config.json is not on this machine, and a guess contradicts no cache.
    platform: of engine.platform; `auto` counts as a GPU. evidence: replaces the formulas."""
    spec = at_any_length(spec)
    folder = folder_of(spec.model, spec.revision, env)
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
            yield from _layers(spec, env, platform, evidence)
        exact = _exact(spec, checkpoint, env, platform, evidence)
        yield from _ranks(spec, shape, exact)
        if is_checked(shape):
            yield from _draft(spec, shape)
        yield from _cache(spec, checkpoint, shape, env, platform, exact or Exact())
        yield from _memory(spec, env, platform, evidence)
    except (CheckpointError, ConfigError):
        return


def _exact(spec: ModelConfig, checkpoint: Checkpoint, env: Mapping[str, str], platform: str, evidence: Evidence) -> Exact | None:
    """vLLM's answer about the entry's split, whatever its format; about one rank where the split is left open."""
    ranks = spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else 1
    consultation = evidence.consultation(spec, checkpoint, env, _hardware(platform))
    consultation.ask([(UNCHANGED, ranks, 1)])
    return consultation.exact(UNCHANGED, Serving(1, tensor_parallel=ranks))


def _layers(spec: ModelConfig, env: Mapping[str, str], platform: str, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """As a load is refused over it."""
    try:
        account(spec, _hardware(platform), env, evidence, (spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else 1, 1))
    except CheckpointError as error:
        yield "model", error.message


def _ranks(spec: ModelConfig, shape: Shape, exact: Exact | None) -> Iterator[tuple[str, str]]:
    if not isinstance(spec.tensor_parallel, int):
        return
    if reason := exact.refusal if exact is not None and exact.decides else next(uneven_heads(shape, spec.tensor_parallel), None):
        counts = [ranks for ranks in range(1, _MOST_RANKS + 1) if ranks != spec.tensor_parallel]
        legal = [str(ranks) for ranks in counts if not any(uneven_heads(shape, ranks))]
        yield "tensor_parallel", f"vLLM cannot split it so: {reason}. Possible are {', '.join(legal)}."


def _draft(spec: ModelConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    if spec.speculative == "mtp" and not shape.mtp_layers:
        yield "speculative", f"{shape.architecture} has no layers here that predict tokens ahead: choose off, ngram or suffix."


def _memory(spec: ModelConfig, env: Mapping[str, str], platform: str, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """A memory_gib that is too small. Where the entry leaves the number of ranks open, it is judged by the most, which need least each."""
    if spec.memory_gib == AUTO:
        return
    ranks = spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else _MOST_RANKS
    needed = account(spec, _hardware(platform), env, evidence, (ranks, 1))
    if needed is not None and exceeds(needed, spec.memory_gib):
        cure = f"Allow it {-(-needed.least // GIB)} or more"
        where = "" if spec.tensor_parallel == ranks else f", even with the model split over {ranks} nodes"
        yield "memory_gib", f"{spec.memory_gib:g} GiB are too little{where} ({needed.sureness}): {needed.sentence}. {cure}."


def _hardware(platform: str) -> Hardware:
    return machine("cpu", SPARK.memory_bytes, SPARK.system_bytes) if platform == "cpu" else SPARK


def _cache(
    spec: ModelConfig, checkpoint: Checkpoint, shape: Shape, env: Mapping[str, str], platform: str, exact: Exact
) -> Iterator[tuple[str, str]]:
    """A cache whose size holds no request of full length: vLLM ends its start over that, after it has loaded all weights."""
    size = cache_of(spec)
    if not isinstance(size, dict) or "tokens" in size or spec.max_model_len == AUTO:
        return
    headers = Headers(inventory(checkpoint, shape), drafting_here(spec, shape, env))
    serving = serving_of(spec, headers, _hardware(platform), env)
    sureness = of_cache(shape, exact, serving.unknown)
    if serving.unknown or sureness == GUESS:
        return
    if isinstance(spec.tensor_parallel, int):
        serving = replace(serving, tensor_parallel=spec.tensor_parallel)
    layout = kv_layout(shape, serving) if exact.layout is None else replace(exact.layout, serving=serving)
    size_bytes, cost = sized(size, layout, serving.max_model_len), layout.cost(serving.max_model_len)
    short = short_cache(size, size_bytes, cost)
    if size_bytes is None or short is None:
        return
    reason, cure = short
    shorter = longest(size, layout, cost.max_model_len, size_bytes)
    cures = [cure] + ([f"choose max_model_len {shorter:,} or less"] if shorter else [])
    yield "extra_args" if "blocks" in size else "kv_cache", f"{reason} ({sureness}): {', or '.join(cures)}."
