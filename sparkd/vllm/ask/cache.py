"""Keeps the answers of a vLLM on disk, under digests of their questions, of the packages beside that vLLM and of the programs that ask."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sparkd.vllm.installed import packages_of
from workers.host import regular_file
from workers.host.private_files import in_others_hands

_FOLDER = "vllm-answers"
_MOST_KEPT = 2048
# The largest answer so far has 200 kB.
_MOST_FILE_BYTES = 16 << 20
# Answers that no folder keeps, of this process.
_unkept: dict[str, Any] = {}


def places(state_dir: Path) -> list[Path]:
    """The folders that keep answers: the daemon's where it exists, and the user's own."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folders = [*([state_dir] if state_dir.is_dir() else []), Path(cache, "sparkd")]
    return [folder / _FOLDER for folder in folders if folder.is_absolute()]


def neighbours(interpreter: Path) -> list[str]:
    """The names, with versions, of the distributions in an interpreter's environment: a plugin adds flags and models."""
    own = [Path(entry) for entry in sys.path if entry.endswith("-packages")] if interpreter == Path(sys.executable) else []
    names: list[str] = []
    for packages in dict.fromkeys([*packages_of(interpreter), *own]):
        with contextlib.suppress(OSError):
            names += sorted(name for name in os.listdir(packages) if name.endswith((".dist-info", ".egg-info", ".pth", ".egg-link")))
    return names


def environment(version: str, packages: Iterable[str], programs: Iterable[Path]) -> str:
    """A digest of what answers: the vLLM, the packages beside it, and the programs that ask it."""
    parts = [version, *packages, *(path.read_text() for path in programs)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def kept(key: str, folders: Sequence[Path]) -> Any:
    """The answer as JSON; None where there is none. Another user may write to a folder, and root reads the daemon's."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return json.loads(regular_file.read(folder / f"{key}.json", _MOST_FILE_BYTES))
    return _unkept.get(key)


def keep(key: str, answer: Any, folders: Sequence[Path]) -> None:
    """Keep an answer in the first folder that can be written to, else in this process alone."""
    for folder in folders:
        if in_others_hands(folder):
            continue
        with contextlib.suppress(OSError):
            _put(folder / f"{key}.json", json.dumps(answer, separators=(",", ":")))
            return
    _unkept[key] = answer


def _put(path: Path, text: str) -> None:
    """Write the file by a rename, so that no reader sees half of it, and remove the oldest files of its folder beyond _MOST_KEPT."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    aged = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
    for old in aged[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)
