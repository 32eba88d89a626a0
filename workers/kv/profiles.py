"""Keeps the profiles of earlier starts of the same engine, one small JSON file each, so that the next start need not rehearse.

A profile has the demand, not the resulting size: the next start sizes the cache by the memory that is free then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.host.private_files import write_private
from workers.kv.arithmetic import Demand

# Version 3: a demand has one peak.
VERSION = 3
MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """demand: as measured; seconds: duration of the rehearsal; starts: number of starts that used the profile; error: bytes by which the
    free memory differed from the expectation at the last start (positive: more was free); slack: bytes free when the engine was ready;
    warm: peak bytes of the compile run's batch in a start from the profile, 0 before the first such start."""

    demand: Demand
    seconds: float
    starts: int = 0
    error: int = 0
    slack: int = 0
    warm: int = 0


def key_of(parts: Mapping[str, Any]) -> str:
    """A digest of everything that the demand depends on, as a file name."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def checkpoint_of(model: str, revision: str = "None") -> str:
    """A digest of the weight files' names, sizes and times and of config.json; for a model that is no folder, its name and revision."""
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{revision}"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".gguf", ".bin"):
            facts = path.stat()
            digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """A profile on disk.

    at: when it was written, in epoch seconds.
    engine: the digest from its starter (settings.engine).
    about: facts of the engine, for a reader.
    """

    profile: MeasuredProfile
    at: float
    engine: str | None
    about: Mapping[str, Any]


def profiles_in(folder: str) -> tuple[KeptProfile, ...]:
    """The profiles of a folder, newest first. An unreadable file is skipped."""
    kept = [profile for path in Path(folder).glob("*.json") if (profile := _read(path)) is not None]
    return tuple(sorted(kept, key=lambda profile: -profile.at))


def _read(path: Path) -> KeptProfile | None:
    """None for a file that is missing or cannot be read, or of another version."""
    try:
        raw = json.loads(path.read_bytes()[:MAX_BYTES])
        if raw["v"] != VERSION:
            return None
        figures = {name: raw[name] for name in ("seconds", "starts", "error", "slack", "warm")}
        return KeptProfile(MeasuredProfile(Demand(**raw["demand"]), **figures), raw["at"], raw["engine"], raw["about"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Profiles:
    """A folder of profiles; None: nothing is kept. A file that cannot be read or written costs the next start a rehearsal, nothing else."""

    def __init__(self, folder: str | None, engine: str | None = None) -> None:
        """engine: a digest written with each profile, by which the daemon finds the profile before an engine runs."""
        self._folder = folder
        self._engine = engine

    def find(self, key: str) -> MeasuredProfile | None:
        kept = None if self._folder is None else _read(Path(self._folder, f"{key}.json"))
        return None if kept is None else kept.profile

    def keep(self, key: str, learned: MeasuredProfile, about: Mapping[str, Any]) -> bool:
        """Write a profile. about: facts for a reader of the file. False where the file could not be written."""
        if self._folder is None:
            return False
        raw = {"v": VERSION, "at": time.time(), **asdict(learned), "about": dict(about), "engine": self._engine}
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            write_private(Path(self._folder, f"{key}.json"), json.dumps(raw, default=str), sync=False)
        except OSError:
            return False
        return True

    def setbacks(self, key: str) -> int:
        """The number of rehearsals in a row that ended because memory ran out."""
        if self._folder is None:
            return 0
        try:
            return os.stat(os.path.join(self._folder, f"{key}.setback")).st_size
        except OSError:
            return 0

    def set_back(self, key: str) -> None:
        """Count one more failed rehearsal. Appends a byte, because the process may end at any moment."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            with open(os.path.join(self._folder, f"{key}.setback"), "ab") as file:
                file.write(b".")

    def forgive(self, key: str) -> None:
        """Forget the failed rehearsals."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, f"{key}.setback"))
