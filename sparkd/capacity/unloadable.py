"""Owns why an engine's start would end over a model's files, as far as these are on this machine. Never says whether it has room."""

from __future__ import annotations

import os
from contextlib import suppress

from sparkd.capacity.headers import headers_here, inventory_in
from sparkd.capacity.mixes import mixes_of
from sparkd.capacity.parallelism import uneven_groups
from sparkd.capacity.weights import Inventory, inventory, refuse_incomplete
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.checkpoint.source import folder_of
from sparkd.errors import CheckpointError, CheckpointIncomplete, ConfigError
from sparkd.schema.engine_args import EngineArgs
from sparkd.schema.quantize import is_open
from sparkd.vllm.flags import LOAD_FORMAT
from workers.quantization.best_wish import BestWish, best_of

# The load formats that need every file of a checkpoint; others read no weights here, or files of their own.
_READS_SAFETENSORS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", LOAD_FORMAT)


def fault(args: EngineArgs) -> CheckpointError | None:
    """Why the files of the model here cannot be loaded, as `sparkd plan` refuses them; None where they can, or are not here.

    The missing files of a hub id are fetched by its engine. CheckpointUncounted: of these files only the engine knows.
    """
    folder = folder_of(args.model, args.revision, args.env)
    if folder is None or not os.path.isdir(folder) or (args.load_format is not None and args.load_format not in _READS_SAFETENSORS):
        return None
    try:
        checkpoint = _checkpoint(folder)
        with suppress(ConfigError):
            refuse_incomplete(inventory(checkpoint, shape_of(checkpoint.config)))
    except CheckpointIncomplete as error:
        return error if args.model.startswith("/") else None
    except CheckpointError as error:
        return error
    except OSError:
        return None  # this user may not look there
    return None


def uneven(args: EngineArgs) -> str | None:
    """Why the loader would refuse the entry's `quantize`: groups that are not whole on any number of ranks, what QuantizationRecipe.assign
    refuses, or a size that no mix of formats is as small as. None where it would not, or the headers are not on this machine."""
    if (wish := best_of(args.quantize)) is not None:
        return _too_small(args, wish)
    model = _quantized_here(args)
    if model is None or args.recipe is None:
        return None
    try:
        groups = uneven_groups(model.formatted(args.recipe))
    except CheckpointError as error:
        return error.message
    return groups and f"{groups}."


def unmet(args: EngineArgs) -> tuple[str, ...]:
    """The result of Inventory.unmet for the entry's `quantize`; empty where the headers are not on this machine."""
    model = _quantized_here(args)
    return () if model is None or args.recipe is None else model.unmet(args.recipe)


def _too_small(args: EngineArgs, wish: BestWish) -> str | None:
    # With the draft and the precision that its flags ask for, as a start counts it.
    headers = headers_here(args) if wish.gib is not None else None
    try:
        if headers is not None:
            mixes_of(headers.model, wish, args.tensor_parallel or 1)
    except ConfigError as error:
        return error.explanation
    except CheckpointError:
        pass  # the engine says it, with the tensor's name
    return None


def _quantized_here(args: EngineArgs) -> Inventory | None:
    """The weights that its `quantize` is about; None where there is none, or they are not on this machine."""
    return None if args.quantize is None or is_open(args.quantize) else _weights_here(args)


def _weights_here(args: EngineArgs) -> Inventory | None:
    folder = folder_of(args.model, args.revision, args.env)
    if folder is None:
        return None
    try:
        return inventory_in(folder)
    except (CheckpointError, ConfigError, OSError):
        return None  # the engine says it, with the tensor's name


def _checkpoint(folder: str) -> Checkpoint:
    try:
        return inventory_in(folder).checkpoint
    except (CheckpointError, OSError):
        return read_checkpoint(folder)
