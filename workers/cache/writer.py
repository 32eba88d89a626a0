"""Writes a quantized checkpoint into the cache during a load. Never makes the load wait, never fails it: an error costs only the cache.

The writer copies the load's tensors into a bounded ring and writes them from a thread. Where the disk is slower than the load, the ring is
full and a tensor is left out. After the load `finish` gets the left-out tensors again, unchanged ones from the source's files, quantized
ones from the loader, so the cache becomes complete while the model already answers. Its folder appears by one rename, after all files are
synced to the disk; a process that ends before that leaves a folder that the next writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkd.checkpoint import Checkpoint, TensorRef
from sparkd.errors import CheckpointError, clause
from workers.cache.companions import companions_bytes, write_companions
from workers.cache.layout import SHARD_BYTES, ShardLayout, Slot, Tensors, lay_out, neighbours
from workers.cache.manifest import MANIFEST, USED, CacheManifest, CheckpointIdentity, OwnFile, TpSlice, entry_name, format_name
from workers.cache.shard_writer import MIB, ShardWriter, Staging
from workers.cache.store import DAMAGED, GIB, WRITING, find, locked, make_room, remove, turn
from workers.load.finite import holds_nan
from workers.load.reader import Piece, Reader
from workers.load.virtual import DTYPES, VirtualCheckpoint, dtype_of

# On a CPU the ring counts toward the load's peak. With CUDA it is host memory, for the tensors that a GPU makes during one write.
CPU_STAGING = Staging(16 * MIB, MIB, hold_bytes=64 * MIB)
CUDA_STAGING = Staging(256 * MIB, 4 * MIB, hold_bytes=32 * MIB, pin=True, threads=4)
# Room for the manifest and the file system's metadata.
MARGIN_BYTES = 16 * MIB

Refill = Callable[[Collection[str]], Iterable[tuple[str, torch.Tensor]]]
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

logger = logging.getLogger("vllm.sparkd.stream")


class _Skipped(Exception):
    """This cache is not written, for a reason that is no error."""


@dataclass(frozen=True, slots=True)
class CacheContent:
    """The content of a cache. layout: name -> (safetensors dtype code, shape) of all tensors that will arrive, roughly in that order.

    quantization_config: for config.json. plain: names of tensors that are equal to the source's bytes. notes: JSON values for the manifest.
    """

    checkpoint: Checkpoint
    recipe: Mapping[str, Any]
    tp_slice: TpSlice
    quantization_config: Mapping[str, Any]
    layout: Tensors
    plain: Container[str] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


class CacheWriter:
    """One entry in the making. state: writing, then written, failed or skipped; reason: a sentence for the latter two.

    limit_bytes: of the whole cache folder. device: the tensors' device. on_state: called with (state, bytes written, reason) at the
    beginning and at each change. damaged: names of written tensors that are not finite; the manifest lists them, and the next start trusts
    the rest. Construct it as soon as the layout is known: its own thread then makes room and allocates the files before the first read.
    No method raises for a disk, a folder or a tensor that is not as expected.
    """

    def __init__(
        self,
        cache_dir: str,
        content: CacheContent,
        limit_bytes: int | None = None,
        *,
        device: torch.device | None = None,
        shard_bytes: int = SHARD_BYTES,
        staging: Staging | None = None,
        on_state: Callable[[str, int, str | None], None] = lambda _state, _bytes, _reason: None,
    ) -> None:
        self.state = "writing"
        self.reason: str | None = None
        self.damaged: set[str] = set()
        self.folder = os.path.join(cache_dir, entry_name(content.checkpoint, content.recipe, content.tp_slice))
        self._cache_dir = cache_dir
        self._writing = os.path.join(cache_dir, WRITING + os.path.basename(self.folder))
        self._checkpoint = content.checkpoint
        self._recipe = content.recipe
        self._tp_slice = content.tp_slice
        self._described = content.quantization_config
        self._limit_bytes = limit_bytes
        self._plain = content.plain
        self._notes = dict(content.notes)
        self._on_state = on_state
        self._turn = contextlib.ExitStack()
        self._mine = False
        self._ending = threading.Lock()
        self._writer: ShardWriter | None = None
        on_state(self.state, 0, None)
        try:
            self._source = CheckpointIdentity.of(content.checkpoint)
            self._shards: list[ShardLayout] = lay_out(neighbours(content.layout), shard_bytes)
            self._writer = ShardWriter(
                self._shards,
                self._prepare,
                self._ended,
                staging or (CUDA_STAGING if device is not None and device.type == "cuda" else CPU_STAGING),
            )
        except (CheckpointError, OSError, RuntimeError) as error:
            self._end(error)

    @property
    def bytes_written(self) -> int:
        return self._writer.bytes_written if self._writer is not None else 0

    @property
    def bytes_total(self) -> int:
        """The bytes of all shards, known from the beginning."""
        return self._writer.bytes_total if self._writer is not None else 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of a tensor, or leave it out where there is no room now. Never waits for a disk or a device."""
        if self._writer is None or self.state != "writing":
            return
        slot = self._slot(name, tensor)
        if slot is None:
            return
        view = bytes_of(tensor)
        if name not in self._plain:
            self._writer.put(slot, 0, view)
            return
        for start in range(0, slot.nbytes, CPU_STAGING.block_bytes):
            self._writer.put(slot, start, view[start : start + CPU_STAGING.block_bytes])

    def add_stacked(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        """Like `add`, for quantized tensors [names, ..] of one shape; those that are adjacent in the file are taken at once."""
        if self._writer is None or self.state != "writing":
            return
        slots = [slot for name in names if (slot := self._slot(name, stacked[0])) is not None]
        if len(slots) != len(names):
            return
        start = 0
        for at in range(1, len(slots) + 1):
            before = slots[at - 1]
            if at < len(slots) and (slots[at].shard, slots[at].offset) == (before.shard, before.offset + before.nbytes):
                continue
            self._writer.put(slots[start], 0, bytes_of(stacked[start:at]), behind=slots[start + 1 : at])
            start = at

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        """Like `add`, for a part of a tensor: its bytes from `start_byte` on, uint8 and 1-D."""
        if self._writer is None or self.state != "writing":
            return
        slot = self._writer.slots.get(name)
        if slot is None or start_byte < 0 or start_byte + view.numel() > slot.nbytes:
            self._refuse(f"bytes {start_byte} to {start_byte + view.numel()} of {name} came, which the cache's layout does not have")
            return
        self._writer.put(slot, start_byte, view)

    def leave_device(self) -> None:
        """Call it after the last tensor from the device. Returns when all copies are in host memory."""
        if self._writer is not None and self.state == "writing":
            self._writer.leave_device()

    def _slot(self, name: str, tensor: torch.Tensor) -> Slot | None:
        """The place of a tensor. For a tensor that does not match the layout: ends the writing and returns None."""
        slot = None if self._writer is None else self._writer.slots.get(name)
        code = CODES.get(tensor.dtype)
        if slot is None or slot.dtype != code or slot.nbytes != tensor.numel() * tensor.element_size():
            self._refuse(f"{name} came as {code} of shape {list(tensor.shape)}, which the cache's layout does not have")
            return None
        return slot

    def finish(self, refill: Refill | None = None) -> str:
        """Complete the entry and return the state. Call it from a separate thread after the load; it may take as long as a load.

        refill: makes the tensors with these names again, in any order.
        """
        try:
            if self._writer is not None and self.state == "writing":
                self._writer.flush()
                self._fill_gaps(self._writer, refill)
                self._writer.settle()
                self._publish()
                self._end(None)
        except Exception as error:  # noqa: BLE001 - the reason is kept and reported: the model serves without its cache
            self._end(error)
        self._close()
        return self.state

    def abandon(self, reason: str) -> None:
        """End without an entry, for instance after a cancelled load, and remove the written files."""
        self._refuse(reason)

    # On the writing thread

    def _prepare(self) -> str:
        """Make room and the new folder. Raises _Skipped, OSError."""
        os.makedirs(self._cache_dir, exist_ok=True)
        with locked(self._cache_dir):
            if not self._turn.enter_context(turn(self._writing)):
                raise _Skipped("another process is writing the same cache")
            there = find(self._cache_dir, self._checkpoint, self._recipe, self._tp_slice, say=lambda _sentence: None)
            if there is not None:
                there.close()
                raise _Skipped("another process has written the same cache meanwhile")
            self._mine = True
            # This is the only writer, so a folder with this name is left by one that died.
            shutil.rmtree(self._writing, ignore_errors=True)
            need_bytes = sum(shard.size_bytes for shard in self._shards) + companions_bytes(self._checkpoint.folder) + MARGIN_BYTES
            problem = make_room(self._cache_dir, need_bytes, self._limit_bytes)
            if problem is not None:
                raise _Skipped(problem)
            os.mkdir(self._writing)
        return self._writing

    # On the thread that finishes

    def _fill_gaps(self, writer: ShardWriter, refill: Refill | None) -> None:
        """Write the missing bytes. Raises CheckpointError where some are still missing afterwards."""
        gaps = list(writer.gaps())
        self._copy(writer, [gap for gap in gaps if gap[0].name in self._plain])
        missing = {slot.name: slot for slot, _, _ in gaps if slot.name not in self._plain}
        if missing and refill is not None:
            reason = "the model leaves them out, or the disk was slower than the load"
            logger.info("sparkd: %d tensors are quantized for the cache after the load: %s.", len(missing), reason)
        for name, tensor in refill(missing.keys()) if missing and refill is not None else ():
            slot = missing[name]
            if (slot.dtype, slot.nbytes) != (CODES.get(tensor.dtype), tensor.numel() * tensor.element_size()):
                break
            if not writer.put(slot, 0, bytes_of(tensor), wait=True):
                break
        writer.flush()
        left = next(writer.gaps(), None)
        if left is not None:
            raise CheckpointError("it was never handed over", tensor=left[0].name)

    def _copy(self, writer: ShardWriter, gaps: list[tuple[Slot, int, int]]) -> None:
        """Copy tensors from the source's files into the cache. Raises CheckpointError; not for a NaN in a tensor that the model leaves out,
        because all the rest would be quantized again at every start."""
        pieces = []
        for slot, start, stop in gaps:
            ref = self._checkpoint.tensors[slot.name]
            pieces.append(Piece((slot, start), ref.path, ref.offset + start, stop - start))
        if not pieces:
            return
        with Reader(pieces, block_bytes=MIB, blocks=4, threads=1, pin=False) as reader:
            for chunk in reader:
                slot, start = chunk.piece.key
                if _holds_nan(self._checkpoint.tensors[slot.name], start + chunk.start, chunk.view):
                    self.damaged.add(slot.name)
                writer.put(slot, start + chunk.start, chunk.view, wait=True)
                chunk.release()

    def _publish(self) -> None:
        """Write the manifest and rename the folder to its final name. Raises _Skipped, OSError."""
        files = [OwnFile(shard.name, shard.size_bytes, hashlib.sha256(shard.header).hexdigest()) for shard in self._shards]
        files += write_companions(self._checkpoint, self._writing, self._described, self._shards)
        if self.damaged:
            self._notes[DAMAGED] = sorted(self.damaged)
            first, more = min(self.damaged), len(self.damaged) - 1
            others = f" and {more} more tensors hold" if more > 1 else " and another tensor hold" if more else " holds"
            logger.warning("sparkd: %s%s NaN or Inf; this model does not take them, and a model that takes them is refused.", first, others)
        manifest = CacheManifest(
            self._source, self._recipe, format_name(self._recipe), self._tp_slice, tuple(files), time.time(), self._notes
        )
        for name, data in ((USED, b""), (MANIFEST, manifest.dump())):
            with open(os.path.join(self._writing, name), "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(self._writing)
        with locked(self._cache_dir):
            if os.path.isdir(self.folder) and not remove(self.folder):
                raise _Skipped("an older cache of the same name is being read")
            os.rename(self._writing, self.folder)
            sync_folder(self._cache_dir)

    # On any thread

    def _refuse(self, reason: str) -> None:
        self._end(CheckpointError(reason))
        self._close()

    def _ended(self, error: BaseException) -> None:
        """Called on the writing thread after an error: free the disk space of the unfinished entry at once."""
        self._end(error)
        self._drop()

    def _end(self, error: BaseException | None) -> None:
        """Set the final state. Only the first call counts."""
        with self._ending:
            if self.state != "writing":
                return
            self.reason = None if error is None else self._sentence(error)
            self.state = "written" if error is None else "skipped" if isinstance(error, _Skipped) else "failed"
        size_bytes = self.bytes_written
        if error is None:
            logger.info("sparkd: quantized cache of %.2f GiB in %s.", size_bytes / GIB, self.folder)
        else:
            logger.log(logging.INFO if self.state == "skipped" else logging.WARNING, "sparkd: %s", self.reason)
        self._on_state(self.state, size_bytes, self.reason)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._drop()

    def _drop(self) -> None:
        """Remove the folder of an unfinished entry, but only while this is its only writer."""
        with self._ending:
            mine, self._mine = self._mine, False
        if mine and self.state != "written":
            shutil.rmtree(self._writing, ignore_errors=True)
        self._turn.close()

    def _sentence(self, error: BaseException) -> str:
        what = f"No quantized cache of {os.path.basename(self._checkpoint.folder)} was kept"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{what}: the disk of {self._cache_dir} is full; free some, or set quantized_cache.dir to another disk."
        if isinstance(error, OSError):
            return f"{what}: {error.filename or self._cache_dir}: {error.strerror}; fix that, or set quantized_cache.dir."
        if isinstance(error, CheckpointError | _Skipped):
            return f"{what}: {clause(str(error))}."
        return f"{what}: {type(error).__name__}: {clause(str(error))}."


def layout_of(virtual: VirtualCheckpoint) -> tuple[Tensors, frozenset[str]]:
    """(layout, names of tensors that pass through unchanged) of all tensors that a virtual checkpoint emits."""
    layout = {tensor.name: (CODES[tensor.dtype], tensor.shape) for tensor in virtual.emitted()}
    return layout, frozenset(unit.plain.name for unit in virtual.units if unit.plain is not None)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 and 1-D, on its device; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def sync_folder(folder: str) -> None:
    """Sync a folder's directory entries to the disk. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _holds_nan(ref: TensorRef, start: int, data: torch.Tensor) -> bool:
    """Whether a part of a tensor holds a NaN. data: its bytes in the file from `start` on, uint8 [bytes]."""
    size = dtype_of(ref).itemsize
    if (ref.offset + start) % size or start % size or data.numel() % size:
        data = data[-start % size :].clone()  # a file that aligns nothing: the elements at the seams are passed over
        data = data[: data.numel() // size * size]
    return holds_nan(data.view(dtype_of(ref)))
