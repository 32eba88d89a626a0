"""Owns whether a configured model is let in: what it needs at least, what it will take, and what would fit where it does not. Never starts
anything, decides nothing that is `auto` (sparkd.capacity.auto_resolve), and says nothing where a model's headers are not on this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparkd.capacity.consultation import UNCHANGED, Ask, Consultation, nobody
from sparkd.capacity.fit import AS_STORED, FitRequest, choose, gib
from sparkd.capacity.footprint import Footprint, footprint
from sparkd.capacity.kv_cache import BATCH_TOKENS, SEQUENCES, KvCost, KvLayout, Serving, kv_layout, sized
from sparkd.capacity.parallelism import refusal, uneven_groups, unfit
from sparkd.capacity.profiles import engine_of, learned_of
from sparkd.capacity.speculative import FLAG, Drafting, of_config
from sparkd.capacity.vllm_figures import EXACT, GUESS, Exact
from sparkd.capacity.weights import Inventory, inventory, refuse_incomplete
from sparkd.checkpoint import CONFIG, Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError, CheckpointIncomplete, ConfigError
from sparkd.hardware import GIB, SPARK, UNKNOWN_RATES, Hardware
from sparkd.models.prequantized import prequantized
from sparkd.models.shape import LENGTHS, Shape, rotary_tables, shape_of, text_config
from sparkd.models.source import folder_of
from sparkd.schema.engine_flags import flags_of
from sparkd.schema.kv_cache import cache_of, in_words
from sparkd.schema.model import ModelConfig
from sparkd.schema.quantize import AUTO
from sparkd.vllm.releases import Release
from sparkd.vllm.translate import LOAD_FORMAT, flag_name, speculative_config, values_of
from sparkd.vllm.unaccounted_args import (
    CACHE,
    KV_DTYPES,
    WEIGHTS,
    at_any_length,
    block_of,
    changed_by,
    counted,
    in_blocks,
    switched,
    unsized,
)
from workers.host import regular_file
from workers.kv.profiles import checkpoint_of
from workers.quantization.recipe import QuantizationRecipe

# Tensor-parallel and pipeline-parallel size.
Ways = tuple[int, int]

# The first release that was seen to take YaRN's max_position_embeddings for the stretched length; 0.26 was seen not to.
YARN_ONCE_SINCE: Release = (0, 32)
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# The load formats that need every file of a checkpoint; others read no weights here, or files of their own.
_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", LOAD_FORMAT)


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
class Headers:
    """The headers of a model, wherever they are. model: of model and draft together."""

    model: Inventory
    drafting: Drafting | None = None

    @staticmethod
    def of(spec: ModelConfig, checkpoint: Checkpoint, read: Callable[[str], Checkpoint]) -> Headers:
        """read: the headers of a draft, by folder or hub id. Raises CheckpointError, and ConfigError for a draft that is not counted."""
        model = inventory(checkpoint, shape_of(checkpoint.config))
        refuse_incomplete(model)
        config = speculative_config(spec.extra_args)
        drafted = of_config(config, model.shape, read) if config is not None else None
        return Headers(model if drafted is None or not drafted.layers else drafted.inventory(checkpoint, model.shape), drafted)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What goes before a formula. profiles: the folder of what earlier starts measured, with the engine's release `vllm`; ask: what vLLM
    said about a model. draft: the headers of its draft, where that need not be on this machine."""

    profiles: str | None = None
    vllm: str | None = None
    ask: Ask = nobody
    draft: Checkpoint | None = None

    def consultation(self, spec: ModelConfig, checkpoint: Checkpoint, env: Mapping[str, str], hardware: Hardware) -> Consultation:
        return Consultation(self.ask, checkpoint, flags_of(spec), env, hardware, self.draft)


NOTHING = Evidence()


def account(
    spec: ModelConfig,
    hardware: Hardware,
    env: Mapping[str, str],
    evidence: Evidence = NOTHING,
    ways: Ways = (1, 1),
    headers: Headers | None = None,
    *,
    guesses: bool = False,
) -> Account | None:
    """None where nothing can be said beforehand: headers that are not here or cannot be read, sizes that nothing tells, flags of the
    operator's own that change the account in a way that neither formulas nor vLLM's answer have. ways: over how many ranks, each on a
    node of its own. headers: where they were read already. guesses: whether such flags leave a guess instead.

    Raises CheckpointError for layers that vLLM makes up and the files contradict (Consultation.completed)."""
    headers = headers or headers_here(spec, env)
    if headers is None:
        return None
    try:
        recipe = recipe_of(spec, env)
        consultation = consulted(spec, headers.model, recipe, hardware, env, ways, evidence)
    except (CheckpointError, ConfigError):
        return None  # the engine says it
    model = consultation.completed(headers.model)
    try:
        plain = serving_of(spec, replace(headers, model=model), hardware, env)
        serving = replace(plain, tensor_parallel=ways[0], pipeline_parallel=ways[1])
        engine, profiles = engine_of(spec, env, evidence.vllm, hardware.platform), evidence.profiles
        learned = learned_of(profiles, engine, folder_of(spec.model, spec.revision, env), ways, hardware.name) if profiles else None
        exact = consultation.exact(recipe, serving)
        if exact is not None and exact.refusal is not None:
            return None  # the engine says it, in vLLM's own words
        if not guesses and not (exact or Exact()).settles(serving.unknown):
            return None
        if (exact is None or exact.layout is None) and not model.shape.mixers:
            return None
        eager = counted(spec).enforce_eager
        needed = footprint(model, recipe, serving, hardware, eager=eager, margin_bytes=0, learned=learned, exact=exact)
    except (CheckpointError, ConfigError):
        return None  # the engine says it, with the tensor's name
    fixed = needed.fixed + needed.upper_bytes
    layout = exact.layout if exact is not None and exact.layout is not None else kv_layout(model.shape, serving)
    size = cache_of(spec)
    cache = sized(size, layout, serving.max_model_len)
    cache_words = in_words(size) if isinstance(size, Mapping) and cache is not None and cache > needed.kv.least else None
    least = fixed + max(needed.kv.least, 0 if cache is None else cache)
    sentence = _sentence(needed, serving, least, cache_words)
    upper = needed.upper_bytes if needed.sureness == GUESS else None
    return Account(least, fixed, cache, sentence, serving.max_model_len, layout, upper, needed.sureness)


def consulted(
    spec: ModelConfig,
    model: Inventory,
    recipe: QuantizationRecipe,
    hardware: Hardware,
    env: Mapping[str, str],
    ways: Ways,
    evidence: Evidence,
) -> Consultation:
    consultation = evidence.consultation(spec, model.checkpoint, env, hardware)
    consultation.ask([(UNCHANGED, *ways), (recipe, *ways)])
    return consultation


def illegal(
    spec: ModelConfig,
    hardware: Hardware,
    env: Mapping[str, str],
    ways: Ways,
    evidence: Evidence = NOTHING,
    headers: Headers | None = None,
) -> str | None:
    """Why vLLM would not split the model over `ways` ranks, without a full stop; None where it would, or nothing is known of it."""
    headers = headers or headers_here(spec, env)
    if headers is None:
        return None
    model = headers.model
    try:
        recipe = recipe_of(spec, env)
        split = Serving(1, tensor_parallel=ways[0], pipeline_parallel=ways[1])
        exact = consulted(spec, model, recipe, hardware, env, ways, evidence).exact(recipe, split)
        if exact is not None and exact.decides:
            return exact.refusal or unfit(model, recipe, ways[0], hardware.platform)
        return None if _is_other(spec, model) else refusal(model, recipe, *ways, hardware.platform)
    except (CheckpointError, ConfigError):
        return None  # the engine says it, with the tensor's name


def recipe_of(spec: ModelConfig, env: Mapping[str, str]) -> QuantizationRecipe:
    """The entry's recipe; as stored where `quantize` is absent or still `auto`. Raises ConfigError."""
    return QuantizationRecipe.parse("bf16") if spec.quantize in (None, AUTO) else QuantizationRecipe.parse(spec.quantize or None, dict(env))


def advice(
    spec: ModelConfig, hardware: Hardware, env: Mapping[str, str], offered_bytes: int, ways: Ways = (1, 1), *, as_asked: bool = False
) -> str:
    """The choices that would fit into offered_bytes of each node instead, split in `ways`; empty where none is known. as_asked: that the
    entry's own length and format fit is an answer too, because it was split otherwise."""
    headers = headers_here(spec, env)
    if headers is None:
        return ""
    model, serving = headers.model, serving_of(spec, headers, hardware, env)
    if serving.unknown:
        return ""
    machine = replace(hardware, memory_bytes=offered_bytes, system_bytes=0)
    wish = FitRequest(serving.max_model_len, 1, ways[0] * ways[1], serving, None, counted(spec).enforce_eager, 0, ways=(ways,))
    options = choose(model, machine, wish).options
    own = (
        (QuantizationRecipe.parse(spec.quantize).default.spelling if spec.quantize else AS_STORED)
        if spec.quantize is not None
        else AS_STORED
    )
    if not as_asked and any(option.fits and option.format == own for option in options):
        return ""  # then it is another key that stands in the way
    cures = []
    shorter = next((option.longest for option in options if option.format == own and option.longest), 0)
    if shorter:
        cures.append(f"max_model_len {shorter:,} as it is")
    better = next((option for option in options if option.fits and option.format not in (own, AS_STORED)), None)
    if better is not None and better.footprint is not None:
        cures.append(f"quantize: {better.format} ({gib(better.footprint.total)})")
    if source := next(_fitting(spec, model, machine, replace(wish, quantize="bf16"), env), None):
        cures.append(source)
    return f"What would fit: {', or '.join(cures)}" if cures else ""


def _fitting(spec: ModelConfig, model: Inventory, machine: Hardware, wish: FitRequest, env: Mapping[str, str]) -> Iterator[str]:
    """The same model on this node, quantized already. It is named and not taken: a request for a model is served by that model."""
    for name, checkpoint in prequantized(spec.model, model.checkpoint, {**os.environ, **env}):
        best = choose(inventory(checkpoint, shape_of(checkpoint.config)), machine, wish).best
        if best is not None and best.footprint is not None:
            yield f"model: {name}, which is quantized already ({gib(best.footprint.total)})"


def too_long(spec: ModelConfig, env: Mapping[str, str], release: Release | None = None) -> str | None:
    """Why vLLM would refuse the entry's max_model_len (vllm/config/model.py, _get_and_verify_max_len); None where it would not, or nothing
    on this machine tells how long the model's requests may be. release: of vLLM; what that judges counts, and else the longest of all."""
    folder, length = folder_of(spec.model, spec.revision, env), counted(at_any_length(spec)).max_model_len
    free = env.get(_LONGER) or os.environ.get(_LONGER, "0")  # an engine inherits it (workers/rank/command.py)
    if folder is None or not isinstance(length, int) or free.strip().lower() in ("1", "true"):
        return None
    try:
        if reads_another_config(spec, os.listdir(folder)):
            return None
        config = json.loads(regular_file.read(Path(folder) / CONFIG))
        text, most = text_config(config), shape_of(config).max_len
    except (OSError, ValueError, AttributeError):
        return None
    if not any(text.get(key) for key in LENGTHS) or (spec.trusts_code() and config.get("auto_map")):
        return None  # vLLM knows no end, or a class of the model's own says where it is
    stated = [size for place in (config, text) if isinstance(size := place.get("model_max_length"), int)]
    longest = [most, *stated, *(_stretched(text, table, max(most, *stated, 0), release) for table in rotary_tables(text).values())]
    if length <= max(longest):
        return None
    cure = f"choose {most:,} or less, scale its rotary embedding (--hf-overrides in extra_args), or set {_LONGER}: 1 in env"
    return f"{length:,} tokens are more than the {most:,} that the model was made for ({CONFIG}), and vLLM will refuse to start: {cure}."


def fault(spec: ModelConfig, env: Mapping[str, str]) -> CheckpointError | None:
    """Why the files of the model here cannot be loaded, as `sparkd plan` refuses them; None where they can, or are not here.

    The missing files of a hub id are fetched by its engine. CheckpointUncounted: of these files only the engine knows.
    """
    folder = folder_of(spec.model, spec.revision, env)
    formats = [value for *_, value in values_of(flags_of(spec), "load-format")]
    if folder is None or not os.path.isdir(folder) or (formats and formats[-1] not in _READS_SAFETENSORS):
        return None
    try:
        checkpoint = _checkpoint(folder)
        with suppress(ConfigError):
            refuse_incomplete(inventory(checkpoint, shape_of(checkpoint.config)))
    except CheckpointIncomplete as error:
        return error if spec.model.startswith("/") else None
    except CheckpointError as error:
        return error
    except OSError:
        return None  # this user may not look there
    return None


def _checkpoint(folder: str) -> Checkpoint:
    try:
        return _read(folder, checkpoint_of(folder)).checkpoint
    except (CheckpointError, OSError):
        return read_checkpoint(folder)


def reads_another_config(spec: ModelConfig, files: Iterable[str] = ()) -> bool:
    """Whether flags or files of other kinds tell vLLM how long a request may be: Mistral's params.json, a sentence transformer's own."""
    flags = any((flag_name(arg) or "").startswith(("hf-", "config-f", "revision")) for arg in spec.extra_args)
    return flags or any(name == "params.json" or fnmatchcase(name, "sentence_*_config.json") for name in files)


def _stretched(text: Mapping[str, Any], table: Mapping[str, Any], most: int, release: Release | None) -> float:
    """The longest request that a table may allow. For YaRN vLLM 0.26 multiplies the original length, or one that is the product already."""
    factor, kind = table.get("factor"), str(table.get("rope_type") or table.get("type"))
    settled = release is not None and release >= YARN_ONCE_SINCE and ("yarn" in kind or kind == "deepseek_llama_scaling")
    if not isinstance(factor, int | float) or settled or kind in ("su", "longrope", "llama3") or "gemma3" in str(text.get("model_type")):
        return 0
    original = table.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    return factor * max(size for size in (most, original, *map(text.get, LENGTHS)) if isinstance(size, int))


def uneven(spec: ModelConfig, env: Mapping[str, str]) -> str | None:
    """Why the loader would refuse the entry's `quantize`: groups that are not whole on any number of ranks, or what
    QuantizationRecipe.assign refuses. None where it would not, or the headers are not on this machine."""
    folder = folder_of(spec.model, spec.revision, env)
    if folder is None or spec.quantize in (None, AUTO):
        return None
    try:
        model, recipe = _read(folder, checkpoint_of(folder)), recipe_of(spec, env)
    except (CheckpointError, ConfigError, OSError):
        return None  # the engine says it, with the tensor's name
    if _is_other(spec, model):
        return None
    try:
        groups = next(uneven_groups(model, recipe), None)
    except CheckpointError as error:
        return error.message
    return groups and f"{groups}."


def unmet(spec: ModelConfig, env: Mapping[str, str]) -> tuple[str, ...]:
    """As Inventory.unmet, for the entry's `quantize`; empty where the headers are not on this machine."""
    folder = folder_of(spec.model, spec.revision, env)
    if folder is None or spec.quantize in (None, AUTO):
        return ()
    try:
        return _read(folder, checkpoint_of(folder)).unmet(recipe_of(spec, env))
    except (CheckpointError, ConfigError, OSError):
        return ()  # the engine says it, with the tensor's name


def machine(platform: str, mem_total_bytes: int, reserve_bytes: int) -> Hardware:
    """This node, for planning: on a GPU a Spark's bandwidths where nothing else is known."""
    node = replace(SPARK, name="node", memory_bytes=mem_total_bytes, system_bytes=reserve_bytes, platform=platform)
    return replace(node, **UNKNOWN_RATES) if platform == "cpu" else node


def headers_here(spec: ModelConfig, env: Mapping[str, str]) -> Headers | None:
    """With the draft that its flags ask for; None where the model's are not on this machine, or none of the kinds that are counted."""
    folder = folder_of(spec.model, spec.revision, env)
    if folder is None:
        return None
    try:
        model = _read(folder, checkpoint_of(folder))
        drafted = drafting_here(spec, model.shape, env)
        return Headers(model if drafted is None or not drafted.layers else drafted.inventory(read_checkpoint(folder), model.shape), drafted)
    except (CheckpointError, ConfigError, OSError):
        return None


@lru_cache(maxsize=4)
def _read(folder: str, _identity: str) -> Inventory:
    """Kept while the files are the same: a model that waits for room is asked about again and again."""
    checkpoint = read_checkpoint(folder)
    model = inventory(checkpoint, shape_of(checkpoint.config))
    refuse_incomplete(model)
    return model


def _is_other(spec: ModelConfig, model: Inventory) -> bool:
    """Whether vLLM makes other weights of the stored ones than are counted: by its own quantizing, in a wider type, by another
    configuration."""
    own = (spec.quantization is not None and model.checkpoint.quantization is None) or spec.dtype in ("float32", "float")
    return own or WEIGHTS in changed_by(unsized(spec.extra_args))


def drafting_here(spec: ModelConfig, shape: Shape, env: Mapping[str, str]) -> Drafting | None:
    """None where there is none, and where nothing is seen of it."""

    def read(name: str) -> Checkpoint:
        return read_checkpoint(folder_of(name, None, env) or "")

    config = speculative_config(spec.extra_args)
    try:
        return of_config(config, shape, read) if config is not None else None
    except (CheckpointError, ConfigError, OSError):
        return None


def serving_of(spec: ModelConfig, headers: Headers, hardware: Hardware, env: Mapping[str, str]) -> Serving:
    """`unknown` of it says what the entry changes in a way that the formulas do not have."""
    spec, model, drafted = counted(spec), headers.model, headers.drafting
    kv_dtype = spec.kv_cache_dtype or "auto"
    unknown = changed_by(unsized(spec.extra_args))
    unknown |= {CACHE} if kv_dtype not in KV_DTYPES else set()
    unknown |= {WEIGHTS, CACHE} if _is_other(spec, model) else set()
    unknown |= {CACHE} if in_blocks(env) else set()
    if drafted is None and any(flag_name(arg) == FLAG[2:] for arg in spec.extra_args):
        unknown |= {WEIGHTS, CACHE}
    length = model.shape.max_len if spec.max_model_len in (None, "auto") else spec.max_model_len
    length = int(length or model.shape.max_len)
    batch = BATCH_TOKENS[hardware.platform]
    if switched(spec.extra_args, "enable-chunked-prefill") is False:
        batch = max(length, batch)  # a prompt in one piece (vllm/engine/arg_utils.py, where not enable_chunked_prefill)
    source = model.checkpoint.quantization
    if kv_dtype == "auto" and source is not None and hardware.platform == "cuda" and (spec.quantize is None or not source.requantizable):
        kv_dtype = source.kv_dtype
    plain = Serving(
        max_model_len=length,
        max_num_seqs=spec.max_num_seqs or SEQUENCES[hardware.platform],
        max_num_batched_tokens=spec.max_num_batched_tokens or batch,
        prefix_caching=switched(spec.extra_args, "enable-prefix-caching") is not False,
        kv_dtype=kv_dtype,
        platform=hardware.platform,
        block_tokens=block_of(spec.extra_args),
        unknown=unknown,
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
