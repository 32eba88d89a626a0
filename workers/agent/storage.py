"""The models on a node's disks: the hub's cache, quantized weights, profiles of KV sizing. Removes only the entry that a caller names."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkd.errors import RankError, refused_by
from workers.cache import store
from workers.cache.manifest import model_name
from workers.files.chunks import Buffer, sha256_of
from workers.host.hub_cache import hub_cache

HUB, QUANTIZED, PROFILE = KINDS = ("hub", "quantized", "profile")
_HUB_FOLDER = re.compile(r"models--[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_ENTRY = re.compile(r"[a-z0-9][a-z0-9._-]{0,200}-[0-9a-f]{16}")
_PROFILE = re.compile(r"[0-9a-f]{24}")
_NAMES = {HUB: _HUB_FOLDER, QUANTIZED: _ENTRY, PROFILE: _PROFILE}
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Storage:
    """A base of workers.agent.actor.Agent. folders: by kind, the daemon's own; this node's stand before them. environ: an engine's, over
    this node's."""

    node_id: str
    _cache_dir: str | None
    _kv_dir: str | None

    def stored(self, folders: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Any]:
        """{"entries": [..], "folders": [..]}: see sparkd.admin.disk.DiskAnswer. Reads headers, no weights."""
        places = self._places(folders, environ)
        entries = [*_hub_entries(places[HUB]), *_quantized_entries(places[QUANTIZED]), *_profile_entries(places[PROFILE])]
        sums = {kind: sum(entry["size_bytes"] for entry in entries if entry["kind"] == kind) for kind in KINDS}
        return {
            "entries": entries,
            "folders": [{"kind": kind, "path": str(places[kind]), "size_bytes": sums[kind], **_free(places[kind])} for kind in KINDS],
        }

    def remove_stored(self, kind: str, name: str, folders: Mapping[str, str], environ: Mapping[str, str]) -> int:
        """Remove one entry; the bytes that it had. Raises RankError where there is none or it is in use, NodeRefused."""
        path = self._path(kind, name, folders, environ)
        size_bytes = _size(path)
        try:
            if kind == QUANTIZED:
                if not store.remove(str(path)):
                    raise RankError(f"{name}: a starting engine is reading it; try again when that engine is READY.")
            elif kind == HUB:
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            raise refused_by(error, f"Node {self.node_id}") from error
        return size_bytes

    def verify_stored(self, kind: str, name: str, folders: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
        """Why an entry cannot be used; None where it can. Reads every byte of the hub's files, past the page cache. Raises RankError."""
        path = self._path(kind, name, folders, environ)
        if kind == HUB:
            return _hub_fault(path)
        entries = _quantized_entries(path.parent) if kind == QUANTIZED else _profile_entries(path.parent)
        return next((entry["fault"] for entry in entries if entry["id"] == name), None)

    def _path(self, kind: str, name: str, folders: Mapping[str, str], environ: Mapping[str, str]) -> Path:
        pattern = _NAMES.get(kind)
        if pattern is None or pattern.fullmatch(name) is None or ".." in name:
            raise RankError(f"{kind[:16]}/{name[:80]} names nothing that sparkd keeps; GET /admin/v1/disk lists what there is.")
        path = self._places(folders, environ)[kind] / (f"{name}.json" if kind == PROFILE else name)
        if path.is_symlink() or not path.exists():
            raise RankError(f"{kind}/{name} is not on node {self.node_id}.")
        return path

    def _places(self, folders: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, Path]:
        return {
            HUB: hub_cache({**os.environ, **environ}),
            QUANTIZED: Path(self._cache_dir or folders[QUANTIZED]),
            PROFILE: Path(self._kv_dir or folders[PROFILE]),
        }


def _entry(
    kind: str, name: str, shown: str, size_bytes: int, used_s: float | None, source: str | None = None, fault: str | None = None
) -> dict[str, Any]:
    """source: the folder or hub id of the model that it is of."""
    return {"kind": kind, "id": name, "name": shown, "size_bytes": size_bytes, "used_s": used_s, "source": source, "fault": fault}


def _hub_entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in _listed(folder):
        if _HUB_FOLDER.fullmatch(path.name) is None or not path.is_dir():
            continue
        hub_id = path.name.removeprefix("models--").replace("--", "/", 1)
        blobs = _listed(path / "blobs")
        half = sum(blob.name.endswith(".incomplete") for blob in blobs)
        fault = f"{half} of its files are half downloaded: `sparkd pull {hub_id}` goes on with them" if half else None
        yield _entry(HUB, path.name, hub_id, _size(path), _used_s([path, *blobs]), hub_id, fault)


def _quantized_entries(folder: Path) -> Iterator[dict[str, Any]]:
    with suppress(OSError):
        for entry in store.entries(str(folder)):
            source = entry.manifest.source.folder if entry.manifest else None
            shown = f"{model_name(source)} {entry.manifest.format}" if source and entry.manifest else entry.name
            yield _entry(QUANTIZED, entry.name, shown, entry.size_bytes, entry.used_s, source, store.fault_of(entry))


def _profile_entries(folder: Path) -> Iterator[dict[str, Any]]:
    for path in _listed(folder):
        if path.suffix == ".json" and _PROFILE.fullmatch(path.stem) is not None:
            yield _entry(PROFILE, path.stem, path.stem, _size(path), _used_s([path]))


def _hub_fault(folder: Path) -> str | None:
    """A file of weights is named by its SHA-256 (huggingface_hub, "Understand caching")."""
    buffer = Buffer()
    try:
        for blob in _listed(folder / "blobs"):
            if _SHA256.fullmatch(blob.name) is not None and sha256_of(blob, buffer) != blob.name:
                return f"the file {blob.name[:16]}.. has other bytes than its name says: remove it, and pull the model again"
    except OSError as error:
        return f"{error.filename or folder}: {error.strerror}"
    finally:
        buffer.close()
    return next((entry["fault"] for entry in _hub_entries(folder.parent) if entry["id"] == folder.name), None)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _size(path: Path) -> int:
    """Bytes on the disk; links count nothing."""
    try:
        facts = path.lstat()
    except OSError:
        return 0
    if stat.S_ISDIR(facts.st_mode):
        return sum(_size(inner) for inner in _listed(path))
    return facts.st_size if stat.S_ISREG(facts.st_mode) else 0


def _used_s(paths: list[Path]) -> float | None:
    """The latest time that one of them was read or written, as far as the file system notes it."""
    times = []
    for path in paths:
        with suppress(OSError):
            facts = path.lstat()
            times.append(max(facts.st_atime if not path.is_dir() else 0.0, facts.st_mtime))
    return max(times, default=None)


def _free(folder: Path) -> dict[str, int | None]:
    """Free bytes of the file system that the folder is on, or will be."""
    for place in (folder, *folder.parents):
        with suppress(OSError):
            return {"free_bytes": shutil.disk_usage(place).free}
    return {"free_bytes": None}
