"""Owns the source of one load's tensors: the checkpoint, while a cache is written, or a quantized cache. Never chooses between them; never
knows vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from workers.cache.store import CachedCheckpoint
from workers.cache.writer import CacheWriter
from workers.load.pipeline import SHAPE, Handed, Needed, Pipeline, Receivers
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.trace import Target, Trace, straightened
from workers.load.virtual import VirtualCheckpoint


@dataclass(slots=True)
class LoadSession:
    """One load's pipeline and its state. trace: the tensors that the model takes, None where it could not be asked. progress: of the
    bytes read. cached: the quantized cache behind the pipeline, which `close` closes. cut: the place of each tensor that it has in part."""

    virtual: VirtualCheckpoint
    device: torch.device
    reader: Callable[..., Reader]
    trace: Trace | None
    dtype: torch.dtype
    progress: ProgressFile
    cached: CachedCheckpoint | None = None
    cut: Mapping[str, Handed] = field(default_factory=dict)
    writer: CacheWriter | None = None
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        self._read(self.virtual, needed_of(self.trace), {} if self.trace is None else self.trace.straight)

    def takes_most(self) -> bool:
        """Whether the model takes more than half of the checkpoint. A draft in the folder of its target does not."""
        if self.trace is None:
            return True
        taken = (tensor.nbytes for tensor in self.virtual.emitted() if self.trace.region(tensor.name) is not None)
        return 2 * sum(taken) > self.virtual.emitted_bytes

    def write_whole(self, writer: CacheWriter) -> None:
        """Read the whole checkpoint, and hand to the writer also what the model leaves out (MTP layers without speculation, a vision tower
        that is turned off), which another start may take."""
        self.writer = writer
        if self.trace is not None:
            taken = frozenset(name for name, taken in self.trace.taken.items() if taken.region is not None)
            needed = Needed(once=needed_of(self.trace).once, taken=taken)
            self._read(self.virtual, needed, self.trace.straight)
        self.pipeline.sink = writer

    def write_parts(self, writer: CacheWriter) -> None:
        """Hand to the writer what this rank reads."""
        self.writer = self.pipeline.sink = writer

    def read_parts(self, cached: CachedCheckpoint, parts: Mapping[str, Handed]) -> None:
        """Read this rank's own cache, which has these parts."""
        self.cached = cached
        self.cut = {name: part for name, part in parts.items() if not name.endswith(f".{SHAPE}")}
        # A tensor that is stored as a part goes to the place of that part.
        self._read(virtual_of(cached, self.cut.__contains__), Needed(), self._targets())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors for the model's own loader; the pipeline places the others itself. Raises CheckpointError."""
        for name, tensor in self.pipeline.tensors():
            part = self.cut.get(name)
            if part is not None and not part.is_whole:
                whole = torch.empty(part.whole, dtype=part.dtype, device=tensor.device)
                whole[tuple(slice(at, at + size) for at, size in zip(part.at, part.shape, strict=True))] = tensor
                tensor = whole
            yield name, tensor

    def finish(self) -> None:
        """Called after the last tensor: complete the cache."""
        if self.writer is not None:
            if damaged := self.pipeline.damaged:
                self.writer.abandon(f"{damaged[0].name} holds NaN or Inf, and this model does not take it")
            self.writer.finish()

    def close(self) -> None:
        """End a cache that is not finished, and release the one that was read. A second call has no effect."""
        if self.writer is not None:
            self.writer.abandon("the load ended before its last tensor")
        if self.cached is not None:
            self.cached.close()

    def _read(self, virtual: VirtualCheckpoint, needed: Needed, straight: dict[str, Target]) -> None:
        receivers = Receivers(watcher=self.progress, straight=straight)
        trusted = self.cached is not None
        self.pipeline = Pipeline(virtual, self.device, self.reader, needed, receivers, dtype=self.dtype, trusted=trusted)

    def _targets(self) -> dict[str, Target]:
        """The targets of a rank's parts that the cache holds in the needed form."""
        targets: dict[str, Target] = {}
        if self.trace is None:
            return targets
        for name, part in self.cut.items():
            taken = self.trace.taken.get(name)
            target = self.trace.straight.get(name)
            if target is None and not part.is_whole and taken is not None and taken.once:
                target = taken.target  # the model's own loader would need the whole tensor, to take this part of it
            placed = None if target is None else target if part.is_whole else straightened(target, part.at, part.shape)
            if placed is not None:
                targets[name] = placed
        return targets


def virtual_of(cached: CachedCheckpoint, keep: Callable[[str], bool] = lambda name: not name.endswith(f".{SHAPE}")) -> VirtualCheckpoint:
    """The tensors that a quantized cache holds for a model, unchanged."""
    return VirtualCheckpoint(cached.checkpoint, {}, keep)


def parts_key(parts: Mapping[str, Handed]) -> str:
    """A digest of what a rank reads, for the name of its own cache: it differs where the ranks or the tensors that the model takes do."""
    described = [(name, part.shape, part.at) for name, part in sorted(parts.items())]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def needed_of(trace: Trace | None) -> Needed:
    if trace is None:
        return Needed()
    return Needed(
        regions={name: taken.region for name, taken in trace.taken.items()},
        once=frozenset() if trace.late else frozenset(name for name, taken in trace.taken.items() if taken.once),
    )
