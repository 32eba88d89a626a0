"""Removes the files of an earlier copy that its source no longer has: weights of an earlier release, which an engine would load too.

vLLM loads every *.safetensors file of a folder without an index, and no new file of a folder with a stale index. So a complete copy records
its files, and the next copy removes those recorded weights and indexes that the source no longer has. Any other file may belong to a user:
it stays, and is reported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from workers.files.manifest import JOURNAL, PART, ModelManifest, is_loaded

NOTE = ".sparkd-pulled.json"


def clear(manifest: ModelManifest, folder: Path) -> tuple[list[str], list[str]]:
    """Names of weights and indexes that the source lacks: (removed, left). To be called once all files of the manifest are there. Nothing
    is touched where the source has no whole set of weights. Raises OSError."""
    if manifest.lacks:
        return [], []
    noted, own = _noted(folder), {file.name for file in manifest.files}
    removed, left = [], []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        begun = name.removesuffix(PART).removesuffix(JOURNAL)
        if begun in own or not path.is_file():
            continue
        if begun != name:
            # A part of a file that will never be complete; only a copy writes such names.
            path.unlink()
        elif is_loaded(name) and noted.get(name) == _mark(path):
            path.unlink()
            removed.append(name)
        elif is_loaded(name) and not name.startswith("."):
            left.append(name)
    _note(folder, own)
    return removed, left


def _note(folder: Path, names: Iterable[str]) -> None:
    fresh = folder / f"{NOTE}.{os.getpid()}"
    try:
        fresh.write_text(json.dumps({name: _mark(folder / name) for name in sorted(names)}), encoding="utf-8")
        fresh.replace(folder / NOTE)
    except OSError:
        # A folder that is only read: then the next copy removes nothing.
        with suppress(OSError):
            fresh.unlink()


def _noted(folder: Path) -> Mapping[str, list[int]]:
    """The files that the last complete copy put there, or found to be the source's; nothing where none did."""
    try:
        note = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _mark(path: Path) -> list[int]:
    """A file that was written since has another one."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
