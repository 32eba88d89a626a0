"""Owns which checkpoint and recipe a user means whose layers are listed: a folder, a configured name, a hub id. Never reads a weight."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkd.capacity.layers import Consult, LayerListing, layers_of
from sparkd.errors import ConfigError, Unavailable
from sparkd.models.remote_headers import Progress, checkpoint_of
from sparkd.models.source import CONFIG_PATH, source_of
from sparkd.schema.quantize import is_open
from workers.quantization.best_wish import BestWish, best_of
from workers.quantization.recipe import AS_IT_IS, QuantizationRecipe

if TYPE_CHECKING:
    from sparkd.config.config import Config, ModelConfig


def listing_of(
    model: str,
    quantize: str | None,
    config_file: Path | None,
    environ: Mapping[str, str],
    ask: Callable[[], list[dict[str, Any]]],
    progress: Progress | None = None,
    consult: Consult | None = None,
) -> LayerListing:
    """The layers of a folder, a configured name, a hub id, or a name that the daemon knows. Raises ConfigError, CheckpointError.

    quantize: a recipe as YAML, in place of the configured one. ask: the daemon's models, called only where nothing else knows `model`.
    progress: called for each header that had to come from the hub, because the local cache has not all of the model. consult: vLLM, about
    the model.
    """
    named = named_model(model, config_file, environ, ask)
    wish = named.best if quantize is None else best_of(value_of(quantize))
    checkpoint = checkpoint_of(named.source, named.revision, named.env, progress)
    if wish is not None:
        # These modules are imported for `best` alone.
        from sparkd.capacity.mixes import mix_of

        recipe = mix_of(checkpoint, wish)
    else:
        recipe = named.recipe if quantize is None else QuantizationRecipe.parse(value_of(quantize))
    return layers_of(checkpoint, recipe, consult, wide=named.wide)


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model that a user calls MODEL. source: a folder or a hub id; env: of its engine; wide: its entry asks for float32; best:
    set where its entry says `quantize: best`."""

    source: str
    revision: str | None
    recipe: QuantizationRecipe
    env: dict[str, str]
    wide: bool = False
    best: BestWish | None = None


def named_model(model: str, config_file: Path | None, environ: Mapping[str, str], ask: Callable[[], list[dict[str, Any]]]) -> NamedModel:
    """As `listing_of`."""
    source, env = source_of(model), dict(environ)
    if source.startswith("/"):
        return NamedModel(source, None, AS_IT_IS, env)
    return _named(model, config_file, env, ask)


def settings_around(config_file: Path | None, environ: Mapping[str, str]) -> tuple[Config, str] | None:
    """The configuration of this machine and its file; None where there is none, or this user may not read it. Raises ConfigError."""
    path = _config_path(config_file, environ)
    if path is None:
        return None
    from sparkd.config.config import load_config

    return load_config(path, environ=environ), str(path)


def of_recipe(model: str, config_file: Path | None, environ: Mapping[str, str]) -> tuple[ModelConfig, Config, str] | None:
    """The entry that names this recipe and nothing else; as `configured`."""
    if ("/" in model and "@" not in model) or model.startswith((".", "~", "/")):
        return None
    from sparkd.config.config import load_config, parse_model

    config = load_config(_config_path(config_file, environ), environ=environ)
    book = config.book()
    if not book.has(model):
        return None
    name = model.replace("@", ":")
    return parse_model(name, {"recipe": model}, over_admin=False, book=book), config, f"the recipe {model}"


def _config_path(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The system's file has keys in it and may be sparkd's alone: who may not read it asks the daemon."""
    if path is not None or environ.get("SPARKD_CONFIG"):
        return path or Path(environ["SPARKD_CONFIG"])
    return CONFIG_PATH if os.access(CONFIG_PATH, os.R_OK) else None


def _named(model: str, config_file: Path | None, environ: dict[str, str], ask: Callable[[], list[dict[str, Any]]]) -> NamedModel:
    path = _config_path(config_file, environ)
    if path is not None:
        from sparkd.config.config import load_config
        from sparkd.entry.trusted_commits import at_trusted_commit
        from sparkd.schema.engine_args import engine_args, recipe_of

        config = load_config(path, environ=environ)
        entry = next((each for each in config.models.values() if model in each.served_names()), None)
        if entry is not None:
            env = {**environ, **entry.environment(config.engine)}
            revision = at_trusted_commit(entry, config).revision
            wide = engine_args(entry, env).wide
            return NamedModel(entry.model, revision, recipe_of(entry), env, wide, best_of(entry.quantize))
    if "/" in model:
        return NamedModel(model, None, AS_IT_IS, environ)
    hidden = f"and this user may not read {CONFIG_PATH}" if CONFIG_PATH.exists() else "and there is no sparkd.yaml"
    where = f"in {path}" if path is not None else hidden
    try:
        view = next((view for view in ask() if model in (view["name"], *view["aliases"])), None)
    except Unavailable:
        cure = "give a folder, a hub id (owner/name), a configured name, or --config FILE"
        raise ConfigError(f"No model is called {model} {where}, and no sparkd answers: {cure}.") from None
    if view is None:
        raise ConfigError(f"No model is called {model}: give a configured name, a folder, or a hub id (owner/name).")
    # The environment of its entry there; this machine's variables are not its engine's.
    quantize = view.get("quantize")
    recipe = AS_IT_IS if quantize is None or is_open(quantize) else QuantizationRecipe.parse(quantize)
    return NamedModel(str(view["source"]), None, recipe, environ, best=best_of(quantize))


def value_of(text: str) -> Any:
    """`nvfp4`, or a mapping as YAML or JSON has it."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "it is no YAML"
        raise ConfigError(
            f"--quantize: {problem}; a format such as nvfp4, or a mapping such as '{{format: nvfp4}}', is expected."
        ) from None
    if value is not None and not isinstance(value, (str, Mapping)):
        raise ConfigError(f"--quantize {text}: a format such as nvfp4, or a mapping such as '{{format: nvfp4}}', is expected.")
    return value
