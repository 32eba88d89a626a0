"""Owns what is `auto` in a model's entry once it is known how much it may take: its format, and its longest context. Never says whether the
model is let in (sparkd.admission), and reserves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sparkd.admission import KNOWN_KV_DTYPES, Account, Headers, Ways, account, inventory_of, serving_of
from sparkd.errors import CheckpointError, ConfigError, RankError
from sparkd.fit import AS_STORED, CONTEXT_STEP, DEFAULT_CONTEXT, recipes
from sparkd.footprint import PROCESS_BYTES
from sparkd.hardware import GIB, Hardware
from sparkd.kv_cost import largest
from sparkd.kv_sizing import cache_of, cpu_space_gib, margin_bytes, utilization_of, vllm_sizes
from sparkd.legal import refusal
from sparkd.model_config import ModelConfig
from sparkd.model_shape import shape_of
from sparkd.prequantized import prequantized
from sparkd.quantizing import AUTO
from sparkd.weight_cost import Inventory, inventory
from workers.kv.arithmetic import margin_of
from workers.kv.settings import CPU_KV_CACHE_GIB
from workers.stream.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take on each of its nodes. engine: in all; cache: of its cache, None for as much as is left."""

    engine: int
    cache: int | None = None

    def holds(self, known: Account) -> bool:
        """Whether a request of full length has its place, in the cache that was asked for too."""
        caches = [size for size in (self.cache, known.cache) if size is not None]
        return known.least <= self.engine and all(known.request <= size for size in caches)


def room_of(spec: ModelConfig, hardware: Hardware, env: Mapping[str, str], free_bytes: int) -> Room:
    """free_bytes: what the other models leave of what a node lends. memory_gib is the engine's own limit; kv_margin_gib stays free beside
    the engine; of a gpu_memory_utilization vLLM takes all but what its processes hold on the host."""
    own = int(spec.memory_gib * GIB) if isinstance(spec.memory_gib, int | float) else free_bytes
    if (share := utilization_of(spec)) is not None:
        beside = PROCESS_BYTES[hardware.platform] if hardware.unified else 0
        return Room(min(free_bytes, own, int(share * hardware.memory_bytes) + beside))
    margin = margin_of(hardware.memory_bytes, margin_bytes(spec, env))
    return Room(min(free_bytes - margin, own), cache_limit(spec, hardware.platform, env))


def cache_limit(spec: ModelConfig, platform: str, env: Mapping[str, str]) -> int | None:
    """Bytes that a cache of no given size may take at most: of a CPU's memory, so much as sparkd.kv_sizing.sizing_of allows it."""
    if platform != "cpu" or cache_of(spec) is not None or vllm_sizes(spec):
        return None
    return (cpu_space_gib(env) or CPU_KV_CACHE_GIB) * GIB


def resolved(
    spec: ModelConfig,
    hardware: Hardware,
    env: Mapping[str, str],
    free_bytes: int,
    ways: Ways = (1, 1),
    profiles: str | None = None,
    vllm: str | None = None,
    headers: Headers | None = None,
    *,
    beside: bool = False,
) -> ModelConfig:
    """With `quantize: auto` and `max_model_len: auto` decided: the best format in which a request of the asked length fits into free_bytes
    and the entry's own limits, and the longest context that fits, at most the model's own. Where nothing fits, as small as can be: what
    refuses it says so. profiles, vllm, headers: as in sparkd.admission.account, which counts here too. beside: whether `quantize: auto` may
    take what this machine has of the model quantized already (sparkd.prequantized), before anything is quantized here.

    Raises RankError for `quantize: auto` beside a kind of cache that is not counted.
    """
    if AUTO not in (spec.quantize, spec.max_model_len):
        return spec
    known = inventory_of(spec, env, headers)
    plain = spec.model_copy(update={"quantize": None if spec.quantize == AUTO else spec.quantize})
    if known is not None and spec.quantize == AUTO and (spec.kv_cache_dtype or "auto") not in KNOWN_KV_DTYPES:
        why = f"what a KV cache of kv_cache_dtype: {spec.kv_cache_dtype} costs is not counted"
        raise RankError(f"{spec.name}: quantize: auto cannot be decided, because {why}: name a format, or leave kv_cache_dtype out.")
    if known is None or serving_of(plain, known, hardware, env, headers) is None:
        return plain
    room = room_of(spec, hardware, env, free_bytes)

    def at(one: ModelConfig, tokens: int) -> Account | None:
        own = headers if one.model == spec.model else None
        return account(one.model_copy(update={"max_model_len": tokens}), hardware, env, profiles, ways, vllm, own)

    def fits(one: ModelConfig, tokens: int) -> bool:
        found = at(one, tokens)
        return found is not None and room.holds(found)

    most = spec.max_model_len if isinstance(spec.max_model_len, int) else known.shape.max_len
    steps = (most - 1) // CONTEXT_STEP if spec.max_model_len == AUTO else 0
    enough = min(most, DEFAULT_CONTEXT) if spec.max_model_len == AUTO else most
    # Trust in code belongs to the entry's own repository.
    others = _neighbours(plain, known, env, ways) if beside and spec.quantize == AUTO and not spec.trusts_code() else ()
    found = [(one, _longest(partial(fits, one), most, steps)) for one in _ranked(_legal(spec, plain, known, env, ways), others)]
    best = next((pair for pair in found if pair[1] >= enough), None) or max(found, key=lambda pair: pair[1], default=(plain, 0))
    if not best[1] and found:
        best = min(found, key=lambda pair: _least(at(pair[0], min(most, CONTEXT_STEP))))
    told = {"max_model_len": best[1]} if spec.max_model_len == AUTO and best[1] else {}
    return best[0].model_copy(update=told)


def _longest(fits: Callable[[int], bool], most: int, steps: int) -> int:
    """`most`, or so many whole steps; 0 where nothing fits."""
    if fits(most):
        return most
    return CONTEXT_STEP * largest(lambda number: fits(number * CONTEXT_STEP), steps)


def _least(known: Account | None) -> float:
    return float("inf") if known is None else known.least


def _ranked(legal: Iterable[ModelConfig], others: Iterable[ModelConfig]) -> list[ModelConfig]:
    """As it is stored, then as others have quantized it, who had data to calibrate with, then by ourselves (sparkd.fit.rank)."""
    own = list(legal)
    return [*(one for one in own if one.quantize is None), *others, *(one for one in own if one.quantize is not None)]


def _neighbours(plain: ModelConfig, known: Inventory, env: Mapping[str, str], ways: Ways) -> Iterator[ModelConfig]:
    """The entry with each checkpoint of the same model that this machine has in four or eight bits."""
    for name, checkpoint in prequantized(plain.model, known.checkpoint, {**os.environ, **env}):
        try:
            why = refusal(inventory(checkpoint, shape_of(checkpoint.config)), Recipe.parse("bf16"), *ways)
        except (CheckpointError, ConfigError):
            continue
        if why is None:
            yield plain.model_copy(update={"model": name, "revision": None})


def _legal(spec: ModelConfig, plain: ModelConfig, known: Inventory, env: Mapping[str, str], ways: Ways) -> Iterator[ModelConfig]:
    """The entry in each format that vLLM would split so, best first."""
    asked = None if spec.quantize == AUTO else Recipe.parse(spec.quantize or None, dict(env)) if spec.quantize is not None else "bf16"
    for name, recipe in recipes(known, asked):
        try:
            if refusal(known, recipe, *ways):
                continue
        except (CheckpointError, ConfigError):
            continue
        quantized = spec.quantize == AUTO and name != AS_STORED
        yield plain.model_copy(update={"quantize": recipe.canonical()}) if quantized else plain
