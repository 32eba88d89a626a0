"""Joins one load's pipeline to the cache: the checkpoint is read and a cache written, or a quantized cache is read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from workers.cache.store import CachedCheckpoint, find
from workers.cache.writer import CODES, CacheContent, CacheWriter, layout_of
from workers.load.pipeline import SHAPE, Needed, Pipeline, Receivers, SinkTensor
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.trace import Target, Trace, target_within
from workers.load.virtual import VirtualCheckpoint

logger = logging.getLogger("vllm.sparkd.stream")


@dataclass(slots=True)
class LoadSession:
    """One load's pipeline and its state.

    trace: of the tensors that the model takes, None where it could not be asked.
    progress: of the bytes read.
    cached: the quantized cache behind the pipeline, which `close` closes.
    layout: of the tensors in that cache, where it is one rank's own.
    """

    virtual: VirtualCheckpoint
    device: torch.device
    reader: Callable[..., Reader]
    trace: Trace | None
    dtype: torch.dtype
    progress: ProgressFile
    cached: CachedCheckpoint | None = None
    layout: Mapping[str, SinkTensor] = field(default_factory=dict)
    writer: CacheWriter | None = None
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        self._read(self.virtual, needed_of(self.trace), {} if self.trace is None else self.trace.direct_targets)

    def use_cache(self, cache_dir: str, content: CacheContent, limit_bytes: int | None, rank: tuple[int, int]) -> None:
        """Write the cache that there is not yet. One of several ranks has a cache of its own, and reads it where it is there.

        content: its layout and its slice are set here.
        rank: (this rank, number of ranks).
        """
        if rank == (0, 1):
            if self.takes_most():
                writer = self._writer(cache_dir, replace(content, layout=layout_of(self.virtual)), limit_bytes)
                if writer is not None:
                    self.write_whole(writer)
            return
        sink_layout = self.pipeline.sink_layout()
        layout = {name: (CODES[tensor.dtype], tensor.shape) for name, tensor in sink_layout.items()}
        own = replace(content, recipe={**content.recipe, "parts": layout_key(sink_layout)}, tp_slice=rank, layout=layout)
        if (cached := find(cache_dir, own.checkpoint, own.recipe, rank, say=logger.info)) is not None:
            self.read_own(cached, sink_layout)
        else:
            self.writer = self.pipeline.sink = self._writer(cache_dir, own, limit_bytes)

    def takes_most(self) -> bool:
        """Whether the model takes more than half of the checkpoint. A draft in the folder of its target does not."""
        if self.trace is None:
            return True
        for_model = (tensor.nbytes for tensor in self.virtual.outputs() if self.trace.tensors[tensor.name].region is not None)
        return 2 * sum(for_model) > self.virtual.output_bytes

    def write_whole(self, writer: CacheWriter) -> None:
        """Read the whole checkpoint into the cache, because another start may take tensors that this model leaves out: MTP layers without
        speculation, a vision tower that is turned off."""
        self.writer = writer
        if self.trace is not None:
            for_model = frozenset(name for name, traced in self.trace.tensors.items() if traced.region is not None)
            needed = Needed(once=needed_of(self.trace).once, for_model=for_model)
            self._read(self.virtual, needed, self.trace.direct_targets)
        self.pipeline.sink = writer

    def read_own(self, cached: CachedCheckpoint, layout: Mapping[str, SinkTensor]) -> None:
        """Read this rank's own cache, which has these tensors."""
        self.cached = cached
        self.layout = {name: part for name, part in layout.items() if not name.endswith(f".{SHAPE}")}
        # A tensor of which the cache has a region goes to the target of that region.
        self._read(virtual_of(cached, self.layout.__contains__), Needed(), self._targets())

    def begin(self, spellings: Sequence[str]) -> None:
        """Called before `tensors`: release the targets that are not used, and report the source. spellings: of the formats."""
        if self.trace is not None:
            self.trace.forget_targets()
        source = "checkpoint" if self.cached is None else "cache"
        self.progress.begin(self.pipeline.bytes_total, self.pipeline.units_total, " ".join(spellings) or "bf16", source)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors for the model's own loader; the pipeline places the others itself. Raises CheckpointError."""
        for name, tensor in self.pipeline.tensors():
            part = self.layout.get(name)
            if part is not None and not part.is_whole:
                whole = torch.empty(part.whole_shape, dtype=part.dtype, device=tensor.device)
                whole[tuple(slice(at, at + size) for at, size in zip(part.origin, part.shape, strict=True))] = tensor
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

    def _writer(self, cache_dir: str, content: CacheContent, limit_bytes: int | None) -> CacheWriter | None:
        """The writer of a new entry; None where it cannot be written."""
        writer = CacheWriter(cache_dir, content, limit_bytes, device=self.device, on_state=self.progress.cache)
        return writer if writer.state == "writing" else None

    def _read(self, virtual: VirtualCheckpoint, needed: Needed, direct_targets: dict[str, Target]) -> None:
        receivers = Receivers(watcher=self.progress, direct_targets=direct_targets)
        trusted = self.cached is not None
        self.pipeline = Pipeline(virtual, self.device, self.reader, needed, receivers, dtype=self.dtype, trusted=trusted)

    def _targets(self) -> dict[str, Target]:
        """The targets of the regions that a rank's own cache has in the needed form."""
        targets: dict[str, Target] = {}
        if self.trace is None:
            return targets
        for name, part in self.layout.items():
            traced = self.trace.tensors.get(name)
            target = self.trace.direct_targets.get(name)
            if target is None and not part.is_whole and traced is not None and traced.once:
                target = traced.target  # the model's own loader would need the whole tensor, to take this part of it
            placed = None if target is None else target if part.is_whole else target_within(target, part.origin, part.shape)
            if placed is not None:
                targets[name] = placed
        return targets


def virtual_of(cached: CachedCheckpoint, keep: Callable[[str], bool] = lambda name: not name.endswith(f".{SHAPE}")) -> VirtualCheckpoint:
    """The tensors that a quantized cache holds for a model, unchanged."""
    return VirtualCheckpoint(cached.checkpoint, {}, keep)


def layout_key(layout: Mapping[str, SinkTensor]) -> str:
    """A digest of the regions that a rank reads, for the name of its own cache: it differs where the ranks or the model's tensors do."""
    described = [(name, part.shape, part.origin) for name, part in sorted(layout.items())]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def needed_of(trace: Trace | None) -> Needed:
    if trace is None:
        return Needed()
    return Needed(
        regions={name: traced.region for name, traced in trace.tensors.items()},
        once=frozenset() if trace.late else frozenset(name for name, traced in trace.tensors.items() if traced.once),
    )
