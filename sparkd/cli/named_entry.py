"""The entry that a user of a command line means by MODEL, where no daemon is asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkd.capacity.planned_entry import made_for
from sparkd.checkpoint.source import CONFIG_PATH, source_of
from sparkd.cli.config_file import config_path
from sparkd.config.config import Config, ModelConfig, load_config, parse_model
from sparkd.errors import ConfigError, NotFound, Unavailable
from sparkd.nearest import nearest


@dataclass(frozen=True, slots=True)
class NamedEntry:
    """A model's entry and the configuration around it.

    origin: the file or recipe that it is of; None where it was made for MODEL.
    """

    spec: ModelConfig
    config: Config
    origin: str | None = None


def configured(model: str, config_file: Path | None, environ: Mapping[str, str]) -> NamedEntry | None:
    """The entry of a sparkd.yaml, or that of a folder; None where the name is neither. Raises ConfigError."""
    # A user who may not read the system's file asks the daemon.
    source, path = source_of(model), config_path(config_file, environ, readable=True)
    if source.startswith("/"):
        config = Config()
        # A folder needs no configuration, and is planned where that has an error.
        with suppress(ConfigError):
            config = load_config(path, environ=environ)
        return NamedEntry(made_for(source), config)
    config = load_config(path, environ=environ)
    spec = config.lookup(model)
    return None if spec is None else NamedEntry(spec, config, str(path))


def of_recipe(model: str, config_file: Path | None, environ: Mapping[str, str]) -> NamedEntry | None:
    """The entry that names this recipe and nothing else. Raises ConfigError."""
    if "/" in model and "@" not in model:
        return None
    config = load_config(config_path(config_file, environ, readable=True), environ=environ)
    book = config.book()
    if not book.has(model):
        return None
    name = model.replace("@", ":")
    return NamedEntry(parse_model(name, {"recipe": model}, over_admin=False, book=book), config, f"the recipe {model}")


def of_hub(model: str, config_file: Path | None, environ: Mapping[str, str]) -> NamedEntry | None:
    """The entry of a hub id; None for a name that is none. Raises ConfigError."""
    if "/" not in model:
        return None
    return NamedEntry(made_for(model), load_config(config_path(config_file, environ, readable=True), environ=environ))


def of_daemon(model: str, config_file: Path | None, environ: Mapping[str, str], ask: Callable[[str], Mapping[str, Any]]) -> NamedEntry:
    """The entry of a daemon's model, with what tells its files and their formats. Raises ConfigError for a name that nothing has.

    ask: for the settings of the daemon's model of a name.
    """
    try:
        entry = ask(model)["resolved"]
    except (NotFound, Unavailable) as error:
        raise unknown(model, config_file, environ, asked=isinstance(error, NotFound)) from None
    # The environment of its entry there; this machine's variables are not its engine's.
    keys = {key: entry.get(key) for key in ("model", "revision", "quantize", "dtype")}
    return NamedEntry(ModelConfig.model_validate({"name": model, **keys}), Config())


def unknown(model: str, config_file: Path | None, environ: Mapping[str, str], *, asked: bool, names: Collection[str] = ()) -> ConfigError:
    """The refusal of a name that nothing has.

    asked: whether a daemon answered.
    names: those of its models.
    """
    path = config_path(config_file, environ, readable=True)
    config = load_config(path, environ=environ)
    near = nearest(model, [*names, *config.names(), *config.book().names()])
    if asked:
        cure = f"did you mean {near}?" if near else "give a configured name, a recipe, a folder, or a hub id (owner/name)."
        return ConfigError(f"No model is called {model}: {cure}")
    hidden = f"and this user may not read {CONFIG_PATH}" if CONFIG_PATH.exists() else "and there is no sparkd.yaml"
    where = f"in {path}" if path is not None else hidden
    cure = f"did you mean {near}?" if near else "give a folder, a hub id (owner/name), a configured name, or --config FILE."
    return ConfigError(f"No model is called {model} {where}, and no sparkd answers: {cure}")


def value_of(text: str) -> Any:
    """`nvfp4`, or a mapping as YAML or JSON has it. Raises ConfigError."""
    import yaml

    value = None
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
    if not isinstance(value, (str, Mapping)):
        raise ConfigError(f"--quantize {text}: a format such as nvfp4, or a mapping such as '{{format: nvfp4}}', is expected.")
    return value
