"""Owns the profiles of earlier starts of the same engine: one small JSON file for each, so that the next start need not rehearse. Never
measures.

The demand is kept, not the size that came of it: the next start takes what is left then.
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

from workers.kv.arithmetic import Demand
from workers.kv.report import replace_json

# 2: every sequence is rehearsed with its drafts and its sampler.
VERSION = 2
MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """demand: as it turned out; seconds: how long the rehearsal took; starts: how many have used it; error: by how much the free memory
    differed from what was expected, the last time (bytes, positive: more was free); slack: what was free when the engine was ready;
    warm: what the batch of a compile run took for a moment in a start from the profile, 0 before there was one."""

    demand: Demand
    seconds: float
    starts: int = 0
    error: int = 0
    slack: int = 0
    warm: int = 0


def key_of(parts: Mapping[str, Any]) -> str:
    """A file name for everything that the demand depends on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def checkpoint_of(model: str, revision: str = "None") -> str:
    """Names, sizes and times of the weight files, and the configuration's text; for a model that is not a folder its name and revision."""
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
    """A profile as it lies on the disk. engine: the name that its starter gave (settings.engine). about: what the engine was."""

    profile: MeasuredProfile
    engine: str | None
    about: Mapping[str, Any]


def profiles_in(folder: str) -> tuple[KeptProfile, ...]:
    """The newest first; a file that cannot be read is passed over."""
    profiles = Profiles(folder)
    dated: list[tuple[float, KeptProfile]] = []
    with contextlib.suppress(OSError):
        for path in Path(folder).glob("*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raw = json.loads(path.read_bytes()[:MAX_BYTES])
                if (profile := profiles.find(path.stem)) is not None:
                    dated.append((float(raw["at"]), KeptProfile(profile, raw["engine"], dict(raw["about"]))))
    return tuple(profile for _, profile in sorted(dated, key=lambda each: -each[0]))


class Profiles:
    """A folder of profiles; None: nothing is kept. A file that cannot be read or written costs the next start a rehearsal, nothing else."""

    def __init__(self, folder: str | None, engine: str | None = None) -> None:
        """engine: what is written beside whatever is kept, for whoever looks for a profile before an engine runs."""
        self._folder = folder
        self._engine = engine

    def find(self, key: str) -> MeasuredProfile | None:
        if self._folder is None:
            return None
        try:
            with open(os.path.join(self._folder, f"{key}.json"), "rb") as file:
                raw = json.loads(file.read(MAX_BYTES))
            if raw["v"] != VERSION:
                return None
            demand = Demand(**{name: int(value) for name, value in raw["demand"].items()})
            if min(asdict(demand).values()) < 0:
                return None
            slack, warm = int(raw.get("slack", 0)), int(raw.get("warm", 0))
            return MeasuredProfile(demand, float(raw["seconds"]), int(raw["starts"]), int(raw["error"]), slack, warm)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def keep(self, key: str, learned: MeasuredProfile, about: Mapping[str, Any]) -> bool:
        """about: for a reader of the file. False where it could not be written."""
        if self._folder is None:
            return False
        raw = {"v": VERSION, "at": time.time(), **asdict(learned), "about": dict(about), "engine": self._engine}
        try:
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            replace_json(os.path.join(self._folder, f"{key}.json"), raw)
        except OSError:
            return False
        return True

    def setbacks(self, key: str) -> int:
        """How many rehearsals in a row had to be ended because memory ran out."""
        if self._folder is None:
            return 0
        try:
            return os.stat(os.path.join(self._folder, f"{key}.setback")).st_size
        except OSError:
            return 0

    def set_back(self, key: str) -> None:
        """One more. A byte is appended: the process that says so has no time left."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
            with open(os.path.join(self._folder, f"{key}.setback"), "ab") as file:
                file.write(b".")

    def forgive(self, key: str) -> None:
        self._remove(f"{key}.setback")

    def _remove(self, name: str) -> None:
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, name))
