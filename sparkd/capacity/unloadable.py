"""Owns why an engine's start would end over a model's files, as far as these are on this machine. Never says whether it has room."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sparkd.capacity.headers import headers_here, inventory_in
from sparkd.capacity.mixes import mixes_of
from sparkd.capacity.parallelism import uneven_groups
from sparkd.capacity.weights import Inventory, inventory, refuse_incomplete
from sparkd.checkpoint import CONFIG, Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError, CheckpointIncomplete, ConfigError
from sparkd.models.shape import LENGTHS, rotary_tables, shape_of, text_config
from sparkd.models.source import folder_of
from sparkd.schema.engine_args import EngineArgs
from sparkd.schema.quantize import is_open
from sparkd.vllm.releases import Release
from sparkd.vllm.translate import LOAD_FORMAT
from workers.host import regular_file
from workers.quantization.best_wish import BestWish, best_of

# The first release that was seen to take YaRN's max_position_embeddings for the stretched length; 0.26 was seen not to.
YARN_ONCE_SINCE: Release = (0, 32)
_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
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


def too_long(args: EngineArgs, release: Release | None = None) -> str | None:
    """Why vLLM would refuse the entry's max_model_len (vllm/config/model.py, _get_and_verify_max_len); None where it would not, or nothing
    on this machine tells how long the model's requests may be. release: of vLLM; what that judges counts, and else the longest of all."""
    folder, length = folder_of(args.model, args.revision, args.env), args.max_model_len
    free = args.env.get(_LONGER) or os.environ.get(_LONGER, "0")  # an engine inherits it (workers/rank/command.py)
    if folder is None or not isinstance(length, int) or free.strip().lower() in ("1", "true"):
        return None
    try:
        if args.other_config or any(_is_another_config(name) for name in os.listdir(folder)):
            return None
        config = json.loads(regular_file.read(Path(folder) / CONFIG))
        text, most = text_config(config), shape_of(config).max_len
    except (OSError, ValueError, AttributeError):
        return None
    if not any(text.get(key) for key in LENGTHS) or (args.trusts_code and config.get("auto_map")):
        return None  # vLLM knows no end, or a class of the model's own says where it is
    stated = [size for place in (config, text) if isinstance(size := place.get("model_max_length"), int)]
    longest = [most, *stated, *(_stretched(text, table, max(most, *stated, 0), release) for table in rotary_tables(text).values())]
    if length <= max(longest):
        return None
    cure = f"choose {most:,} or less, scale its rotary embedding (--hf-overrides in extra_args), or set {_LONGER}: 1 in env"
    return f"{length:,} tokens are more than the {most:,} that the model supports ({CONFIG}), so vLLM refuses to start: {cure}."


def uneven(args: EngineArgs) -> str | None:
    """Why the loader would refuse the entry's `quantize`: groups that are not whole on any number of ranks, what QuantizationRecipe.assign
    refuses, or a size that no mix of formats is as small as. None where it would not, or the headers are not on this machine."""
    if (wish := best_of(args.quantize)) is not None:
        return _too_small(args, wish)
    model = _quantized_here(args)
    if model is None or args.recipe is None:
        return None
    try:
        groups = next(uneven_groups(model.formatted(args.recipe)), None)
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


def _is_another_config(name: str) -> bool:
    """Whether a file of this name tells vLLM how long a request may be: Mistral's params.json, a sentence transformer's own."""
    return name == "params.json" or fnmatchcase(name, "sentence_*_config.json")


def _stretched(text: Mapping[str, Any], table: Mapping[str, Any], most: int, release: Release | None) -> float:
    """The longest request that a table may allow. For YaRN vLLM 0.26 multiplies the original length, or one that is the product already."""
    factor, kind = table.get("factor"), str(table.get("rope_type") or table.get("type"))
    settled = release is not None and release >= YARN_ONCE_SINCE and ("yarn" in kind or kind == "deepseek_llama_scaling")
    if not isinstance(factor, int | float) or settled or kind in ("su", "longrope", "llama3") or "gemma3" in str(text.get("model_type")):
        return 0
    original = table.get("original_max_position_embeddings", text.get("original_max_position_embeddings"))
    return factor * max(size for size in (most, original, *map(text.get, LENGTHS)) if isinstance(size, int))


def _checkpoint(folder: str) -> Checkpoint:
    try:
        return inventory_in(folder).checkpoint
    except (CheckpointError, OSError):
        return read_checkpoint(folder)
