"""The headers of a model and of its draft, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory, WeightPart, has_layers_ahead, inventory
from sparkd.checkpoint import COMPLETE, Checkpoint, read_checkpoint
from sparkd.checkpoint.bounded_read import read_bounded
from sparkd.checkpoint.shape import Shape, shape_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.engine_args import EngineArgs
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted, ConfigError
from sparkd.vllm.flags import Draft
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.kv.profiles import checkpoint_of

# Neither of them looks into weights: they draft from the text (vllm/v1/spec_decode/ngram_proposer.py, suffix_decoding.py).
OF_TEXT = ("ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Headers:
    """The headers of a model, wherever they are.

    model: of model and draft together.
    identity: the name of its files (workers.kv.profiles.checkpoint_of), None where they are not on this machine.
    """

    model: Inventory
    drafting: Drafting | None = None
    identity: str | None = None

    @staticmethod
    def of(args: EngineArgs, checkpoint: Checkpoint, read: Callable[[str], Checkpoint]) -> Headers:
        """With the draft of the flags.

        read: the headers of a draft, by folder or hub id.

        Raises CheckpointError, and ConfigError for a draft that is not counted.
        """
        model = inventory(checkpoint, shape_of(checkpoint.config))
        identity = checkpoint_of(checkpoint.folder) if checkpoint.folder.startswith("/") else None
        return _with_draft(args, model, identity, lambda: checkpoint, read)


def headers_here(args: EngineArgs) -> Headers | None:
    """With the draft of the flags; None where the model's are not on this machine, or none of the kinds that are counted."""
    folder = folder_of(args.spec.model, args.spec.revision, args.env)
    if folder is None:
        return None
    try:
        identity = checkpoint_of(folder)
        return _with_draft(args, _read(folder, identity), identity, lambda: read_bounded(read_checkpoint, folder))
    except (CheckpointError, ConfigError, OSError):
        return None


def draft_folder(args: EngineArgs) -> str | None:
    """Where the files of the entry's draft are for an engine of this machine; None where they are not, or it drafts without files."""
    draft = args.draft
    if draft is None or draft.model is None or draft.method in OF_TEXT:
        return None
    return folder_of(draft.model, draft.revision, args.env)


def _with_draft(
    args: EngineArgs,
    model: Inventory,
    identity: str | None,
    whole: Callable[[], Checkpoint],
    read: Callable[[str], Checkpoint] | None = None,
) -> Headers:
    """The headers of a model with those of its draft.

    whole: reads the model's with the layers that predict ahead.
    read: reads a draft's, None for those on this machine.
    """
    model, folder = model.widened() if args.wide else model, draft_folder(args)
    drafted = None if args.draft is None else replace(drafting_of(args.draft, read or partial(_draft, folder)), folder=folder)
    both = model if drafted is None or not drafted.layers else drafted.inventory(whole(), model.shape)
    return Headers(both, drafted, identity)


def inventory_in(folder: str) -> Inventory:
    """Raises CheckpointError and OSError."""
    return _read(folder, checkpoint_of(folder))


def _draft(folder: str | None, name: str) -> Checkpoint:
    if folder is None:
        raise CheckpointIncomplete("its files are not on this machine", file=name, cure=COMPLETE)
    return read_bounded(read_checkpoint, folder)


@lru_cache(maxsize=4)
def _read(folder: str, _identity: str) -> Inventory:
    """Kept while the files are the same: a model that waits for room is asked about again and again."""
    checkpoint = read_bounded(read_checkpoint, folder)
    return inventory(checkpoint, shape_of(checkpoint.config))


@dataclass(frozen=True, slots=True)
class Drafting:
    """One method of speculation for a model.

    tokens: proposed at a time.
    layers: those that keep a cache in addition to the model's own.
    ahead: whether the checkpoint's own layers for it are loaded.
    draft: a separate checkpoint.
    is_read: whether the draft's headers could be read.
    folder: of the draft, where an engine of this machine has its files.
    """

    method: str
    tokens: int
    layers: int = 0
    ahead: bool = False
    draft: Checkpoint | None = None
    is_read: bool = True
    folder: str | None = None

    def inventory(self, checkpoint: Checkpoint, shape: Shape) -> Inventory:
        """The inventory of model and draft together. A draft's own tensors are never quantized here. Raises ConfigError where nothing
        drafts."""
        own = inventory(checkpoint, shape, ahead=self.ahead)
        if self.ahead and not has_layers_ahead(own):
            reason = f"this checkpoint of {shape.architecture} comes without its layers that predict tokens ahead"
            raise ConfigError(f"speculative {self.method}: {reason}: choose off, ngram or suffix.", param="speculative")
        if self.draft is None:
            return own
        parts = tuple(_beside(inventory(self.draft, shape_of(self.draft.config))))
        more = sum(part.tensor.nbytes * part.count for part in parts)
        return replace(own, parts=own.parts + parts, stored_bytes=own.stored_bytes + more)

    def serving(self, plain: Serving) -> Serving:
        unknown = plain.unknown if self.is_read else plain.unknown | {WEIGHTS, CACHE}
        return replace(plain, speculative_tokens=self.tokens, draft_layers=self.layers, unknown=unknown)


def drafting_of(draft: Draft, read: Callable[[str], Checkpoint]) -> Drafting:
    """The layers of a draft. Raises CheckpointError for one that is missing."""
    if draft.method in OF_TEXT:
        return Drafting(draft.method, draft.tokens)
    if draft.model is None:
        return Drafting(draft.method, draft.tokens, 1, ahead=True)
    try:
        checkpoint = read(draft.model)
    except CheckpointUncounted:  # EAGLE's drafts are often pickled
        return Drafting(draft.method, draft.tokens, 1, is_read=False)
    return Drafting(draft.method, draft.tokens, shape_of(checkpoint.config).layers, draft=checkpoint)


def _beside(draft: Inventory) -> Iterator[WeightPart]:
    """In one stage of a pipeline, where the drafter runs; in no layer of the model, and never as its embedding or head."""
    for part in draft.parts:
        tensor = part.tensor._replace(name=f"draft.{part.tensor.name}")
        yield replace(part, tensor=tensor, kind="other" if part.kind in ("embedding", "lm_head", "vision") else part.kind, layered=False)
