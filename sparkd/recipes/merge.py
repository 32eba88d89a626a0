"""Puts the settings of a recipe below the keys of the entry that names it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkd.config import yaml_file
from sparkd.config.engine_flags import contradictions
from sparkd.config.yaml_file import Document
from sparkd.recipes.library import RecipeLibrary

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
    entry: dict[str, Any] = document.values["models"][name]
    for key, message in contradictions(entry, arguments(entry)):
        document.problems.append(document.place((*path, key)).problem(f"models.{name}.{message}", key=(*path, key)))
    if not isinstance(entry.get("recipe"), str):
        return
    file, problems = book.read(entry["recipe"])
    if file is None:
        own = document.place((*path, "recipe"))
        located = [each if each.line else own.problem(f"models.{name}.recipe: {each.message}", key=(*path, "recipe")) for each in problems]
        document.problems += [each for each in located if each not in document.problems]  # two models may have one recipe
        entry.setdefault("model", "unknown/unknown")  # so that the model is not said to be missing, too
        return
    replaced = {other for key, value in entry.items() if value is not None for other in _INSTEAD_OF.get(key, ())}
    settings = {key: value for key, value in file.settings.items() if key not in replaced or key in entry}
    merged = {"model": file.recipe.model, **settings, **entry}
    for key in ("env", "metadata"):
        below, above = settings.get(key), entry.get(key)
        if isinstance(above, list) and all(isinstance(item, str) for item in above):
            above = dict(item.split("=", 1) for item in above if "=" in item)  # llama-swap's list of NAME=value
        if isinstance(below, dict) and isinstance(above, dict):
            merged[key] = {**below, **above}
    first = arguments(settings)
    if first and isinstance(entry.get("extra_args"), list):
        merged["extra_args"] = [*settings["extra_args"], *entry["extra_args"]]
        places = [document.place((*path, "extra_args", index)) for index in range(len(entry["extra_args"]))]
        document.places |= {(*path, "extra_args", len(first) + index): place for index, place in enumerate(places)}
        document.places |= {
            (*path, "extra_args", index): file.document.place(("settings", "extra_args", index)) for index in range(len(first))
        }
    for known, place in file.document.places.items():
        if known[0] == "settings":
            document.places.setdefault((*path, *known[1:]), place)
    document.places.setdefault((*path, "model"), file.document.place(("model",)))
    document.values["models"][name] = merged


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """The extra_args of these keys; empty where they are no list."""
    args = settings.get("extra_args")
    return [str(arg) for arg in args] if isinstance(args, list | tuple) else []


def book_of(recipes_dir: Any, state_dir: Any, base: Path | None, environ: Mapping[str, str]) -> RecipeLibrary:
    """The recipes for a configuration that is not validated yet. A wrong path is reported by the validation."""

    def folder(value: Any) -> Path | None:
        return (base or Path.cwd()) / os.path.expanduser(value) if isinstance(value, str) and value else None

    return RecipeLibrary(folder(recipes_dir), environ, folder(state_dir))
