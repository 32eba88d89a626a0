"""Owns what an added model, one that came over the admin API, may not bring in by itself. Never reads a file."""

from __future__ import annotations

from collections.abc import Mapping

from sparkd import vllm_args
from sparkd.errors import ConfigError
from sparkd.model_config import ModelConfig
from sparkd.yamlfile import Table


def refuse_paths(own: Table) -> None:
    """Raises ConfigError for a recipe by its path, before anything is looked at: whether a file is there is no caller's business.

    own: the keys of the request. A model that begins with '.' or '~' is refused too, because the daemon's folders are not the caller's.
    """
    if "/" in str(own.get("recipe") or ""):
        raise ConfigError("recipe must be a name here, not a path: put the file into recipes_dir.", param="recipe")
    if str(own.get("model", "")).startswith((".", "~")):
        raise ConfigError("model must be a hub id or an absolute path here, not one that begins with '.' or '~'.", param="model")


def refuse_over_admin(own: Table, model: ModelConfig) -> None:
    """Raises ConfigError for code, files, addresses or another Python among the keys of the request itself.

    own: those keys. model: what they came to; what its recipe brought is the word of whoever put the recipe on this machine.
    """
    for key in ("trust_remote_code", "runtime", "entrypoint"):
        if own.get(key):
            raise ConfigError(f"{key} is refused over the admin API: set it in the configuration file.", param=key)
    if model.trust_remote_code and ("model" in own or "revision" in own):
        raise ConfigError("The recipe runs code that comes with its own model: another one is refused over the admin API.", param="model")
    args, env = own.get("extra_args") or (), own.get("env") or {}
    names = list(env) if isinstance(env, Mapping) else [str(pair).partition("=")[0] for pair in env]
    vllm_args.refused_over_admin(model.extra_args[len(model.extra_args) - len(args) :], names)
