"""One model's entry: its keys, the vLLM flags they stand for, and the hash of what its engine runs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, PrivateAttr, ValidationInfo, model_validator

from sparkd.config import fields as kinds
from sparkd.config import kv_cache as kv_sizing
from sparkd.config import quantize as quantizing
from sparkd.config.engine_flags import flags_of
from sparkd.config.fields import (
    AbsolutePath,
    Arguments,
    Count,
    Environment,
    Gib,
    Metadata,
    Name,
    Names,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Section,
    VllmFlag,
    Word,
)
from sparkd.config.quantize import Quantize
from sparkd.config.refusal import refuse
from sparkd.units import readable
from sparkd.vllm.parsers import OFF
from workers.host.hub_cache import is_hub_id, is_revision
from workers.host.runtime import API_SERVER, COMMAND_LINE

if TYPE_CHECKING:
    from sparkd.config.config import EngineSettings

VLLM_ENTRYPOINTS = ("auto", API_SERVER, COMMAND_LINE)
# vLLM's bounds (vllm/sampling_params.py, _verify_args), and OpenAI's for the temperature.
_Share = Annotated[float, BeforeValidator(kinds.no_bool), Field(ge=0, le=1)]
_PositiveShare = Annotated[float, BeforeValidator(kinds.no_bool), Field(gt=0, le=1)]
_Temperature = Annotated[float, BeforeValidator(kinds.no_bool), Field(ge=0, le=2)]
_Penalty = Annotated[float, BeforeValidator(kinds.no_bool), Field(ge=-2, le=2)]
_Factor = Annotated[float, BeforeValidator(kinds.no_bool), Field(gt=0, le=2)]
_Top = Annotated[int, BeforeValidator(kinds.no_bool), Field(ge=-1, le=2**31)]
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*")


def _model(value: str, info: ValidationInfo) -> str:
    """A folder ('/', './', '../', '~') becomes absolute; anything else must look like a hub id, so that a typing error fails here."""
    if value.startswith(("/", "./", "../", "~")) or value in {".", ".."}:
        return str(kinds.absolute(Path(value), info))
    if not is_hub_id(value):
        raise ValueError("a folder (begin it with '/', './' or '~') or a hub id (owner/name) is expected")
    if "/" not in value:
        cure = f"a hub id is owner/name, such as owner/{value}; a folder begins with '/', './' or '~'; a recipe is named by 'recipe'"
        raise refuse(f"{value} has no owner: {cure}")
    return value


def _revision(value: str | None) -> str | None:
    if value is not None and not is_revision(value):
        raise ValueError("a branch, a tag or a commit of the hub")
    return value


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("the name of a host, such as images.example.com, without scheme, port or path")
    return value.lower()


def _readable_int(value: Any) -> Any:
    kinds.no_bool(value)
    if value == -1 or value == "-1":
        return "auto"
    found = readable(value) if isinstance(value, str) else None
    return value if found is None else found


def _minus_one_is_none(value: Any) -> Any:
    """llama-swap's -1, "as set globally", becomes None."""
    return None if kinds.no_bool(value) == -1 else value


def _zero_is_none(value: Any) -> Any:
    return None if kinds.no_bool(value) in (0, "0") else value


def _auto_is_none(value: Any) -> Any:
    return None if kinds.no_bool(value) == "auto" else value


def _off_is_none(value: Any) -> Any:
    """`off`, and false, which is YAML 1.1's reading of it, become `none`."""
    return OFF if value is False or value == "off" else value


class Media(Section):
    """The hosts from which an engine may fetch images, audio and video of a request."""

    domains: tuple[Annotated[str, AfterValidator(_host)], ...] = ()


class Sampling(Section):
    """Sampling defaults for requests, under the names of OpenAI's API and vLLM's. None leaves a value to the model's own
    generation_config.json, which vLLM reads."""

    temperature: _Temperature | None = None
    top_p: _PositiveShare | None = None
    top_k: _Top | None = None
    min_p: _Share | None = None
    repetition_penalty: _Factor | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    max_tokens: PositiveCount | None = None

    def flag(self) -> str:
        """The value of vLLM's --override-generation-config, which uses transformers' name for max_tokens; empty without any setting."""
        said = self.model_dump(exclude_none=True)
        if "max_tokens" in said:
            said["max_new_tokens"] = said.pop("max_tokens")
        return json.dumps(said, separators=(",", ":")) if said else ""


Length = Annotated[PositiveCount | Literal["auto"] | None, BeforeValidator(_readable_int)]
Tokens = Annotated[PositiveCount | None, BeforeValidator(_readable_int)]


@dataclass(frozen=True, slots=True)
class Given:
    """An entry's own keys by our names, secrets masked. It takes no part in a comparison: two spellings of one entry are equal."""

    keys: Mapping[str, Any] = field(default_factory=dict, compare=False)


class TuningKeys(Section):
    """The keys of an entry that only name or tune a model. A model that is added over the admin API may set these and no others."""

    name: Name
    # The recipe, whose keys sparkd.recipes.merge has already put below the entry's own.
    recipe: Word | None = None
    model: Annotated[str, AfterValidator(_model)]
    revision: Annotated[Word | None, AfterValidator(_revision), VllmFlag()] = None

    aliases: Names = ()
    served_model_name: Names = ()
    unlisted: bool = False
    default: bool = False
    metadata: Metadata = Field(default_factory=dict)

    preload: bool = False
    ttl: Annotated[Seconds | None, BeforeValidator(_minus_one_is_none)] = None
    pin: bool = False
    priority: Annotated[Count, Field(le=100)] = 50
    concurrency_limit: Annotated[PositiveCount | None, BeforeValidator(_zero_is_none)] = None
    wait_for_load_s: Seconds | None = None
    send_loading_state: bool | None = None
    health_check_timeout_s: PositiveSeconds | None = None

    executor: Literal["mp", "ray"] = "mp"
    tensor_parallel: PositiveCount | Literal["auto"] = "auto"
    memory_gib: Gib | Literal["auto"] = "auto"
    env: Environment = Field(default_factory=dict)

    quantize: Annotated[Quantize, PlainValidator(quantizing.parse), PlainSerializer(quantizing.canonical)] = None
    quantized_cache: bool = True
    allow_missing_weights: bool = False

    kv_cache: Annotated[dict[str, Any] | Literal["auto"] | None, BeforeValidator(kv_sizing.kv_cache)] = None
    kv_margin_gib: Annotated[Annotated[float, Field(ge=0, le=1e6)] | None, BeforeValidator(kinds.no_bool)] = None

    max_model_len: Annotated[Length, VllmFlag()] = None
    max_num_seqs: Annotated[PositiveCount | None, VllmFlag()] = None
    max_num_batched_tokens: Annotated[Tokens, VllmFlag()] = None
    gpu_memory_utilization: Annotated[Annotated[float, Field(gt=0, le=1)] | None, BeforeValidator(_auto_is_none), VllmFlag()] = None
    kv_cache_dtype: Annotated[Word | None, VllmFlag()] = None
    dtype: Annotated[Word | None, VllmFlag()] = None
    quantization: Annotated[Word | None, VllmFlag()] = None
    load_format: Annotated[Word | None, VllmFlag()] = None
    enforce_eager: bool = False
    tool_call_parser: Annotated[Word | None, BeforeValidator(_off_is_none)] = None
    reasoning_parser: Annotated[Word | None, BeforeValidator(_off_is_none), VllmFlag()] = None
    sampling: Sampling | None = None
    extra_args: Arguments = ()


class ModelConfig(TuningKeys):
    """One model's entry: the tuning keys, and those that bring code, another Python or an address, which need the configuration file.

    configs/sparkd.yaml documents each key; the names are those of llama-swap and of eugr's and sparkrun's recipes.
    """

    runtime: AbsolutePath | None = None
    entrypoint: Word | None = None
    trust_remote_code: bool = False
    media: Media = Media()

    _given: Given = PrivateAttr(default_factory=Given)

    @model_validator(mode="after")
    def _one_of_each(self) -> ModelConfig:
        for key, message in (*quantizing.excluded(self), *kv_sizing.excluded(self)):
            raise refuse(message, item=key)
        return self

    @property
    def given(self) -> Mapping[str, Any]:
        """The entry as it was written, before its recipe was laid under it; empty if sparkd made it."""
        return self._given.keys

    def with_given(self, keys: Mapping[str, Any]) -> ModelConfig:
        """keys: of sparkd.config.overlay.shown."""
        copy = self.model_copy()
        copy._given = Given(keys)
        return copy

    def served_names(self) -> tuple[str, ...]:
        """Every name a request may call this model by, the canonical one first."""
        return tuple(dict.fromkeys((self.name, *self.served_model_name, *self.aliases)))

    def vllm_flags(self) -> list[str]:
        """The vLLM flags, see sparkd.config.engine_flags.flags_of."""
        return flags_of(self)

    def environment(self, engine: EngineSettings) -> dict[str, str]:
        """engine.env, then this model's, in plain text: for the rank's process only."""
        return {name: value.get_secret_value() for name, value in {**engine.env, **self.env}.items()}

    def runtime_of(self, engine: EngineSettings) -> Path | None:
        """The Python interpreter whose environment has vLLM; None is sparkd's own."""
        return self.runtime or engine.runtime

    def runs_vllm(self, engine: EngineSettings) -> bool:
        """Whether the entry's engine is vLLM, as far as the entry shows."""
        return self.entrypoint_of(engine) in VLLM_ENTRYPOINTS

    @property
    def reads_tokenizer(self) -> bool:
        """Whether vLLM reads a tokenizer beside the model's weights: no flag names another one or none."""
        return not any(word.partition("=")[0] in ("--tokenizer", "--skip-tokenizer-init") for word in self.extra_args)

    def entrypoint_of(self, engine: EngineSettings) -> str:
        return self.entrypoint or engine.entrypoint


def config_hash(model: ModelConfig, engine: EngineSettings) -> str:
    """A digest of 16 hex digits over everything that changes the engine's processes; a change of it restarts the engine.

    It excludes keys that only the gateway and the supervisor read (ttl, limits, waits, preload, unlisted, metadata), the folder of
    quantized weights and the weights that may be missing: they do not affect a running engine.
    """
    runtime = model.runtime_of(engine)
    parts: dict[str, Any] = {
        "model": model.model,
        "served_names": model.served_names(),
        "flags": model.vllm_flags(),
        "executor": model.executor,
        "tensor_parallel": model.tensor_parallel,
        "env": model.environment(engine),
        "runtime": str(runtime) if runtime else None,
        "entrypoint": model.entrypoint_of(engine),
        "platform": engine.platform,
    }
    # These keys count only where they are set, so that a daemon adopts engines of a release without them.
    if model.quantize is not None:
        parts["quantize"] = quantizing.canonical(model.quantize)
    if model.kv_cache is not None and not kv_sizing.vllm_sizes(model):
        parts["kv_cache"] = model.kv_cache
    if model.media.domains:
        parts["media"] = {**model.media.model_dump(mode="json"), "local": False}  # as earlier releases had it
    if model.kv_margin_gib is not None:
        parts["kv_margin_gib"] = model.kv_margin_gib
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
