"""Parses a model's keys, the flags of its extra_args and its engine's variables to one value, from which its memory follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkd.config import kv_cache as kv_sizing
from sparkd.config.engine_flags import flags_of
from sparkd.config.quantize import is_open
from sparkd.errors import ConfigError
from sparkd.units import GIB
from sparkd.vllm.flags import DRAFTS, Draft, amount, draft_of, parsed, speculative_config
from sparkd.vllm.unaccounted_args import (
    BLOCK,
    BLOCKS,
    BYTES,
    CACHE,
    KV_DTYPES,
    NARROW,
    WEIGHTS,
    WIDE,
    changed_by,
    count_in,
    unsized,
)
from workers.quantization.best_wish import BestWish
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

# Flags by which vLLM reads the longest request from another place than config.json.
_OTHER_CONFIG = frozenset({"hf-config-path", "hf-overrides", "config-format"})


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """An entry with its flags and variables parsed.

    spec: its keys; a plan decides those that are `auto` (see `with_keys`).
    env: of the engine.
    block_tokens: of a block of the KV cache, where a flag says so.
    cache: the size of the KV cache, as sparkd.capacity.kv_cache.sized takes it; cache_words: its spelling in the entry.
    cpu_space_bytes: the size in the CPU backend's variable.
    share: the share of the node's memory for vLLM; share_words: its spelling.
    vllm_sizes: vLLM, or a worker class that is not sparkd's, sizes the cache.
    margin_bytes: bytes to leave free, None for the default.
    draft: None without one that can be read; drafts: whether a flag for one exists, even an unreadable one.
    uncounted: flags whose effect on memory no formula covers.
    changes: the parts that they and other settings change (WEIGHTS, CACHE, OTHER in sparkd.vllm.unaccounted_args).
    """

    spec: ModelConfig
    env: Mapping[str, str]
    block_tokens: int | None
    prefix_caching: bool
    chunked_prefill: bool
    cache: Mapping[str, Any] | str | None
    cache_words: str
    cpu_space_bytes: int | None
    share: float | None
    share_words: str
    vllm_sizes: bool
    margin_bytes: int | None
    draft: Draft | None
    drafts: bool
    uncounted: tuple[str, ...]
    changes: frozenset[str]
    other_config: bool

    @property
    def recipe(self) -> QuantizationRecipe:
        """The formats of the weights; the checkpoint as stored where they are still to be chosen."""
        return self.spec.quantize if isinstance(self.spec.quantize, QuantizationRecipe) else AS_IT_IS

    @property
    def wish(self) -> BestWish | None:
        """`quantize: best`; None for anything else."""
        return self.spec.quantize if isinstance(self.spec.quantize, BestWish) else None

    @property
    def memory_gib(self) -> float | None:
        """The operator's reservation for the engine."""
        return self.spec.memory_gib if isinstance(self.spec.memory_gib, int | float) else None

    @property
    def tensor_parallel(self) -> int | None:
        return self.spec.tensor_parallel if isinstance(self.spec.tensor_parallel, int) else None

    @property
    def wide(self) -> bool:
        """Whether vLLM converts other floats to float32."""
        return self.spec.dtype in WIDE

    @property
    def flags(self) -> list[str]:
        """The vLLM flags, see sparkd.config.engine_flags.flags_of."""
        return flags_of(self.spec)

    @property
    def blocks(self) -> int | None:
        return self.cache.get("blocks") if isinstance(self.cache, Mapping) else None

    @property
    def split(self) -> tuple[int, int]:
        """(tensor-parallel size, pipeline-parallel size) of the entry; one rank where the entry leaves them open."""
        return self.tensor_parallel or 1, 1

    def given_cache(self, platform: str) -> Mapping[str, Any] | None:
        """The size of the cache from its key, its flag or the CPU backend's variable; None where the start determines it."""
        if isinstance(self.cache, Mapping):
            return None if "utilization" in self.cache else self.cache
        own = self.cpu_space_bytes if self.cache is None and platform == "cpu" and not self.vllm_sizes else None
        return {"bytes": own} if own else None

    def with_keys(self, **keys: Any) -> EngineArgs:
        """The entry with another model, revision, quantize, max_model_len or memory_gib, on which the other fields do not depend."""
        return replace(self, spec=self.spec.model_copy(update=keys))

    def quantized(self, recipe: QuantizationRecipe) -> EngineArgs:
        return self.with_keys(quantize=recipe if recipe.quantizes else None)

    def undecided(self) -> EngineArgs:
        """The entry with the checkpoint as stored in place of `quantize: auto` and `best`."""
        return self.with_keys(quantize=None) if is_open(self.spec.quantize) else self


def engine_args(spec: ModelConfig, env: Mapping[str, str]) -> EngineArgs:
    """Parse an entry. env: the engine's environment (ModelConfig.environment). Raises ConfigError for a number that vLLM refuses too."""
    flags = parsed(spec.extra_args)
    if isinstance(size := flags.get(BYTES), str) and amount(size) is None:
        raise ConfigError("--kv-cache-memory-bytes must be a size such as 2G.", param="extra_args")
    config = speculative_config(spec.extra_args)
    draft = None if config is None else draft_of(config)
    drafts = flags.get(DRAFTS, "None") != "None"  # vLLM reads None as no draft (arg_utils.py, optional_type)
    uncounted, blocks, block_tokens = tuple(unsized(flags)), count_in(flags, BLOCKS), count_in(flags, BLOCK)
    changes = changed_by(uncounted)
    changes |= {WEIGHTS, CACHE} if spec.dtype in WIDE and (drafts or spec.quantize is not None) else frozenset()
    changes |= {CACHE} if (spec.kv_cache_dtype or "auto") not in KV_DTYPES else frozenset()
    share, share_words = kv_sizing.share_of(spec)
    space_gib = kv_sizing.cpu_space_gib(env) if spec.kv_cache is None else None
    cache = spec.kv_cache if blocks is None else {"blocks": blocks}
    cache_words = kv_sizing.written("kv_cache", cache) if isinstance(cache, Mapping) else ""
    vllm_sizes = kv_sizing.vllm_sizes(spec)
    return EngineArgs(
        spec=spec,
        env=env,
        block_tokens=block_tokens,
        prefix_caching=flags.get("enable-prefix-caching") is not False,
        chunked_prefill=flags.get("enable-chunked-prefill") is not False,
        cache=cache,
        cache_words=cache_words,
        cpu_space_bytes=None if space_gib is None else space_gib * GIB,
        share=share,
        share_words=share_words,
        vllm_sizes=vllm_sizes,
        margin_bytes=kv_sizing.margin_bytes(spec) if share is None else None,
        draft=draft,
        drafts=drafts,
        uncounted=uncounted,
        changes=changes,
        other_config=not _OTHER_CONFIG.isdisjoint(flags),
    )


def settings_uncounted(args: EngineArgs) -> list[str]:
    """The settings, as written in the entry, whose effect on memory no formula covers."""
    spec = args.spec
    names = [f"{flag} (extra_args)" for flag in args.uncounted]
    names += [f"quantization: {spec.quantization}"] if spec.quantization is not None else []
    dtype = spec.dtype or NARROW[0]
    # With float32, formats and a separate draft are not counted.
    counted = args.wide and spec.quantize is None and not args.drafts
    names += [f"dtype: {dtype}"] if dtype not in NARROW and not counted else []
    return names + ([f"kv_cache_dtype: {spec.kv_cache_dtype}"] if (spec.kv_cache_dtype or "auto") not in KV_DTYPES else [])
