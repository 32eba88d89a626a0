"""Owns the headers of a model and its draft, read once. Counts nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sparkd.capacity.speculative import Drafting, of_config
from sparkd.capacity.weights import Inventory, inventory, refuse_incomplete
from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.checkpoint.shape import shape_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.engine_args import EngineArgs
from sparkd.errors import CheckpointError, ConfigError
from workers.kv.profiles import checkpoint_of


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a model, wherever they are. model: of model and draft together. identity: the name of its files
    (workers.kv.profiles.checkpoint_of), None where they are not on this machine."""

    model: Inventory
    drafting: Drafting | None = None
    identity: str | None = None

    @staticmethod
    def of(args: EngineArgs, checkpoint: Checkpoint, read: Callable[[str], Checkpoint]) -> Headers:
        """read: the headers of a draft, by folder or hub id. Raises CheckpointError, and ConfigError for a draft that is not counted."""
        model = inventory(checkpoint, shape_of(checkpoint.config))
        model = model.widened() if args.wide else model
        refuse_incomplete(model)
        drafted = of_config(args.draft, read) if args.draft is not None else None
        both = model if drafted is None or not drafted.layers else drafted.inventory(checkpoint, model.shape)
        return Headers(both, drafted, checkpoint_of(checkpoint.folder) if checkpoint.folder.startswith("/") else None)


def headers_here(args: EngineArgs) -> Headers | None:
    """With the draft that its flags ask for; None where the model's are not on this machine, or none of the kinds that are counted."""
    folder = folder_of(args.model, args.revision, args.env)
    if folder is None:
        return None
    try:
        identity = checkpoint_of(folder)
        model = _read(folder, identity)
        model = model.widened() if args.wide else model
        drafted = None if args.draft is None else of_config(args.draft, lambda name: read_checkpoint(folder_of(name, None, args.env) or ""))
        both = model if drafted is None or not drafted.layers else drafted.inventory(read_checkpoint(folder), model.shape)
        return Headers(both, drafted, identity)
    except (CheckpointError, ConfigError, OSError):
        return None


def inventory_in(folder: str) -> Inventory:
    """Raises CheckpointError and OSError."""
    return _read(folder, checkpoint_of(folder))


@lru_cache(maxsize=4)
def _read(folder: str, _identity: str) -> Inventory:
    """Kept while the files are the same: a model that waits for room is asked about again and again."""
    checkpoint = read_checkpoint(folder)
    model = inventory(checkpoint, shape_of(checkpoint.config))
    refuse_incomplete(model)
    return model
