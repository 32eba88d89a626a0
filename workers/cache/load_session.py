"""Owns the source of one load's tensors: the checkpoint, while a cache is written, or a quantized cache. Never chooses between them; never
knows vLLM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize

import torch

from workers.cache.layout import ALIGNMENT
from workers.cache.store import CachedCheckpoint
from workers.cache.writer import CacheWriter
from workers.load.expert_placement import straightened
from workers.load.pipeline import SHAPE, Handed, Needed, Pipeline, Receivers
from workers.load.progress import ProgressFile
from workers.load.reader import Reader
from workers.load.trace import Target, Trace
from workers.load.virtual import VirtualCheckpoint

logger = logging.getLogger("vllm.sparkd.stream")

ENDING_S = 10.0


@dataclass(slots=True)
class LoadSession:
    """One load's pipeline and its state. cut: the cache holds one rank's part of each tensor; `cut` has the place of each part."""

    pipeline: Pipeline
    device: torch.device
    reader: Callable[..., Reader]
    trace: Trace | None
    dtype: torch.dtype
    progress: ProgressFile
    placed: Callable[[Sequence[str]], None] = lambda _names: None
    cached: CachedCheckpoint | None = None
    cut: Mapping[str, Handed] | None = None
    writer: CacheWriter | None = None

    @classmethod
    def of(
        cls,
        virtual: VirtualCheckpoint,
        device: torch.device,
        reader: Callable[..., Reader],
        trace: Trace | None,
        dtype: torch.dtype,
        progress: ProgressFile,
        placed: Callable[[Sequence[str]], None] = lambda _names: None,
        cached: CachedCheckpoint | None = None,
    ) -> LoadSession:
        """trace: the tensors that the model takes, None where it could not be asked. placed: called with the names of tensors that have
        reached their parameters. cached: the quantized cache behind `virtual`, closed with the source."""
        receivers = Receivers(watcher=progress, straight={} if trace is None else trace.straight, placed=placed)
        pipeline = Pipeline(virtual, device, reader, _needed(virtual, trace), receivers, dtype=dtype, trusted=cached is not None)
        return cls(pipeline, device, reader, trace, dtype, progress, placed, cached)

    def from_cache(self, cached: CachedCheckpoint, handed: Mapping[str, Handed]) -> LoadSession | None:
        """A session with the same tensors from a quantized cache, which it closes; None where the cache lacks a tensor that the model
        takes."""
        stored = cached.checkpoint.tensors
        needed = {name: tensor for name, tensor in handed.items() if not name.endswith(f".{SHAPE}")}
        if missing := next((name for name in needed if name not in stored), None):
            logger.info("sparkd: the quantized cache %s has no %s, which this model takes: the checkpoint is read.", cached.folder, missing)
            return None
        if damaged := next((name for name in needed if name in cached.damaged), None):
            message = "sparkd: %s is damaged, the quantized cache %s says, and this model takes it: the checkpoint is read."
            logger.info(message, damaged, cached.folder)
            return None
        whole = all(stored[name].shape == tensor.whole for name, tensor in needed.items())
        if not whole and (odd := next((name for name, tensor in needed.items() if stored[name].shape != tensor.shape), None)):
            logger.info("sparkd: the quantized cache %s holds another part of %s: the checkpoint is read.", cached.folder, odd)
            return None
        virtual = virtual_of(cached, needed.__contains__)
        # Without a trace, a tensor that is stored as a part goes to the place of that part.
        trace = self.trace if whole else None
        straight = trace.straight if trace is not None else {} if whole else self._parts(needed)
        receivers = Receivers(watcher=self.progress, straight=straight, placed=self.placed)
        pipeline = Pipeline(virtual, self.device, self.reader, _needed(virtual, trace), receivers, dtype=self.dtype, trusted=True)
        cut = None if whole else needed
        return LoadSession(pipeline, self.device, self.reader, self.trace, self.dtype, self.progress, self.placed, cached, cut)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors for the model's own loader; the session places the others itself. Raises CheckpointError."""
        for name, tensor in self.pipeline.tensors():
            cut = None if self.cut is None else self.cut[name]
            if cut is not None and not cut.is_whole:
                whole = torch.empty(cut.whole, dtype=cut.dtype, device=tensor.device)
                whole[tuple(slice(at, at + size) for at, size in zip(cut.at, cut.shape, strict=True))] = tensor
                tensor = whole
            yield name, tensor

    def _parts(self, needed: Mapping[str, Handed]) -> dict[str, Target]:
        """The targets of a rank's parts that the cache holds in the needed form."""
        targets: dict[str, Target] = {}
        if self.trace is None:
            return targets
        for name, handed in needed.items():
            taken = self.trace.taken.get(name)
            target = self.trace.straight.get(name)
            if target is None and not handed.is_whole and taken is not None and taken.once:
                target = taken.target  # the model's own loader would need the whole tensor, to take this part of it
            part = None if target is None else target if handed.is_whole else straightened(target, handed.at, handed.shape)
            if part is not None:
                targets[name] = part
        return targets

    def finish(self) -> None:
        """Called after the load: complete the cache in a separate thread while the model already answers.

        The engine owns the device by then, so missing tensors are made on the CPU.
        """
        self.pipeline.forget()
        if self.trace is not None:
            self.trace.straight.clear()
        if self.writer is None:
            return
        writer = self.writer
        writer.leave_device()

        def again(names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
            return self.pipeline.again(names, torch.device("cpu"), writer.damaged)

        thread = threading.Thread(target=writer.finish, args=(again,), name="quantized-cache", daemon=True)
        thread.start()
        # Unlike atexit's functions, these also run in a forked engine (multiprocessing.popen_fork ends by os._exit).
        Finalize(None, self._end, args=(thread,), exitpriority=0)

    def _end(self, thread: threading.Thread) -> None:
        """End the cache's thread: an engine that ends does not wait for its cache, but no thread may be inside torch at the interpreter's
        end."""
        if thread.is_alive():
            self.abandon("the engine ended before it was whole")
            thread.join(ENDING_S)

    def abandon(self, reason: str) -> None:
        if self.writer is not None:
            self.writer.abandon(reason)

    def close(self) -> None:
        if self.cached is not None:
            self.cached.close()


def virtual_of(cached: CachedCheckpoint, keep: Callable[[str], bool] = lambda name: not name.endswith(f".{SHAPE}")) -> VirtualCheckpoint:
    """The tensors that a quantized cache holds for a model, unchanged.

    The reader begins with the tensors at the end of a shard, put there for alignment: NVFP4's global scales, without which no layer is
    complete, so that otherwise each kernel's layout would wait for the last byte.
    """
    return VirtualCheckpoint(cached.checkpoint, {}, keep, first=lambda ref: ref.nbytes % ALIGNMENT != 0)


def _needed(virtual: VirtualCheckpoint, trace: Trace | None) -> Needed:
    if trace is None:
        return Needed()
    # A quantized checkpoint has shape tensors that no kernel reads: one may arrive after its module has got the kernel's layout.
    unread = () if virtual.formats else (f".{SHAPE}",)
    return Needed(
        regions={name: None if name.endswith(unread) else taken.region for name, taken in trace.taken.items()},
        once=frozenset() if trace.late else frozenset(name for name, taken in trace.taken.items() if taken.once),
    )
