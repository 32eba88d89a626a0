"""Owns what is `auto` in a model's entry once it is known how much it may take: its format, and its longest context. Never says whether the
model is let in (sparkd.capacity.account), and reserves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from sparkd.capacity.account import NOTHING, Account, Evidence, Headers, Ways, account, consulted, headers_here, illegal, recipe_of
from sparkd.capacity.fit import AS_STORED, CONTEXT_STEP, DEFAULT_CONTEXT, recipes
from sparkd.capacity.footprint import PROCESS_BYTES
from sparkd.capacity.kv_cache import largest
from sparkd.capacity.parallelism import uneven_groups
from sparkd.capacity.weights import Inventory
from sparkd.errors import CheckpointError, ConfigError
from sparkd.hardware import GIB, Hardware
from sparkd.models.prequantized import prequantized
from sparkd.schema.kv_cache import cache_of, cpu_space_gib, margin_bytes, utilization_of, vllm_sizes
from sparkd.schema.model import ModelConfig
from sparkd.schema.quantize import AUTO
from sparkd.vllm.unaccounted_args import at_any_length, counted
from workers.kv.arithmetic import margin_of
from workers.kv.settings import CPU_KV_CACHE_GIB


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model may take on each of its nodes. engine: in all; cache: of its cache, None for as much as is left."""

    engine: int
    cache: int | None = None

    def holds(self, known: Account) -> bool:
        """Whether a request of full length has its place, in the cache that was asked for too."""
        caches = [size for size in (self.cache, known.cache) if size is not None]
        return known.least <= self.engine and all(known.kv.least <= size for size in caches)


def room_of(spec: ModelConfig, hardware: Hardware, env: Mapping[str, str], free_bytes: int) -> Room:
    """free_bytes: what the other models leave of what a node lends. memory_gib is the engine's own limit; kv_margin_gib stays free beside
    the engine; of a gpu_memory_utilization vLLM takes all but what its processes hold on the host."""
    own = int(spec.memory_gib * GIB) if isinstance(spec.memory_gib, int | float) else free_bytes
    if (share := utilization_of(counted(spec))) is not None:
        beside = PROCESS_BYTES[hardware.platform] if hardware.unified else 0
        return Room(min(free_bytes, own, int(share * hardware.memory_bytes) + beside))
    margin = margin_of(hardware.memory_bytes, margin_bytes(spec, env))
    return Room(min(free_bytes - margin, own), cache_limit(spec, hardware.platform, env))


def cache_limit(spec: ModelConfig, platform: str, env: Mapping[str, str]) -> int | None:
    """Bytes that a cache of no given size may take at most: of a CPU's memory, so much as sparkd.schema.kv_cache.sizing_of allows it."""
    if platform != "cpu" or cache_of(spec) is not None or vllm_sizes(spec):
        return None
    return (cpu_space_gib(env) or CPU_KV_CACHE_GIB) * GIB


def resolved(
    spec: ModelConfig,
    hardware: Hardware,
    env: Mapping[str, str],
    free_bytes: int,
    ways: Ways = (1, 1),
    evidence: Evidence = NOTHING,
    headers: Headers | None = None,
    *,
    beside: bool = False,
) -> ModelConfig:
    """With `quantize: auto` and `max_model_len: auto` decided: the best format in which a request of the asked length fits into free_bytes
    and the entry's own limits, and the longest context that fits, at most the model's own. Where nothing fits, as small as can be: what
    refuses it says so. evidence, headers: as in sparkd.capacity.account.account, which counts here too. beside: whether `quantize: auto`
    may take what this machine has of the model quantized already (sparkd.models.prequantized), before anything is quantized here.

    Beside flags that leave an account a guess, a format is chosen by that, and a length of `auto` is left to vLLM, which measures. Raises
    CheckpointError as sparkd.capacity.account.account.
    """
    spec = at_any_length(spec)
    if AUTO not in (spec.quantize, spec.max_model_len):
        return spec
    headers = headers or headers_here(spec, env)
    plain = spec.model_copy(update={"quantize": None if spec.quantize == AUTO else spec.quantize})
    if headers is None:
        return plain
    known = consulted(plain, headers.model, recipe_of(plain, env), hardware, env, ways, evidence).completed(headers.model)
    room = room_of(spec, hardware, env, free_bytes)

    def own_headers(one: ModelConfig) -> Headers | None:
        return headers if one.model == spec.model else None

    def at(one: ModelConfig, tokens: int) -> Account | None:
        timed = one.model_copy(update={"max_model_len": tokens})
        try:
            return account(timed, hardware, env, evidence, ways, own_headers(one), guesses=True)
        except CheckpointError:
            return None  # of a neighbour: the entry's own files were judged above

    def fits(one: ModelConfig, tokens: int) -> bool:
        found = at(one, tokens)
        return found is not None and room.holds(found)

    most = spec.max_model_len if isinstance(spec.max_model_len, int) else known.shape.max_len
    step = CONTEXT_STEP if spec.max_model_len == AUTO else most
    enough = min(most, DEFAULT_CONTEXT) if spec.max_model_len == AUTO else most
    # Trust in code belongs to the entry's own repository.
    judged = partial(illegal, hardware=hardware, env=env, ways=ways, evidence=evidence)
    legal = _legal(spec, plain, known, env, partial(judged, headers=headers))
    others = _neighbours(plain, known, env, judged) if beside and spec.quantize == AUTO and not spec.trusts_code() else ()
    found = [(one, largest(partial(fits, one), most, step)) for one in _ranked(legal, others)]
    best = next((pair for pair in found if pair[1] >= enough), None) or max(found, key=lambda pair: pair[1], default=(plain, 0))
    if not best[1] and found:
        best = min(found, key=lambda pair: _least(at(pair[0], min(most, CONTEXT_STEP))))
    chosen = best[0].model_copy(update={"max_model_len": best[1]})
    if spec.max_model_len != AUTO or not best[1] or account(chosen, hardware, env, evidence, ways, own_headers(best[0])) is None:
        return best[0]
    return chosen


def _least(known: Account | None) -> float:
    return float("inf") if known is None else known.least


def _ranked(legal: Iterable[ModelConfig], others: Iterable[ModelConfig]) -> list[ModelConfig]:
    """As it is stored, then as others have quantized it, who had data to calibrate with, then by ourselves (sparkd.capacity.fit.rank)."""
    own = list(legal)
    return [*(one for one in own if one.quantize is None), *others, *(one for one in own if one.quantize is not None)]


def _neighbours(
    plain: ModelConfig, known: Inventory, env: Mapping[str, str], judged: Callable[[ModelConfig], str | None]
) -> Iterator[ModelConfig]:
    """The entry with each checkpoint of the same model that this machine has in four or eight bits."""
    for name, _ in prequantized(plain.model, known.checkpoint, {**os.environ, **env}):
        one = plain.model_copy(update={"model": name, "revision": None})
        if judged(one) is None:
            yield one


def _legal(
    spec: ModelConfig, plain: ModelConfig, known: Inventory, env: Mapping[str, str], judged: Callable[[ModelConfig], str | None]
) -> Iterator[ModelConfig]:
    """The entry in each format that vLLM would split so, best first."""
    asked = None if spec.quantize == AUTO else recipe_of(plain, env) if spec.quantize is not None else "bf16"
    for name, recipe in recipes(known, asked):
        try:
            if next(uneven_groups(known, recipe), None):
                continue
        except (CheckpointError, ConfigError):
            continue
        quantized = spec.quantize == AUTO and name != AS_STORED
        one = plain.model_copy(update={"quantize": recipe.canonical()}) if quantized else plain
        if judged(one) is None:
            yield one
