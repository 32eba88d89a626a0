"""The configuration: every key, its default and unit, from sparkd.yaml, environment and flags to one frozen value.

configs/sparkd.yaml explains every key; a test holds the two together.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from sparkd.checkpoint.model_folder import places_of
from sparkd.config import kv_cache, quantize, yaml_file
from sparkd.config.api_keys import KeySettings, load_keys
from sparkd.config.fields import (
    AbsolutePath,
    Address,
    Count,
    Environment,
    Gib,
    NodeAddress,
    NodeIp,
    Origin,
    PositiveCount,
    PositiveSeconds,
    Seconds,
    Section,
    Word,
    is_loopback,
    no_bool,
    split_address,
)
from sparkd.config.groups import GroupSettings, known_or_nearest
from sparkd.config.memory import MemorySettings
from sparkd.config.model import ModelConfig, config_hash
from sparkd.config.overlay import (
    dotted,
    error_of,
    in_order,
    overlay_environ,
    overlay_flags,
    problems_of,
    rename_aliases,
    shown,
)
from sparkd.config.yaml_file import ConfigProblem, Document, Map
from sparkd.errors import ConfigError
from sparkd.recipes.admin_policy import refuse_many, refuse_over_admin, refuse_paths
from sparkd.recipes.library import RecipeLibrary
from sparkd.recipes.merge import book_of, merge_recipe
from sparkd.units import MIB
from workers.host import regular_file
from workers.host.hub_cache import cache_places

__all__ = ["Config", "ConfigProblem", "ModelConfig", "config_hash", "is_loopback", "load_config", "parse_model"]

STATE_DIR = Path("/var/lib/sparkd")


def _log_level(value: Any) -> Any:
    return "warning" if value == "warn" else value


class LimitSettings(Section):
    """The most that one client may cost the gateway; bytes and seconds."""

    max_body_bytes: PositiveCount = 32 * MIB
    max_header_bytes: Annotated[PositiveCount, Field(ge=1024)] = 32 * 1024
    header_timeout_s: PositiveSeconds = 10
    body_timeout_s: PositiveSeconds = 60
    client_write_timeout_s: PositiveSeconds = 120
    keep_alive_s: PositiveSeconds = 75
    max_connections: PositiveCount = 4096


class Cors(Section):
    """Which web pages a browser may let use the API of the models; `*` is every page."""

    origins: tuple[Origin, ...] = ()


class ClusterSettings(Section):
    """Ray: join the head at `address`, or start one where it is None."""

    address: NodeAddress | None = None
    node_ip: NodeIp | None = None
    port: Annotated[Count, Field(le=65535)] = 0
    object_store_memory_mib: Annotated[PositiveCount, Field(ge=75)] = 80
    token_file: AbsolutePath | None = None


class EngineSettings(Section):
    """How engines are started where a model says nothing else."""

    runtime: AbsolutePath | None = None
    entrypoint: Word = "auto"
    env: Environment = Field(default_factory=dict)
    platform: Literal["auto", "cuda", "cpu"] = "auto"
    stop_timeout_s: PositiveSeconds = 30
    log_max_bytes: Annotated[PositiveCount, Field(ge=64 * 1024)] = 16 * MIB
    log_backups: Count = 3


class BackoffSettings(Section):
    """How long a model that failed waits for its next try: from initial_s, doubled with each failure, to max_s, plus or minus jitter.

    reset_after_s: READY for that long, it starts over.
    """

    initial_s: PositiveSeconds = 10
    max_s: PositiveSeconds = 300
    jitter: Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)] = 0.25
    reset_after_s: PositiveSeconds = 600

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Delay before the next try after `failures` (>= 1) failures in a row, seconds."""
        # Without a limit the 1,025th failure would overflow a float.
        base_s = min(self.max_s, self.initial_s * 2.0 ** min(failures - 1, 60))
        return base_s * (1.0 + self.jitter * (2.0 * rng.random() - 1.0))

    @model_validator(mode="after")
    def _ordered(self) -> BackoffSettings:
        if self.max_s < self.initial_s:
            raise ValueError("max_s must be at least initial_s")
        return self


class QuantizedCache(Section):
    """Where models with `quantize` are kept as they were quantized, and how much room they may take."""

    dir: AbsolutePath | None = None
    limit_gib: Gib | None = None


class OnStartup(Section):
    """llama-swap's hook: the models to load at start."""

    preload: tuple[str, ...] = ()


class Hooks(Section):
    """llama-swap's place for `on_startup`."""

    on_startup: OnStartup = OnStartup()


class Config(Section):
    """The whole configuration. Lists are tuples; maps are plain dictionaries that no code changes."""

    listen: Address = "127.0.0.1:4000"
    state_dir: AbsolutePath = STATE_DIR
    runtime_dir: AbsolutePath | None = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_log_level)] = "info"
    keys: KeySettings = KeySettings()
    metrics_need_key: bool = False
    web: bool = True
    include_aliases_in_list: bool = False
    request_log: bool = True
    wait_for_load_s: Seconds = 300
    max_queued_requests: Count = 512
    loading_heartbeat_s: Seconds = 10
    send_loading_state: bool = False
    cancel_abandoned_loads: bool = True
    health_check_timeout_s: PositiveSeconds = 1800
    unload_timeout_s: Seconds = 60
    global_ttl_s: Seconds = 0
    min_residency_s: Seconds = 60
    swap_idle_s: Seconds = 5
    cors: Cors = Cors()
    limits: LimitSettings = LimitSettings()
    cluster: ClusterSettings = ClusterSettings()
    engine: EngineSettings = EngineSettings()
    backoff: BackoffSettings = BackoffSettings()
    memory: MemorySettings = MemorySettings()
    quantized_cache: QuantizedCache = QuantizedCache()
    recipes_dir: AbsolutePath | None = None
    hooks: Hooks = Hooks()
    groups: GroupSettings = GroupSettings()
    models: dict[str, ModelConfig] = Field(default_factory=dict)

    @property
    def host(self) -> str:
        """The address to bind, IPv6 without brackets."""
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        """0 lets the system choose a free one."""
        return split_address(self.listen)[1]

    @property
    def runtime_path(self) -> Path:
        """Sockets and handles of this boot. Short, because the path of a Unix socket has at most 107 bytes (unix(7)).

        Below /tmp another user may have created it first, so its creator checks owner and mode.
        """
        if self.runtime_dir is not None:
            return self.runtime_dir
        if self.state_dir == STATE_DIR:
            return Path("/run/sparkd")
        digest = hashlib.sha256(os.fsencode(self.state_dir.resolve())).hexdigest()[:8]
        return Path(f"/tmp/sparkd-{os.getuid()}-{digest}")

    def token_path(self, environ: Mapping[str, str] | None = None) -> Path:
        """The file with Ray's authentication token: the key's, else systemd's credential ray.token unless blank, else one in state_dir."""
        if self.cluster.token_file is not None:
            return self.cluster.token_file
        folder = (environ or {}).get("CREDENTIALS_DIRECTORY")
        if folder and (credential := Path(folder) / "ray.token").is_file() and credential.read_bytes().strip():
            return credential
        return self.state_dir / "ray.token"

    @property
    def quantized_path(self) -> Path:
        """The folder of quantized weights."""
        return self.quantized_cache.dir or self.state_dir / "quantized"

    @property
    def profiles_path(self) -> Path:
        """The folder of what the KV cache's workers learned."""
        return self.state_dir / "kv-profiles"

    def book(self) -> RecipeLibrary:
        """The recipes that a model may name."""
        return RecipeLibrary(self.recipes_dir, os.environ, self.state_dir)

    def names(self) -> dict[str, str]:
        """Every name a request may use -> the model's canonical name."""
        return {alias: model.name for model in self.models.values() for alias in model.served_names()}

    def lookup(self, name: str) -> ModelConfig | None:
        canonical_name = self.names().get(name)
        return self.models[canonical_name] if canonical_name else None

    def preload(self) -> tuple[str, ...]:
        """Canonical names of the models to load at start: the hook's first, in its order."""
        names = self.names()
        wanted = [names[name] for name in self.hooks.on_startup.preload if name in names]
        return tuple(dict.fromkeys([*wanted, *(model.name for model in self.models.values() if model.preload)]))

    def ttl_s(self, model: ModelConfig) -> float:
        """Idle seconds before the model is unloaded; 0 is never."""
        return self.global_ttl_s if model.ttl is None else model.ttl

    def wait_s(self, model: ModelConfig) -> float:
        """Seconds a request waits for the model to load."""
        return self.wait_for_load_s if model.wait_for_load_s is None else model.wait_for_load_s

    def tells_loading(self, model: ModelConfig) -> bool:
        """Whether a chat that waits for the model receives the load's progress as reasoning text."""
        return self.send_loading_state if model.send_loading_state is None else model.send_loading_state

    def start_deadline_s(self, model: ModelConfig) -> float:
        """Seconds from the start of the engine to READY before it counts as failed."""
        return self.health_check_timeout_s if model.health_check_timeout_s is None else model.health_check_timeout_s

    def model_places(self) -> tuple[str, ...]:
        """Folders below which an error says why there is no model (model_folder.unusable). Call it on the file's configuration alone."""
        own = {name: value.get_secret_value() for name, value in self.engine.env.items()}
        return places_of((model.model for model in self.models.values()), {**cache_places(os.environ), **cache_places(own)})

    def with_model(self, model: ModelConfig) -> Config:
        """This configuration with one model added or replaced. Raises ConfigError where one of its names is taken, or the engine's
        settings forbid it."""
        models = {**self.models, model.name: model}
        for location, message in chain(_shared_names(models), _unusable_keys(model, self.engine)):
            # The fault may stand in another model's entry, such as an alias that is this model's name.
            own = location[0] == model.name
            raise ConfigError(message, param=str(location[-1]) if own else "name")
        return self.model_copy(update={"models": models})

    def without_model(self, name: str) -> Config:
        return self.model_copy(update={"models": {each: model for each, model in self.models.items() if each != name}})


def load_config(path: Path | None, *, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str]) -> Config:
    """Flag over environment over file over default. Raises ConfigError with every problem that was found, one a line.

    flags: dotted keys ("listen", "engine.platform"; None is "not given"); "models" adds whole models by name.
    """
    reading = read(path, flags or {}, environ)
    if reading.config is None:
        raise error_of(reading.document.problems)
    return reading.config


def check_bind(config: Config, environ: Mapping[str, str]) -> None:
    """Raises ConfigError where the daemon would be open to the network, or to every web page, without keys. Reads the key files."""
    reachable, every_page = not is_loopback(config.host), "*" in config.cors.origins
    if not reachable and not every_page:
        return
    ring = load_keys(config.keys, environ)
    if ring.inference or ring.admin:
        return
    cure = "Set keys.inference_file and keys.admin_file (or keys.inference, keys.admin)"
    if reachable:
        raise ConfigError(
            f"listen: {config.listen} can be reached from other machines, and no key is set. {cure}, or listen on 127.0.0.1.",
            param="listen",
        )
    every = "cors.origins: '*' lets every web page use the models, and no key is set"
    raise ConfigError(f"{every}. {cure}, or name the pages' origins.", param="cors.origins")


def parse_model(name: str, raw: Mapping[str, Any], *, over_admin: bool, book: RecipeLibrary | None = None) -> ModelConfig:
    """One model from a plain map, as the admin API or a recipe gives it. Raises ConfigError.

    over_admin refuses what an admin key alone must not bring in (sparkd.recipes.admin_policy): code, files, addresses, another Python.
    The settings of a recipe on this machine are its operator's word. book: the recipes; those that come with sparkd where it is None.
    """
    document = Document(Map({"models": Map({name: Map(raw)})}))
    rename_aliases(document)
    _name_models(document)
    own = document.values["models"].get(name) or Map()
    own_keys = shown(own)
    if over_admin:
        refuse_many(own)
        refuse_paths(own, lambda name: book is not None and book.has(name))
    model = None
    if own:
        merge_recipe(document, name, book or RecipeLibrary(None, {}))
        try:
            model = ModelConfig.model_validate(document.values["models"][name]).with_given(own_keys)
        except ValidationError as error:
            document.problems += problems_of(error, document, Config, ("models", name))
    if model is None or document.problems:
        raise error_of(document.problems, ("models", name))
    if over_admin:
        refuse_over_admin(own, model)
    return model


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """A configuration as it was read.

    config: None where something is wrong with it.
    document: its values, their places and problems.
    """

    config: Config | None
    document: Document


def read(path: Path | None, flags: Mapping[str, Any], environ: Mapping[str, str]) -> ConfigReading:
    """File, environment and flags. Never raises."""
    document = Document()
    if path is not None:
        try:
            raw = regular_file.read(path, yaml_file.MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its name holds a zero byte"
            problem = f"The file cannot be read: {reason}. Give the path of a sparkd.yaml."
            return ConfigReading(None, Document(problems=[ConfigProblem(str(path), None, problem)]))
        document = yaml_file.parse(raw, str(path), environ)
    rename_aliases(document)
    overlay_environ(document, environ, Config)
    overlay_flags(document, flags, Config)
    values, base = document.values, path.absolute().parent if path else None
    book = book_of(values.get("recipes_dir"), values.get("state_dir", str(STATE_DIR)), base, environ)
    own_keys = {}
    for name in _name_models(document):
        own_keys[name] = shown(values["models"][name])
        merge_recipe(document, name, book)
    config = None
    try:
        config = Config.model_validate(values, context={"base": base})
        models = {name: model.with_given(own_keys.get(name, {})) for name, model in config.models.items()}
        config = config.model_copy(update={"models": models})
        document.problems += [document.place(key).problem(message, key=key) for key, message in _cross_checks(config)]
    except ValidationError as error:
        document.problems += problems_of(error, document, Config)
    document.problems = in_order(document.problems)
    return ConfigReading(None if document.problems else config, document)


def _name_models(document: Document) -> list[str]:
    """Give each entry its name, which the validation judges. Returns the names of the entries that are maps."""
    models = document.values.get("models")
    if not isinstance(models, dict):
        return []
    named = []
    for name, entry in models.items():
        if not isinstance(entry, Map | None):
            continue
        models[name] = entry = Map() if entry is None else entry
        if "name" in entry:
            key = ("models", name, "name")
            message = f"{dotted(key)} is not a key of sparkd: a model's name is its key below models."
            document.problems.append(document.place(key).problem(message, key=key))
        entry["name"] = name
        named.append(name)
    return named


def _cross_checks(config: Config) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The mistakes of one key about another, each with the location of the key to blame."""
    own = (_unusable_keys(model, config.engine) for model in config.models.values())
    yield from ((("models", *location), message) for location, message in chain(_shared_names(config.models), *own))
    names = config.names()
    yield from config.groups.problems(names)
    for index, name in enumerate(config.hooks.on_startup.preload):
        if name not in names:
            yield (
                ("hooks", "on_startup", "preload", index),
                f"hooks.on_startup.preload names {name!r}, which is not a model. {known_or_nearest(name, names)}",
            )


def _shared_names(models: Mapping[str, ModelConfig]) -> Iterator[tuple[tuple[str, ...], str]]:
    owner: dict[str, str] = {name: name for name in models}
    defaults = [model.name for model in models.values() if model.default]
    for name in defaults[1:]:
        yield (name, "default"), f"models.{name}.default: {defaults[0]!r} is already the default, and only one model can be."
    for model in models.values():
        for key in ("served_model_name", "aliases"):
            for alias in getattr(model, key):
                if owner.setdefault(alias, model.name) != model.name:
                    yield (
                        (model.name, key),
                        f"models.{model.name}.{key}: {alias!r} is a name of the model {owner[alias]!r}. Choose another.",
                    )


def _unusable_keys(model: ModelConfig, engine: EngineSettings) -> Iterator[tuple[tuple[str, ...], str]]:
    if problem := quantize.unreachable(model, model.environment(engine)):
        yield (model.name, "quantize"), f"models.{model.name}.quantize: {problem}"
    if problem := kv_cache.unreadable(model, model.environment(engine)):
        yield (model.name, "env"), f"models.{model.name}.env: {problem}"
