"""A model's files as they are on a node, and the difference to those of another node.

A hub id lies in the hub's cache (huggingface_hub, "Understand caching"): blobs/ETAG, which snapshots/COMMIT/FILE link to, and refs/NAME
with the commit. The ETag of a large file is its SHA-256. A folder is what it is, at the same path on every node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sparkd.checkpoint import INDEX_END, Folder, is_weights, lacking_weights
from sparkd.errors import RankError
from workers.host.hub_cache import hub_cache, snapshot_of

SPARE_BYTES = 1 << 30  # stays free beside what is fetched
PART = ".sparkd-part"
JOURNAL = ".sparkd-part.sums"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class File:
    """One file of a model.

    name: below its folder.
    blob: what the hub's cache calls its content, None in a plain folder.
    """

    name: str
    size: int
    mtime_ns: int
    blob: str | None = None

    @property
    def sha256(self) -> str | None:
        return self.blob if self.blob and _SHA256.fullmatch(self.blob) else None


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """model: a hub id, or a folder's path; commit: the hub's, None of a folder; root: the folder of the files on the node that has them.

    partial: a copy to this node was interrupted, and the rest of a file is still to come; or a download of the hub's was, and shards that
    its index or their own names speak of are lacking. lacks: whether they are, also of a folder, or there are no weights at all.
    """

    model: str
    revision: str | None
    commit: str | None
    root: str
    files: tuple[File, ...]
    partial: bool = False
    lacks: bool = False

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelManifest:
        """Raises RankError for names, which a hub gave, that lead out of the model's folder."""
        manifest = cls(**{**raw, "files": tuple(File(**entry) for entry in raw["files"])})
        names = [manifest.revision, manifest.commit, *(name for file in manifest.files for name in (file.name, file.blob))]
        names += [] if manifest.model.startswith("/") else [manifest.model]
        if wrong := [name for name in names if name and (name.startswith("/") or ".." in PurePosixPath(name).parts)]:
            raise RankError(f"{manifest.model[:200]}: {wrong[0][:100]!r} leads out of the folder of a model.")
        return manifest


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model's files belong on this node.

    files: their folder.
    blobs: the cache's, None for a plain folder.
    top: above both.
    """

    files: Path
    blobs: Path | None
    top: Path

    def of(self, file: File) -> Path:
        """Where its content belongs."""
        return self.blobs / file.blob if self.blobs and file.blob else self.files / file.name


def manifest_of(model: str, revision: str | None, environ: Mapping[str, str]) -> ModelManifest | None:
    """This node's files of a model; None where it has nothing. Raises RankError for what cannot be read."""
    folder = Path(model) if model.startswith("/") else snapshot_of(model, revision, environ)
    if folder is None or not folder.is_dir():
        return None
    try:
        files = tuple(_files(folder))
    except OSError as error:
        raise RankError(f"{error.filename or folder} cannot be read: {error.strerror or error}. Check its owner and mode.") from error
    manifest = ModelManifest(model, revision, None if model.startswith("/") else folder.name, str(folder), files)
    top = place_of(manifest, environ).top if manifest.commit is not None else folder
    begun = next(top.rglob(f"*{PART}"), None) is not None
    lacks = _lacks_weights(folder, {file.name for file in files})
    return replace(manifest, partial=begun or (manifest.commit is not None and lacks), lacks=lacks)


def place_of(manifest: ModelManifest, environ: Mapping[str, str]) -> ModelFolder:
    if manifest.commit is None:
        return ModelFolder(Path(manifest.model), None, Path(manifest.model))
    folder = hub_cache(environ) / f"models--{manifest.model.replace('/', '--')}"
    return ModelFolder(folder / "snapshots" / manifest.commit, folder / "blobs", folder)


def lacking(manifest: ModelManifest, environ: Mapping[str, str]) -> dict[str, Any]:
    """{"path", "bytes", "free_bytes"}: what this node still has to write for it, and what its disk has.

    Parts of an earlier try count as written.
    """
    place = place_of(manifest, environ)
    need = 0
    for file in manifest.files:
        path = place.of(file)
        if not is_there(path, file):
            need += max(0, file.size - _blocks(path.with_name(path.name + PART)))
    return {"path": str(place.top), "bytes": need, "free_bytes": _free(place.top)}


def is_there(path: Path, file: File) -> bool:
    """Whether a file is at its place. The hub's cache names its content; a copy gives a plain folder's file the time of its source's."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == file.size and (file.blob is not None or status.st_mtime_ns == file.mtime_ns)


def refuse_without_room(model: str, space: Mapping[str, Any]) -> None:
    """Raises RankError where the disk cannot hold what is lacking."""
    if space["bytes"] + SPARE_BYTES > space["free_bytes"] and space["bytes"]:
        raise RankError(
            f"{space['path']} has {space['free_bytes']:,} bytes free and {model} needs {space['bytes']:,} more, and {SPARE_BYTES >> 30} "
            "GiB stays free: make room, or set HF_HOME in engine.env to a larger disk."
        )


def _files(folder: Path) -> Any:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where) / name
            if name.startswith(".") or name.endswith((PART, JOURNAL)) or not path.is_file():
                continue
            real = Path(os.path.realpath(path))
            status = real.stat()
            blob = real.name if path.is_symlink() and real.parent.name == "blobs" else None
            yield File(str(path.relative_to(folder)), status.st_size, status.st_mtime_ns, blob)


def is_loaded(name: str) -> bool:
    """Whether an engine that loads a folder may take this file of it for weights, or for what says which weights count. In a folder below
    it an engine takes nothing by itself."""
    return "/" not in name and (is_weights(name) or name.endswith(INDEX_END))


def _lacks_weights(folder: Path, names: Set[str]) -> bool:
    """Whether a snapshot is whole, whose files appear once each is; a folder counts as far as names tell."""
    return not any(map(is_weights, names)) or bool(lacking_weights(names, Folder(folder).content))


def _blocks(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _free(path: Path) -> int:
    """The free bytes of the file system that the nearest folder that is there lies on, for this user."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize
