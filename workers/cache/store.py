"""The folder of quantized checkpoints: finds, checks, lists, evicts and removes entries. Imports no torch.

An entry is a folder `<model>-<format>-<key>`, a standard checkpoint with a manifest; it appears by one rename and never changes.
A reader holds a shared lock on an entry's manifest, a remover an exclusive lock. `.writing-<entry>` is an entry that is being
written, under an exclusive lock on `.writing-<entry>.lock`; if that lock is free its writer has died. `.gone-*` is on its way out.
`.calibrations` has the figures that scales of activations are made from, a few kilobytes a model.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkd.checkpoint import Checkpoint, read_checkpoint
from sparkd.errors import CheckpointError, CheckpointUnread, clause
from workers.cache.manifest import (
    CODE_VERSION,
    MANIFEST,
    USED,
    CacheManifest,
    CheckpointIdentity,
    TpSlice,
    entry_name,
    file_sha256,
    format_name,
    model_name,
)

GIB = 1 << 30
# Bytes that stay free on the cache's disk for other programs.
RESERVE_BYTES = 2 * GIB
RESERVE_FRACTION = 0.02

WRITING = ".writing-"
GONE = ".gone-"
LOCK = ".lock"
# Keys in a manifest's notes.
SPELLINGS = "formats"
UNMEASURED_INPUTS = "unmeasured_inputs"
_KEPT = " It stays, and the checkpoint is read this time."
_KEY = re.compile(r"[0-9a-f]{16}")
_ENTRY = re.compile(rf"[a-z0-9][a-z0-9._-]*-{_KEY.pattern}")

logger = logging.getLogger("vllm.sparkd.stream")


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry of the cache.

    manifest: None where it cannot be read, and `fault` says why.
    used_s: epoch seconds.
    """

    folder: str
    manifest: CacheManifest | None
    size_bytes: int
    used_s: float
    fault: str | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.folder)


class CachedCheckpoint:
    """A valid entry that cannot be removed until `close`; a context manager. checkpoint: the entry's headers."""

    def __init__(self, folder: str, manifest: CacheManifest, checkpoint: Checkpoint, lock: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.checkpoint = checkpoint
        self._lock: int | None = lock

    @property
    def spellings(self) -> list[str]:
        """The formats in the entry, as its writer noted them."""
        return [str(spelling) for spelling in self.manifest.notes.get(SPELLINGS, [])] or [self.manifest.format]

    @property
    def unmeasured_inputs(self) -> int:
        """How many modules with 4-bit activations got a scale without a measurement."""
        return int(self.manifest.notes.get(UNMEASURED_INPUTS, 0))

    def __enter__(self) -> CachedCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the entry. A second call has no effect."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def find(
    cache_dir: str, checkpoint: Checkpoint, recipe: Mapping[str, Any], tp_slice: TpSlice = None, *, say: Callable[[str], None] = logger.info
) -> CachedCheckpoint | None:
    """The entry for this source, canonical recipe and slice; None where there is no valid one: then `say` receives the reason.

    Cheap: reads sizes, headers and small files of the entry, no weights. An entry that is proved invalid is removed; the load makes a new
    one. One that the system does not let us read now stays.
    """
    folder = os.path.join(cache_dir, entry_name(checkpoint, recipe, tp_slice))
    if not os.path.isdir(folder):
        say(f"There is no quantized cache in {folder} yet.")
        return None
    try:
        lock = _hold(os.path.join(folder, MANIFEST), fcntl.LOCK_SH)
        if lock is None:
            say(f"The quantized cache {folder} is being removed.")
            return None
    except OSError as error:
        say(f"The quantized cache {folder} cannot be used: {error.strerror}.{_KEPT}")
        return None
    try:
        manifest = CacheManifest.read(folder)
        cached, reason = _check(folder, manifest, CheckpointIdentity.of(checkpoint))
    except CheckpointUnread as error:
        os.close(lock)
        say(f"The quantized cache {folder} cannot be used: {clause(error.message)}.{_KEPT}")
        return None
    except CheckpointError as error:
        cached, reason = None, error.message
    if cached is None:
        say(f"The quantized cache {folder} is not valid: {clause(str(reason))}.{_removed(folder, lock)}")
        return None
    with contextlib.suppress(OSError):  # on a read-only disk nothing is evicted either
        os.utime(os.path.join(folder, USED))
    return CachedCheckpoint(folder, manifest, cached, lock)


def has_entry(cache_dir: str, model: str, recipe: Mapping[str, Any]) -> bool:
    """Whether an entry exists for a model (folder or hub id) in this format. Only `find` checks that it is valid."""
    prefix = f"{model_name(model)}-{format_name(recipe)}-"
    with contextlib.suppress(OSError):
        return any(name.startswith(prefix) and _KEY.fullmatch(name.removeprefix(prefix)) for name in os.listdir(cache_dir))
    return False


def entries(cache_dir: str) -> list[CacheEntry]:
    """All entries of the cache by name, valid or not. Raises OSError where the folder exists but cannot be read."""
    try:
        names = sorted(os.listdir(cache_dir))
    except FileNotFoundError:
        return []
    return [entry for name in names if _ENTRY.fullmatch(name) and (entry := _entry(os.path.join(cache_dir, name))) is not None]


def fault_of(entry: CacheEntry) -> str | None:
    """Why the next start would not use this entry; None where it would. Reads headers of the entry and of its source."""
    if entry.manifest is None:
        return entry.fault
    try:
        return _check(entry.folder, entry.manifest, CheckpointIdentity.of(read_checkpoint(entry.manifest.source.folder)))[1]
    except CheckpointError as error:
        return error.message


def remove(folder: str) -> bool:
    """Remove an entry. False where a process reads it. The next writer completes an interrupted removal. Raises OSError."""
    manifest = os.path.join(folder, MANIFEST)
    lock = _hold(manifest, fcntl.LOCK_EX) if os.path.exists(manifest) else None
    if lock is None and os.path.exists(manifest):
        return False
    try:
        gone = _put_aside(folder)
    finally:
        if lock is not None:
            os.close(lock)
    _dropped(gone)
    return True


def make_room(cache_dir: str, need_bytes: int, limit_bytes: int | None) -> str | None:
    """Evict the least recently used entries until `need_bytes` fit under the limit and on the disk; call it under `locked`.

    Returns the reason where that is not possible, and then evicts nothing. limit_bytes: of the whole cache, None for none. Raises OSError.
    """
    if freed := sweep(cache_dir):
        logger.info("sparkd: %s that earlier loads left were removed from %s.", _gib(freed), cache_dir)
    if limit_bytes is not None and need_bytes > limit_bytes:
        return f"it needs {_gib(need_bytes)} and the cache may take {_gib(limit_bytes)}: raise quantized_cache.limit_gib"
    disk = shutil.disk_usage(cache_dir)
    reserve_bytes = max(RESERVE_BYTES, int(disk.total * RESERVE_FRACTION))
    present = entries(cache_dir)
    over_limit = 0
    if limit_bytes is not None:
        over_limit = need_bytes + written_now(cache_dir) + sum(entry.size_bytes for entry in present) - limit_bytes
    over_disk = need_bytes + reserve_bytes - disk.free
    with contextlib.ExitStack() as locks:
        chosen: list[CacheEntry] = []
        for entry in sorted(present, key=lambda entry: entry.used_s):
            if max(over_limit, over_disk) <= 0:
                break
            if _held_exclusively(entry, locks):
                chosen.append(entry)
                over_limit -= entry.size_bytes
                over_disk -= entry.size_bytes
        if over_disk > 0:
            left = f"{_gib(disk.free)} are free and {_gib(reserve_bytes)} are left to others"
            return f"it needs {_gib(need_bytes)} on the disk of {cache_dir}, where {left}: free some, or set quantized_cache.dir"
        if over_limit > 0:
            full = f"what fills the cache's {_gib(limit_bytes or 0)} is in use"
            return f"it needs {_gib(need_bytes)}, and {full}: raise quantized_cache.limit_gib"
        for entry in chosen:
            _put_aside(entry.folder)
            logger.info("sparkd: the quantized cache %s makes room for another.", entry.folder)
    sweep(cache_dir)
    return None


def sweep(cache_dir: str) -> int:
    """Remove the leftovers of writers and removers that died, and return their bytes; call it under `locked`. Raises OSError."""
    freed = 0
    for name in sorted(os.listdir(cache_dir)):
        path = os.path.join(cache_dir, name)
        if name.startswith(GONE):
            freed += _dropped(path)
        elif name.startswith(WRITING):
            own = path.removesuffix(LOCK)
            with turn(own) as mine:
                if mine and os.path.isdir(own):
                    freed += _dropped(own)
    return freed


def written_now(cache_dir: str) -> int:
    """Bytes of entries in the making. An abandoned one counts until it is swept. Raises OSError."""
    try:
        return sum(_size(entry.path) for entry in os.scandir(cache_dir) if entry.name.startswith(WRITING) and entry.is_dir())
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def locked(cache_dir: str) -> Iterator[None]:
    """A lock, so that one process at a time evicts and publishes entries. Raises OSError."""
    fd = os.open(os.path.join(cache_dir, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def turn(writing: str) -> Iterator[bool]:
    """Yield whether this is the only writer of `.writing-<entry>` for the time of the block; call it under `locked`. Raises OSError."""
    path = f"{writing}{LOCK}"
    lock = _hold(path, fcntl.LOCK_EX, create=True)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(lock)


def _check(folder: str, manifest: CacheManifest, source: CheckpointIdentity) -> tuple[Checkpoint | None, str | None]:
    """(the entry's headers, None), or (None, its fault). Raises CheckpointError; CheckpointUnread proves no fault."""
    if manifest.code != CODE_VERSION:
        return None, f"it was quantized by version {manifest.code} of the code, and this is {CODE_VERSION}"
    if change := manifest.source.change(source):
        return None, change
    checkpoint = read_checkpoint(folder)
    shards = {os.path.basename(shard.path): shard for shard in checkpoint.shards}
    for file in manifest.files:
        shard = shards.pop(file.name, None)
        path = os.path.join(folder, file.name)
        try:
            size_bytes = shard.size_bytes if shard else os.path.getsize(path)
        except FileNotFoundError:
            return None, f"{file.name} is missing"
        except OSError as error:
            raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure="Check the disk") from None
        if size_bytes != file.size_bytes:
            return None, f"{file.name} has {size_bytes} bytes instead of {file.size_bytes}"
        if (shard.header_sha256 if shard else file_sha256(path)) != file.sha256:
            return None, f"{file.name} has changed"
    return (None, f"{min(shards)} is not one of its files") if shards else (checkpoint, None)


def _entry(folder: str) -> CacheEntry | None:
    """The entry in a folder; None where it has been removed meanwhile or the folder is no entry."""
    try:
        size_bytes = _size(folder)
        try:
            manifest, fault = CacheManifest.read(folder), None
        except CheckpointError as error:
            manifest, fault = None, error.message
        used = os.path.join(folder, USED)
        used_s = os.stat(used if os.path.exists(used) else folder).st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None
    return CacheEntry(folder, manifest, size_bytes, min(used_s, time.time()), fault)


def _size(folder: str) -> int:
    size_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += os.path.getsize(os.path.join(parent, name))
    return size_bytes


def _put_aside(folder: str) -> str:
    """Take an entry's name away, under its lock, and return the folder that is to be dropped. Raises OSError."""
    gone = os.path.join(os.path.dirname(folder), f"{GONE}{os.path.basename(folder)}-{os.getpid()}")
    os.rename(folder, gone)
    return gone


def _dropped(folder: str) -> int:
    """Remove a folder, even if another process removes it at the same time, and return its bytes. Raises OSError."""
    size_bytes = _size(folder)
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
    return size_bytes


def _held_exclusively(entry: CacheEntry, locks: contextlib.ExitStack) -> bool:
    """Lock the entry exclusively until the stack ends. False where a reader holds it."""
    manifest = os.path.join(entry.folder, MANIFEST)
    if not os.path.exists(manifest):
        return True
    lock = _hold(manifest, fcntl.LOCK_EX)
    if lock is not None:
        locks.callback(os.close, lock)
    return lock is not None


def _hold(path: str, kind: int, *, create: bool = False) -> int | None:
    """A descriptor that holds the lock, None where another holds it or the file was removed meanwhile. Raises OSError."""
    flags = os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR | (os.O_CREAT if create else 0)
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        if _locks(fd, path, kind):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _locks(fd: int, path: str, kind: int) -> bool:
    """Whether the descriptor holds the lock now, and is still that of the file with this name. Raises OSError."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _removed(folder: str, lock: int) -> str:
    """Remove an invalid entry, unless another process reads it, or a writer has put a new one there since `lock` was taken. Closes `lock`.

    Returns the end of a sentence about the result."""
    try:
        if not _locks(lock, os.path.join(folder, MANIFEST), fcntl.LOCK_EX):
            return " Another process still reads it, or has replaced it."
        gone = _put_aside(folder)
    except OSError as error:
        return f" It cannot be removed: {error.strerror}."
    finally:
        os.close(lock)
    with contextlib.suppress(OSError):  # the next writer completes it
        _dropped(gone)
    return " It was removed."


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
