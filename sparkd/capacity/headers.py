"""The headers of a model and of its draft, read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from sparkd.capacity.kv_cache import Serving
from sparkd.capacity.weights import Inventory, WeightPart, has_layers_ahead, inventory
from sparkd.checkpoint import COMPLETE, Checkpoint, read_checkpoint
from sparkd.checkpoint.bounded_read import read_bounded
from sparkd.checkpoint.shape import Shape, shape_of
from sparkd.checkpoint.source import folder_of
from sparkd.config.engine_args import EngineArgs
from sparkd.errors import CheckpointError, CheckpointIncomplete, CheckpointUncounted, ConfigError
from sparkd.vllm.flags import draft_method
from sparkd.vllm.unaccounted_args import CACHE, WEIGHTS
from workers.kv.profiles import checkpoint_of

# Neither of them looks into weights: they draft from the text (vllm/v1/spec_decode/ngram_proposer.py, suffix_decoding.py).
OF_TEXT = ("ngram", "suffix")
# vLLM's number for a draft by suffix where no number of tokens is given (suffix_decoding_max_tree_depth).
_SUFFIX_DEPTH = 24


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
        return _with_draft(args, model, lambda: checkpoint, read, identity)


def headers_here(args: EngineArgs) -> Headers | None:
    """With the draft of the flags; None where the model's are not on this machine, or none of the kinds that are counted."""
    folder = folder_of(args.model, args.revision, args.env)
    if folder is None:
        return None
    try:
        identity = checkpoint_of(folder)
        model = _read(folder, identity)
        return _with_draft(args, model, lambda: read_bounded(read_checkpoint, folder), lambda name: _draft(name, args.env), identity)
    except (CheckpointError, ConfigError, OSError):
        return None


def _with_draft(
    args: EngineArgs, model: Inventory, whole: Callable[[], Checkpoint], read: Callable[[str], Checkpoint], identity: str | None
) -> Headers:
    """whole: reads the model's headers with the layers that predict ahead."""
    model = model.widened() if args.wide else model
    drafted = of_config(args.draft, read) if args.draft is not None else None
    both = model if drafted is None or not drafted.layers else drafted.inventory(whole(), model.shape)
    return Headers(both, drafted, identity)


def inventory_in(folder: str) -> Inventory:
    """Raises CheckpointError and OSError."""
    return _read(folder, checkpoint_of(folder))


def _draft(name: str, environ: Mapping[str, str]) -> Checkpoint:
    folder = folder_of(name, None, environ)
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
    """

    method: str
    tokens: int
    layers: int = 0
    ahead: bool = False
    draft: Checkpoint | None = None
    is_read: bool = True

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


def of_config(config: Mapping[str, Any], read: Callable[[str], Checkpoint]) -> Drafting:
    """The draft of a configuration of vLLM's (config/speculative.py). Raises CheckpointError for one that is missing."""
    method, tokens = draft_method(config), config.get("num_speculative_tokens")
    if method == "suffix" and tokens is None:
        tokens = config.get("suffix_decoding_max_tree_depth", _SUFFIX_DEPTH)
    tokens = tokens if type(tokens) is int and tokens > 0 else 1
    if method in OF_TEXT:
        return Drafting(method, tokens)
    if not isinstance(config.get("model"), str):
        return Drafting(method, tokens, 1, ahead=True)
    try:
        draft = read(config["model"])
    except CheckpointUncounted:  # EAGLE's drafts are often pickled
        return Drafting(method, tokens, 1, is_read=False)
    return Drafting(method, tokens, shape_of(draft.config).layers, draft=draft)


def _beside(draft: Inventory) -> Iterator[WeightPart]:
    """In one stage of a pipeline, where the drafter runs; in no layer of the model, and never as its embedding or head."""
    for part in draft.parts:
        tensor = part.tensor._replace(name=f"draft.{part.tensor.name}")
        yield replace(part, tensor=tensor, kind="other" if part.kind in ("embedding", "lm_head", "vision") else part.kind, layered=False)
