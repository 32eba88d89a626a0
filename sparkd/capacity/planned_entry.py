"""The question that a plan answers, and the entry that the plan is made of: a configured one, or one made for a folder or a hub id."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparkd.capacity.headers import OF_TEXT
from sparkd.capacity.node_runtime import NodeRuntime
from sparkd.capacity.placed_entry import runtime_of
from sparkd.checkpoint.source import name_of
from sparkd.config.config import Config, ModelConfig
from sparkd.config.quantize import AUTO
from sparkd.errors import ConfigError, RankError, clause
from sparkd.units import MOST
from sparkd.vllm.ask.cache import places
from sparkd.vllm.ask.model import Away, InquiryRuntime
from sparkd.vllm.flags import DRAFTS, SPECULATIVE, draft_of, parsed, speculative_config, without
from workers.host.runtime import API_SERVER, probe

if TYPE_CHECKING:
    from sparkd.recipes.file import RecipeFile

MODEL_CHARACTERS = 4096
KvDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
# By key of the question: the keys of the entry that it replaces.
_INSTEAD = {
    "quantize": ("quantization", "load_format"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
}
# By key: the flag of extra_args that it replaces.
_FLAG_INSTEAD = {
    "quantize": "model-loader-extra-config",
    "kv_cache": "kv-cache-memory-bytes",
    "kv_margin_gib": "kv-cache-memory-bytes",
}
METHODS = ("off", "ngram", "suffix", "mtp", "dflash")
# vLLM's configuration of the methods that need no draft of their own (config/speculative.py).
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}


class PlanRequest(BaseModel):
    """The options of one plan; each that is not None overrides the model's entry.

    model: a configured name, a recipe, a folder or a hub id.
    nodes: how many there are.
    max_model_len: tokens of one request.
    requests: of that length at once.
    quantize: a format, a mapping of formats, `auto` or `best`.
    hardware: of the daemon's plan; `node` is its own machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, max_length=MODEL_CHARACTERS)
    nodes: int | None = Field(default=None, ge=1, le=MOST["nodes"])
    max_model_len: int | None = Field(default=None, ge=1, le=MOST["max_model_len"])
    requests: int | None = Field(default=None, ge=1, le=MOST["requests"])
    quantize: str | dict[str, Any] | None = None
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=MOST["max_num_batched_tokens"])
    max_num_seqs: int | None = Field(default=None, ge=1, le=MOST["max_num_seqs"])
    kv_cache_dtype: KvDtype | None = None
    margin_gib: Annotated[float | None, Field(ge=0, le=MOST["margin_gib"])] = None
    speculative: Literal["off", "ngram", "suffix", "mtp", "dflash"] | None = None
    hardware: Literal["node", "spark", "h200"] = "node"


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """A model's entry with the facts of its runtime.

    vllm: the vLLM release of its runtime, None without vLLM.
    entrypoint: the engine's module.
    origin: the file or daemon that has the entry.
    away: set where only another node has its runtime.
    added: None for a configured entry; of one that is made for a plan, its keys for sparkd.yaml.
    """

    spec: ModelConfig
    config: Config
    vllm: str | None
    entrypoint: str
    origin: str | None = None
    added: Mapping[str, Any] | None = field(default=None, compare=False)
    away: Away | None = None

    @property
    def runtime(self) -> InquiryRuntime:
        """The runtime whose vLLM is asked."""
        return InquiryRuntime(self.spec.runtime_of(self.config.engine), places(self.config.state_dir), self.away)

    @property
    def env(self) -> dict[str, str]:
        return self.spec.environment(self.config.engine)


def entry_of(
    spec: ModelConfig, config: Config, origin: str | None = None, there: NodeRuntime | None = None, *, made: bool = False
) -> PlannedEntry:
    """The entry with the facts of its runtime, asked as at a start.

    there: another node's runtime, where this node lacks it. Without any runtime the flags stay as written.
    made: whether `spec` is of made_for.
    """
    facts: Mapping[str, Any] = {"entrypoint": None, "vllm": None}
    with suppress(RankError):
        facts = there.facts if there is not None else probe(runtime_of(spec, config)).to_dict()
    entrypoint = spec.entrypoint_of(config.engine)
    if entrypoint == AUTO:
        entrypoint = facts["entrypoint"] or API_SERVER
    away = None if there is None else Away(there.node, str(there.facts["vllm"]), str(there.facts["packages"]))
    return PlannedEntry(spec, config, facts["vllm"], entrypoint, origin, {"model": spec.model} if made else None, away)


def made_for(source: str) -> ModelConfig:
    """The entry of a folder or a hub id: in the best format that fits, as long as fits. Raises ConfigError for what is neither."""
    return _validated(name_of(source), {"name": name_of(source), "model": source, "quantize": AUTO, "max_model_len": AUTO})


def overlaid(entry: PlannedEntry, request: PlanRequest) -> PlannedEntry:
    """The entry with the question's options in place of its own. Raises ConfigError."""
    spec = entry.spec
    overlay = _requested(spec, request)
    added = {} if entry.added is None else {**entry.added, **{key: value for key, value in overlay.items() if value != AUTO}}
    if replaced := parsed(spec.extra_args).keys() & {_FLAG_INSTEAD.get(key) for key in overlay}:
        overlay["extra_args"] = without(spec.extra_args, *replaced)
    for key in [key for key in overlay if key in _INSTEAD]:
        overlay = dict.fromkeys(_INSTEAD[key]) | overlay
    if request.speculative is not None:
        draft = draft_keys(request.speculative, spec.model, overlay.get("kv_cache_dtype", spec.kv_cache_dtype) or "auto")
        recipe, flags = draft.pop("recipe", None), draft.pop("extra_args", [])
        overlay |= {"extra_args": [*without(overlay.get("extra_args", spec.extra_args), DRAFTS), *flags]}
        overlay |= {**draft, "env": {**spec.env, **draft["env"]}} if draft else {}
        added |= {"recipe": recipe} if recipe is not None else {"extra_args": flags} if flags else {}
    if overlay:
        spec = _validated(spec.name, {**{key: getattr(spec, key) for key in spec.model_fields_set}, **overlay})
    return replace(entry, spec=spec, added=None if entry.added is None else added)


def _requested(spec: ModelConfig, request: PlanRequest) -> dict[str, Any]:
    """The keys of an entry that the question sets."""
    short = request.nodes is not None and isinstance(spec.tensor_parallel, int) and request.nodes < spec.tensor_parallel
    requested = {
        "tensor_parallel": AUTO if short else None,
        "max_model_len": request.max_model_len,
        # The number of concurrent requests: the batch, the sampler's rows and the graphs depend on it.
        "max_num_seqs": request.max_num_seqs or request.requests,
        "max_num_batched_tokens": request.max_num_batched_tokens,
        "kv_cache": {"sequences": request.requests} if request.requests is not None else None,
        "kv_cache_dtype": request.kv_cache_dtype,
        "kv_margin_gib": request.margin_gib,
        "quantize": request.quantize,
    }
    return {key: value for key, value in requested.items() if value is not None}


def _validated(name: str, keys: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(keys)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("item")
        reason = clause(first["msg"].removeprefix("Value error, "))
        raise ConfigError(f"{name}: {where or 'the entry'}: {reason}.", param=where) from None


def draft_keys(method: str, model: str, dtype: str) -> dict[str, Any]:
    """The keys of an entry that `--speculative METHOD` stands for; none for `off`. A draft that the checkpoint lacks is that of the recipe
    for this model, which is among them.

    dtype: the `kv_cache_dtype` of the entry.

    Raises ConfigError.
    """
    if method == "off":
        return {}
    recipe = recipe_for(model, method) if method not in OF_TEXT else None
    config = _CONFIGS.get(method) if recipe is None else speculative_config(recipe.arguments)
    if config is None:
        raise ConfigError(f"speculative {method}: no recipe has such a draft for it: choose off, ngram or suffix.", param="speculative")
    keys: dict[str, Any] = {"extra_args": [SPECULATIVE, json.dumps(config)], "env": {}}
    if recipe is None:
        return keys
    needed = recipe.settings.get("kv_cache_dtype") if method == "dflash" else None
    if needed is not None and dtype not in ("auto", needed):
        raise ConfigError(f"speculative {method} needs a KV cache in {needed}: leave {dtype} out.", param="kv_cache_dtype")
    keys |= {"recipe": recipe.name, "env": recipe.settings.get("env") or {}}
    return keys if needed is None else {**keys, "kv_cache_dtype": needed}


def recipe_for(model: str, method: str | None = None) -> RecipeFile | None:
    """The recipe for this folder or hub id; with `method`, one that drafts by it."""
    from sparkd.recipes.library import RecipeLibrary

    book = RecipeLibrary(None, os.environ)
    name = model.rstrip("/").rpartition("/")[2].lower()
    for each in book.names():
        file, _ = book.read(each)
        if file is None or (method is not None and draft_of(speculative_config(file.arguments) or {}).method != method):
            continue
        if model == file.recipe.model or (model.startswith("/") and file.recipe.model.rpartition("/")[2].lower() == name):
            return file
    return None
