"""Puts the settings of a recipe below the keys of the entry that names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.config import yaml_file
from sparkd.config.engine_flags import SWITCHES, arguments, with_flags_as_keys
from sparkd.config.overlay import dotted
from sparkd.config.yaml_file import Document, Items, Location, Map, places_in
from sparkd.recipes.library import RecipeLibrary
from sparkd.vllm.flags import flags_in

# A key of the entry that says the same as these keys of the recipe in another way.
_INSTEAD_OF: Mapping[str, tuple[str, ...]] = {
    "gpu_memory_utilization": ("kv_cache", "kv_margin_gib"),
    "kv_cache": ("gpu_memory_utilization",),
    "kv_margin_gib": ("gpu_memory_utilization",),
    "quantize": ("quantization", "load_format"),
    "quantization": ("quantize",),
    "load_format": ("quantize",),
}


def merge_recipe(document: Document, name: str, book: RecipeLibrary) -> None:
    """Make the entry of the model `name` in the document one without a recipe: its own keys, over those of its recipe.

    `env` and `metadata` are merged, and its `extra_args` follow the recipe's. Each key keeps its place.
    """
    path: yaml_file.Path = ("models", name)
    written: Map = document.values["models"][name]
    entry, both = with_flags_as_keys(written)
    for key in both:
        message = f"{dotted((*path, key))} and --{key.replace('_', '-')} in extra_args set the same: remove one of them."
        document.problems.append(places_in(written).get(key, Location()).problem(message, key=(*path, key)))
    document.values["models"][name] = entry = _over_recipe(entry, document, path, book)
    for flag in flags_in(arguments(entry)):
        # vLLM's server takes a word after a switch for a model tag and turns the switch on, so nothing here may read it as off.
        if flag.name.replace("-", "_") in SWITCHES and not isinstance(flag.value, bool):
            argument = (*path, "extra_args", flag.place)
            message = f"{dotted(argument[:-1])}: --{flag.name} takes no value."
            document.problems.append(document.place(argument).problem(message, key=argument))


def _over_recipe(entry: Map, document: Document, path: yaml_file.Path, book: RecipeLibrary) -> Map:
    """The entry over the settings of the recipe that it names. path: of the entry."""
    if not isinstance(entry.get("recipe"), str):
        return entry
    file, problems = book.read(entry["recipe"])
    if file is None:
        head, at = dotted((*path, "recipe")), (*path, "recipe")
        located = [each if each.line else document.place(at).problem(f"{head}: {each.message}", key=at) for each in problems]
        document.problems += [each for each in located if each not in document.problems]  # two models may have one recipe
        entry.setdefault("model", "unknown/unknown")  # so that the model is not said to be missing, too
        return entry
    replaced = {other for key, value in entry.items() if value is not None for other in _INSTEAD_OF.get(key, ())}
    places = {"model": file.document.place(("model",)), **places_in(file.document.values.get("settings"))}
    recipe, _ = with_flags_as_keys(Map({"model": file.recipe.model, **file.settings}, places))
    settings = Map({key: value for key, value in recipe.items() if key not in replaced or key in entry}, recipe.places)
    merged = entry.over(settings)
    for key in ("env", "metadata"):
        below, own = settings.get(key), entry.get(key)
        if isinstance(own, list) and all(isinstance(item, str) for item in own):
            own = dict(item.split("=", 1) for item in own if "=" in item)  # llama-swap's list of NAME=value
        if isinstance(below, dict) and isinstance(own, dict):
            merged[key] = Map(own, places_in(own)).over(below)
    below, own = settings.get("extra_args"), entry.get("extra_args")
    if isinstance(below, list) and isinstance(own, list):
        merged["extra_args"] = Items.joined(below, own)
    return merged


def book_of(recipes_dir: Any, state_dir: Any, base: Path | None, environ: Mapping[str, str]) -> RecipeLibrary:
    """The recipes for a configuration that is not validated yet. A wrong path is reported by the validation."""

    def folder(value: Any) -> Path | None:
        return (base or Path.cwd()) / os.path.expanduser(value) if isinstance(value, str) and value else None

    return RecipeLibrary(folder(recipes_dir), environ, folder(state_dir))
