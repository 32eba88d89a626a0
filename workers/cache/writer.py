"""Writes a quantized checkpoint into the cache during a load, which waits where the disk is slower. Never fails a load: an error costs only
the cache.

Its folder is made and allocated first, and appears by one rename, after all files are synced to the disk; a process that ends before that
leaves a folder that the next writer removes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError, clause
from workers.cache.companions import companions_bytes, write_companions
from workers.cache.layout import SHARD_BYTES, Slot, Tensors, lay_out, neighbours
from workers.cache.manifest import MANIFEST, USED, CacheManifest, CheckpointIdentity, OwnFile, TpSlice, entry_name, format_name
from workers.cache.shard_writer import MIB, ShardWriter, Staging
from workers.cache.store import GIB, WRITING, find, locked, make_room, remove, turn
from workers.load.virtual import DTYPES, VirtualCheckpoint

# On a CPU the ring counts toward the load's peak. With CUDA it is host memory, for the tensors that a GPU makes during one write.
CPU_STAGING = Staging(16 * MIB, MIB)
CUDA_STAGING = Staging(256 * MIB, 4 * MIB, pin=True, threads=4)
# Room for the manifest and the file system's metadata.
MARGIN_BYTES = 16 * MIB
SLOW_S = 5.0  # a load that has waited so long for the disk says so
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

logger = logging.getLogger("vllm.sparkd.stream")


class _Skipped(Exception):
    """This cache is not written, for a reason that is no error."""


@dataclass(frozen=True, slots=True)
class CacheContent:
    """The content of a cache. layout: name -> (safetensors dtype code, shape) of all tensors that will arrive, roughly in that order.

    quantization_config: for config.json. notes: JSON values for the manifest.
    """

    checkpoint: Checkpoint
    recipe: Mapping[str, Any]
    tp_slice: TpSlice
    quantization_config: Mapping[str, Any]
    layout: Tensors
    notes: Mapping[str, Any] = field(default_factory=dict)


class CacheWriter:
    """One entry in the making. state: writing, then written, failed or skipped; reason: a sentence for the latter two.

    limit_bytes: of the whole cache folder. device: the tensors' device. on_state: called with (state, bytes written, reason) at the
    beginning and at each change, and with the reason why the load waits for it. The constructor makes room and allocates the files. No
    method raises for a disk, a folder or a tensor that is not as expected.
    """

    def __init__(
        self,
        cache_dir: str,
        content: CacheContent,
        limit_bytes: int | None = None,
        *,
        device: torch.device | None = None,
        staging: Staging | None = None,
        on_state: Callable[[str, int, str | None], None] = lambda _state, _bytes, _reason: None,
    ) -> None:
        self.state = "writing"
        self.reason: str | None = None
        self.folder = os.path.join(cache_dir, entry_name(content.checkpoint, content.recipe, content.tp_slice))
        self._cache_dir = cache_dir
        self._writing = os.path.join(cache_dir, WRITING + os.path.basename(self.folder))
        self._content = content
        self._on_state = on_state
        self._is_slow = False
        self._turn = contextlib.ExitStack()
        self._writer: ShardWriter | None = None
        on_state(self.state, 0, None)
        try:
            self._source = CheckpointIdentity.of(content.checkpoint)
            self._shards = lay_out(neighbours(content.layout), SHARD_BYTES)
            self._make_folder(limit_bytes)
            staging = staging or (CUDA_STAGING if device is not None and device.type == "cuda" else CPU_STAGING)
            self._writer = ShardWriter(self._writing, self._shards, staging, self._waits)
        except Exception as error:  # noqa: BLE001 - the reason is kept and reported: the model serves without its cache
            self._end(error)

    @property
    def bytes_written(self) -> int:
        return self._writer.bytes_written if self._writer is not None else 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of a tensor, after a wait for room."""
        if (slot := self._slot(name, tensor)) is not None:
            self._put([slot], tensor)

    def add_stacked(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        """Like `add`, for quantized tensors [names, ..] of one shape; those that are adjacent in the file are taken at once."""
        slots = [slot for name in names if (slot := self._slot(name, stacked[0])) is not None]
        start = 0
        for at in range(1, len(slots) + 1):
            before = slots[at - 1]
            if at < len(slots) and (slots[at].shard, slots[at].offset) == (before.shard, before.offset + before.nbytes):
                continue
            self._put(slots[start:at], stacked[start:at])
            start = at

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        """Like `add`, for a part of a tensor: its bytes from `start_byte` on, uint8 and 1-D."""
        slot = None if self._writer is None else self._writer.slots.get(name)
        if slot is None or start_byte < 0 or start_byte + view.numel() > slot.nbytes:
            self.abandon(f"bytes {start_byte} to {start_byte + view.numel()} of {name} came, which the cache's layout does not have")
            return
        self._put([slot], view, start_byte)

    def finish(self) -> str:
        """Complete the entry and return the state. Called after the load's last tensor."""
        if self._writer is not None and self.state == "writing":
            try:
                self._writer.settle()
                self._publish()
                self._end(None)
            except Exception as error:  # noqa: BLE001 - the reason is kept and reported: the model serves without its cache
                self._end(error)
        return self.state

    def abandon(self, reason: str) -> None:
        """End without an entry, for instance after a cancelled load, and remove the written files."""
        self._end(CheckpointError(reason))

    def _slot(self, name: str, tensor: torch.Tensor) -> Slot | None:
        """The place of a tensor. For a tensor that does not match the layout: ends the writing and returns None."""
        slot = None if self._writer is None else self._writer.slots.get(name)
        code = CODES.get(tensor.dtype)
        if slot is None or slot.dtype != code or slot.nbytes != tensor.numel() * tensor.element_size():
            self.abandon(f"{name} came as {code} of shape {list(tensor.shape)}, which the cache's layout does not have")
            return None
        return slot

    def _put(self, slots: Sequence[Slot], tensor: torch.Tensor, start: int = 0) -> None:
        if self._writer is None or self.state != "writing":
            return
        try:
            self._writer.put(slots, bytes_of(tensor), start)
        except Exception as error:  # noqa: BLE001 - the reason is kept and reported: the model serves without its cache
            self._end(error)

    def _waits(self, seconds: float) -> None:
        """Say once that the load waits for this disk."""
        if self._is_slow or seconds < SLOW_S:
            return
        self._is_slow = True
        why = f"the load waits for the disk of {self._cache_dir}, where its quantized weights are kept for the next start"
        logger.info("sparkd: %s.", why)
        self._on_state(self.state, self.bytes_written, why)

    def _make_folder(self, limit_bytes: int | None) -> None:
        """Make room and the new folder. Raises _Skipped, OSError."""
        os.makedirs(self._cache_dir, exist_ok=True)
        content = self._content
        with locked(self._cache_dir):
            if not self._turn.enter_context(turn(self._writing)):
                raise _Skipped("another process is writing the same cache")
            there = find(self._cache_dir, content.checkpoint, content.recipe, content.tp_slice, say=lambda _sentence: None)
            if there is not None:
                there.close()
                raise _Skipped("another process has written the same cache meanwhile")
            # This is the only writer, so a folder with this name is left by one that died.
            shutil.rmtree(self._writing, ignore_errors=True)
            need_bytes = sum(shard.size_bytes for shard in self._shards) + companions_bytes(content.checkpoint.folder) + MARGIN_BYTES
            problem = make_room(self._cache_dir, need_bytes, limit_bytes)
            if problem is not None:
                raise _Skipped(problem)
            os.mkdir(self._writing)
            self._turn.callback(shutil.rmtree, self._writing, ignore_errors=True)  # nothing is left there once it has its final name

    def _publish(self) -> None:
        """Write the manifest and rename the folder to its final name. Raises _Skipped, OSError."""
        content = self._content
        files = [OwnFile(shard.name, shard.size_bytes, hashlib.sha256(shard.header).hexdigest()) for shard in self._shards]
        files += write_companions(content.checkpoint, self._writing, content.quantization_config, self._shards)
        form = format_name(content.recipe)
        manifest = CacheManifest(self._source, content.recipe, form, content.tp_slice, tuple(files), time.time(), content.notes)
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

    def _end(self, error: BaseException | None) -> None:
        """Set the final state, and remove the folder of an unfinished entry. Only the first call counts."""
        if self.state != "writing":
            return
        self.state = "written" if error is None else "skipped" if isinstance(error, _Skipped) else "failed"
        with contextlib.suppress(Exception):  # a device that has failed refuses to give the ring back, too
            if self._writer is not None:
                self._writer.close()
        with contextlib.suppress(Exception):
            self._turn.close()
        if error is None:
            waited_s = self._writer.waited_s if self._writer is not None else 0.0
            message = "sparkd: quantized cache of %.2f GiB in %s; the load waited %.1f s for its disk."
            logger.info(message, self.bytes_written / GIB, self.folder, waited_s)
        else:
            self.reason = self._sentence(error)
            logger.log(logging.INFO if self.state == "skipped" else logging.WARNING, "sparkd: %s", self.reason)
        self._on_state(self.state, self.bytes_written, self.reason)

    def _sentence(self, error: BaseException) -> str:
        what = f"No quantized cache of {os.path.basename(self._content.checkpoint.folder)} was kept"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{what}: the disk of {self._cache_dir} is full; free some, or set quantized_cache.dir to another disk."
        if isinstance(error, OSError):
            return f"{what}: {error.filename or self._cache_dir}: {error.strerror}; fix that, or set quantized_cache.dir."
        if isinstance(error, CheckpointError | _Skipped):
            return f"{what}: {clause(str(error))}."
        return f"{what}: {type(error).__name__}: {clause(str(error))}."


def layout_of(virtual: VirtualCheckpoint) -> Tensors:
    """The layout of all tensors that a virtual checkpoint emits."""
    return {tensor.name: (CODES[tensor.dtype], tensor.shape) for tensor in virtual.emitted()}


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
