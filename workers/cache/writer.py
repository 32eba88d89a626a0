"""Writes a quantized checkpoint into the cache during a load, which waits where the disk is slower. An error costs only the cache.

Its folder is made and allocated first, and appears by one rename, after all files are synced to the disk; a process that ends before that
leaves a folder that the next writer removes. A ring gathers bytes in blocks with the file's layout, so that a full block bypasses the page
cache in one write, even with small tensors; a block that has to make room before it is full is written through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import logging
import mmap
import os
import shutil
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError, clause
from workers.cache.layout import SHARD_BYTES, ShardLayout, ShardTensor, Tensors, companions_bytes, lay_out, neighbours, write_companions
from workers.cache.manifest import MANIFEST, USED, CacheManifest, CheckpointIdentity, OwnFile, TpSlice, entry_name, format_name
from workers.cache.store import GIB, WRITING, find, locked, make_room, remove, turn
from workers.files.direct_file import DirectFile
from workers.host.private_files import sync_folder
from workers.load.ring import Ring
from workers.load.virtual import DTYPES, VirtualCheckpoint

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Staging:
    """The writer's memory.

    staging_bytes: the ring, pinned if `pin`, in blocks of block_bytes.
    threads: the number of writing threads, because several writes in flight keep the disk busy.
    """

    staging_bytes: int
    block_bytes: int
    pin: bool = False
    threads: int = 1


# On a CPU the ring counts toward the load's peak. With CUDA it is host memory, for the tensors that a GPU makes during one write.
CPU_STAGING = Staging(16 * MIB, MIB)
CUDA_STAGING = Staging(256 * MIB, 4 * MIB, pin=True, threads=4)
# Room for the manifest and the file system's metadata.
MARGIN_BYTES = 16 * MIB
LOOK_S = 1.0  # between two reports of one wait
SLOW_S = 5.0  # a load that has waited so long for the disk says so
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}

logger = logging.getLogger("vllm.sparkd.stream")


class _Skipped(Exception):
    """This cache is not written, for a reason that is no error."""


@dataclass(frozen=True, slots=True)
class CacheContent:
    """The content of a cache. layout: name -> (safetensors dtype code, shape) of all tensors that will arrive, roughly in that order.

    quantization_config: for config.json.
    notes: JSON values for the manifest.
    """

    checkpoint: Checkpoint
    recipe: Mapping[str, Any]
    tp_slice: TpSlice
    quantization_config: Mapping[str, Any]
    layout: Tensors
    notes: Mapping[str, Any] = field(default_factory=dict)


class CacheWriter:
    """One entry in the making.

    state: writing, then written, failed or skipped.
    reason: a sentence for the latter two.

    limit_bytes: of the whole cache folder.
    device: the tensors' device.
    on_state: called with (state, bytes written, reason) at the beginning and at each change, and with the reason why the load waits for it.

    The constructor makes room and allocates the files. No method raises for a disk, a folder or a tensor that is not as expected.
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

    def add(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        """Take a copy of tensors [names, ..], after a wait for room."""
        self._take(lambda writer: writer.add(names, stacked))

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        """Like `add`, for a part of a tensor: its bytes from `start_byte` on, uint8 and 1-D."""
        self._take(lambda writer: writer.add_chunk(name, start_byte, view))

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

    def _take(self, take: Callable[[ShardWriter], None]) -> None:
        if self._writer is None or self.state != "writing":
            return
        try:
            take(self._writer)
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
            published = find(self._cache_dir, content.checkpoint, content.recipe, content.tp_slice, say=lambda _sentence: None)
            if published is not None:
                published.close()
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


class ShardWriter:
    """Makes the files of `shards` in `folder` at once, so that a full disk shows before the first byte. One thread calls its methods.

    waits: called about once a second while `put` waits, with the seconds that it has waited so far.
    bytes_written: bytes in the files.
    waited_s: of all calls of `put`. The constructor raises OSError, `put` and `settle` the error that ended the writing.
    """

    def __init__(
        self,
        folder: str,
        shards: Sequence[ShardLayout],
        staging: Staging,
        waits: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self.tensors = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
        self.bytes_total = sum(shard.size_bytes for shard in shards)
        self.bytes_written = 0
        self.waited_s = 0.0
        self._shards = shards
        self._waits = waits
        self._block_bytes = staging.block_bytes
        self._left = {name: tensor.nbytes for name, tensor in self.tensors.items()}
        blocks = staging.staging_bytes // staging.block_bytes
        self._ring = Ring(staging.block_bytes, blocks, pin=staging.pin)
        self._changed = threading.Condition()
        self._free = list(range(blocks))
        self._blocks: OrderedDict[tuple[int, int], _Block] = OrderedDict()  # the one that was filled last is the last
        self._jobs: deque[_Block] = deque()
        self._busy = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._files: list[DirectFile] = []
        self._threads: list[threading.Thread] = []
        try:
            for shard in shards:
                file = DirectFile(os.path.join(folder, shard.name), size_bytes=shard.size_bytes)
                self._files.append(file)
                file.reserve()
                header = mmap.mmap(-1, len(shard.header))  # aligned, as a write past the page cache needs it
                header.write(shard.header)
                file.write(0, memoryview(header))
                self.bytes_written += len(shard.header)
        except BaseException:
            self.close()
            raise
        for number in range(staging.threads):
            self._threads.append(threading.Thread(target=self._work, name=f"stream-write-{number}", daemon=True))
            self._threads[-1].start()

    def add(self, names: Sequence[str], stacked: torch.Tensor) -> None:
        """Take a copy of tensors [names, ..] of one shape; those that are adjacent in the file are taken at once."""
        tensors = [self.tensors[name] for name in names]
        start = 0
        for at in range(1, len(tensors) + 1):
            before = tensors[at - 1]
            if at < len(tensors) and (tensors[at].shard, tensors[at].offset) == (before.shard, before.offset + before.nbytes):
                continue
            self.put(tensors[start:at], bytes_of(stacked[start:at]))
            start = at

    def add_chunk(self, name: str, start_byte: int, view: torch.Tensor) -> None:
        """Like `add`, for a part of a tensor: its bytes from `start_byte` on, uint8 and 1-D."""
        self.put([self.tensors[name]], view, start_byte)

    def put(self, tensors: Sequence[ShardTensor], view: torch.Tensor, start: int = 0) -> None:
        """Take the bytes (uint8, 1-D) of tensors that are adjacent in a file, or, from byte `start` on, a part of one.

        They may change as soon as this returns, on a GPU in stream order.
        """
        shard, begin = tensors[0].shard, tensors[0].offset + start
        at, stop = begin, begin + view.numel()
        while at < stop:
            number = at // self._block_bytes
            low, end = number * self._block_bytes, min(stop, (number + 1) * self._block_bytes)
            block = self._open(shard, number)
            self._copy(block, at - low, view[at - begin : end - begin])
            with self._changed:
                block.add(at - low, end - low)
                if block.filled == self._bytes_of(shard, number):
                    self._submit(block)
            at = end
        for tensor in tensors:
            self._left[tensor.name] -= view.numel() // len(tensors)

    def flush(self) -> None:
        """Wait until all bytes of `put` are in the files. Raises the error that ended the writing."""
        with self._changed:
            for block in list(self._blocks.values()):
                self._submit(block)
            self._changed.wait_for(lambda: self._error is not None or not self._busy)
            self._raise()

    def settle(self) -> None:
        """Sync the files to the disk and end the threads. Raises CheckpointError for a tensor that has not come whole."""
        self.flush()
        if (missing := next((name for name, left in self._left.items() if left), None)) is not None:
            raise CheckpointError("it was never handed over", tensor=missing)
        for file in self._files:
            file.settle()
        self.close()

    def close(self) -> None:
        """End the threads and free the memory; bytes not written by now are lost. A second call has no effect."""
        with self._changed:
            self._stopping = True
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for file in self._files:
            file.close()
        self._ring.close()
        self._error = None  # its traceback holds the ring's memory and the tensor that was taken

    def _open(self, shard: int, number: int) -> _Block:
        """The block to gather into, after a wait for a free one."""
        with self._changed:
            self._raise()
            if (block := self._blocks.get((shard, number))) is None:
                if not self._free:
                    self._wait_for_room()
                block = self._blocks[(shard, number)] = _Block(shard, number, self._free.pop())
            self._blocks.move_to_end((shard, number))
            return block

    def _wait_for_room(self) -> None:
        before_s, began_s = self.waited_s, time.monotonic()
        while not self._free:
            if not self._busy:  # all blocks wait for tensors that are still to come
                self._submit(next(iter(self._blocks.values())))
            self._changed.wait(LOOK_S)
            self._raise()
            self.waited_s = before_s + time.monotonic() - began_s
            self._waits(self.waited_s)

    def _bytes_of(self, shard: int, number: int) -> int:
        """The bytes of tensors in this block of the file."""
        layout, low = self._shards[shard], number * self._block_bytes
        return min(low + self._block_bytes, layout.size_bytes) - max(low, len(layout.header))

    def _copy(self, block: _Block, at: int, view: torch.Tensor) -> None:
        """Copy into the ring; from a GPU in stream order, without waiting."""
        at += block.at * self._block_bytes
        target = self._ring.tensor()[at : at + view.numel()]
        if view.is_cuda:
            target.copy_(view, non_blocking=True)
            block.stream = torch.cuda.current_stream(view.device)
        else:
            # torch would use every core and wait for the slowest, although one core saturates the memory bandwidth of one stream.
            ctypes.memmove(target.data_ptr(), view.data_ptr(), view.numel())

    def _submit(self, block: _Block) -> None:
        """Queue a block for the threads."""
        del self._blocks[(block.shard, block.number)]
        if block.stream is not None:
            block.event = block.stream.record_event()
        self._busy += 1
        self._jobs.append(block)
        self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """A thread's work. The first error ends the writing."""
        try:
            while (block := self._next()) is not None:
                self._write(block)
                with self._changed:
                    self.bytes_written += block.filled
                    self._free.append(block.at)
                    self._busy -= 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - `put` and `settle` raise it
            with self._changed:
                self._error = self._error or error
                self._jobs.clear()
                self._changed.notify_all()

    def _next(self) -> _Block | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._stopping or self._error is not None)
            return self._jobs.popleft() if self._jobs else None

    def _write(self, block: _Block) -> None:
        if block.event is not None:
            block.event.synchronize()
        memory, low = self._ring.memory(block.at), block.number * self._block_bytes
        for start, stop in [(0, self._block_bytes)] if block.filled == self._block_bytes else block.ranges:
            self._files[block.shard].write(low + start, memory[start:stop])


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a shard that is being gathered.

    at: the number of its block in the ring.
    ranges: the [start, stop) that have arrived.
    """

    shard: int
    number: int
    at: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    filled: int = 0
    stream: torch.cuda.Stream | None = None
    event: torch.cuda.Event | None = None

    def add(self, start: int, stop: int) -> None:
        if self.ranges and self.ranges[-1][1] == start:
            self.ranges[-1] = (self.ranges[-1][0], stop)
        else:
            self.ranges.append((start, stop))
        self.filled += stop - start


def layout_of(virtual: VirtualCheckpoint) -> Tensors:
    """The layout of all tensors of a virtual checkpoint."""
    return {tensor.name: (CODES[tensor.dtype], tensor.shape) for tensor in virtual.outputs()}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 and 1-D, on its device; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
