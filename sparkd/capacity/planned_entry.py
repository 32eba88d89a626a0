"""The entry that a plan is made of: a configured one, or one made for a folder or a hub id; with the options of the question in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from sparkd.capacity.plan_request import PlanRequest
from sparkd.capacity.requirement import runtime_of
from sparkd.capacity.speculative import drafting
from sparkd.checkpoint import Checkpoint
from sparkd.checkpoint.source import name_of
from sparkd.config.config import Config, ModelConfig
from sparkd.config.engine_args import at_any_length
from sparkd.config.quantize import AUTO
from sparkd.entry.node_runtime import NodeRuntime
from sparkd.errors import ConfigError, RankError, clause
from sparkd.vllm.flags import DRAFTS, parsed, without
from workers.host.runtime import API_SERVER, probe

# By key of the question: the keys of the entry that it replaces.
_INSTEAD = {
    "quantize": ("quantization", "load_format"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
}
# By key: the flags of extra_args that it replaces, besides the flag with the key's own name.
_FLAGS_INSTEAD = {
    "quantize": ("quantization", "load-format", "model-loader-extra-config"),
    "kv_cache": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
    "kv_margin_gib": ("gpu-memory-utilization", "kv-cache-memory-bytes"),
}


@dataclass(frozen=True, slots=True)
class PlannedEntry:
    """A model's entry with the facts of its runtime.

    vllm: the vLLM release of its runtime, None without vLLM.
    entrypoint: the engine's module.
    origin: the file or daemon that has the entry.
    added: None for a configured entry; of one that is made for a plan, its keys for sparkd.yaml.
    """

    spec: ModelConfig
    config: Config
    vllm: str | None
    entrypoint: str
    origin: str | None = None
    added: Mapping[str, Any] | None = field(default=None, compare=False)

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
    return PlannedEntry(spec, config, facts["vllm"], entrypoint, origin, {"model": spec.model} if made else None)


def made_for(source: str) -> ModelConfig:
    """The entry of a folder or a hub id: in the best format that fits, as long as fits. Raises ConfigError for what is neither."""
    return _validated(name_of(source), {"name": name_of(source), "model": source, "quantize": AUTO, "max_model_len": AUTO})


def overlaid(entry: PlannedEntry, request: PlanRequest, read: Callable[[str], Checkpoint]) -> PlannedEntry:
    """The entry with the question's options in place of its own. read: the headers of a draft.

    Raises ConfigError and CheckpointError.
    """
    spec = at_any_length(entry.spec)
    overlay = _requested(spec, request)
    added = {} if entry.added is None else {**entry.added, **{key: value for key, value in overlay.items() if value != AUTO}}
    # extra_args come last, and vLLM takes the last flag.
    if replaced := parsed(spec.extra_args).keys() & set(_flags_of(overlay)):
        overlay["extra_args"] = without(spec.extra_args, *replaced)
    for key in [key for key in overlay if key in _INSTEAD]:
        overlay = dict.fromkeys(_INSTEAD[key]) | overlay
    if request.speculative is not None:
        wish = {key: overlay.get(key, getattr(spec, key)) for key in ("max_num_seqs", "quantize", "kv_cache_dtype")}
        drafted = drafting(request.speculative, spec.model, wish, read)
        overlay |= {"extra_args": without(overlay.get("extra_args", spec.extra_args), DRAFTS)}
        if drafted is not None:
            overlay |= {**drafted.settings, "extra_args": [*overlay["extra_args"], *drafted.args], "env": {**spec.env, **drafted.env}}
            added |= {"extra_args": list(drafted.args)} if drafted.recipe is None else {"recipe": drafted.recipe}
    if overlay:
        spec = _validated(spec.name, {**{key: getattr(spec, key) for key in spec.model_fields_set}, **overlay})
    return PlannedEntry(spec, entry.config, entry.vllm, entry.entrypoint, entry.origin, None if entry.added is None else added)


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
        "enforce_eager": request.enforce_eager,
    }
    return {key: value for key, value in requested.items() if value is not None}


def _flags_of(keys: Iterable[str]) -> Iterator[str]:
    """The flags that these keys replace."""
    for key in keys:
        yield from (key.replace("_", "-"), *_FLAGS_INSTEAD.get(key, ()))


def _validated(name: str, keys: Mapping[str, Any]) -> ModelConfig:
    try:
        return ModelConfig.model_validate(keys)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("item")
        reason = clause(first["msg"].removeprefix("Value error, "))
        raise ConfigError(f"{name}: {where or 'the entry'}: {reason}.", param=where) from None
