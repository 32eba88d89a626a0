"""Parses a model's keys, the flags of its extra_args and its engine's variables to one value, from which its memory follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkd.config import kv_cache as kv_sizing
from sparkd.config.engine_flags import flags_of
from sparkd.config.quantize import Quantize, is_open
from sparkd.errors import ConfigError
from sparkd.units import GIB
from sparkd.vllm.flags import DRAFTS, Draft, amount, draft_of, parsed, speculative_config
from sparkd.vllm.unaccounted_args import (
    BLOCK,
    BLOCKS,
    BYTES,
    CACHE,
    KV_DTYPES,
    LAYOUT,
    NARROW,
    WEIGHTS,
    WIDE,
    changed_by,
    count_in,
    in_blocks,
    unsized,
)
from workers.kv.settings import MARGIN_VARIABLE
from workers.quantization.best_wish import BestWish
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

# Flags by which vLLM reads the longest request from another place than config.json.
_OTHER_CONFIG = frozenset({"hf-config-path", "hf-overrides", "config-format"})


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """A parsed entry.

    own_quantization: vLLM quantizes by itself.
    max_model_len: tokens, `auto` for as many as fit, None for the model's own.
    wide: vLLM converts other floats to float32.
    cache: the size of the KV cache, as sparkd.capacity.kv_cache.sized takes it; cache_words: its spelling in the entry.
    cpu_space_bytes: the size in the CPU backend's variable.
    share: the share of the node's memory for vLLM; share_words: its spelling.
    vllm_sizes: vLLM, or a worker class that is not sparkd's, sizes the cache.
    margin_bytes: bytes to leave free, None for the default.
    memory_gib: the operator's reservation for the engine.
    draft: None without one that can be read; drafts: whether a flag for one exists, even an unreadable one.
    uncounted: flags whose effect on memory no formula covers.
    changes: the parts that they and other settings change (WEIGHTS, CACHE, OTHER in sparkd.vllm.unaccounted_args).
    rest: the flags without the revision and the length, which a decision may change.
    """

    name: str
    model: str
    revision: str | None
    env: Mapping[str, str]
    quantize: Quantize
    own_quantization: bool
    tensor_parallel: int | None
    max_model_len: int | str | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    wide: bool
    kv_cache_dtype: str
    block_tokens: int | None
    enforce_eager: bool
    prefix_caching: bool
    chunked_prefill: bool
    cache: Mapping[str, Any] | str | None
    cache_words: str
    cpu_space_bytes: int | None
    share: float | None
    share_words: str
    vllm_sizes: bool
    margin_bytes: int | None
    margin_words: str
    memory_gib: float | None
    draft: Draft | None
    drafts: bool
    uncounted: tuple[str, ...]
    changes: frozenset[str]
    trusts_code: bool
    other_config: bool
    load_format: str | None
    rest: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The vLLM flags, see sparkd.config.engine_flags.flags_of."""
        flags = [] if self.revision is None else ["--revision", self.revision]
        if self.max_model_len is not None:
            flags += ["--max-model-len", str(self.max_model_len)]
        return [*flags, *self.rest]

    @property
    def recipe(self) -> QuantizationRecipe:
        """The formats of the weights; the checkpoint as stored where they are still to be chosen."""
        return self.quantize if isinstance(self.quantize, QuantizationRecipe) else AS_IT_IS

    @property
    def wish(self) -> BestWish | None:
        """`quantize: best`; None for anything else."""
        return self.quantize if isinstance(self.quantize, BestWish) else None

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

    def quantized(self, recipe: QuantizationRecipe) -> EngineArgs:
        return replace(self, quantize=recipe if recipe.quantizes else None)

    def undecided(self) -> EngineArgs:
        """The entry with the checkpoint as stored in place of `quantize: auto` and `best`."""
        return replace(self, quantize=None) if is_open(self.quantize) else self


def engine_args(spec: ModelConfig, env: Mapping[str, str]) -> EngineArgs:
    """Parse an entry. env: the engine's environment (ModelConfig.environment). Raises ConfigError for a number that vLLM refuses too."""
    flags = parsed(spec.extra_args)
    if isinstance(size := flags.get(BYTES), str) and amount(size) is None:
        raise ConfigError("--kv-cache-memory-bytes must be a size such as 2G.", param="extra_args")
    config = speculative_config(spec.extra_args)
    draft = None if config is None else draft_of(config)
    drafts = flags.get(DRAFTS, "None") != "None"  # vLLM reads None as no draft (arg_utils.py, optional_type)
    uncounted, blocks, block_tokens = tuple(unsized(flags)), count_in(flags, BLOCKS), count_in(flags, BLOCK)
    wide, kv_dtype = spec.dtype in WIDE, spec.kv_cache_dtype or "auto"
    changes = changed_by(uncounted) | ({WEIGHTS, CACHE} if wide and (drafts or spec.quantize is not None) else frozenset())
    changes |= {CACHE} if kv_dtype not in KV_DTYPES or in_blocks(env) else frozenset()
    rest = tuple(flags_of(spec.model_copy(update={"revision": None, "max_model_len": None})))
    share, share_words = kv_sizing.share_of(spec)
    space_gib = kv_sizing.cpu_space_gib(env) if spec.kv_cache is None else None
    margin = kv_sizing.margin_bytes(spec, env) if share is None else None
    cache = spec.kv_cache if blocks is None else {"blocks": blocks}
    cache_words = kv_sizing.written("kv_cache", cache) if isinstance(cache, Mapping) else ""
    vllm_sizes = kv_sizing.vllm_sizes(spec)
    return EngineArgs(
        name=spec.name,
        model=spec.model,
        revision=spec.revision,
        env=env,
        quantize=spec.quantize,
        own_quantization=spec.quantization is not None,
        tensor_parallel=spec.tensor_parallel if isinstance(spec.tensor_parallel, int) else None,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        wide=wide,
        kv_cache_dtype=kv_dtype,
        block_tokens=block_tokens,
        enforce_eager=spec.enforce_eager,
        prefix_caching=flags.get("enable-prefix-caching") is not False,
        chunked_prefill=flags.get("enable-chunked-prefill") is not False,
        cache=cache,
        cache_words=cache_words,
        cpu_space_bytes=None if space_gib is None else space_gib * GIB,
        share=share,
        share_words=share_words,
        vllm_sizes=vllm_sizes,
        margin_bytes=margin,
        margin_words="kv_margin_gib" if spec.kv_margin_gib is not None else MARGIN_VARIABLE,
        memory_gib=spec.memory_gib if isinstance(spec.memory_gib, int | float) else None,
        draft=draft,
        drafts=drafts,
        uncounted=uncounted,
        changes=changes,
        trusts_code=spec.trust_remote_code,
        other_config=not _OTHER_CONFIG.isdisjoint(flags),
        load_format=spec.load_format,
        rest=rest,
    )


def decided(spec: ModelConfig, args: EngineArgs) -> ModelConfig:
    """The entry with the values of `args` in place of `auto`."""
    values = {key: getattr(args, key) for key in ("model", "revision", "quantize", "max_model_len")}
    changed = {key: value for key, value in values.items() if value != getattr(spec, key)}
    return spec.model_copy(update=changed) if changed else spec


def settings_uncounted(spec: ModelConfig, args: EngineArgs) -> list[str]:
    """The settings, as written in the entry, whose effect on memory no formula covers."""
    names = [f"{flag} (extra_args)" for flag in args.uncounted]
    names += [f"quantization: {spec.quantization}"] if spec.quantization is not None else []
    dtype = spec.dtype or NARROW[0]
    # With float32, formats and a separate draft are not counted.
    counted = args.wide and args.quantize is None and not args.drafts
    names += [f"dtype: {dtype}"] if dtype not in NARROW and not counted else []
    names += [f"kv_cache_dtype: {spec.kv_cache_dtype}"] if (spec.kv_cache_dtype or "auto") not in KV_DTYPES else []
    return names + ([f"{LAYOUT}: {args.env[LAYOUT]} (env)"] if in_blocks(args.env) else [])
