"""Owns what speculative decoding adds to a model's account: tokens ahead, layers with a cache, weights of a draft. Never reads a weight.

Its configuration is counted as vLLM takes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory, WeightPart, has_layers_ahead, inventory
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.shape import Shape, shape_of
from sparkd.errors import CheckpointUncounted, ConfigError
from sparkd.vllm.flags import SPECULATIVE, draft_method, speculative_config
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile

METHODS = ("off", "ngram", "suffix", "mtp", "dflash")
# Neither of them looks into weights: they draft from the text (vllm/v1/spec_decode/ngram_proposer.py, suffix_decoding.py).
_OF_TEXT = ("ngram", "suffix")
# vLLM's number for a draft by suffix where no number of tokens is given (suffix_decoding_max_tree_depth).
_SUFFIX_DEPTH = 24
# vLLM's configuration of the methods that need no draft of their own (config/speculative.py).
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """One method of speculation for a model.

    tokens: proposed at a time.
    layers: those that keep a cache in addition to the model's own.
    ahead: whether the checkpoint's own layers for it are loaded.
    draft: a separate checkpoint.
    is_read: whether the draft's headers could be read.
    args, env, settings: the model's entry with it.
    recipe: the recipe that has it.
    """

    method: str
    tokens: int
    layers: int = 0
    ahead: bool = False
    draft: Checkpoint | None = None
    is_read: bool = True
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    recipe: str | None = None

    def inventory(self, checkpoint: Checkpoint, shape: Shape) -> Inventory:
        """The inventory of model and draft together. A draft's own tensors are never quantized here. Raises ConfigError where nothing
        drafts."""
        own = inventory(checkpoint, shape, ahead=self.ahead)
        if self.ahead and not has_layers_ahead(own):
            told = f"this checkpoint of {shape.architecture} comes without its layers that predict tokens ahead"
            raise ConfigError(f"speculative {self.method}: {told}: choose off, ngram or suffix.", param="speculative")
        if self.draft is None:
            return own
        parts = tuple(_beside(inventory(self.draft, shape_of(self.draft.config))))
        more = sum(part.tensor.nbytes * part.count for part in parts)
        return replace(own, parts=own.parts + parts, stored_bytes=own.stored_bytes + more)

    def serving(self, plain: Serving) -> Serving:
        unknown = plain.unknown if self.is_read else plain.unknown | {WEIGHTS, CACHE}
        return replace(plain, speculative_tokens=self.tokens, draft_layers=self.layers, unknown=unknown)


def drafting(method: str, model: str, wish: Mapping[str, Any], read: Callable[[str], Checkpoint]) -> Drafting | None:
    """The meaning of `--speculative METHOD` for a model without an entry; None for `off`.

    A draft that the checkpoint lacks is that of the recipe for this model.
    wish: the requested `max_num_seqs`, `quantize` and `kv_cache_dtype`. read: reads the headers of a draft.

    Raises ConfigError and CheckpointError.
    """
    if method == "off":
        return None
    recipe = recipe_for(model, method) if method not in _OF_TEXT else None
    config = _CONFIGS.get(method) if recipe is None else speculative_config(recipe.arguments)
    if config is None:
        raise ConfigError(f"speculative {method}: no recipe has such a draft for it: choose off, ngram or suffix.", param="speculative")
    needed = recipe.settings.get("kv_cache_dtype") if recipe is not None and method == "dflash" else None
    dtype = wish.get("kv_cache_dtype") or "auto"
    if needed is not None and dtype not in ("auto", needed):
        raise ConfigError(f"speculative {method} needs a KV cache in {needed}: leave {dtype} out.", param="kv_cache_dtype")
    settings = {"kv_cache_dtype": needed} if needed is not None else {}
    env = (recipe.settings.get("env") or {}) if recipe is not None else {}
    name = recipe.name if recipe is not None else None
    return replace(of_config(config, read), args=(SPECULATIVE, json.dumps(config)), env=env, settings=settings, recipe=name)


def of_config(config: Mapping[str, Any], read: Callable[[str], Checkpoint]) -> Drafting:
    """config: vLLM's own (config/speculative.py). Raises CheckpointError and ConfigError for a draft that is missing."""
    config = {key.replace("-", "_"): value for key, value in config.items()}
    method, tokens = draft_method(config), config.get("num_speculative_tokens")
    if method == "suffix" and tokens is None:
        tokens = config.get("suffix_decoding_max_tree_depth", _SUFFIX_DEPTH)
    tokens = tokens if type(tokens) is int and tokens > 0 else 1
    if method in _OF_TEXT:
        return Drafting(method, tokens)
    if not isinstance(config.get("model"), str):
        return Drafting(method, tokens, 1, ahead=True)
    try:
        draft = read(config["model"])
    except CheckpointUncounted:  # EAGLE's drafts are often pickled
        return Drafting(method, tokens, 1, is_read=False)
    return Drafting(method, tokens, shape_of(draft.config).layers, draft=draft)


def _beside(draft: Inventory) -> Iterator[WeightPart]:
    """In the last stage of a pipeline, where the drafter runs; in no layer of the model, and never as its embedding or head."""
    for part in draft.parts:
        number = "" if part.layer is None else f"{part.layer}."
        tensor = part.tensor._replace(name=f"draft.{number}{part.tensor.name}")
        yield replace(part, tensor=tensor, kind="other" if part.kind in ("embedding", "lm_head", "vision") else part.kind, layer=None)


def recipe_for(model: str, method: str | None = None) -> RecipeFile | None:
    """The recipe for this folder or hub id; with `method`, one that drafts by it."""
    from sparkd.recipes.library import RecipeLibrary

    book = RecipeLibrary(None, os.environ)
    name = model.rstrip("/").rpartition("/")[2].lower()
    for each in book.names():
        file, _ = book.read(each)
        if file is None or (method is not None and draft_method(speculative_config(file.arguments) or {}) != method):
            continue
        if model == file.recipe.model or (model.startswith("/") and file.recipe.model.rpartition("/")[2].lower() == name):
            return file
    return None
