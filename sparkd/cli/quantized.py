"""Lists and removes this node's quantized weights, and finds those of an export. It asks no daemon."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkd.checkpoint.model_folder import refuse_unusable
from sparkd.checkpoint.source import name_of, snapshot_of, source_of
from sparkd.cli.named_entry import value_of
from sparkd.config.quantize import is_open
from sparkd.errors import CheckpointError, ConfigError, Conflict
from sparkd.units import GIB
from workers.cache import store
from workers.cache.manifest import CacheManifest, model_name

if TYPE_CHECKING:
    from sparkd.config.config import Config
    from sparkd.config.model import ModelConfig
    from workers.quantization.recipe import QuantizationRecipe

_AS_ITS_USER = "Run this as the user that sparkd runs as."


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint and what is to be made of it.

    runtime: the Python that has torch, "" for ours.
    cache_dir: where it may be already.
    """

    folder: str
    recipe: QuantizationRecipe
    runtime: str
    cache_dir: str


def listing(config: Config) -> dict[str, Any]:
    """The answer of `ls --cached`: the folder, its entries, what is being written, and how much was removed at this look of what earlier
    loads left (or why not, in `sweep_fault`). Raises ConfigError where the folder cannot be read."""
    limit_gib, folder = config.quantized_cache.limit_gib, str(config.quantized_path)
    entries = _entries(config)
    swept_bytes, sweep_fault = 0, None
    try:
        swept_bytes = store.swept(folder)
    except OSError as error:
        sweep_fault = f"{error.filename or folder}: {error.strerror}"
    return {
        "folder": folder,
        "limit_bytes": None if limit_gib is None else int(limit_gib * GIB),
        "cached": [_row(entry, config) for entry in entries],
        "writing_bytes": store.written_now(folder),
        "swept_bytes": swept_bytes,
        "sweep_fault": sweep_fault,
    }


def remove(model: str, config: Config) -> tuple[list[dict[str, Any]], int]:
    """Removes every entry of a model: a folder, a hub id, the name of one entry, or a configured name, of which only the entries in its
    own formats are removed; and what earlier loads have left of any.

    Returns what it removed, and the bytes of the latter. Raises ConfigError where there is nothing, Conflict where an engine reads one;
    the others are removed all the same.
    """
    entries = [entry for entry in _entries(config) if _is_of(entry, model, config)]
    try:
        swept_bytes = store.swept(str(config.quantized_path))
    except OSError as error:
        raise ConfigError(f"{error.filename or config.quantized_path}: {error.strerror}. {_AS_ITS_USER}") from None
    if not entries:
        hint = "" if config.lookup(model) else "; a configured name needs its sparkd.yaml as --config"
        freed = f" Leftovers of earlier loads were removed anyway: {swept_bytes:,} bytes." if swept_bytes else ""
        raise ConfigError(f"{config.quantized_path} has no weights of {model}. `sparkd ls --cached` lists them{hint}.{freed}")
    removed: list[dict[str, Any]] = []
    in_use: list[dict[str, Any]] = []
    for entry in entries:
        row = {"name": entry.name, "folder": entry.folder, "size_bytes": entry.size_bytes}
        try:
            (removed if store.remove(entry.folder) else in_use).append(row)
        except OSError as error:
            raise ConfigError(f"{error.filename or entry.folder}: {error.strerror}. {_AS_ITS_USER}") from None
    if in_use:
        done = f" Removed: {', '.join(row['name'] for row in removed)}." if removed else ""
        raise Conflict(
            f"{', '.join(row['name'] for row in in_use)}: a starting engine is reading it; try again when that engine is READY.{done}"
        )
    return removed, swept_bytes


def chosen(model: str, quantize: str | None, config: Config, environ: Mapping[str, str]) -> Chosen:
    """The model that `export` writes: a folder, a configured name, or a hub id in the local cache. Raises ConfigError, CheckpointError.

    quantize: a recipe as YAML, in place of the configured one.
    """
    from workers.quantization.recipe import QuantizationRecipe

    configured = config.lookup(model)
    source = source_of(configured.model if configured else model)
    runtime = configured.runtime_of(config.engine) if configured else config.engine.runtime
    env = {**environ, **(configured.environment(config.engine) if configured else {})}
    if not source.startswith("/"):
        if configured is None and "/" not in source:
            sources = "a folder, a hub id (owner/name), or a configured name with its sparkd.yaml as --config"
            raise ConfigError(f"No model is called {model}: give {sources}.")
        snapshot = snapshot_of(source, configured.revision if configured else None, env)
        if snapshot is None:
            raise CheckpointError(f"{source} is not in this machine's hub cache", cure="Load it once, or give a folder")
        source = str(snapshot)
    refuse_unusable(source, vllm=True)
    own = configured.quantize if configured is not None and not is_open(configured.quantize) else None
    value = value_of(quantize) if quantize is not None else own
    recipe = QuantizationRecipe.parse(value)
    if not recipe.quantizes:
        raise ConfigError(f"{model} has no `quantize` key that changes its checkpoint: give --quantize, such as --quantize nvfp4.")
    return Chosen(source, recipe, str(runtime) if runtime else "", str(config.quantized_path))


def _entries(config: Config) -> list[store.CacheEntry]:
    folder = str(config.quantized_path)
    try:
        return store.entries(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}. Run this as the user that sparkd runs as, or set quantized_cache.dir.") from None


def _row(entry: store.CacheEntry, config: Config) -> dict[str, Any]:
    manifest, fault = entry.manifest, store.fault_of(entry)
    return {
        "name": entry.name,
        "model": model_name(manifest.source.folder) if manifest else None,
        "entries": [name for name, model in config.models.items() if manifest and model.quantize and _is_for(manifest, model)],
        "format": manifest.format if manifest else None,
        "quantize": dict(manifest.recipe) if manifest else None,
        "tensor_parallel": list(manifest.tp_slice) if manifest and manifest.tp_slice else None,
        "size_bytes": entry.size_bytes,
        "source": manifest.source.folder if manifest else None,
        "created_s": manifest.created_s if manifest else None,
        "used_s": entry.used_s,
        "valid": fault is None,
        "fault": fault,
        "folder": entry.folder,
    }


def _is_of(entry: store.CacheEntry, model: str, config: Config) -> bool:
    """Whether an entry is what a user means by `model`."""
    source = source_of(model)
    if entry.name == model or (source.startswith("/") and os.path.realpath(source) == entry.folder):
        return True
    if entry.manifest is None:
        return False
    configured = config.lookup(model)
    return _is_for(entry.manifest, configured) if configured else _is_made_of(entry.manifest.source.folder, source)


def _is_for(manifest: CacheManifest, model: ModelConfig) -> bool:
    """Whether the quantized weights are of a configured model: in its own format, or in any where it names none."""
    from workers.quantization.recipe import QuantizationRecipe

    if not _is_made_of(manifest.source.folder, source_of(model.model)):
        return False
    own = None if is_open(model.quantize) else model.quantize
    return own is None or QuantizationRecipe.parse(own).canonical().items() <= manifest.recipe.items()


def _is_made_of(folder: str, source: str) -> bool:
    """Whether a checkpoint's folder is that of a source: a folder, a hub id, or a bare name."""
    if source.startswith("/"):
        return os.path.realpath(source) == folder
    return f"/models--{source.replace('/', '--')}/" in folder if "/" in source else model_name(folder) == name_of(source)
