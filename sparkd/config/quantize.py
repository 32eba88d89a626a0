"""The key `quantize:` of a model: its recipe, the keys that it excludes, and the settings of sparkd's loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from sparkd.config.refusal import plain, refuse
from sparkd.errors import ConfigError, SparkdError
from sparkd.vllm import reserved_args
from sparkd.vllm.flags import LOAD_FORMAT
from sparkd.vllm.unaccounted_args import unanswered
from workers.quantization.best_wish import BEST, BestWish, best_of
from workers.quantization.recipe import QuantizationRecipe

if TYPE_CHECKING:
    from sparkd.config.model import ModelConfig

# The name of sparkd's entry point in vLLM's plugin group; VLLM_PLUGINS is a list of such names.
PLUGIN = "sparkd"
# The best format that fits, chosen when the model is placed (sparkd/capacity/fit.py).
AUTO: Literal["auto"] = "auto"
# The value of the key. None: vLLM loads the weights.
Quantize = QuantizationRecipe | BestWish | Literal["auto"] | None
_PLUGINS_VARIABLE = "VLLM_PLUGINS"


def parse(value: Any) -> Quantize:
    """Parse the key: a format's name or a map. A pydantic validator."""
    if value is None or isinstance(value, QuantizationRecipe | BestWish):
        return value
    if isinstance(value, str) and value.strip().lower() == AUTO:
        return AUTO
    if not isinstance(value, str | Mapping) or not value:
        raise refuse("must be a format, such as nvfp4, or a map of a recipe")
    try:
        return best_of(plain(value)) or QuantizationRecipe.parse(plain(value))
    except SparkdError as error:
        choosers = f"; {AUTO} and {BEST} choose by what fits." if isinstance(value, str) else "."
        raise refuse(f"{error.explanation.removesuffix('.')}{choosers}", repeats=True) from None


def canonical(value: Quantize) -> dict[str, Any] | str | None:
    """The value as JSON, which `parse` reads back, so that all spellings of one recipe are equal."""
    return value if value is None or isinstance(value, str) else value.canonical()


def is_open(value: Quantize) -> bool:
    """Whether the format is decided when the model is placed."""
    return value == AUTO or isinstance(value, BestWish)


def excluded(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of every other key or flag of the entry that determines how the weights are loaded."""
    if model.quantize is None:
        return
    for key in ("quantization", "load_format"):
        if getattr(model, key) is not None:
            yield key, f"{key} and quantize exclude each other, because sparkd's loader decides on it: remove one of them"
    for flag in reserved_args.loader_flags(model.extra_args):
        yield "extra_args", f"{flag} and quantize exclude each other, because sparkd's loader decides on it: remove one of them"
    for flag in unanswered(model.extra_args) if is_open(model.quantize) else ():
        both = f"{flag} and quantize: {_open_name(model.quantize)}"
        yield "extra_args", f"{both} exclude each other, because what fits is not known with it: name a format, or remove it"


def unreachable(model: ModelConfig, env: Mapping[str, str]) -> str | None:
    """Why an engine with this environment could not load `model`; None where it can."""
    if model.quantize is None:
        return None
    allowed = env.get(_PLUGINS_VARIABLE)
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"{_PLUGINS_VARIABLE} in env shuts out sparkd's plugin for vLLM, which quantize needs: add {PLUGIN} to it, or remove it."
    return None


def remark(model: ModelConfig) -> str | None:
    """The warning of `sparkd check` for an entry without errors."""
    if model.quantize is None and model.allow_missing_weights:
        return "allow_missing_weights has no effect without quantize: quantize: bf16 loads the weights as they are."
    return None


def loader_of(model: ModelConfig, cache_dir: str | None, cache_limit_bytes: int | None) -> dict[str, Any]:
    """The fields of a RankSpec that make vLLM use sparkd's loader; empty for a model without `quantize`.

    cache_dir: the folder of quantized weights, None keeps none.
    """
    if model.quantize is None:
        return {}
    if is_open(model.quantize):
        raise ConfigError(f"quantize: {_open_name(model.quantize)} was not resolved before the model is started.", param="quantize")
    told: dict[str, Any] = {"quantize": canonical(model.quantize), "cache_dir": None, "cache_limit_bytes": None}
    if model.quantized_cache:
        told |= {"cache_dir": cache_dir, "cache_limit_bytes": cache_limit_bytes}
    if model.allow_missing_weights:
        told["enable_weights_track"] = False
    return {"load_format": LOAD_FORMAT, "loader_extra_config": told}


def _open_name(value: Quantize) -> str:
    return BEST if isinstance(value, BestWish) else AUTO
