"""Refuses what a model added over the admin API may not set: an admin key steers models, and brings in no code, file or address."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sparkd.config.engine_flags import arguments
from sparkd.config.model import ModelConfig, TuningKeys
from sparkd.config.quantize import canonical
from sparkd.errors import ConfigError
from sparkd.recipes.admin_flags import CURE, WHERE, refuse_flags, refuse_variables

KEYS = frozenset(TuningKeys.model_fields)
# The load formats of vLLM that read a checkpoint's own files as plain numbers: no pickle, no address, no plugin. instanttensor is missing:
# vLLM hands the files to that library (weight_utils.py, instanttensor_weights_iterator), which takes a tensor's length from its shape and
# its place from data_offsets, and compares the two with each other and with the file's size nowhere in Python. A header that lies could
# then show other memory of the GPU.
LOAD_FORMATS = frozenset({"auto", "hf", "safetensors", "fastsafetensors", "mistral", "dummy", "bitsandbytes", "gguf"})
MOST_ARGUMENTS = 512
MOST_ARGUMENT_CHARACTERS = 4096
# Kept entries are parsed again with each new configuration of the file.
MOST_ENTRY_CHARACTERS = 65_536


def refuse_paths(own: Mapping[str, Any], is_recipe: Callable[[str], bool]) -> None:
    """Raise ConfigError for a recipe given by path, before any file is read, so that a caller cannot probe which files exist.

    A model that begins with '.' or '~' is refused too, because the daemon's folders are not the caller's.

    own: the keys of the request.
    is_recipe: whether a recipe has this name; names in a registry may contain folders.
    """
    recipe = str(own.get("recipe") or "")
    if "/" in recipe and not is_recipe(recipe):
        raise ConfigError("recipe must be a name here, not a path: put the file into recipes_dir.", param="recipe")
    if str(own.get("model", "")).startswith((".", "~")):
        raise ConfigError("model must be a hub id or an absolute path here, not one that begins with '.' or '~'.", param="model")


def refuse_many(own: Mapping[str, Any]) -> None:
    """Raise ConfigError for a longer entry, for more arguments or for longer ones than any model needs: the holder of a key could keep
    the event loop busy."""
    try:
        size = len(json.dumps(own, ensure_ascii=False).encode())
    except UnicodeEncodeError:
        raise ConfigError("A text holds a lone surrogate, which no answer can return: write it anew.") from None
    if size > MOST_ENTRY_CHARACTERS:
        raise ConfigError(f"An entry has at most {MOST_ENTRY_CHARACTERS:,} characters over the admin API: shorten it, or {CURE}")
    args = own.get("extra_args")
    if isinstance(args, list) and (len(args) > MOST_ARGUMENTS or any(len(str(arg)) > MOST_ARGUMENT_CHARACTERS for arg in args)):
        most = f"at most {MOST_ARGUMENTS} arguments of {MOST_ARGUMENT_CHARACTERS:,} characters are taken over the admin API"
        raise ConfigError(f"extra_args: {most}. Leave some out, or {CURE}", param="extra_args")


def refuse_calibration(quantize: Any, where: str = WHERE, cure: str = CURE) -> None:
    """Raise ConfigError for a text of the caller's choice: its absence, its size and its encoding are told, and it may be any file.

    where, cure: see `refuse_flags`.
    """
    if isinstance(quantize, Mapping) and "calibration" in quantize:
        raise ConfigError(f"quantize.calibration is refused {where}: {cure}", param="quantize")


def refuse_more_than_tuning(keys: Mapping[str, Any], where: str = WHERE, cure: str = CURE) -> None:
    """Raise ConfigError for the first key, flag or variable of an entry that is not in the lists. where, cure: see `refuse_flags`."""
    for key, value in keys.items():
        if key not in KEYS and value not in (None, False):
            raise ConfigError(f"{key} is refused {where}: {cure}", param=key)
    if keys.get("load_format") is not None and str(keys["load_format"]) not in LOAD_FORMATS:
        raise ConfigError(f"load_format is refused {where} but for {', '.join(sorted(LOAD_FORMATS))}: {cure}", param="load_format")
    refuse_calibration(keys.get("quantize"), where, cure)
    refuse_flags(arguments(keys), where, cure)
    env = keys.get("env")
    # The validation of the entry refuses a value of another type.
    names = env if isinstance(env, Mapping) else [str(pair).partition("=")[0] for pair in env] if isinstance(env, list) else ()
    refuse_variables(names, where, cure)


def refuse_over_admin(own: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError for a request that does more than tune a model.

    A recipe trusts the code of its own repository and revision only: a request that names another is refused.

    own: the keys of the request.
    model: the expanded entry; keys from its recipe are allowed, because an operator installed the recipe, but for a calibration's text.
    """
    refuse_more_than_tuning(own)
    refuse_calibration(canonical(model.quantize))
    if model.trust_remote_code:
        for key in ("model", "revision"):
            if key in own:
                reason = "The recipe runs code that comes with its own model at its own revision"
                raise ConfigError(f"{key}: {reason}: another one is refused over the admin API. Leave {key} out.", param=key)
