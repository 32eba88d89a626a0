"""A cached checkpoint's own description: its source, its recipe and its files. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparkd.checkpoint import Checkpoint
from sparkd.errors import CheckpointError, CheckpointUnread

MANIFEST = "sparkd-manifest.json"
# A file whose modification time is the last use of the entry; separate, so that a manifest is never rewritten.
USED = "used"
VERSION = 1
# Increased whenever the same recipe makes other bytes from the same source; entries of older versions are then made again.
CODE_VERSION = 3
# Limit of a manifest. The largest real one, for 60 shards and 30 other files, has 12 KiB.
MAX_BYTES = 16 << 20

TpSlice = tuple[int, int] | None
_UNSAFE = re.compile(r"[^a-z0-9._-]+")
_SNAPSHOT = re.compile(r"/models--(?P<owner>[^/]+?)--(?P<model>[^/]+)/snapshots/[^/]+$")


@dataclass(frozen=True, slots=True)
class SourceShard:
    """Identity of one file of the source. header_sha256: digest of the 8 bytes of the header's length and the header."""

    name: str
    size_bytes: int
    mtime_ns: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointIdentity:
    """Identity of the checkpoint that was quantized."""

    folder: str
    shards: tuple[SourceShard, ...]
    config_sha256: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointIdentity:
        """The identity of a checkpoint, from what was read of it already."""
        shards = tuple(
            SourceShard(os.path.basename(shard.path), shard.size_bytes, shard.mtime_ns, shard.header_sha256) for shard in checkpoint.shards
        )
        return cls(os.path.realpath(checkpoint.folder), shards, checkpoint.config_sha256)

    def change(self, now: CheckpointIdentity) -> str | None:
        """The difference between this source and `now`, as a clause; None where they are equal."""
        if self.config_sha256 != now.config_sha256:
            return "config.json of its source has changed"
        before = {shard.name: shard for shard in self.shards}
        after = {shard.name: shard for shard in now.shards}
        if before.keys() != after.keys():
            return f"its source has {len(after)} other files instead of {len(before)}: {min(before.keys() ^ after.keys())} is one of them"
        return next((f"{name} of its source has changed" for name, shard in before.items() if after[name] != shard), None)


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file of the entry. sha256: digest of the header for *.safetensors, as in sparkd.checkpoint, else of the whole file."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CacheManifest:
    """sparkd-manifest.json.

    recipe: QuantizationRecipe.canonical().
    format: its short name.
    created_s: in epoch seconds.
    notes: the loader's own.
    """

    source: CheckpointIdentity
    recipe: Mapping[str, Any]
    format: str
    tp_slice: TpSlice
    files: tuple[OwnFile, ...]
    created_s: float
    notes: Mapping[str, Any]
    code: int = CODE_VERSION

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def dump(self) -> bytes:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False, sort_keys=True).encode() + b"\n"

    @classmethod
    def read(cls, folder: str) -> CacheManifest:
        """Read the manifest of an entry. Raises CheckpointError, which names the file, where it is missing, damaged or of another
        version, CheckpointUnread where the system does not give it."""
        path = os.path.join(folder, MANIFEST)
        cure = "Remove this folder; the next start quantizes again"
        try:
            with open(path, "rb") as file:
                raw = json.loads(file.read(MAX_BYTES))
            if raw["version"] != VERSION:
                raise CheckpointError(f"it has version {raw['version']!r}, and this sparkd writes {VERSION}", file=path, cure=cure)
            source, tp_slice = raw["source"], raw["tp_slice"]
            shards = tuple(SourceShard(**shard) for shard in source["shards"])
            return cls(
                source=CheckpointIdentity(source["folder"], shards, source["config_sha256"]),
                tp_slice=tp_slice and (tp_slice[0], tp_slice[1]),
                files=tuple(OwnFile(file["name"], file["size_bytes"], file["sha256"]) for file in raw["files"]),
                **{name: raw[name] for name in ("recipe", "format", "created_s", "notes", "code")},
            )
        except FileNotFoundError:
            raise CheckpointError("it is not there", file=path, cure=cure) from None
        except OSError as error:
            raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure="Check its owner and mode") from None
        except (ValueError, KeyError, TypeError):
            raise CheckpointError("it is not the manifest of a quantized cache", file=path, cure=cure) from None


def cache_key(checkpoint: Checkpoint, recipe: Mapping[str, Any], tp_slice: TpSlice = None) -> str:
    """A digest of 16 hex digits over the source's path, the canonical recipe and the slice.

    The manifest records facts that may change under the same key (the source's bytes, sparkd's code), so that an outdated entry is detected
    and replaced.
    """
    parts = [os.path.realpath(checkpoint.folder), recipe, tp_slice]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def on_device(recipe: Mapping[str, Any], device: str) -> Mapping[str, Any]:
    """The canonical recipe, extended to the key of an entry that this kind of device quantized.

    A CPU quantizes with torch and may choose other scales than a GPU, whose entries have the key of the recipe alone.
    """
    return recipe if device == "cuda" else {**recipe, "device": device}


def entry_name(checkpoint: Checkpoint, recipe: Mapping[str, Any], tp_slice: TpSlice = None) -> str:
    """The entry's folder: `<model>-<format>-<key>`."""
    return f"{model_name(checkpoint.folder)}-{format_name(recipe)}-{cache_key(checkpoint, recipe, tp_slice)}"


def model_name(folder: str) -> str:
    """A model's name from its folder: `/models/Qwen3-8B` and `.../models--Qwen--Qwen3-8B/snapshots/<revision>` become qwen3-8b."""
    snapshot = _SNAPSHOT.search(folder.rstrip("/"))
    last = snapshot["model"] if snapshot else os.path.basename(folder.rstrip("/"))
    return _UNSAFE.sub("-", last.lower()).strip("-._")[:100] or "model"


def format_name(recipe: Mapping[str, Any]) -> str:
    """The short name of a canonical recipe: its default format, with `-mixed` where rules change some layers."""
    default = _UNSAFE.sub("-", str(recipe.get("format", "")).lower()) or "quantized"
    return f"{default}-mixed" if recipe.get("layers") else default


def file_sha256(path: str) -> str:
    """The digest of a file. Raises CheckpointUnread where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointUnread(f"it cannot be read: {error.strerror}", file=path, cure="Check its owner and mode") from None
